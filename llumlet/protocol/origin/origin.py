# SPDX-License-Identifier: Apache-2.0
"""The origin: an API server's decisions about the requests whose clients it holds, wherever they run.

It keeps a gate and the delivered tokens of every stream (`streams`), knows engines (`owners`), finds streams that have
lost theirs, raises their terms and has them replayed, each by its own machine (`replay`), spread over the remaining
engines (`placement`), suspects one at a time (`suspects`).

Events carry their time: outputs, messages, answers, a periodic look, a timer that `due` asked for. The resulting
effects are then taken with `ready`, in order:

    origin.hear(identity, message, now)
    for effect in origin.ready(): …

Released outputs are among them (`Deliver`): a shell that carries out all effects before the next event cannot reorder
tokens. For outputs of the home engine, which vLLM holds, `take_home` returns the remaining ones at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from llumlet.protocol import wire
from llumlet.protocol.effects import ClearTimer, SetTimer
from llumlet.protocol.events import TimerFired
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin import replay_words as words
from llumlet.protocol.origin.inputs import Inputs, SendPart
from llumlet.protocol.origin.owners import PROBE_SECONDS, Owner, Owners, ReadSteps, steps_of
from llumlet.protocol.origin.placement import Placement
from llumlet.protocol.origin.replay import Around, Replay, State
from llumlet.protocol.origin.streams import Check, Complain, HomeOutput, Orphan, Part, Stream, Streams, TakenHome
from llumlet.protocol.recovery.suspects import Judgement, Suspects


class Send(msgspec.Struct, frozen=True):
    """A message for the connection with this identity, at once or not at all: the peer's next message brings another
    answer."""

    identity: bytes
    message: wire.ToEngine


class Deliver(msgspec.Struct, frozen=True):
    """Outputs for the clients, in this order."""

    parts: list[Part]
    weight_version: str | None


class Fail(msgspec.Struct, frozen=True):
    """The end of a stream that cannot go on: its client gets an error, with this explanation if there is one."""

    stream: Stream
    explanation: str = ""


class Probe(msgspec.Struct, frozen=True):
    """Asks if an engine's llumlet has stopped listening. Answered with `probed`."""

    owner: Owner


OriginEffect = (
    Send
    | SendPart
    | Deliver
    | Fail
    | Probe
    | words.Log
    | words.AskCached
    | words.Identify
    | words.Adopt
    | words.CallOff
    | words.AskWhetherGone
    | words.AbortAt
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The interface of an origin to its process. None of it waits."""

    check: Check
    complain: Complain
    read_steps: ReadSteps
    peers: Callable[[], Sequence[str]]
    """Addresses of llumlets that may take requests, beside those that are known to live."""
    room: Callable[[], Mapping[str, int]]
    """Room at some of them: tokens of KV cache that nothing is waiting for."""
    takes_aborts: Callable[[], bool]
    """True if an engine that gives a request up unasked counts as lost; false while it was told to abort all."""


class Origin:
    """The origin of one API server process."""

    replay_class: type[Replay] = Replay

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self.owners = Owners()
        self.streams = Streams(surroundings.check, surroundings.complain)
        self.inputs = Inputs(self.streams)
        self.suspects = Suspects[Owner](lambda: len(self.targets(None)))
        self.placement = Placement()
        self.replays: dict[str, Replay] = {}
        """Replays by request; its stream may have ended meanwhile."""
        self.num_replayed = 0
        """Requests that went on elsewhere after their owner was lost."""
        self.home_dead = False
        """The engine that the requests were sent to is gone for good."""
        self._homes: dict[str, str] = {}
        """Incarnations of the own engines, by instance."""
        self._around = Around(
            self.streams,
            self.owners,
            self.suspects,
            self.placement,
            lambda avoid: self.targets(avoid),
            surroundings.room,
            self._dies,
        )
        self._timers: dict[tuple[str, str], float] = {}
        """Times at which replays' timers fire, by request and name."""
        self._probing: set[str] = set()
        """Addresses of llumlets."""
        self._effects: list[OriginEffect] = []

    # What is to be done

    def ready(self) -> list[OriginEffect]:
        """Everything since this was last asked, in order."""
        self._settle()
        effects, self._effects = self._effects, []
        return effects

    @property
    def due(self) -> float | None:
        """The time at which `tick` has to be called, if nothing happens before."""
        return min(self._timers.values(), default=None)

    @property
    def is_busy(self) -> bool:
        """True if requests are looking for an engine."""
        return bool(self.replays)

    # Streams and their outputs

    def open(self, stream: Stream, now: float) -> None:
        """Called before the request is sent."""
        self.streams.open(stream, now)

    def add_input(self, stream: Stream, part: object) -> bool:
        """More input of an open stream. Returns whether it has to go to the home engine, on vLLM's own path."""
        self._effects += self.inputs.add(stream, part)
        return stream.owner is None

    def end_input(self, stream: Stream, now: float) -> bool:
        """There is no more. As `add_input`; where everything is answered, the stream ends with this."""
        self._effects += self.inputs.end(stream)
        if stream.ends_left == 0:
            self.close([stream.request_id], now)
        return stream.owner is None

    def cannot_send(self, part: SendPart, why: str, now: float) -> None:
        """The engine that has the stream's request cannot be sent the part."""
        self.close([part.stream.request_id], now)
        self._give_up(part.stream, f"request {part.stream.request_id} ends: it has moved, and {why}")

    def close(self, request_ids: Iterable[str], now: float) -> list[Stream]:
        """The clients have left: tell the owners of requests that have moved. Returns the streams that were open."""
        self._around.now = now
        closed = self.streams.close(request_ids)
        unwanted: dict[Owner, list[tuple[str, Epoch]]] = {}
        for stream in closed:
            if stream.owner is not None:
                unwanted.setdefault(stream.owner, []).append((stream.request_id, stream.epoch))
        for owner, requests in unwanted.items():
            self._dismiss_all(owner, requests)
        return closed

    def cut(self, now: float) -> None:
        """End every stream with an error."""
        for stream in self.streams.all():
            self.close([stream.request_id], now)
            self.streams.give_up(stream)
            self._effects.append(Fail(stream))

    def came_after(self, stream: Stream, num_deaths: int, now: float) -> None:
        """A gateway has seen so many instances die with this request."""
        self._around.now = now
        self.suspects.came_after(stream.request_id, num_deaths, self.home_of(stream))

    def take_home(self, outputs: Sequence[HomeOutput], weight_version: str | None, now: float) -> TakenHome | None:
        """The outputs of the own engine's step for clients; None: all of them, unchanged."""
        self._around.now = now
        return self.streams.take_home(outputs, weight_version, self._gave_up)

    # The relay

    def hear(self, identity: bytes, message: wire.ToOrigin, now: float) -> None:
        """An engine has said this on the connection with this identity."""
        self._around.now = now
        match message:
            case wire.TokenBatch():
                owner = self.owners.heard(identity, message.instance, message.incarnation, now)
                owner.llumlet = message.llumlet
                taken = self.streams.take_batch(message, owner, self._gave_up, now)
                self._deliver(taken.delivered, message.weight_version)
                if taken.unwanted:
                    self._effects.append(Send(identity, wire.Dismissal(list(taken.unwanted.items()))))
            case wire.Heartbeat():
                owner = self.owners.heard(identity, message.instance, message.incarnation, now)
                owner.says(message.health)
                unknown = self.streams.confirm(owner, message.requests, now)
                self._effects.append(Send(identity, wire.HeartbeatAck(unknown)))
                self._effects += self.inputs.lacking_at(owner, message.num_parts)
            case wire.HandedOver():
                owner = self.owners.expected(message.instance, message.incarnation, message.llumlet, now)
                self.streams.hand_over(message, owner, now)
            case wire.Parting():
                self.owners.heard(identity, message.instance, message.incarnation, now).parted = True
            case wire.FenceQuestion():
                answer = self.streams.fence(message, self.owners.at(identity), now)
                self._effects.append(Send(identity, answer))
            case wire.Hello():
                owner = self.owners.heard(identity, message.instance, message.incarnation, now)
                owner.llumlet, owner.digest = message.llumlet, message.digest
                if message.version != wire.RELAY_VERSION:
                    theirs = f"{message.instance} speaks version {message.version}, we {wire.RELAY_VERSION}"
                    self._surroundings.complain("version", theirs)

    def _deliver(self, parts: list[Part], weight_version: str | None) -> None:
        if self.suspects.any_tried:
            for part in parts:
                assert part.stream is not None
                self.suspects.heard(part.stream.request_id, len(part.stream.delivered))
        if parts:
            self._effects.append(Deliver(parts, weight_version))

    # Lost owners

    def look(self, now: float) -> None:
        """Several times a second: probes silent engines, and has orphans continue elsewhere."""
        self._around.now = now
        for owner in self.owners.all():
            silent = owner.silence(now) > PROBE_SECONDS and not owner.parted
            if silent and owner.llumlet and not owner.dead and owner.llumlet not in self._probing:
                self._probing.add(owner.llumlet)
                self._effects.append(Probe(owner))
        for orphan in self.streams.orphans(self.home_of, now):
            self._let_go_on(orphan)
        self.suspects.keep(self.streams)
        self.suspects.advance()

    def forgive(self, seconds: float, now: float) -> None:
        """Extends all limits by `seconds` in which this process stood still."""
        for owner in self.owners.all():
            owner.forgiven = min(now - owner.last_heard, owner.forgiven + seconds)
        for replay in self.replays.values():
            replay.forgive(seconds, now)

    def probed(self, owner: Owner, last_heard: float, gone: bool, now: float) -> None:
        """The answer to `Probe`, asked when it had been heard of at `last_heard`; since then it may have been again."""
        self._around.now = now
        self._probing.discard(owner.llumlet)
        if gone and owner.last_heard == last_heard:
            owner.died("its process is gone", now)

    def home_died(self, now: float) -> None:
        """The process of the own engine has ended."""
        self.home_dead = True
        self.look(now)

    def home_of(self, stream: Stream) -> Owner | None:
        """The engine that the request was sent to; None until it has said hello, or died."""
        home = self.own_engine(stream.home)
        if self.home_dead:
            # Also one that has died before it could say hello.
            now = self._around.now
            home = home or self.owners.expected(stream.home, incarnation="", llumlet="", now=now)
            home.died("its engine has died", now)
        return home

    def own_engine(self, instance: str) -> Owner | None:
        """The life of an own engine that has been heard of. What is started anew under its name is another engine."""
        known = self._homes.get(instance)
        engine = self.owners.named(instance) if known is None else self.owners.life(instance, known)
        if engine is not None and engine.incarnation:
            self._homes[instance] = engine.incarnation
        return engine

    def targets(self, avoid: Owner | None) -> list[str]:
        """Addresses of llumlets that could take a request: engines that are known to live, and peers that may."""
        now = self._around.now
        owners = self.owners.all()
        living = [owner for owner in owners if owner.llumlet and owner.may_take_requests(now)]
        alive = [owner.llumlet for owner in living]
        ailing = {owner.llumlet for owner in owners if owner.is_ailing(now)}.difference(alive)
        peers = [peer for peer in self._surroundings.peers() if peer not in ailing]
        if avoid is not None:
            # Another life of the lost one may listen where it did.
            alive = [owner.llumlet for owner in living if owner is not avoid]
            peers = [peer for peer in peers if peer != avoid.llumlet]
        return list(dict.fromkeys(alive + peers))

    def _gave_up(self, stream: Stream) -> bool:
        """Handles a request that its engine aborted unasked, for example at its shutdown."""
        if not self._surroundings.takes_aborts():
            return False
        if stream.request_id in self.replays:
            self._feed(stream.request_id, words.GivenUpThere())
            return True
        return self._let_go_on(Orphan(stream, "its engine gave it up", stream.owner or self.home_of(stream)))

    def _let_go_on(self, orphan: Orphan) -> bool:
        """Start the request elsewhere. False if that cannot be: then it stays as it is, or ends if it is hopeless."""
        stream, home = orphan.stream, self.home_of(orphan.stream)
        if orphan.lost is not None and self._dies(stream, orphan.lost):
            self._dismiss(stream, orphan.lost)
            return True
        never = problem = stream.why_not_elsewhere
        if not problem and (home is None or not home.digest):
            problem = "it is not known which engines could"
        if not problem and not self.targets(orphan.lost):
            problem = "there is no other engine (--llumlet-peers, --llumlet-cms)"
        if not problem:
            assert home is not None
            self._dismiss(stream, orphan.lost or stream.owner or home)
            self._begin_replay(orphan, home.digest)
            return True
        if orphan.hopeless or (never and orphan.lost is not None and orphan.lost.dead):
            self._give_up(stream, f"request {stream.request_id} ends: {orphan.reason}, and {problem}")
        return False

    def _begin_replay(self, orphan: Orphan, digest: str) -> None:
        stream = orphan.stream
        self._effects.append(
            words.Log(f"request {stream.request_id} goes on elsewhere: {orphan.reason}", words.Level.WARNING)
        )
        self.streams.depose(stream, self._around.now)
        self.replays[stream.request_id] = self.replay_class(self._around, stream, orphan.lost, digest)
        self._feed(stream.request_id, words.ReplayBegun())

    def _dies(self, stream: Stream, lost: Owner, ends: bool = False) -> bool:
        """True if the request crashes its engines and was ended for that; otherwise it may be a suspect now."""
        steps = steps_of(lost, self._around.now, self._surroundings.read_steps, ends)
        if steps is None:
            return False
        request_id = stream.request_id
        if self.suspects.judge(request_id, lost, steps, len(stream.delivered)) is not Judgement.GUILTY:
            return False
        names = ["unknown here"] * self.suspects.num_before(request_id)
        names += [owner.instance for owner in self.suspects.deaths(request_id)]
        reason = (
            f"This request was in the step in which {len(names)} engines died or hung, one after the other "
            f"({', '.join(names)}), the last time on trial. It is not sent to a third."
        )
        self._give_up(stream, f"request {request_id} ends: {reason}", reason)
        return True

    def _dismiss(self, stream: Stream, owner: Owner) -> None:
        """Tell an owner that may wake up, or live, that its epoch counts no more."""
        self._dismiss_all(owner, [(stream.request_id, stream.epoch)])

    def _dismiss_all(self, owner: Owner, requests: list[tuple[str, Epoch]]) -> None:
        """Dismisses all requests. An engine that is not known yet is told when it is."""
        if owner.identity:
            self._effects.append(Send(owner.identity, wire.Dismissal(requests)))

    def _give_up(self, stream: Stream, why: str, explanation: str = "") -> None:
        self._effects.append(words.Log(why, words.Level.ERROR))
        self.streams.give_up(stream)
        self._effects.append(Fail(stream, explanation))

    # Replays

    def answered(self, request_id: str, attempt: int, event: words.ReplayEvent, now: float) -> None:
        """Notes the result of an attempt's call. Former attempts are ignored."""
        self._around.now = now
        replay = self.replays.get(request_id)
        if replay is not None and replay.attempt == attempt:
            self._feed(request_id, event)

    def tick(self, now: float) -> None:
        """Fires the timers that are due."""
        self._around.now = now
        for (request_id, name), when in list(self._timers.items()):
            if when <= now and self._timers.pop((request_id, name), None) is not None:
                self._feed(request_id, TimerFired(name))

    def _settle(self) -> None:
        """Ends replays of ended streams, and continues those whose turn or place has come."""
        while True:
            for request_id, replay in list(self.replays.items()):
                if replay.state is not State.CLOSING and not self.streams.is_open(replay.stream):
                    self._feed(request_id, words.StreamEnded())
            turns, places = self.suspects.come(), self.placement.come()
            if not (turns or places):
                return
            for request_id in turns:
                self._feed(request_id, words.TurnCame(), State.WAITING)
            for request_id in places:
                self._feed(request_id, words.PlaceCame(), State.PLACING)

    def _feed(self, request_id: str, event: words.ReplayEvent, only_in: State | None = None) -> None:
        replay = self.replays.get(request_id)
        if replay is None or (only_in is not None and replay.state is not only_in):
            return
        for effect in replay.on(event):
            self._perform(replay, effect)
        if replay.state is State.TAKEN:
            self.num_replayed += 1
        if replay.over:
            del self.replays[request_id]

    def _perform(self, replay: Replay, effect: words.ReplayEffect) -> None:
        stream = replay.stream
        match effect:
            case SetTimer(name=name, seconds=seconds):
                self._timers[stream.request_id, name] = self._around.now + seconds
            case ClearTimer(name=name):
                self._timers.pop((stream.request_id, name), None)
            case words.Dismiss(owner=owner):
                self._dismiss(stream, owner)
            case words.GiveUp():
                self.streams.give_up(stream)
                self._effects.append(Fail(stream))
            case _:
                self._effects.append(effect)
