# SPDX-License-Identifier: Apache-2.0
"""Starts a stream's request again on another engine, from what its client has received: one machine per replay.

Whatever became of the owner, the origin has the request and the delivered tokens. All former owners are barred before a
replay begins. Each attempt has an epoch of its own, so that an attempt whose answer was lost cannot own the request
beside a later one.

All streams of a dead engine are replayed at once. `placement` spreads them and lets a few at a time go to each engine:
an attempt's time begins with its place. An engine at work on an attempt shows that on the relay, and may take as long
as a grammar does. An attempt that is given up is called off. A suspect waits for its turn to be tried (`suspects`).

    WAITING       for the request's turn, which comes at once if it is not suspected
    COMPARING     a few engines say how much of it they have cached: computing the rest is the cost of a replay
    PLACING       waiting for a place among the requests on their way to the chosen engine
    IDENTIFYING   asking the engine for its id, to find its crash record if it dies before it answers
    ASKING        an attempt is under way
    LOOKING       the attempt broke off: is the engine's process gone?
    RESTING       no engine took the request; all are asked again in a moment
    TAKEN, GIVEN_UP, ENDED
    CLOSING       the client has left meanwhile; an attempt that succeeds is undone
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from llumlet.protocol.effects import ClearTimer, SetTimer
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import TimerFired
from llumlet.protocol.ids import HOME
from llumlet.protocol.machine import Machine, install, rows, timer
from llumlet.protocol.origin import replay_words as w
from llumlet.protocol.origin.owners import Owner, Owners
from llumlet.protocol.origin.placement import Placement
from llumlet.protocol.origin.streams import Stream, Streams
from llumlet.protocol.recovery.suspects import Suspects
from llumlet.protocol.wire import Health

CALL_SECONDS = 5.0
"""Silence of an asked engine after which another one is asked."""
ATTEMPT_SECONDS = 25.0
"""Time for the answer of an engine that is heard of: building the request, its grammar included, and a turn of its
loop."""
IDENTIFY_SECONDS = 1.0
COMPARE_SECONDS = 0.5
"""Longest wait for answers. With connections to all engines, they come within milliseconds."""
MOST_COMPARED = 4
WATCH_SECONDS = 0.25
REPLAY_SECONDS = 60.0
"""Time after which a request that no engine has taken ends with an error."""
RETRY_SECONDS = 0.2
HOPELESS = frozenset({Reason.INVALID_REQUEST})
"""Refusals that every engine would give."""
OF_THE_REQUEST = HOPELESS | {
    Reason.HANDOVER_OPEN,
    Reason.BARRED,
    Reason.DEADLINE,
    Reason.LORA_NOT_AVAILABLE,
    Reason.OTHER_WEIGHTS,
    Reason.REQUEST_TOO_LONG,
    Reason.TRANSFER_FAILED,
}
"""Refusals that say nothing of how others would fare at that engine."""
WATCH = "watch"


class State(enum.StrEnum):
    NEW = "new"
    WAITING = "waiting"
    COMPARING = "comparing"
    PLACING = "placing"
    IDENTIFYING = "identifying"
    ASKING = "asking"
    LOOKING = "looking"
    RESTING = "resting"
    TAKEN = "taken"
    GIVEN_UP = "given_up"
    CLOSING = "closing"
    ENDED = "ended"


@dataclasses.dataclass(eq=False, slots=True)
class Around:
    """The shared context of an origin's replays. `dies` is called for a request whose new owner was lost, or announced
    its end, before it answered; it returns true if that ends the request."""

    streams: Streams
    owners: Owners
    suspects: Suspects[Owner]
    placement: Placement
    targets: Callable[[Owner | None], Sequence[str]]
    room: Callable[[], Mapping[str, int]]
    dies: Callable[[Stream, Owner, bool], bool]
    now: float = 0.0
    """The time of the present event, in seconds of the origin's monotonic clock."""


class Replay(Machine[State, w.ReplayEvent, w.ReplayEffect]):
    """`lost`: the engine to ask last. `digest`: the engines that fit."""

    compares_from: ClassVar[int] = 256
    """Number of tokens from which on engines are asked for cached ones; fewer are computed in the time of asking."""

    def __init__(self, around: Around, stream: Stream, lost: Owner | None, digest: str) -> None:
        super().__init__(State.NEW)
        self.stream = stream
        self.attempt = 0
        """Number of the present one."""
        self._around = around
        self._lost = lost
        self._digest = digest
        self._holder: Owner | None = None
        """The engine that may still have its KV cache."""
        self._cached: Mapping[str, int] | None = None
        """Tokens of it that engines have cached, by address, once they were asked."""
        self._asked: set[str] = set()
        self._address = ""
        self._give_up_at: float | None = None
        """Time at which it is given up."""
        self._hopeless = False
        """True if no engine would take it."""
        self._has_had_turn = False
        self._looked_for: Owner | None = None
        self._asked_at = 0.0
        self._forgiven = 0.0
        """Seconds since then in which this process stood still."""
        self._epoch = HOME
        """The present attempt's epoch."""

    @property
    def over(self) -> bool:
        return self.state in (State.TAKEN, State.GIVEN_UP, State.ENDED)

    def _deadline(self, state: State) -> float | None:
        return RETRY_SECONDS if state is State.RESTING else None

    # Its turn

    def _ask_turn(self, event: object) -> list[w.ReplayEffect]:
        self._around.suspects.ask_turn(self.stream.request_id)
        return []

    def _left(self) -> list[str]:
        """Llumlets to choose from. For a suspect, those of engines without a trial, if there are any. The lost engine
        may have returned, and is a choice if no other is left."""
        targets = self._around.targets
        left = [address for address in targets(self._lost) if address not in self._asked]
        left = left or [address for address in targets(None) if address not in self._asked]
        if not self._trial_tokens:
            return left
        taken = {owner.llumlet for owner in self._around.suspects.engines}
        return [address for address in left if address not in taken] or left

    def _is_to_compare(self, event: w.TurnCame) -> bool:
        """True if the choice matters: the request is long, and no engine may still have all of its KV cache."""
        brings_cache = self._lost is not None and self._lost.may_have_cache(self._around.now)
        matters = self.stream.num_tokens >= self.compares_from and not brings_cache
        return matters and self._cached is None and not self.attempt and len(self._left()) > 1

    def _compare(self, event: w.TurnCame) -> list[w.ReplayEffect]:
        """Asks the engines that could be chosen, and first its original one, which may have its prompt cached."""
        self._begin_with_turn()
        around, stream = self._around, self.stream
        ranked = around.placement.ranked(stream.request_id, stream.num_tokens, self._left(), around.room(), around.now)
        home = around.owners.named(stream.home)
        ranked.sort(key=lambda address: home is None or address != home.llumlet)
        return [w.AskCached(stream, self.attempt, ranked[:MOST_COMPARED], list(stream.delivered), COMPARE_SECONDS)]

    def _learn_cached(self, event: w.CachedKnown) -> list[w.ReplayEffect]:
        self._cached = event.num_tokens
        return self._ask_turn(event)

    def _anybody_left(self, event: w.TurnCame) -> bool:
        return not self._hopeless and bool(self._left())

    def _choose(self, event: w.TurnCame) -> list[w.ReplayEffect]:
        around, stream = self._around, self.stream
        self._begin_with_turn()
        address = around.placement.choose(
            stream.request_id, stream.num_tokens, self._left(), around.room(), around.now, self._cached or {}
        )
        around.placement.enter(stream.request_id, address, stream.num_tokens, around.now)
        return []

    def _begin_with_turn(self) -> None:
        if not self._has_had_turn:
            self._has_had_turn = True
            # What it insists on for a while, it insists on from here.
            self.stream.deposed_at = now = self._around.now
            self._holder = self._lost if self._lost is not None and self._lost.may_have_cache(now) else None

    def _too_late(self, event: w.TurnCame) -> bool:
        return self._hopeless or (self._give_up_at is not None and self._around.now > self._give_up_at)

    def _give_up(self, event: w.TurnCame) -> list[w.ReplayEffect]:
        self._around.suspects.step_back(self.stream.request_id)
        said = f"no engine takes request {self.stream.request_id}; its client gets an error"
        return [w.Log(said, w.Level.ERROR), w.GiveUp()]

    def _rest(self, event: w.TurnCame) -> list[w.ReplayEffect]:
        self._begin_with_turn()
        if self._give_up_at is None:
            self._give_up_at = self._around.now + REPLAY_SECONDS
        self._asked.clear()
        return []

    # An attempt

    def _is_stale(self, event: w.PlaceCame) -> bool:
        return self._around.placement.is_stale(self.stream.request_id)

    def _is_stranger(self, event: w.PlaceCame) -> bool:
        """True if the request is on trial and its engine's id is not known."""
        owner = self._around.owners.at_llumlet(self._around.placement.address_of(self.stream.request_id))
        return self._trial_tokens > 0 and (owner is None or bool(owner.dead))

    @property
    def _trial_tokens(self) -> int:
        return self._around.suspects.trial_tokens(self.stream.request_id)

    def _begin_attempt(self) -> None:
        self._address = self._around.placement.address_of(self.stream.request_id)
        self._asked.add(self._address)
        if self.attempt:
            self._raise_term()
        self.attempt += 1

    def _raise_term(self) -> None:
        """Raises the term, as the attempt before may have succeeded."""
        self._around.streams.depose(self.stream, self._around.now)

    def _identify(self, event: w.PlaceCame) -> list[w.ReplayEffect]:
        self._begin_attempt()
        return [w.Identify(self.stream.request_id, self.attempt, self._address, IDENTIFY_SECONDS)]

    def _adopt_here(self, event: w.PlaceCame) -> list[w.ReplayEffect]:
        self._begin_attempt()
        return self._adopt(self._around.owners.at_llumlet(self._address))

    def _adopt_at(self, event: w.Identified) -> list[w.ReplayEffect]:
        return self._adopt(Owner(event.instance, event.incarnation, identity=b"", llumlet=self._address))

    def _adopt(self, owner: Owner | None) -> list[w.ReplayEffect]:
        around, stream = self._around, self.stream
        if self._trial_tokens:
            # If the answer never comes, the last steps of this engine tell why.
            around.suspects.sent(stream.request_id, owner, len(stream.delivered))
        self._asked_at, self._forgiven, self._epoch = around.now, 0.0, stream.epoch
        adopt = w.Adopt(
            stream=stream,
            attempt=self.attempt,
            address=self._address,
            epoch=stream.epoch,
            delivered=list(stream.delivered),
            digest=self._digest,
            weight_version=stream.weights_wanted(around.now),
            trial_tokens=self._trial_tokens,
            holder=self._holder,
            seconds=ATTEMPT_SECONDS,
        )
        return [adopt, SetTimer(WATCH, WATCH_SECONDS)]

    def _why_silent(self) -> str:
        """The reason to wait no longer for the answer; empty while the replay waits."""
        around = self._around
        owner = around.owners.at_llumlet(self._address)
        if owner is not None and owner.health is Health.HUNG and owner.last_heard > self._asked_at:
            return "its loop hangs"
        silent = around.now - self._asked_at - self._forgiven
        if owner is not None:
            silent = min(silent, owner.silence(around.now))
        return f"nothing heard of it for {silent:.1f} s" if silent > CALL_SECONDS else ""

    def forgive(self, seconds: float, now: float) -> None:
        """Excuses a time in which nothing could be heard of the asked engine."""
        self._forgiven = min(now - self._asked_at, self._forgiven + seconds)

    def _is_silent(self, event: TimerFired) -> bool:
        return event.name == WATCH and bool(self._why_silent())

    def _call_off(self, event: TimerFired) -> list[w.ReplayEffect]:
        why = f"{self._address} is not waited for with request {self.stream.request_id}: {self._why_silent()}"
        return [w.CallOff(self.stream.request_id, self.attempt), w.Log(why), *self._look()]

    def _call_off_closed(self, event: TimerFired) -> list[w.ReplayEffect]:
        return [w.CallOff(self.stream.request_id, self.attempt), *self._dismiss(), *self._leave(event)]

    def _lost_closed(self, event: w.AnswerLost) -> list[w.ReplayEffect]:
        return [*self._dismiss(), *self._leave(event)]

    # What came of it

    def _taken(self, event: w.Adopted) -> list[w.ReplayEffect]:
        around, stream = self._around, self.stream
        owner = around.owners.expected(event.instance, event.incarnation, self._address, around.now)
        if stream.epoch == self._epoch:
            # Otherwise it has moved on by now, and its new owner has said so.
            stream.owned_by(owner, self._epoch, around.now)
        around.suspects.taken_by(stream.request_id, owner)
        stream.replaying = False
        stream.replays += 1
        self._leave_place(taken=True)
        return self._stop_watching()

    def _refused(self, event: w.AdoptRefused) -> list[w.ReplayEffect]:
        around, request_id = self._around, self.stream.request_id
        self._hopeless = event.reason in HOPELESS
        if event.reason is Reason.TRANSFER_FAILED:
            self._holder = None
        # A trial that keeps another waiting says nothing of the engine either.
        busy_with_trial = self._trial_tokens > 0 and event.reason is Reason.DESTINATION_BUSY
        if event.reason not in OF_THE_REQUEST and not busy_with_trial:
            around.placement.shun(self._address, around.now)
        ends = event.reason is Reason.SHUTTING_DOWN
        self._learn(self._whose_end() if ends else None, ends=ends)
        said = f"{event.reason}: {event.detail}" if event.detail else str(event.reason)
        return [
            *self._stop_watching(),
            w.Log(f"{self._address} does not take request {request_id}: {said}"),
            *self._next(),
        ]

    def _not_sent(self, event: w.NotSent) -> list[w.ReplayEffect]:
        self._holder = None
        said = f"request {self.stream.request_id} cannot be sent to {self._address}: {event.detail}"
        return [*self._stop_watching(), w.Log(said), *self._next()]

    def _come_back(self, event: w.GivenUpThere) -> list[w.ReplayEffect]:
        self._around.placement.shun(self._address, self._around.now)
        said = f"{self._address} has taken request {self.stream.request_id}, and given it up"
        return [w.CallOff(self.stream.request_id, self.attempt), *self._stop_watching(), w.Log(said), *self._next()]

    def _is_broken(self, event: w.AnswerLost) -> bool:
        return event.broken

    def _look_for_it(self, event: w.AnswerLost) -> list[w.ReplayEffect]:
        return [*self._stop_watching(), self._not_waited_for(event), *self._look()]

    def _do_not_wait(self, event: w.AnswerLost) -> list[w.ReplayEffect]:
        self._give_up_attempt()
        self._learn()
        return [*self._stop_watching(), self._not_waited_for(event), *self._dismiss(), *self._next()]

    def _not_waited_for(self, event: w.AnswerLost) -> w.Log:
        return w.Log(f"{self._address} is not waited for with request {self.stream.request_id}: {event.detail}")

    def _look(self) -> list[w.ReplayEffect]:
        self._give_up_attempt()
        self._looked_for = owner = self._whose_end()
        return [w.AskWhetherGone(self.stream.request_id, self.attempt, owner.llumlet)]

    def _give_up_attempt(self) -> None:
        self._holder = None
        self._around.placement.shun(self._address, self._around.now)

    def _know(self, event: w.GoneKnown) -> list[w.ReplayEffect]:
        owner = self._looked_for
        assert owner is not None
        if event.gone:
            owner.died("its process is gone", self._around.now)
        self._learn(owner)
        return [*self._dismiss(), *self._next()]

    def _whose_end(self) -> Owner:
        """The engine that the attempt may have ended."""
        around = self._around
        owner = around.suspects.tried_at(self.stream.request_id) or around.owners.at_llumlet(self._address)
        return owner or Owner(self._address, incarnation="", identity=b"", llumlet=self._address)

    def _learn(self, lost: Owner | None = None, *, ends: bool = False) -> None:
        """Records that the request may have been there for long enough to end the engine, and so be ended itself."""
        if lost is None or not self._around.dies(self.stream, lost, ends):
            self._around.suspects.sent(self.stream.request_id, None, len(self.stream.delivered))

    def _dismiss(self) -> list[w.ReplayEffect]:
        """Dismisses the engine in case it has the request after all, before the heartbeat that would show it."""
        owner = self._around.owners.at_llumlet(self._address)
        return [w.Dismiss(owner)] if owner is not None else []

    def _next(self, event: object = None) -> list[w.ReplayEffect]:
        self._leave_place()
        return self._ask_turn(event)

    # The client has left

    def _undo(self, event: w.Adopted) -> list[w.ReplayEffect]:
        return [w.AbortAt(self.stream.request_id, self._address), *self._leave(event)]

    def _leave(self, event: object) -> list[w.ReplayEffect]:
        self._around.suspects.step_back(self.stream.request_id)
        self._leave_place()
        return self._stop_watching()

    def _leave_place(self, *, taken: bool = False) -> None:
        self._around.placement.leave(self.stream.request_id, taken=taken, now=self._around.now)

    def _stop_watching(self) -> list[w.ReplayEffect]:
        return [ClearTimer(WATCH)] if WATCH in self._armed else []


_S = State
_IDLE = (_S.WAITING, _S.COMPARING, _S.PLACING, _S.LOOKING, _S.RESTING)
_CALLING = (_S.IDENTIFYING, _S.ASKING)

install(
    Replay,
    [
        rows(_S.NEW, w.ReplayBegun, _S.WAITING, Replay._ask_turn),
        rows(_S.WAITING, w.TurnCame, _S.COMPARING, Replay._compare, when=Replay._is_to_compare),
        rows(_S.WAITING, w.TurnCame, _S.PLACING, Replay._choose, when=Replay._anybody_left),
        rows(_S.WAITING, w.TurnCame, _S.GIVEN_UP, Replay._give_up, when=Replay._too_late),
        rows(_S.WAITING, w.TurnCame, _S.RESTING, Replay._rest),
        rows(_S.COMPARING, w.CachedKnown, _S.WAITING, Replay._learn_cached),
        rows(_S.RESTING, TimerFired, _S.WAITING, Replay._ask_turn),
        rows(_S.PLACING, w.PlaceCame, _S.WAITING, Replay._next, when=Replay._is_stale),
        rows(_S.PLACING, w.PlaceCame, _S.IDENTIFYING, Replay._identify, when=Replay._is_stranger),
        rows(_S.PLACING, w.PlaceCame, _S.ASKING, Replay._adopt_here),
        rows(_S.IDENTIFYING, w.Identified, _S.ASKING, Replay._adopt_at),
        rows(_S.ASKING, w.Adopted, _S.TAKEN, Replay._taken),
        rows(_CALLING, w.AdoptRefused, _S.WAITING, Replay._refused),
        rows(_S.ASKING, w.NotSent, _S.WAITING, Replay._not_sent),
        rows(_S.ASKING, w.GivenUpThere, _S.WAITING, Replay._come_back),
        rows(_CALLING, w.AnswerLost, _S.LOOKING, Replay._look_for_it, when=Replay._is_broken),
        rows(_CALLING, w.AnswerLost, _S.WAITING, Replay._do_not_wait),
        rows(_S.ASKING, TimerFired, _S.LOOKING, Replay._call_off, when=Replay._is_silent),
        rows(_S.ASKING, TimerFired, None, [SetTimer(WATCH, WATCH_SECONDS)], when=timer(WATCH)),
        rows(_S.LOOKING, w.GoneKnown, _S.WAITING, Replay._know),
        # The client has left
        rows(_IDLE, w.StreamEnded, _S.ENDED, Replay._leave),
        rows(_CALLING, w.StreamEnded, _S.CLOSING),
        rows(_S.CLOSING, w.Adopted, _S.ENDED, Replay._undo),
        rows(_S.CLOSING, TimerFired, _S.ENDED, Replay._call_off_closed, when=Replay._is_silent),
        rows(_S.CLOSING, TimerFired, None, [SetTimer(WATCH, WATCH_SECONDS)], when=timer(WATCH)),
        rows(_S.CLOSING, w.AnswerLost, _S.ENDED, Replay._lost_closed),
        *(rows(_S.CLOSING, answer, _S.ENDED, Replay._leave) for answer in (w.Identified, w.AdoptRefused, w.NotSent)),
        # Answers to an attempt that was called off, or of a former replay
        *(
            rows(_IDLE, answer, None, late=True)
            for answer in (w.CachedKnown, w.Identified, w.Adopted, w.AdoptRefused, w.NotSent, w.AnswerLost)
        ),
        rows((*_IDLE, _S.IDENTIFYING), w.GivenUpThere, None, late=True),
    ],
)
