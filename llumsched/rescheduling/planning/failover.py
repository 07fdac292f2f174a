# SPDX-License-Identifier: Apache-2.0
"""`roundRobinSelector` of rescheduling: moves everything away from failing instances.

By id, source i begins with destination i modulo their number. The requests of a source are distributed over all
destinations in turn, as many as it can move at a time; later passes continue in turn.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from llumlet.contract.types import Health
from llumlet.protocol.move.selection import ALL, Order, Unit
from llumsched.cluster.providers.status import Cargo
from llumsched.rescheduling.planning.draft import Draft
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from llumsched.rescheduling.planning.pairs import Ends, Unfit

_HEEDED = frozenset({"move_open", "destination_avoided"})
"""Obstacles that also hold for a failover: only destinations that refused or failed are avoided."""


@dataclass(frozen=True, slots=True)
class RoundRobinPairs:
    name: ClassVar[str] = "roundRobinSelector"
    purpose: ClassVar[Purpose] = Purpose.FAILOVER
    metric: ClassVar[None] = None
    """No metric: everything moves."""

    def pair(self, draft: Draft, policy: str, ends: Ends) -> tuple[int, int]:
        snapshot, left = draft.snapshot, ends.without(_unfit(draft))
        sources, destinations = np.flatnonzero(left.sources).tolist(), left.destinations
        groups, caches = snapshot["exchange_group"], snapshot["cache_group"]
        for turn, source in enumerate(sources):
            if draft.history.source_avoided(snapshot.ids[source], draft.now_s):
                draft.refused["source_avoided"] += 1
                continue
            if source in draft.taking:  # another policy holds it for well
                draft.refused["takes_itself"] += 1
                continue
            able = destinations & (groups == groups[source])
            # To who can read the KV caches, if anybody can.
            alike = able & (caches == caches[source])
            same = np.flatnonzero(alike if alike.any() else able).tolist()
            if not same:
                draft.refused["no_destination"] += 1
                continue
            start = (turn + draft.history.dealt(snapshot.ids[source])) % len(same)
            _deal(draft, policy, source, same[start:] + same[:start])
        return len(sources), int(destinations.sum())

    def unfit(self, draft: Draft) -> Unfit:
        of_now = _unfit(draft)
        return Unfit(
            [*of_now.sources, ("takes requests itself", draft.mask(draft.taking))],
            [*of_now.destinations, ("gives requests itself", draft.mask(draft.sources))],
        )


def _unfit(draft: Draft) -> Unfit:
    """Instances that cannot be in any pair of this pass."""
    snapshot = draft.snapshot
    sources = [
        ("cannot be asked: its loop hangs", snapshot["health"] == Health.HUNG),
        ("cannot be asked: it is lost", snapshot["lost"] > 0),
        ("has no requests", ~(draft.running + draft.waiting > 0)),
        ("its requests cannot go elsewhere", ~(snapshot["movable"] > 0)),
        ("has as many moves away from it as it may have", ~(draft.out_slots >= 1)),
    ]
    return Unfit(sources, [("has as many moves to it as it may have", ~(draft.in_slots >= 1))])


def _permitted(draft: Draft, source: int, destination: int) -> bool:
    """True if a pair may be used."""
    if (obstacle := draft.obstacle(source, destination)) in _HEEDED:
        draft.refused[obstacle] += 1
        return False
    if draft.in_slots[destination] < 1:  # taken by another source of this pass
        draft.refused["no_slot"] += 1
        return False
    return destination not in draft.sources


def _deal(draft: Draft, policy: str, source: int, ring: list[int]) -> None:
    slots = int(draft.out_slots[source])
    left = int(draft.running[source] + draft.waiting[source] - draft.leaving[source])
    if left <= 0:
        return
    permitted = (destination for destination in ring if _permitted(draft, source, destination))
    destinations = list(islice(permitted, min(left, slots)))
    if not destinations:
        return
    if left <= slots and len(ring) == 1:
        tokens = float(draft.running_tokens[source] + draft.waiting_tokens[source])
        _add(draft, policy, (source, destinations[0]), Selection(Unit.NUM_REQ, Order.LR, ALL), Cargo(left, tokens))
        return
    # Requests with a KV cache first: what waits has the least to lose.
    running = min(int(draft.running[source]), left)
    queue = ([Order.LR] * running + [Order.FCW] * (left - running))[:slots]
    for (order, destination), number in _shares(draft, queue, destinations).items():
        waits = order is Order.FCW
        held, requests = (draft.waiting_tokens, draft.waiting) if waits else (draft.running_tokens, draft.running)
        cargo = Cargo(number, number * float(held[source]) / max(float(requests[source]), 1.0), waits)
        _add(draft, policy, (source, destination), Selection(Unit.NUM_REQ, order, float(number)), cargo)


def _shares(draft: Draft, queue: list[Order], destinations: list[int]) -> Counter[tuple[Order, int]]:
    """Requests per order and destination: one each in turn, while there are slots."""
    slots = {destination: int(draft.in_slots[destination]) for destination in destinations}
    ring = deque(destinations)
    shares: Counter[tuple[Order, int]] = Counter()
    for order in queue:
        while ring and slots[ring[0]] <= 0:
            ring.popleft()
        if not ring:
            draft.refused["no_slot"] += 1
            break
        shares[order, ring[0]] += 1
        slots[ring[0]] -= 1
        ring.rotate(-1)
    return shares


def _add(draft: Draft, policy: str, ends: tuple[int, int], selection: Selection, cargo: Cargo) -> None:
    if draft.room <= 0:
        draft.refused["pass_is_full"] += 1
        return
    source, destination = (draft.snapshot.ids[row] for row in ends)
    move = Move(policy, Purpose.FAILOVER, source, destination, selection, cargo.tokens, float(cargo.requests))
    draft.choose(*ends, move, cargo)
