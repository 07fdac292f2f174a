# SPDX-License-Identifier: Apache-2.0
"""What the gate remembers of a peer that makes epochs up. Its rules are in the transcripts."""

from __future__ import annotations

import pytest

from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.origin.gate import MAX_BARRED, Arrival, Gate


def arrival(epoch: Epoch, base: int, first: int, count: int = 1) -> Arrival:
    return Arrival(epoch, base=base, first=first, count=count, finished=False, payload=None)


@pytest.mark.parametrize("step", [1, 2], ids=["in a row", "with gaps"])
def test_made_up_epochs_do_not_fill_the_memory(step: int) -> None:
    gate = Gate()
    gate.offer(arrival(HOME, 0, 0, 5))
    hops = range(1, 5000, step)
    for hop in hops:
        assert gate.offer(arrival(Epoch(0, hop), base=2, first=2)).stale
    assert len(gate._barred) <= MAX_BARRED + 1
    assert all(gate.is_barred(Epoch(0, hop)) for hop in hops)
    assert gate.offer(arrival(Epoch(0, hops[-1]), base=5, first=5)).stale, "for ever"
    assert gate.offer(arrival(HOME, 0, 5)).deliver, "the owner is who it was"
    assert gate.offer(arrival(Epoch(0, 6000), base=6, first=6)).deliver


def test_no_adopted_epoch_is_barred_for_want_of_memory() -> None:
    gate = Gate()
    gate.offer(arrival(HOME, 0, 0, 5))
    owners = [Epoch(0, hop) for hop in range(2, 400, 2)]
    for owner in owners:
        assert gate.offer(arrival(owner.next_hop(), base=0, first=0)).stale
        assert gate.offer(arrival(owner.next_hop().next_hop(), base=gate.next_index, first=gate.next_index)).deliver
    assert not any(gate.is_barred(owner.next_hop().next_hop()) for owner in owners)
