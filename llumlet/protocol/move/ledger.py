# SPDX-License-Identifier: Apache-2.0
"""Owners of the blocks of an engine's KV cache while requests come and go.

    One request of S, in blocks. Half-open ranges; `c` = copied so far, `f` = frontier, `e` = end.

    COPYING     [0 ------------ c)[c ------------- f)[f ---- e)
                 scheduler         scheduler + pin    scheduler      bytes from f on still change
    FREEZING …  [0 ------------------------------------------ e)
                 scheduler + pin                                     nothing changes until the settlement
    aborted     [0 ------------------------------------------ e)
                 pin alone                                           D may still be reading

    The same request at D, `h` = prefix-cache hits, `r` = reserved.

    RESERVED …  [0 ------ h)[h ------------------------------ r)
                 scheduler   reservation                             D's movers write [h, r) and nothing else
                 + reservation
    DRAINING    [0 ------ h)[h ------------------------------ r)
                 scheduler   draining                                barred, but a mover may still write
    COMMITTED   [0 ------------------------------------------ r)
                 scheduler                                           hashes of full blocks published now, not before

A block that nobody holds is free. A block under `reservation` or `draining` alone may be written by a mover, so nobody
else may hold it; a pin never comes first, it joins the scheduler. Everything else is a fault: `audit` finds it in a
block pool, and `tests/protocol/ledger.py`, of which the tests' engines are made, does not let it happen.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping


class BlockOwner(enum.StrEnum):
    SCHEDULER = "scheduler"
    PIN = "pin"
    RESERVATION = "reservation"
    DRAINING = "draining"


EXCLUSIVE = frozenset({BlockOwner.RESERVATION, BlockOwner.DRAINING})


def audit(num_blocks: int, free: Iterable[int], held: Mapping[BlockOwner, Collection[int]]) -> list[str]:
    """Faults of a block pool, a sentence each.

    `free`: the pool's free blocks. `held`: the blocks by kind of owner, each under every kind that holds it.
    """
    free_list = list(free)
    unowned = set(free_list)
    owned: set[int] = set().union(*held.values())
    faults = []
    if len(unowned) != len(free_list):
        faults.append("a block is in the free list twice")
    if both := unowned & owned:
        faults.append(f"free and owned: {sorted(both)}")
    if lost := set(range(num_blocks)) - unowned - owned:
        faults.append(f"neither free nor owned: {sorted(lost)}")
    for owner in EXCLUSIVE:
        others: set[int] = set().union(*(blocks for other, blocks in held.items() if other is not owner))
        if shared := others & set(held.get(owner, ())):
            faults.append(f"{owner}, but held by others too: {sorted(shared)}")
    return sorted(faults)
