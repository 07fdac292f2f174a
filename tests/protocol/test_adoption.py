# SPDX-License-Identifier: Apache-2.0
"""How a lost request comes to an engine, step by step: its adoption, the rescue of its KV cache, the claim on that."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from llumlet.protocol.effects import ClearTimer, SetTimer
from llumlet.protocol.errors import LocalProtocolError, Reason, Refused
from llumlet.protocol.events import TimerFired
from llumlet.protocol.ids import Epoch
from llumlet.protocol.machine import Machine
from llumlet.protocol.recovery import adoption, claim, rescue
from llumlet.protocol.recovery.adoption import Adoption, require_former
from llumlet.protocol.recovery.claim import LEASE, LEASE_SECONDS, Claim
from llumlet.protocol.recovery.rescue import CLAIM_SECONDS, PULL_SECONDS, Rescue

BLOCK_SIZE = 16


def fed(machine: Machine[Any, Any, Any], *events: Any) -> list[Any]:
    """What the last of them asks for."""
    effects: list[Any] = []
    for event in events:
        effects = machine.on(event)
    return effects


# Adoption


def building(may_fetch: bool = False) -> Adoption:
    machine = Adoption(may_fetch)
    fed(machine, adoption.AdoptRequested(), adoption.WayMade())
    assert machine.state is adoption.State.BUILDING
    return machine


def test_a_request_without_its_cache() -> None:
    machine = building()
    assert fed(machine, adoption.RequestBuilt()) == [adoption.AddRequest(with_cache=False)]
    assert fed(machine, adoption.RequestAdded()) == [adoption.AnswerAdopt()]


@pytest.mark.parametrize(("outcome", "with_cache"), [(adoption.CacheFetched(), True), (adoption.CacheLost(), False)])
def test_a_request_whose_cache_may_be_fetched(outcome: adoption.AdoptionEvent, with_cache: bool) -> None:
    machine = building(may_fetch=True)
    assert fed(machine, adoption.RequestBuilt()) == [adoption.FetchCache()]
    assert fed(machine, outcome) == [adoption.AddRequest(with_cache)]
    assert fed(machine, adoption.RequestAdded()) == [adoption.AnswerAdopt()]


def test_a_former_life_is_ended_and_the_attempt_refused() -> None:
    machine = Adoption(may_fetch=False)
    (refusal,) = fed(machine, adoption.AdoptRequested(), adoption.FormerLifeEnded())
    assert refusal.reason is Reason.HANDOVER_OPEN
    assert machine.over


def test_called_off_adoption_leaves_nothing() -> None:
    """It is seen to its end before that."""
    machine = building()
    assert fed(machine, adoption.CalledOff()) == []
    (refusal,) = fed(machine, adoption.RequestBuilt())
    assert refusal.reason is Reason.BARRED
    machine = building(may_fetch=True)
    fed(machine, adoption.RequestBuilt(), adoption.CalledOff())
    free, refusal = fed(machine, adoption.CacheFetched())
    assert (free, refusal.reason) == (adoption.FreeCache(), Reason.BARRED)


def test_request_being_added_is_ended_in_the_scheduler() -> None:
    machine = building()
    assert fed(machine, adoption.RequestBuilt(), adoption.CalledOff()) == []
    assert fed(machine, adoption.RequestAdded()) == [adoption.AnswerAdopt()]


def test_fetched_blocks_are_returned_if_not_admitted() -> None:
    machine = building(may_fetch=True)
    fed(machine, adoption.RequestBuilt(), adoption.CacheFetched())
    free, refusal = fed(machine, adoption.AttemptFailed(Reason.DESTINATION_PAUSED))
    assert (free, refusal.reason) == (adoption.FreeCache(), Reason.DESTINATION_PAUSED)


class Life(NamedTuple):
    origin: str | None
    epoch: Epoch


@pytest.mark.parametrize(
    ("present", "makes_way"),
    [
        (Life("here", Epoch(0, 3)), True),
        (Life("here", Epoch(2, 0)), False),
        (Life("here", Epoch(3, 0)), False),
        (Life("elsewhere", Epoch(0, 0)), False),
        (None, False),
    ],
    ids=["former", "the same", "later", "of another API server", "of no API server"],
)
def test_which_life_makes_way(present: Life | None, makes_way: bool) -> None:
    life = Life("here", Epoch(2, 0))
    if makes_way:
        require_former(present, life)
    else:
        with pytest.raises(Refused) as refusal:
            require_former(present, life)
        assert refusal.value.reason is Reason.HANDOVER_OPEN


# Rescue

DELIVERED = (5, 6)
GRANTED = rescue.ClaimGranted(computed_tokens=41, num_blocks=3, output_token_ids=[5, 6, 7])
"""One token more than the client has: 40 with the prompt are computed here."""


def claiming(num_tokens: int = 41) -> Rescue:
    machine = Rescue(num_tokens, DELIVERED, BLOCK_SIZE)
    assert fed(machine, rescue.RescueStarted()) == [rescue.AskClaim(CLAIM_SECONDS)]
    return machine


def test_the_cache_is_copied_and_asked_for() -> None:
    machine = claiming()
    assert fed(machine, GRANTED) == [rescue.TakeRoom()]
    assert fed(machine, rescue.RoomTaken(hit_blocks=1)) == [rescue.CopyBlocks(1, 3, PULL_SECONDS)]
    assert fed(machine, rescue.CopyDone(1000)) == [rescue.EndClaim(CLAIM_SECONDS)]
    assert not machine.answered
    assert fed(machine, rescue.ClaimSettled(intact=True)) == []
    assert machine.state is rescue.State.FETCHED
    assert (machine.computed_tokens, machine.copied_bytes) == (40, 1000), "its last token is computed here"


def test_unkept_blocks_are_discarded() -> None:
    machine = claiming()
    fed(machine, GRANTED, rescue.RoomTaken(0), rescue.CopyDone(1000))
    assert fed(machine, rescue.ClaimSettled(intact=False)) == [rescue.FreeRoom()]
    assert machine.state is rescue.State.WITHOUT


def test_everything_is_in_the_prefix_cache() -> None:
    machine = claiming(num_tokens=70)
    fed(machine, rescue.ClaimGranted(33, 3, list(DELIVERED)))
    assert fed(machine, rescue.RoomTaken(hit_blocks=4)) == [rescue.EndClaim(CLAIM_SECONDS)]
    assert machine.computed_tokens == 4 * BLOCK_SIZE


def test_blocks_of_a_copy_that_was_given_up_are_free_when_the_movers_are_quiet() -> None:
    machine = claiming()
    fed(machine, GRANTED, rescue.RoomTaken(0))
    assert fed(machine, rescue.CopyFailed()) == [rescue.StopCopy(), rescue.EndClaim(CLAIM_SECONDS)]
    assert machine.answered
    assert fed(machine, rescue.ClaimSettled(intact=True)) == [], "nobody asks any more"
    assert fed(machine, rescue.CopyQuiet()) == [rescue.FreeRoom()]


@pytest.mark.parametrize(
    "granted",
    [
        rescue.ClaimGranted(41, 3, [5, 9, 7]),
        rescue.ClaimGranted(41, 3, [5]),
        rescue.ClaimGranted(41, 2, [5, 6, 7]),
        rescue.ClaimGranted(0, 0, [5, 6, 7]),
    ],
    ids=["other tokens", "fewer tokens", "too few blocks", "nothing"],
)
def test_a_cache_that_is_of_no_use(granted: rescue.ClaimGranted) -> None:
    machine = claiming()
    assert fed(machine, granted) == [rescue.EndClaim(CLAIM_SECONDS)]
    assert machine.state is rescue.State.WITHOUT
    assert machine.detail


# Claim

ASKED = claim.ClaimRequested(epoch=Epoch(2, 0), in_model=True, present=Epoch(0, 1), has_cache=True)


def standing() -> Claim:
    machine = Claim()
    assert fed(machine, ASKED) == [SetTimer(LEASE, LEASE_SECONDS), claim.AnswerClaim()]
    return machine


def test_the_waking_loop_keeps_the_blocks_and_ends_the_request() -> None:
    machine = standing()
    assert fed(machine, claim.LoopWoke()) == [claim.KeepBlocks(), claim.EndSilently()]
    assert fed(machine, claim.ClaimEnded()) == [claim.AnswerEnd(True), claim.GiveBack(), ClearTimer(LEASE)]
    assert fed(machine, claim.ClaimEnded()) == [claim.AnswerEnd(False)]


def test_blocks_read_from_a_stuck_loop_need_no_pin() -> None:
    machine = standing()
    assert fed(machine, claim.ClaimEnded()) == [claim.AnswerEnd(True), ClearTimer(LEASE)]
    assert fed(machine, claim.LoopWoke()) == [claim.EndSilently()]
    assert machine.over


@pytest.mark.parametrize("woken", [False, True])
def test_a_lease_that_is_over(woken: bool) -> None:
    machine = standing()
    if woken:
        fed(machine, claim.LoopWoke())
    assert fed(machine, TimerFired(LEASE)) == ([claim.GiveBack()] if woken else [])
    assert fed(machine, claim.ClaimEnded()) == [claim.AnswerEnd(False)], "what was read after it is not to be trusted"


def test_the_same_claim_again_is_one_claim() -> None:
    assert fed(standing(), ASKED) == [claim.AnswerClaim()]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (claim.ClaimRequested(epoch=Epoch(2, 0), in_model=False), Reason.SOURCE_BUSY),
        (claim.ClaimRequested(epoch=Epoch(2, 0), in_model=True), Reason.BARRED),
        (claim.ClaimRequested(epoch=Epoch(2, 0), in_model=True, present=Epoch(2, 1)), Reason.BARRED),
        (claim.ClaimRequested(epoch=Epoch(2, 0), in_model=True, present=Epoch(1, 4)), Reason.NOT_STARTED),
        (
            claim.ClaimRequested(epoch=Epoch(2, 0), in_model=True, problem=(Reason.REQUEST_FINISHED, "it has")),
            Reason.REQUEST_FINISHED,
        ),
    ],
)
def test_some_requests_cannot_be_claimed(asked: claim.ClaimRequested, reason: Reason) -> None:
    machine = Claim()
    (refusal,) = fed(machine, asked)
    assert refusal.reason is reason
    assert machine.over


# Illegal events


@pytest.mark.parametrize(
    ("machine", "event"),
    [
        (building(), adoption.RequestAdded()),
        (building(), adoption.CacheFetched()),
        (claiming(), rescue.CopyDone(1)),
        (claiming(), rescue.ClaimSettled(intact=True)),
        (Claim(), claim.LoopWoke()),
        (Claim(), claim.ClaimEnded()),
    ],
    ids=lambda item: type(item).__name__,
)
def test_an_illegal_event_changes_nothing(machine: Machine[Any, Any, Any], event: Any) -> None:
    before = dict(vars(machine), _armed=set(machine._armed))
    with pytest.raises(LocalProtocolError):
        machine.on(event)
    assert vars(machine) == before
