# SPDX-License-Identifier: Apache-2.0
"""What a scenario cannot show well: the tables as wholes, and rules about single events."""

from __future__ import annotations

import enum
import inspect
from typing import Any, get_args

import pytest

from llumlet.protocol import effects, events
from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol.errors import LocalProtocolError, Reason
from llumlet.protocol.events import Call, Gone, Settlement
from llumlet.protocol.ids import Epoch
from llumlet.protocol.machine import Machine
from llumlet.protocol.move import destination, source
from llumlet.protocol.move.destination import Destination
from llumlet.protocol.move.plan import Method, Plan, Terms
from llumlet.protocol.move.source import Source
from llumlet.protocol.origin import replay, replay_words
from llumlet.protocol.origin.replay import Replay
from llumlet.protocol.recovery import adoption, claim, rescue
from llumlet.protocol.recovery.adoption import Adoption
from llumlet.protocol.recovery.claim import Claim
from llumlet.protocol.recovery.rescue import Rescue

STATES: dict[type[Machine[Any, Any, Any]], type[enum.StrEnum]] = {
    Source: source.State,
    Destination: destination.State,
    Adoption: adoption.State,
    Rescue: rescue.State,
    Claim: claim.State,
    Replay: replay.State,
}
EVENTS: dict[type[Machine[Any, Any, Any]], Any] = {
    Source: ev.SourceEvent,
    Destination: ev.DestinationEvent,
    Adoption: adoption.AdoptionEvent,
    Rescue: rescue.RescueEvent,
    Claim: claim.ClaimEvent,
    Replay: replay_words.ReplayEvent,
}
ALPHABETS: dict[Any, tuple[Any, ...]] = {
    events: (ev.Event,),
    effects: (do.Effect,),
    adoption: (adoption.AdoptionEvent, adoption.AdoptionEffect),
    rescue: (rescue.RescueEvent, rescue.RescueEffect),
    claim: (claim.ClaimEvent, claim.ClaimEffect),
    replay_words: (replay_words.ReplayEvent, replay_words.ReplayEffect),
}
PEER_MESSAGES = (
    ev.ReserveRequested,
    ev.RoundRequested,
    ev.CommitRequested,
    ev.WithdrawRequested,
    ev.CancelRequested,
    ev.AbortRequested,
    ev.CloseRequested,
    ev.QueryRequested,
)


def make_source(method: Method = Method.LIVE, **plan: object) -> Source:
    return Source(Plan(method=method, epoch_next=Epoch(0, 1), bytes_per_block=100, **plan))  # type: ignore[arg-type]


def source_in(state: source.State) -> Source:
    """A source in a state that a request that is still here passes through."""
    machine = make_source()
    way = {
        source.State.RESERVING: ev.Start(),
        source.State.PINNING: ev.Reserved(0, 30.0, "D1"),
        source.State.COPYING: ev.BlocksPinned(9, 300),
        source.State.FREEZING: ev.RoundDone(1, 900, 0.001),
        source.State.COMMITTING: ev.Frozen(310, 309, 10, 100),
        source.State.WITHDRAWING: ev.CancelRequested(),
        source.State.FENCING: ev.Forgotten(),
    }
    for reached, event in way.items():
        if machine.state is state:
            break
        machine.on(event)
        if reached is source.State.FREEZING:
            machine.on(ev.BlocksPinned(9, 301))
    assert machine.state is state
    return machine


def reserved() -> Destination:
    machine = Destination(Terms(block_size=32))
    machine.on(ev.ReserveRequested())
    machine.on(ev.BlocksReserved(0, 20))
    return machine


def destination_in(state: destination.State) -> Destination:
    """A destination in a state in which its fate is open."""
    ways: dict[destination.State, tuple[ev.DestinationEvent, ...]] = {
        destination.State.RESERVING: (ev.ReserveRequested(),),
        destination.State.GROWING: (ev.RoundRequested(1, 0, 20, 660),),
        destination.State.PULLING: (ev.RoundRequested(1, 0, 9, 300),),
        destination.State.EXTENDING: (ev.CommitRequested(Epoch(0, 1), 9, 700, 0, 22),),
        destination.State.COMMITTING: (ev.CommitRequested(Epoch(0, 1), 9, 100, 0, 4),),
        destination.State.ADMITTING: (ev.CommitRequested(Epoch(0, 1), 9, 0, 0, 0),),
        destination.State.RESERVED: (),
    }
    machine = Destination(Terms(block_size=32)) if state is destination.State.RESERVING else reserved()
    for event in ways[state]:
        machine.on(event)
    assert machine.state is state
    return machine


# The tables


@pytest.mark.parametrize("machine", STATES)
def test_every_state_can_be_reached(machine: type[Machine[Any, Any, Any]]) -> None:
    states = STATES[machine]
    reached = {next(iter(states))}
    for _ in states:
        reached |= {row.to for row in machine.TABLE if row.state in reached}
    assert reached == set(states)


@pytest.mark.parametrize("machine", STATES)
def test_no_row_is_hidden_by_an_earlier_one(machine: type[Machine[Any, Any, Any]]) -> None:
    unguarded: set[object] = set()
    hidden = []
    for row in machine.TABLE:
        key = (row.state, row.event)
        if key in unguarded and not row.late:
            hidden.append(row)
        if row.when is None:
            unguarded.add(key)
    assert not hidden


def test_settled_states_are_left_by_nothing() -> None:
    for row in Source.TABLE:
        if row.state in source.SETTLED:
            assert row.to is row.state, row
    for row in Destination.TABLE:
        if row.state is destination.State.COMMITTED:
            assert row.to in (destination.State.COMMITTED, destination.State.FORGOTTEN), row
        if row.state in (destination.State.DRAINING, destination.State.BARRED):
            assert row.to in (destination.State.DRAINING, destination.State.BARRED, destination.State.FORGOTTEN), row


def test_no_message_of_a_peer_is_a_fault_of_ours() -> None:
    """Whatever a source sends, whenever it arrives, the table has an answer or knows that one is on its way."""
    catch_all = {(row.state, row.event) for row in Destination.TABLE if row.when is None}
    for state in destination.State:
        for message in PEER_MESSAGES:
            if state is not destination.State.FORGOTTEN:
                assert (state, message) in catch_all, (state, message)


@pytest.mark.parametrize("machine", STATES)
def test_rows_name_events_of_their_own_alphabet(machine: type[Machine[Any, Any, Any]]) -> None:
    assert {row.event for row in machine.TABLE} == set(get_args(EVENTS[machine]))


@pytest.mark.parametrize("module", ALPHABETS, ids=lambda module: module.__name__)
def test_every_event_and_effect_belongs_to_an_alphabet(module: Any) -> None:
    defined = {
        item
        for _, item in inspect.getmembers(module, inspect.isclass)
        if item.__module__ == module.__name__ and hasattr(item, "__struct_fields__")
    }
    named = {item for alphabet in ALPHABETS[module] for item in get_args(alphabet)}
    assert defined == {item for item in named if item.__module__ == module.__name__}


# An illegal event


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (source.State.PLANNED, ev.Reserved(0, 30.0, "D1")),
        (source.State.RESERVING, ev.Committed("D1")),
        (source.State.PINNING, ev.Frozen(1, 1, 1, 1)),
        (source.State.COPYING, ev.BlocksPinned(3, 100)),
        (source.State.COMMITTING, ev.FenceRaised(Epoch(1, 0))),
    ],
)
def test_illegal_event_changes_nothing(state: source.State, event: ev.SourceEvent) -> None:
    machine = source_in(state)
    before = dict(vars(machine), _armed=set(machine._armed))
    with pytest.raises(LocalProtocolError, match=str(state)):
        machine.on(event)
    assert vars(machine) == before


def test_timer_that_was_cleared_is_no_event() -> None:
    machine = source_in(source.State.COPYING)
    assert machine.on(ev.TimerFired("reserving")) == []
    assert machine.on(ev.TimerFired("no such timer")) == []
    assert machine.state is source.State.COPYING


# Deadlines


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (source.State.RESERVING, source.State.STAYED),
        (source.State.PINNING, source.State.STAYED),
        (source.State.COPYING, source.State.STAYED),
        (source.State.FREEZING, source.State.STAYED),
        (source.State.COMMITTING, source.State.WITHDRAWING),
        (source.State.WITHDRAWING, source.State.FENCING),
        (source.State.FENCING, source.State.LOST),
    ],
)
def test_every_state_of_a_source_has_a_deadline(state: source.State, after: source.State) -> None:
    machine = source_in(state)
    machine.on(ev.TimerFired(state.value))
    assert machine.state is after


def test_own_loop_that_does_not_answer_is_told_apart_from_the_peer() -> None:
    for state, reason in ((source.State.PINNING, Reason.SOURCE_BUSY), (source.State.COPYING, Reason.DEADLINE)):
        machine = source_in(state)
        machine.on(ev.TimerFired(state.value))
        assert machine.outcome is not None
        assert machine.outcome.reason is reason


def committing(method: Method, round_seconds: float = 0.0, **plan: object) -> Source:
    """With ten blocks left to copy. A live one has copied ten in so many seconds."""
    machine = make_source(method, force=True, max_rounds=1, **plan)
    live = (ev.BlocksPinned(10, 330), ev.RoundDone(1, 1000, round_seconds), ev.BlocksPinned(19, 650))
    before = (ev.Start(), ev.Reserved(0, 30.0, "D1"), *(live if method is Method.LIVE else ()))
    num_blocks = 20 if method is Method.LIVE else 10
    for event in (*before, ev.Frozen(32 * num_blocks, 32 * num_blocks - 1, num_blocks, 100)):
        machine.on(event)
    assert machine.state is source.State.COMMITTING
    return machine


def seconds_in_doubt(machine: Source, *, answers: bool) -> float:
    """How long it waits for Commit's answer from a destination that does, or does not, say that it is still at it."""
    seconds = 0.0
    while machine.state is source.State.COMMITTING:
        seconds += machine.plan.commit_s
        if do.SendQuery() in machine.on(ev.TimerFired("committing")) and answers:
            machine.on(ev.Unsettled())
    return seconds


@pytest.mark.parametrize(
    ("machine", "seconds"),
    [
        (committing(Method.LIVE, 0.5), 2.5),
        (committing(Method.LIVE, 5.0), 12.5),  # twice what it should take, and `commit_s`
        (committing(Method.BLOCKING), 32.5),  # nothing was measured: the lease, and `commit_s`
        (committing(Method.RECOMPUTE), 2.5),
    ],
    ids=["quick", "slow", "blocking", "recompute"],
)
def test_commit_has_the_time_that_its_copy_takes(machine: Source, seconds: float) -> None:
    assert seconds_in_doubt(machine, answers=True) == seconds


@pytest.mark.parametrize(
    ("machine", "seconds"),
    [(committing(Method.LIVE, 0.5), 2.5), (committing(Method.LIVE, 9.0), 5.0), (committing(Method.BLOCKING), 5.0)],
    ids=["quick", "slow", "blocking"],
)
def test_a_silent_destination_costs_the_same_however_much_there_is_to_copy(machine: Source, seconds: float) -> None:
    assert seconds_in_doubt(machine, answers=False) == seconds


# The source


@pytest.mark.parametrize("kind", [Gone.FINISHED, Gone.ABORTED])
@pytest.mark.parametrize("state", [source.State.RESERVING, source.State.COPYING, source.State.FREEZING])
def test_gone_before_commit_gives_everything_back(state: source.State, kind: Gone) -> None:
    machine = source_in(state)
    told = machine.on(ev.RequestGone(kind))
    assert do.SendCancel(Reason(f"request_{kind}")) in told
    assert machine.state is source.State.GONE
    assert machine.over


def test_a_pin_that_comes_after_the_end_is_unpinned() -> None:
    machine = source_in(source.State.PINNING)
    machine.on(ev.CancelRequested())
    assert machine.on(ev.BlocksPinned(9, 300)) == [do.Unpin()]
    machine = source_in(source.State.FREEZING)
    assert machine.on(ev.CancelRequested())[:2] == [do.Unfreeze(), do.Unpin()]
    assert machine.on(ev.Frozen(310, 309, 10, 100)) == [do.Unpin()]


def test_stall_is_estimated_from_the_rate_that_was_measured() -> None:
    """10 blocks in 1 s: 3 full blocks and the partial one take 0.4 s."""
    for budget, state in ((0.39, source.State.STAYED), (0.41, source.State.FREEZING)):
        machine = make_source(stall_budget_s=budget, max_rounds=1)
        for event in (ev.Start(), ev.Reserved(0, 30.0, "D1"), ev.BlocksPinned(10, 330), ev.RoundDone(1, 1000, 1.0)):
            machine.on(event)
        machine.on(ev.BlocksPinned(13, 420))
        assert machine.state is state
        if machine.outcome:
            assert machine.outcome.reason is Reason.TOO_MANY_ROUNDS
            assert "400 ms" in machine.outcome.detail


def test_a_destination_that_takes_tokens_alone() -> None:
    """Said with its answer to Reserve: no round, nothing to read, and no more time for the last copy."""
    machine = source_in(source.State.RESERVING)
    machine.leave_kv()
    machine.on(ev.Reserved(0, 30.0, "D1"))
    assert machine.state is source.State.FREEZING
    assert machine.on(ev.Frozen(310, 309, 0, 10))[0] == do.SendCommit(Epoch(0, 1), 10, 0, 0, 0)
    late = source_in(source.State.PINNING)
    with pytest.raises(LocalProtocolError):
        late.leave_kv()


def test_short_request_needs_no_round() -> None:
    machine = make_source()
    for event in (ev.Start(), ev.Reserved(0, 30.0, "D1"), ev.BlocksPinned(1, 40)):
        machine.on(event)
    assert machine.state is source.State.FREEZING
    assert machine.on(ev.Frozen(41, 40, 2, 5))[0] == do.SendCommit(Epoch(0, 1), 5, 40, 0, 2)


def test_rounds_go_on_while_they_shrink_and_no_longer() -> None:
    machine = make_source(max_rounds=16)
    for event in (ev.Start(), ev.Reserved(0, 30.0, "D1")):
        machine.on(event)
    frontier = 0
    for number, added in enumerate((100, 20, 5, 2), start=1):
        frontier += added
        assert do.SendRound(number, frontier - added, frontier, 1) in machine.on(ev.BlocksPinned(frontier, 1))
        machine.on(ev.RoundDone(number, 100 * added, 0.0001 * added))
    machine.on(ev.BlocksPinned(frontier + 2, 1))
    assert machine.state is source.State.FREEZING
    assert machine.copied_blocks == 127


def test_reason_of_a_withdrawn_move_is_the_one_that_started_it() -> None:
    machine = source_in(source.State.COMMITTING)
    machine.on(ev.PeerUnreachable(Call.COMMIT, "connection reset"))
    machine.on(ev.Barred(Reason.BARRED, "D1"))
    assert machine.outcome == source.Outcome(source.State.STAYED, Reason.PEER_UNREACHABLE, "connection reset")


def test_fence_answer_that_raises_nothing_is_not_believed() -> None:
    machine = source_in(source.State.FENCING)
    assert machine.on(ev.FenceRaised(Epoch(0, 1))) == []
    assert machine.state is source.State.FENCING


# The destination


def test_only_a_first_answer_renews_the_lease() -> None:
    machine = reserved()
    assert machine.on(ev.ReserveRequested()) == [do.AnswerReserve(0, 30.0)]
    first = ev.RoundRequested(1, 0, 9, 300)
    machine.on(first)
    assert do.SetTimer("lease", 30.0) in machine.on(ev.PullDone(1, 900, 0.1))
    assert machine.on(first) == [do.AnswerRound(1, 900, 0.1, 30.0)]


@pytest.mark.parametrize(
    "odd",
    [
        ev.RoundRequested(2, 0, 9, 300),  # not the first
        ev.RoundRequested(1, 3, 9, 300),  # leaves blocks out
        ev.RoundRequested(1, 0, 0, 300),  # empty
    ],
)
def test_round_that_makes_no_sense_is_refused_and_harmless(odd: ev.RoundRequested) -> None:
    machine = reserved()
    (refusal,) = machine.on(odd)
    assert isinstance(refusal, do.RefuseRound)
    assert refusal.reason is Reason.INVALID_REQUEST
    assert machine.state is destination.State.RESERVED


@pytest.mark.parametrize(
    "odd",
    [
        ev.CommitRequested(Epoch(0, 1), 9, 100, 1, 4),  # leaves out a block that was not copied
        ev.CommitRequested(Epoch(0, 1), 9, 100, 0, 3),  # three blocks of 32 do not hold 100 tokens
        ev.CommitRequested(Epoch(0, 1), 9, 100, 4, 4),  # claims that everything is copied
        ev.CommitRequested(Epoch(0, 1), 9, 0, 0, 1),  # no KV, but a block
    ],
)
def test_commit_that_makes_no_sense_bars(odd: ev.CommitRequested) -> None:
    machine = reserved()
    told = machine.on(odd)
    assert do.FreeReservation() in told
    assert machine.settlement is Settlement.BARRED
    assert machine.reason is Reason.INVALID_REQUEST


def test_prefix_cache_hits_are_never_written() -> None:
    machine = Destination(Terms(block_size=32))
    machine.on(ev.ReserveRequested())
    machine.on(ev.BlocksReserved(3, 20))
    machine.on(ev.CommitRequested(Epoch(0, 1), 9, 310, 2, 10))
    assert machine.settlement is Settlement.BARRED


def test_reservation_stays_a_block_ahead_if_there_is_room() -> None:
    machine = Destination(Terms(block_size=32))
    machine.on(ev.ReserveRequested())
    machine.on(ev.BlocksReserved(0, 10))
    assert machine.on(ev.RoundRequested(1, 0, 9, 300)) == [do.GrowReservation(364)]
    # There is none, but the blocks of this round are there.
    assert machine.on(ev.GrowFailed(Reason.DESTINATION_FULL)) == [do.Pull(1, 0, 9)]
    machine.on(ev.PullDone(1, 900, 0.1))
    # Short by one at Commit: the loop has to be asked, and the client waits for its turn.
    assert machine.on(ev.CommitRequested(Epoch(0, 1), 40, 330, 9, 11)) == [do.GrowReservation(330)]


UNDER_WAY: dict[destination.State, ev.DestinationEvent | None] = {
    destination.State.RESERVING: ev.BlocksReserved(0, 9),
    destination.State.RESERVED: None,
    destination.State.GROWING: ev.Grown(22),
    destination.State.PULLING: ev.PullQuiesced(1),
    destination.State.EXTENDING: ev.GrowFailed(Reason.DESTINATION_FULL),
    destination.State.COMMITTING: ev.PullQuiesced(1),
}
"""What the loop or the movers have begun in a pending state, as the event that ends it."""
SENSELESS = ev.CommitRequested(Epoch(0, 1), 9, 100, 3, 4)
BARS: tuple[ev.DestinationEvent, ...] = (
    ev.WithdrawRequested(),
    ev.CancelRequested(),
    ev.AbortRequested(),
    ev.Revoked(Reason.DESTINATION_NEEDS_BLOCKS),
    ev.TimerFired("lease"),
    SENSELESS,
)
NO_BAR = {
    (destination.State.RESERVING, BARS[4]),  # there is no lease yet
    (destination.State.EXTENDING, SENSELESS),  # joins the Commit that is being worked on
    (destination.State.COMMITTING, SENSELESS),
    (destination.State.ADMITTING, BARS[3]),  # the blocks are about to be the request's own
    (destination.State.ADMITTING, BARS[4]),  # the bytes are there
    (destination.State.ADMITTING, SENSELESS),
}


@pytest.mark.parametrize(
    ("state", "bar"), [(state, bar) for state in UNDER_WAY for bar in BARS if (state, bar) not in NO_BAR]
)
def test_barred_at_once_and_freed_when_nothing_is_under_way(state: destination.State, bar: ev.DestinationEvent) -> None:
    machine = destination_in(state)
    told = machine.on(bar)
    assert machine.settlement is Settlement.BARRED
    if (ended := UNDER_WAY[state]) is not None:
        assert do.FreeReservation() not in told
        told = machine.on(ended)
    assert told.count(do.FreeReservation()) == 1
    assert machine.state is destination.State.BARRED


@pytest.mark.parametrize(("state", "bar"), sorted(NO_BAR, key=str))
def test_some_events_bar_nothing(state: destination.State, bar: ev.DestinationEvent) -> None:
    machine = destination_in(state)
    assert machine.on(bar) == []
    assert machine.state is state


@pytest.mark.parametrize("bar", BARS[:3], ids=lambda bar: type(bar).__name__)
def test_admission_is_taken_back_if_the_loop_has_not_begun_it(bar: ev.DestinationEvent) -> None:
    machine = destination_in(destination.State.ADMITTING)
    assert machine.on(bar) == [do.RevokeAdmit()]
    assert machine.settlement is Settlement.PENDING
    told = machine.on(ev.AdmitFailed(Reason.BARRED))
    assert told.count(do.FreeReservation()) == 1
    assert any(isinstance(answer, do.AnswerSettle) and answer.state is Settlement.BARRED for answer in told)


def test_admission_is_taken_back_if_the_loop_takes_too_long() -> None:
    machine = destination_in(destination.State.ADMITTING)
    assert machine.on(ev.TimerFired("admitting")) == [do.RevokeAdmit()]
    assert do.AnswerCommit(Settlement.BARRED, Reason.BARRED) in machine.on(ev.AdmitFailed(Reason.BARRED))


def test_admission_that_the_loop_has_begun_is_not() -> None:
    machine = destination_in(destination.State.ADMITTING)
    machine.on(ev.TimerFired("admitting"))
    assert machine.on(ev.Admitted())[0] == do.AnswerCommit(Settlement.COMMITTED)
    assert machine.settlement is Settlement.COMMITTED


@pytest.mark.parametrize("grown", [ev.Grown(20), ev.GrowFailed(Reason.DESTINATION_FULL)])
def test_reservation_that_cannot_grow_serves_a_round_that_fits(grown: ev.DestinationEvent) -> None:
    machine = destination_in(destination.State.GROWING)
    assert machine.on(grown) == [do.Pull(1, 0, 20)]


@pytest.mark.parametrize("grown", [ev.Grown(20), ev.GrowFailed(Reason.DESTINATION_FULL)])
def test_commit_that_finds_no_room_is_barred(grown: ev.DestinationEvent) -> None:
    machine = destination_in(destination.State.EXTENDING)
    assert do.FreeReservation() in machine.on(grown)
    assert machine.settlement is Settlement.BARRED


@pytest.mark.parametrize("ended", [ev.BlocksReserved(0, 9), ev.ReserveFailed(Reason.DESTINATION_FULL)])
def test_reservation_that_the_loop_has_begun_is_waited_for(ended: ev.DestinationEvent) -> None:
    machine = Destination(Terms(block_size=32))
    machine.on(ev.ReserveRequested())
    told = machine.on(ev.CancelRequested())
    assert do.FreeReservation() not in told
    assert do.AnswerSettle(Call.CANCEL, Settlement.BARRED, Reason.CANCELLED) in told
    assert (do.FreeReservation() in machine.on(ended)) == isinstance(ended, ev.BlocksReserved)
    assert machine.state is destination.State.BARRED


def test_abort_of_a_request_that_was_admitted_in_the_meantime() -> None:
    machine = reserved()
    machine.on(ev.CommitRequested(Epoch(0, 1), 9, 0, 0, 0))
    assert machine.on(ev.AbortRequested()) == [do.RevokeAdmit()]
    told = machine.on(ev.Admitted())
    assert do.AbortAdmitted() in told
    assert do.AnswerSettle(Call.ABORT, Settlement.COMMITTED) in told


def test_record_is_forgotten_in_the_end() -> None:
    machine = reserved()
    assert not machine.over
    assert do.SetTimer("barred", 600.0) in machine.on(ev.WithdrawRequested())
    machine.on(ev.TimerFired("barred"))
    assert machine.over
    assert machine.settlement is Settlement.UNKNOWN
