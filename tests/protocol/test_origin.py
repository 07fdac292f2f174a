# SPDX-License-Identifier: Apache-2.0
"""What the origin decides, step by step: no sockets, no clock. Random schedules: `tests/simulation`."""

from __future__ import annotations

import dataclasses

import pytest

from llumlet.protocol import wire
from llumlet.protocol.errors import Reason
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin import replay_words as words
from llumlet.protocol.origin.origin import Deliver, Fail, Origin, OriginEffect, Probe, Send, Surroundings
from llumlet.protocol.origin.owners import LOST_SECONDS
from llumlet.protocol.origin.placement import IN_FLIGHT
from llumlet.protocol.origin.replay import (
    CALL_SECONDS,
    COMPARE_SECONDS,
    MOST_COMPARED,
    REPLAY_SECONDS,
    RETRY_SECONDS,
    Replay,
    State,
)
from llumlet.protocol.origin.streams import GRACE_SECONDS, Stream
from llumlet.protocol.recovery.steps import LastSteps, name_of

RAISED = Epoch(1, 0)
DIGEST = "digest"


@dataclasses.dataclass
class Output:
    """Of the home engine."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: int | None = None


class Bench:
    """An origin with its home engine, A, and others; `now` is what the clock says."""

    def __init__(self, *others: str) -> None:
        self.now = 0.0
        self.steps = {"1": LastSteps(), "2": LastSteps()}
        """By incarnation: nobody is in a step."""
        self.complaints: list[str] = []
        self.origin = Origin(
            Surroundings(
                check=lambda token, stream: None,
                complain=lambda kind, text: self.complaints.append(kind),
                read_steps=self.steps.get,
                peers=tuple,
                room=dict,
                takes_aborts=lambda: True,
            )
        )
        for name in ("A", *others):
            self.hello(name)

    def hello(self, name: str, incarnation: str = "1") -> list[OriginEffect]:
        return self.hear(name, wire.Hello(wire.RELAY_VERSION, name, incarnation, name, DIGEST), incarnation)

    def hear(self, name: str, message: wire.ToOrigin, incarnation: str = "1") -> list[OriginEffect]:
        self.origin.hear(f"{name}{incarnation}".encode(), message, self.now)
        return self.origin.ready()

    def beat(self, *names: str) -> None:
        for name in names:
            self.hear(name, wire.Heartbeat(name, "1", wire.Health.OK, []))

    def tokens(
        self,
        name: str,
        request_id: str,
        first: int,
        *tokens: int,
        epoch: Epoch = RAISED,
        base: int = 0,
        finish: int | None = None,
    ) -> list[OriginEffect]:
        output = wire.TokenOutput(request_id, epoch, base, first, list(tokens), finish)
        return self.hear(name, wire.TokenBatch(name, "1", name, [output]))

    def open(self, *request_ids: str, never: str = "", num_prompt_tokens: int = 3) -> list[Stream]:
        streams = [Stream(request_id, num_prompt_tokens, "A", never=never) for request_id in request_ids]
        for stream in streams:
            self.origin.open(stream, self.now)
        return streams

    def home_dies(self) -> list[OriginEffect]:
        self.origin.home_died(self.now)
        return self.origin.ready()

    def answer(
        self, asked: words.AskCached | words.Adopt | words.Identify, event: words.ReplayEvent
    ) -> list[OriginEffect]:
        self.origin.answered(asked.request_id, asked.attempt, event, self.now)
        return self.origin.ready()

    def later(self, seconds: float) -> list[OriginEffect]:
        """Time passes, and every timer fires that is due on the way."""
        end, effects = self.now + seconds, []
        while (due := self.origin.due) is not None and due <= end:
            self.now = due
            self.origin.tick(self.now)
            effects += self.origin.ready()
        self.now = end
        return effects

    def state(self, request_id: str = "r") -> State | None:
        replay = self.origin.replays.get(request_id)
        return replay.state if replay is not None else None


def adopts(effects: list[OriginEffect]) -> list[words.Adopt]:
    return [effect for effect in effects if isinstance(effect, words.Adopt)]


def compared(effects: list[OriginEffect]) -> list[words.AskCached]:
    return [effect for effect in effects if isinstance(effect, words.AskCached)]


def kinds(effects: list[OriginEffect]) -> set[type]:
    return {type(effect) for effect in effects}


def test_a_lost_request_goes_on_under_a_term_of_its_own() -> None:
    bench = Bench("B")
    (stream,) = bench.open("r")
    bench.origin.take_home([Output("r", [10, 11])], "w1", bench.now)
    (asked,) = adopts(bench.home_dies())
    assert (asked.address, asked.epoch, asked.delivered) == ("B", RAISED, [10, 11])
    assert (asked.digest, asked.weight_version, asked.trial_tokens) == (DIGEST, "w1", 0)
    bench.answer(asked, words.Adopted("B", "1"))
    assert bench.state() is None
    assert (stream.replaying, stream.replays, bench.origin.num_replayed) == (False, 1, 1)
    assert stream.owner is not None
    assert (stream.owner.instance, stream.epoch) == ("B", RAISED)
    (delivered,) = bench.tokens("B", "r", 2, 12, base=2)
    assert isinstance(delivered, Deliver)
    late = bench.origin.take_home([Output("r", [99])], "w1", bench.now)
    assert late is not None
    assert late.parts == [], "what the lost one still says is nobody's"


def test_each_attempt_has_an_epoch_of_its_own() -> None:
    bench = Bench("B", "C")
    bench.open("r")
    (first,) = adopts(bench.home_dies())
    (second,) = adopts(bench.answer(first, words.AdoptRefused(Reason.DESTINATION_FULL)))
    assert {first.address, second.address} == {"B", "C"}
    assert (first.epoch, second.epoch) == (RAISED, Epoch(2, 0))
    stale = bench.tokens(first.address, "r", 0, 66)
    assert Send(f"{first.address}1".encode(), wire.Dismissal([("r", RAISED)])) in stale
    # The lost one is not asked, and nobody else is left: all are asked again in a moment.
    bench.answer(second, words.AdoptRefused(Reason.DESTINATION_FULL))
    assert bench.state() is State.RESTING
    bench.beat("B", "C")
    (third,) = adopts(bench.later(RETRY_SECONDS))
    assert third.epoch == Epoch(3, 0)


def test_an_answer_to_a_former_attempt_says_nothing() -> None:
    bench = Bench("B", "C")
    (stream,) = bench.open("r")
    (first,) = adopts(bench.home_dies())
    (second,) = adopts(bench.answer(first, words.AdoptRefused(Reason.DESTINATION_FULL)))
    assert bench.answer(first, words.Adopted(first.address, "1")) == []
    assert bench.state() is State.ASKING
    bench.answer(second, words.Adopted(second.address, "1"))
    assert stream.owner is not None
    assert stream.owner.instance == second.address


def test_silent_engine_is_called_off_and_slow_one_is_awaited() -> None:
    bench = Bench("B")
    bench.open("r")
    (asked,) = adopts(bench.home_dies())
    for _ in range(10):
        bench.beat("B")
        assert bench.later(1.0) == []
    effects = bench.later(CALL_SECONDS + 1.0)
    assert words.CallOff("r", asked.attempt) in effects
    assert words.AskWhetherGone("r", asked.attempt, "B") in effects
    assert bench.answer(asked, words.Adopted("B", "1")) == [], "its answer comes too late"
    dismissed = bench.answer(asked, words.GoneKnown(gone=False))
    assert Send(b"B1", wire.Dismissal([("r", RAISED)])) in dismissed


def test_time_in_which_the_origin_stood_still_is_nobodys_silence() -> None:
    """Neither of an owner, nor of who was asked to adopt; what was silent before stays so."""
    bench = Bench("B", "C")
    bench.open("r")
    bench.now = 0.5
    bench.beat("B")
    bench.now += 100.0
    bench.origin.forgive(99.0, bench.now)
    bench.origin.look(bench.now)
    assert {effect.owner.instance for effect in bench.origin.ready() if isinstance(effect, Probe)} == {*"ABC"}
    assert {*bench.origin.targets(None)} == {*"ABC"}
    (asked,) = adopts(bench.home_dies())
    bench.now += 100.0
    bench.origin.forgive(99.0, bench.now)
    bench.origin.tick(bench.now)
    assert bench.origin.ready() == [], "it is long due, and is waited for"
    assert words.CallOff("r", asked.attempt) in bench.later(CALL_SECONDS)
    bench.beat("B", "C")
    bench.now += LOST_SECONDS
    bench.origin.look(bench.now)
    assert bench.origin.targets(None) == [], "what was forgiven is over once it has spoken"


def test_an_engine_that_gives_the_request_up_before_it_has_answered() -> None:
    """One replay goes on, where two would raise each other's terms."""
    bench = Bench("B", "C")
    bench.open("r")
    (first,) = adopts(bench.home_dies())
    bench.tokens(first.address, "r", 0, 20)
    effects = bench.tokens(first.address, "r", 1, finish=wire.ABORT)
    assert words.CallOff("r", first.attempt) in effects
    (second,) = adopts(effects)
    assert (second.delivered, second.epoch) == ([20], Epoch(2, 0))
    assert second.address != first.address
    assert bench.answer(first, words.Adopted(first.address, "1")) == []
    bench.answer(second, words.Adopted(second.address, "1"))
    assert bench.origin.num_replayed == 1


def test_a_request_that_has_moved_on_before_its_adoption_was_answered() -> None:
    bench = Bench("B", "C")
    (stream,) = bench.open("r")
    (asked,) = adopts(bench.home_dies())
    other = "C" if asked.address == "B" else "B"
    bench.tokens(other, "r", 0, 20, epoch=RAISED.next_hop())
    bench.answer(asked, words.Adopted(asked.address, "1"))
    assert stream.owner is not None
    assert (stream.owner.instance, stream.epoch) == (other, RAISED.next_hop())


def test_the_client_leaves_while_an_engine_is_asked() -> None:
    bench = Bench("B")
    bench.open("r")
    (asked,) = adopts(bench.home_dies())
    bench.origin.close(["r"], bench.now)
    assert bench.origin.ready() == []
    assert bench.state() is State.CLOSING
    assert words.AbortAt("r", "B") in bench.answer(asked, words.Adopted("B", "1"))
    assert not bench.origin.is_busy
    assert bench.origin.due is None


def test_request_without_a_taker_is_retried_then_fails() -> None:
    bench = Bench("B")
    (stream,) = bench.open("r")
    effects = bench.home_dies()
    while not any(isinstance(effect, Fail) for effect in effects):
        assert bench.now < 2 * REPLAY_SECONDS
        bench.beat("B")
        asked = adopts(effects)
        effects = bench.answer(asked[0], words.AdoptRefused(Reason.DESTINATION_FULL)) if asked else bench.later(0.5)
    assert bench.now >= REPLAY_SECONDS
    assert not bench.origin.streams.is_open(stream)
    assert not bench.origin.is_busy


def test_a_refusal_that_all_would_give_ends_it_at_once() -> None:
    bench = Bench("B", "C")
    bench.open("r")
    (asked,) = adopts(bench.home_dies())
    assert Fail in kinds(bench.answer(asked, words.AdoptRefused(Reason.INVALID_REQUEST)))
    assert not bench.origin.is_busy


def test_a_few_at_a_time_go_to_an_engine() -> None:
    bench = Bench("B")
    names = [f"r{number}" for number in range(IN_FLIGHT + 2)]
    bench.open(*names)
    asked = adopts(bench.home_dies())
    assert len(asked) == IN_FLIGHT
    (next_one,) = adopts(bench.answer(asked[0], words.Adopted("B", "1")))
    assert next_one.request_id == names[IN_FLIGHT]


def test_suspects_are_tried_one_at_a_time_and_the_second_death_on_trial_ends_one() -> None:
    bench = Bench("B")
    bench.open("a", "b", "other")
    bench.steps["1"] = LastSteps(frozenset({name_of("a"), name_of("b")}))
    asked = {one.request_id: one for one in adopts(bench.home_dies())}
    assert {name: one.trial_tokens for name, one in asked.items()} == {"a": 4, "other": 0}
    bench.answer(asked["a"], words.Adopted("B", "1"))
    bench.steps["1"] = LastSteps(frozenset({name_of("a")}), on_trial=name_of("a"))
    owner = bench.origin.owners.named("B")
    assert owner is not None
    owner.died("its process is gone", bench.now)
    bench.origin.look(bench.now)
    (failed,) = [effect for effect in bench.origin.ready() if isinstance(effect, Fail)]
    assert failed.stream.request_id == "a"
    assert "(A, B)" in failed.explanation
    assert {stream.request_id for stream in bench.origin.streams.all()} == {"b", "other"}


def test_another_life_under_the_name_of_the_own_engine_is_not_that_one() -> None:
    """It has been started anew where the own one died, whose streams go on from here."""
    bench = Bench()
    bench.open("r")
    assert adopts(bench.home_dies()) == []
    bench.now = 1.0
    bench.hello("A", "2")
    bench.origin.look(bench.now)
    (asked,) = adopts(bench.origin.ready())
    assert asked.address == "A"
    bench.answer(asked, words.Adopted("A", "2"))
    again = bench.origin.owners.life("A", "2")
    assert again is not None
    assert not again.dead


@pytest.mark.parametrize("at_home", [True, False], ids=["at home", "elsewhere"])
def test_a_request_that_can_go_on_nowhere_and_is_given_up(at_home: bool) -> None:
    """Its client hears of an error, once, and the others of their tokens."""
    bench = Bench("B")
    bench.open("r", never="its prompt is more than tokens")
    bench.open("other")
    if at_home:
        bench.home_dies()
        bench.origin.open(Stream("r", 3, "A", never="its prompt is more than tokens"), bench.now)
        outputs = [Output("r", [], wire.ABORT), Output("other", [7])]
        taken = bench.origin.take_home(outputs, None, bench.now)
        effects = bench.origin.ready()
        assert taken is not None
        assert all(part.stream is None or part.stream.request_id == "other" for part in taken.parts)
        assert outputs[0] not in [part.payload for part in taken.parts]
    else:
        bench.tokens("B", "r", 0, 20, epoch=Epoch(0, 1))
        owner = bench.origin.owners.named("B")
        assert owner is not None
        owner.died("its process is gone", bench.now)
        effects = bench.tokens("B", "r", 1, epoch=Epoch(0, 1), finish=wire.ABORT)
    assert [effect.stream.request_id for effect in effects if isinstance(effect, Fail)] == ["r"]


def test_silent_engine_is_probed() -> None:
    bench = Bench("B")
    bench.now = 1.0
    bench.beat("A")
    bench.origin.look(bench.now)
    (probe,) = bench.origin.ready()
    assert isinstance(probe, Probe)
    assert probe.owner.instance == "B"
    bench.origin.look(bench.now)
    assert bench.origin.ready() == [], "one question at a time"
    heard = probe.owner.last_heard
    bench.beat("B")
    bench.origin.probed(probe.owner, heard, True, bench.now)
    assert not probe.owner.dead, "it has spoken since it was asked"


def test_without_another_engine_nothing_is_barred() -> None:
    bench = Bench()
    (stream,) = bench.open("r")
    bench.now = 10.0
    bench.origin.look(bench.now)
    bench.origin.ready()
    assert stream.gate is None, "it may wake up"
    bench.home_dies()
    bench.now += GRACE_SECONDS + 0.1
    bench.origin.look(bench.now)
    assert Fail in kinds(bench.origin.ready()), "now it will not"


LONG = Replay.compares_from


def test_of_a_long_stream_it_is_asked_who_has_it_cached() -> None:
    """Once: an attempt that was refused is followed by another one at once."""
    bench = Bench("B", "C", "D")
    bench.open("r", num_prompt_tokens=LONG - 2)
    bench.origin.take_home([Output("r", [10, 11])], None, bench.now)
    (asked,) = compared(effects := bench.home_dies())
    assert adopts(effects) == []
    assert (sorted(asked.addresses), asked.delivered, asked.seconds) == (["B", "C", "D"], [10, 11], COMPARE_SECONDS)
    assert bench.state() is State.COMPARING
    (first,) = adopts(bench.answer(asked, words.CachedKnown({"B": 16, "D": 128})))
    assert first.address == "D"
    (second,) = adopts(bench.answer(first, words.AdoptRefused(Reason.DESTINATION_FULL)))
    assert second.address == "B"
    bench.answer(second, words.Adopted("B", "1"))
    assert not bench.origin.is_busy


def test_unanswered_cache_question_is_not_awaited() -> None:
    bench = Bench("B", "C")
    bench.open("r", num_prompt_tokens=LONG)
    (asked,) = compared(bench.home_dies())
    (adopt,) = adopts(bench.answer(asked, words.CachedKnown({})))
    assert adopt.address in {"B", "C"}
    assert bench.answer(asked, words.CachedKnown({"B": 99})) == [], "the answer to a former replay"


def test_a_handful_is_asked_and_first_where_the_request_was_sent() -> None:
    """It has moved to B since, which is lost."""
    others = [f"B{number}" for number in range(9)]
    bench = Bench("B", *others)
    bench.open("r", num_prompt_tokens=LONG)
    bench.tokens("B", "r", 0, 20, epoch=Epoch(0, 1))
    owner = bench.origin.owners.named("B")
    assert owner is not None
    owner.died("its process is gone", bench.now)
    bench.origin.look(bench.now)
    (asked,) = compared(bench.origin.ready())
    assert len(asked.addresses) == MOST_COMPARED
    assert asked.addresses[0] == "A"
    (adopt,) = adopts(bench.answer(asked, words.CachedKnown({"A": LONG - 16})))
    assert adopt.address == "A"


def test_the_client_leaves_while_it_is_asked_who_has_it_cached() -> None:
    bench = Bench("B", "C")
    bench.open("r", num_prompt_tokens=LONG)
    (asked,) = compared(bench.home_dies())
    bench.origin.close(["r"], bench.now)
    assert bench.origin.ready() == []
    assert not bench.origin.is_busy
    assert bench.answer(asked, words.CachedKnown({"B": LONG})) == []


def test_a_suspect_is_tried_where_it_is_cached() -> None:
    """It keeps its turn meanwhile."""
    bench = Bench("B", "C")
    bench.open("r", "s", num_prompt_tokens=LONG)
    bench.steps["1"] = LastSteps(frozenset({name_of("r"), name_of("s")}))
    first, second = compared(bench.home_dies())
    for asked, at in ((first, "C"), (second, "B")):
        (adopt,) = adopts(bench.answer(asked, words.CachedKnown({at: LONG})))
        assert (adopt.request_id, adopt.address, adopt.trial_tokens) == (asked.request_id, at, 4)


@pytest.mark.parametrize("why", ["short", "one engine", "its cache can be read"])
def test_it_is_not_asked_where_it_makes_no_difference(why: str) -> None:
    bench = Bench("B") if why == "one engine" else Bench("B", "C")
    bench.open("r", num_prompt_tokens=LONG - 1 if why == "short" else LONG)
    if why == "its cache can be read":
        bench.hear("A", wire.Heartbeat("A", "1", wire.Health.HUNG, []))
        bench.origin.look(bench.now)
        effects = bench.origin.ready()
    else:
        effects = bench.home_dies()
    assert compared(effects) == []
    (adopt,) = adopts(effects)
    assert (adopt.holder is not None) == (why == "its cache can be read")
