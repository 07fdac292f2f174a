# SPDX-License-Identifier: Apache-2.0
"""A `World` that loses engines: the production origin, replays and adoptions, and everything that can go wrong.

What is real on top of `World`: `Origin`, with its streams, owners, suspects and replays, and what adopts and rescues at
the engines. What is modelled: heartbeats, the calls between them, and the records that engines keep of their steps.

Every sample is a draw of its own: sampled twice after the same prefix, a token comes out differently. What a client
receives must have been sampled after exactly the prompt and the tokens that it received before, from KV that was right
in every byte. That says at once that nothing is missing, doubled, out of order or conditioned on what it never saw.

Engines die (`crash`, and `kill` until `start`), are stopped as a process (`stop`: nothing happens there, and nobody
hears of it, but its memory can be read) or hang in their loop (`hang`: messages are answered, nothing is scheduled),
and `wake`; a request of one that hangs brings its KV cache along. Outputs that were on their way from an engine may die
with it. The way from one to another can be cut in one direction: what goes over the relay waits until it is repaired,
everything else is lost.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import Any

from llumlet.protocol import effects as do
from llumlet.protocol import replay_words as words
from llumlet.protocol import wire
from llumlet.protocol.gate import Gate
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.ledger import Owner as BlockOwner
from llumlet.protocol.origin import Deliver, Fail, Log, Origin, OriginEffect, Probe, Send, Surroundings
from llumlet.protocol.owners import Owner
from llumlet.protocol.replay import REPLAY_SECONDS
from llumlet.protocol.steps import LastSteps, name_of
from llumlet.protocol.streams import Part, Stream
from tests.protocol.world import Client, Engine, Message, Outgoing, Request, cell, cells_of
from tests.simulation.adopting import CALLS, MESSAGES, ORIGIN, Adopting, Attempt, Desk, Holder

VOCABULARY = 1 << 48
DIGEST = "fits"
BEAT_S = 0.5
"""Between an engine's heartbeats, and between the origin's looks at its streams."""
HUNG_S = 4.5
"""After that long an engine says of itself that its loop hangs."""
MIGRATION_S = 10.0 + 16 * (10.0 + 30.0) + 10.0 + 5.0 + 5.0 + 30.0 + 30.0
"""The sum of a plan's deadlines and a lease: no migration takes longer."""
WAKE_S = 2 * REPLAY_SECONDS
"""Whoever is stopped wakes up after that long, for it may be the only one that can go on."""
RELAY = frozenset({"out", "hello", "heartbeat", "handed over"})
"""What an engine says to the origin over the relay's socket: it waits while the way is cut."""


class Finish(enum.IntEnum):
    """vLLM's, as far as they occur here."""

    LENGTH = 1
    ABORT = wire.ABORT
    ERROR = 3


@dataclasses.dataclass
class HomeWord:
    """What the home engine's step produced for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Finish | None


class Waiting(Client):
    """A client, and what it has received so far."""

    def __init__(self, prompt: list[int], num_output: int, gate: Gate) -> None:
        super().__init__(prompt, num_output, gate)
        self.cells = cells_of(prompt)
        """Those of the prompt and of what was received."""
        self.ended: Finish | None = None
        self.lost_lives: set[str] = set()
        """Of engines that died or hung while they had the request."""


@dataclasses.dataclass
class Call:
    """Of the origin, to an engine."""

    kind: str
    request_id: str
    attempt: int
    engine: str
    until: float


class Watched(Origin):
    """Says whom it could not help."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self.helpless: set[str] = set()
        """Requests that their engine gave up when no other was there to take them."""

    def _gave_up(self, stream: Stream) -> bool:
        goes_on = super()._gave_up(stream)
        if not goes_on:
            self.helpless.add(stream.request_id)
        return goes_on


class Cluster(Adopting):
    """Requests arrive at A, whose API server, O, holds their streams. O itself does not die: its clients would."""

    origin_class: type[Watched] = Watched
    traced = False
    step_s = 0.05
    answers_get_lost = False
    """Schedules that are about sources in doubt: other faults are left out while an answer can be lost."""
    hosts = 1
    """On how many the engines are: records of steps can be read on one's own host only, that of A."""

    def __init__(self, engines: str = "ABC", requests: int = 2, output: int = 14) -> None:
        self.now = 0.0
        self.complaints: list[str] = []
        self.samples: dict[int, int] = {}
        """Which draw a token is."""
        self.stopped: dict[str, float] = {}
        """Engines that are stopped as a process, and since when."""
        self.hanging: dict[str, float] = {}
        self.in_step: dict[str, LastSteps] = {}
        """Of lives that have died, or hang."""
        self.lost_ways: set[tuple[str, str]] = set()
        self.beat_at = dict.fromkeys(engines, 0.0)
        self.look_at = 0.0
        self.calls: dict[int, Call] = {}
        self.probes: list[Owner] = []
        self.looks_for: list[words.AskWhetherGone] = []
        self.num_tried = 0
        self.num_guilty = 0
        self._draws = itertools.count(1)
        self._call_numbers = itertools.count(1)
        self._questions: dict[int, str] = {}
        """Moves about which the origin is asked, by question."""
        self.origin = self.origin_class(
            Surroundings(
                check=lambda token, stream: None,
                complain=lambda kind, what: self.complaints.append(kind),
                read_steps=self._read_steps,
                peers=lambda: list(self.engines),
                room=dict,
                takes_aborts=lambda: True,
            )
        )
        super().__init__(engines, output=output, requests=requests)
        self._send("A", ORIGIN, "hello", self._hello("A"))

    def _hello(self, name: str) -> wire.Hello:
        return wire.Hello(wire.RELAY_VERSION, name, self.engines[name].incarnation, name, DIGEST)

    # Requests and their outputs

    def _arrives(self, request_id: str, prompt: int, output: int) -> None:
        super()._arrives(request_id, prompt, output)
        plain = self.clients[request_id]
        self.clients[request_id] = Waiting(plain.prompt, plain.num_output, plain.gate)
        self.origin.open(Stream(request_id, len(plain.prompt), "A"), self.now)

    def client(self, request_id: str) -> Waiting:
        client = self.clients[request_id]
        assert isinstance(client, Waiting)
        return client

    def _sample(self, engine: Engine, request: Request) -> int:
        draw = next(self._draws)
        token = hash((draw, *engine.cells(request.blocks, request.computed))) % VOCABULARY
        self.samples[token] = draw
        return token

    def _emit(self, engine: Engine, request: Request, first: int, tokens: list[int], finished: bool) -> None:
        self._report(engine, request, first, tokens, Finish.LENGTH if finished else None)

    def _report(self, engine: Engine, request: Request, first: int, tokens: list[int], finish: Finish | None) -> None:
        body: HomeWord | wire.TokenBatch
        if request.epoch == HOME:
            body = HomeWord(request.id, tokens, finish)
        else:
            output = wire.TokenOutput(request.id, request.epoch, request.base, first, tokens, finish)
            body = wire.TokenBatch(engine.name, engine.incarnation, engine.name, [output])
        self._send(engine.name, ORIGIN, "out", body, request=request.id)

    def _receive(self, request_id: str, tokens: list[int], finish: Finish | None) -> None:
        """The client gets something. vLLM passes nothing on to a client that has ended."""
        client = self.client(request_id)
        if client.ended is not None or client.left:
            return
        for token in tokens:
            draw = self.samples.get(token)
            if token != hash((draw, *client.cells)) % VOCABULARY:
                self.faults.append(f"token {len(client.received)} of {request_id} follows something else")
            client.received.append(token)
            client.cells.append(cell(client.cells[-1], token))
        client.ended = finish
        if finish is Finish.LENGTH and len(client.received) != client.num_output:
            self.faults.append(f"{request_id} ends with {len(client.received)} tokens")
        if finish is Finish.ABORT and request_id not in self.origin.helpless:
            self.faults.append(f"{request_id} ends as aborted")

    def _receive_part(self, part: Part) -> None:
        payload: Any = part.payload
        tokens = payload.token_ids if isinstance(payload, wire.TokenOutput) else payload.new_token_ids
        finish = payload.finish_reason if part.finished else None
        ended = Finish(finish) if finish is not None else None
        self._receive(payload.request_id, tokens[part.skip : part.skip + part.count], ended)

    # The origin

    def _at_origin(self, message: Message) -> None:
        body, sender = message.body, message.sender
        match body:
            case HomeWord():
                self._take_home(body)
            case (int() as number, answer):
                self._call_answered(number, answer)
            case Epoch():
                self._introduce(sender)
                self._questions[message.number] = message.move
                identity = self.engines[sender].incarnation.encode()
                self.origin.hear(identity, wire.FenceQuestion(message.number, message.request, body), self.now)
            case wire.Hello():
                self.origin.hear(body.incarnation.encode(), body, self.now)
            case _:
                self._introduce(sender)
                self.origin.hear(body.incarnation.encode(), body, self.now)
        epochs = dict(body.requests) if isinstance(body, wire.Heartbeat) else {}
        self._carry_out(epochs)

    def _introduce(self, name: str) -> None:
        """What is said first on a connection."""
        if self.origin.owners.at(self.engines[name].incarnation.encode()) is None:
            hello = self._hello(name)
            self.origin.hear(hello.incarnation.encode(), hello, self.now)

    def _take_home(self, word: HomeWord) -> None:
        taken = self.origin.take_home([word], None, self.now)
        if taken is None:
            self._receive(word.request_id, word.new_token_ids, word.finish_reason)
        else:
            for part in taken.parts:
                self._receive_part(part)

    def look(self) -> None:
        """The origin looks after its streams."""
        self.look_at = self.now + BEAT_S
        self.origin.look(self.now)
        self._carry_out()

    def _carry_out(self, epochs: dict[str, Epoch] | None = None) -> None:
        """`epochs`: of the heartbeat that is answered."""
        for effect in self.origin.ready():
            self._do_for_origin(effect, epochs or {})

    def _do_for_origin(self, effect: OriginEffect, epochs: dict[str, Epoch]) -> None:
        match effect:
            case Send(identity=identity, message=message):
                self._tell_engine(identity.decode()[0], message, epochs)
            case Deliver(parts=parts):
                for part in parts:
                    self._receive_part(part)
            case Fail(stream=stream, explanation=explanation):
                self._fail(stream, explanation)
            case Probe(owner=owner):
                self.probes.append(owner)
            case Log(text=text):
                self.note(f"O: {text}")
            case words.Identify():
                self._call("identify", effect, (), effect.seconds)
            case words.Adopt():
                self.num_tried += bool(effect.trial_tokens)
                holder = Holder(effect.holder.instance, effect.holder.incarnation) if effect.holder else None
                body = (effect.epoch, effect.delivered, holder, effect.trial_tokens)
                self._call("adopt", effect, body, effect.seconds)
            case words.AskWhetherGone():
                self.looks_for.append(effect)
            case words.CallOff():
                for number, call in list(self.calls.items()):
                    if (call.request_id, call.attempt) == (effect.request_id, effect.attempt):
                        del self.calls[number]
                        self._send(ORIGIN, call.engine, "call off", (number,), request=call.request_id)
            case words.AbortAt():
                self._send(ORIGIN, effect.address, "abort", request=effect.request_id)

    def _tell_engine(self, name: str, message: wire.ToEngine, epochs: dict[str, Epoch]) -> None:
        match message:
            case wire.Release():
                for request_id, epoch in message.requests:
                    self._send(ORIGIN, name, "release", epoch, request=request_id)
            case wire.HeartbeatAck():
                for request_id in message.unknown:
                    self._send(ORIGIN, name, "release", epochs[request_id], request=request_id)
            case wire.FenceAnswer():
                move = self._questions.pop(message.question)
                self._send(ORIGIN, name, "fence answer", message, move, message.request_id)

    def _fail(self, stream: Stream, explanation: str) -> None:
        client = self.client(stream.request_id)
        if explanation:
            self.num_guilty += 1
            # Of an engine on another host it is not known whether the request had come as far as a step.
            if self.hosts == 1 and len(client.lost_lives) < 2:
                self.faults.append(f"{stream.request_id} ends for the death of {client.lost_lives or 'nobody'}")
        self._receive(stream.request_id, [], Finish.ERROR)

    def _call(self, kind: str, effect: words.Identify | words.Adopt, body: tuple[object, ...], seconds: float) -> None:
        number = next(self._call_numbers)
        request_id = effect.request_id
        self.calls[number] = Call(kind, request_id, effect.attempt, effect.address, self.now + seconds)
        self._send(ORIGIN, effect.address, kind, (number, *body), request=request_id)

    def _call_answered(self, number: int, answer: words.ReplayEvent) -> None:
        """An answer, or what stands for it. Nobody waits for that of a call which was called off."""
        call = self.calls.pop(number, None)
        if call is not None:
            self.origin.answered(call.request_id, call.attempt, answer, self.now)

    def call_breaks(self, number: int) -> None:
        """There is no answer in time, or nobody listens there."""
        self._call_answered(number, words.AnswerLost(broken=self.engines[self.calls[number].engine].up))
        self._carry_out()

    def looked_for(self) -> None:
        """Whether engines that did not answer are there."""
        for effect in self.looks_for[:1]:
            self.looks_for.remove(effect)
            gone = words.GoneKnown(self._is_gone(effect.address))
            self.origin.answered(effect.request_id, effect.attempt, gone, self.now)
        self._carry_out()

    def probed(self) -> None:
        owner = self.probes.pop(0)
        self.origin.probed(owner, owner.last_heard, self._is_gone(owner.llumlet), self.now)
        self._carry_out()

    def _is_gone(self, name: str) -> bool:
        return not self.engines[name].up and self._reaches(ORIGIN, name) and self._reaches(name, ORIGIN)

    def tick_origin(self) -> None:
        self.origin.tick(self.now)
        self._carry_out()

    def client_leaves(self, request_id: str = "r") -> None:
        self.client(request_id).left = True
        self.origin.close([request_id], self.now)
        self._carry_out()
        self._send(ORIGIN, "A", "abort", request=request_id)

    # What engines write down of their steps

    def _read_steps(self, incarnation: str) -> LastSteps | None:
        name = incarnation[:1]
        if not name or (self.hosts > 1 and name != "A"):
            return None
        return self.in_step.get(incarnation, LastSteps())

    def _is_in_step(self, name: str) -> None:
        """The engine dies, or hangs, in a step of all its requests that it can compute."""
        engine = self.engines[name]
        requests = [request.id for request in engine.requests.values() if not request.frozen]
        on_trial = self.desks[name].on_trial
        tried = {"on_trial": name_of(on_trial)} if on_trial is not None else {}
        under_way = frozenset(map(name_of, requests))
        self.in_step[engine.incarnation] = LastSteps(under_way, began=self.now, **tried)

    def _note_lost(self, name: str) -> None:
        engine = self.engines[name]
        attempts = (attempt.request_id for attempt in self.desks[name].attempts.values())
        for request_id in {*engine.requests, *attempts}:
            self.client(request_id).lost_lives.add(engine.incarnation)

    # Engines

    def turn(self, name: str) -> None:
        """A turn of the loop, and the time that it takes."""
        self.step(name)
        self.advance(self.step_s)

    def beat(self, name: str) -> None:
        """An engine's heartbeat."""
        engine = self.engines[name]
        self.beat_at[name] = self.now + BEAT_S
        hung = name in self.hanging and self.now - self.hanging[name] > HUNG_S
        health = wire.Health.HUNG if hung else wire.Health.OK
        requests = [(request.id, request.epoch) for request in engine.requests.values() if request.epoch != HOME]
        attempts = self.desks[name].attempts.values()
        requests += [(one.request_id, one.epoch) for one in attempts if one.shows and not one.added]
        self._send(name, ORIGIN, "heartbeat", wire.Heartbeat(name, engine.incarnation, health, requests))

    def gives_up(self, name: str, request_id: str) -> None:
        """An engine ends a request as aborted, and nobody asked it to."""
        engine = self.engines[name]
        request = engine.requests[request_id]
        if not request.frozen:
            self._report(engine, request, len(request.output), [], Finish.ABORT)
            self._abort(engine, request_id)

    def _do_at_source(self, engine: Engine, out: Outgoing, effect: do.Effect) -> None:
        super()._do_at_source(engine, out, effect)
        if isinstance(effect, do.Release | do.Drop):
            machine = out.machine
            handed_over = wire.HandedOver(out.request, machine.plan.epoch_next, out.to, machine._incarnation, out.to)
            self._send(engine.name, "O", "handed over", handed_over, request=out.request)

    def _at_engine(self, engine: Engine, message: Message) -> None:
        if message.kind in MESSAGES:
            self._heard(engine, message)
            return
        if message.sender == ORIGIN and message.kind in ("abort", "release"):
            self._call_off_attempts(engine, message.request, message.body)
        super()._at_engine(engine, message)

    def loop(self, name: str) -> None:
        if self.runs(name):
            super().loop(name)

    def runs(self, name: str) -> bool:
        """Whether its loop turns."""
        return self.engines[name].up and name not in self.stopped and name not in self.hanging

    # Faults

    def crash(self, name: str, num_lost: int = 0, *, in_step: bool = False) -> None:
        """Dies, with the last `num_lost` of its words to the origin that are on their way, and is another life."""
        engine = self.engines[name]
        if in_step and engine.incarnation not in self.in_step:
            self._is_in_step(name)
        self._note_lost(name)
        words = [message for message in self.network if message.sender == name and message.kind in RELAY]
        for message in words[max(len(words) - num_lost, 0) :]:
            self.network.remove(message)
        self.crashed = True
        self.stopped.pop(name, None)
        self.hanging.pop(name, None)
        is_home = engine.life == 1 and name == "A"
        engine.restart()
        self.desks[name] = Desk()
        if is_home:
            self.origin.home_died(self.now)
            self._carry_out()

    def kill(self, name: str, num_lost: int, *, in_step: bool = False) -> None:
        self.crash(name, num_lost, in_step=in_step)
        self.engines[name].up = False

    def start(self, name: str) -> None:
        self.engines[name].up = True

    def stop(self, name: str) -> None:
        self.stopped[name] = self.now

    def hang(self, name: str) -> None:
        """In a model step."""
        self.hanging[name] = self.now
        self._is_in_step(name)
        self._note_lost(name)

    def wake(self, name: str) -> None:
        self.stopped.pop(name, None)
        if self.hanging.pop(name, None) is not None:
            del self.in_step[self.engines[name].incarnation]
            self.goes_on(name)

    def cut_way(self, sender: str, receiver: str) -> None:
        """Cut or repair one direction."""
        self.lost_ways ^= {(sender, receiver)}

    def _reaches(self, sender: str, receiver: str) -> bool:
        # A and its API server are one host.
        return (sender, receiver) not in self.lost_ways

    def deliverable(self) -> Iterator[Message]:
        """Messages that can arrive next. An engine's own API server receives in order, everything else need not."""
        home_is_first = True
        for message in self.network:
            if isinstance(message.body, HomeWord):
                if home_is_first:
                    yield message
                home_is_first = False
            elif message.receiver in self.stopped:
                continue
            elif message.kind not in RELAY or self._reaches(message.sender, message.receiver):
                yield message

    def deliver(self, message: Message, *, keep: bool = False) -> None:
        home = isinstance(message.body, HomeWord)
        if not home and not self._reaches(message.sender, message.receiver):
            if not keep:
                self.network.remove(message)
            return
        if message.sender == ORIGIN and message.kind in CALLS and not self.engines[message.receiver].up and not keep:
            self.network.remove(message)
            if message.body[0] in self.calls:
                self.call_breaks(message.body[0])
            return
        super().deliver(message, keep=keep)

    # What must hold

    def wrong_tokens_or_owners(self) -> list[str]:
        return self.faults + self._several_owners()

    def _is_barred(self, request_id: str, epoch: Epoch) -> bool:
        stream = self.origin.streams.get(request_id)
        # Whoever runs a request that has ended is told so when it emits.
        return stream is None or (stream.gate is not None and stream.gate.is_barred(epoch))

    def left_at_rest(self) -> list[str]:
        faults = [
            f"{request_id} has not ended: {len(client.received)} of {client.num_output} tokens"
            for request_id, client in self.clients.items()
            if isinstance(client, Waiting) and not client.left and client.ended is None
        ]
        origin = self.origin
        held = {"streams": len(origin.streams), "replays": len(origin.replays), "calls": len(self.calls)}
        faults += [f"the origin holds {count} {what}" for what, count in held.items() if count]
        for name, desk in self.desks.items():
            left = {"attempts": len(desk.attempts), "preparing": len(desk.preparing), "claims": len(desk.claims)}
            faults += [f"{name} holds {count} {what}" for what, count in left.items() if count]
        return faults + self._held_at_rest()

    # The way to rest

    def settle(self, *, wake_last: bool = False) -> None:
        """No faults any more. `wake_last`: who is stopped wakes up only when every stream has ended without it."""
        self.lost_ways.clear()
        for engine in self.engines.values():
            engine.up = True
            engine.ledger.give_back(BlockOwner.SCHEDULER, "others")
        if not wake_last or len(self.stopped | self.hanging) == len(self.engines):
            self._wake_all()
        began = self.now
        for _ in range(20000):
            moved = self.tick()
            if self.faults:
                return
            if (self.stopped or self.hanging) and (
                not len(self.origin.streams) or self.now > began + WAKE_S or not moved
            ):
                self._wake_all()
                began, moved = self.now, True
            if not moved:
                return
            if self.now > began + MIGRATION_S and any(engine.out for engine in self.engines.values()):
                self.faults.append("a migration has outlived its deadlines")
                return
        raise AssertionError("the cluster does not come to rest")

    def _wake_all(self) -> None:
        for name in {*self.stopped, *self.hanging}:
            self.wake(name)

    def due(self) -> Iterator[tuple[str, str, str]]:
        return (due for due in super().due() if due[0] not in self.stopped)

    def tick(self) -> bool:
        if self.react():
            return True
        for due in self.due():
            self.fire(*due)
            return True
        if self._attend():
            return True
        turning = [name for name, engine in self.engines.items() if engine.requests and self.runs(name)]
        turned = [self.step(name) for name in turning]
        if any(turned):
            self.now += self.step_s
            return True
        when = self.next_due()
        if when is None:
            return False
        self.now = max(self.now, when)
        return True

    def react(self) -> bool:
        message = next(self.deliverable(), None)
        if message is not None:
            self.deliver(message)
            return True
        for name, engine in self.engines.items():
            if engine.commands and self.runs(name):
                self.loop(name)
                return True
            if name in self.stopped:
                continue
            for incoming in engine.into.values():
                if incoming.job is not None:
                    self.pull_block(name, incoming.move)
                    return True
        for attempt in self.copying():
            self.rescue_block(attempt)
            return True
        return self._build_one()

    def _build_one(self) -> bool:
        attempt = next(self.building(), None)
        if attempt is not None:
            self.build(attempt)
        return attempt is not None

    def building(self) -> Iterator[Attempt]:
        return (attempt for attempt in self.attempts() if attempt.building)

    def _answers(self, name: str) -> bool:
        return super()._answers(name) and name not in self.stopped

    def attentions(self) -> Iterator[tuple[str, Any]]:
        """Heartbeats, looks, replays and rescues whose time has come."""
        if self.look_at <= self.now:
            yield "look", None
        if self.origin.due is not None and self.origin.due <= self.now:
            yield "tick", None
        if self.probes:
            yield "probe", None
        if self.looks_for:
            yield "look for", None
        for name, when in self.beat_at.items():
            if when <= self.now and self.engines[name].up and name not in self.stopped:
                yield "beat", name
        yield from [("call", number) for number, call in self.calls.items() if call.until <= self.now]
        yield from [(what, who) for when, what, who in self.deadlines() if when <= self.now]

    def attend(self, what: str, who: Any) -> None:
        match what:
            case "look":
                self.look()
            case "tick":
                self.tick_origin()
            case "probe":
                self.probed()
            case "look for":
                self.looked_for()
            case "beat":
                self.beat(who)
            case "call":
                self.call_breaks(who)
            case "rescue":
                self.rescue_due(who)
            case "lease":
                self.claim_expires(*who)

    def _is_busy(self) -> bool:
        busy = bool(len(self.origin.streams)) or any(engine.requests for engine in self.engines.values())
        return busy or any(desk.attempts or desk.claims for desk in self.desks.values())

    def _attend(self) -> bool:
        if not self._is_busy() and not self.origin.replays:
            return False
        due = list(self.attentions())
        # The origin looks when it has heard those who have something to say.
        for what, who in reversed(due):
            if (what, who) in self.attentions():
                self.attend(what, who)
        return bool(due)

    def next_due(self) -> float | None:
        times = [
            when
            for name, engine in self.engines.items()
            if name not in self.stopped
            for shell in (*engine.out.values(), *engine.into.values())
            for when in shell.timers.values()
        ]
        if self._is_busy() or self.origin.replays:
            times += [self.look_at, *(call.until for call in self.calls.values())]
            times += [] if self.origin.due is None else [self.origin.due]
            times += [when for name, when in self.beat_at.items() if name not in self.stopped]
            times += [when for when, _, _ in self.deadlines()]
        return min(times, default=None)

    def ended(self, request_id: str) -> str:
        """How the client's stream ended; "None" if it did not."""
        return str(self.client(request_id).ended)

    def summary(self) -> str:
        parts = [
            f"{request_id}: {len(client.received)} of {client.num_output} tokens"
            + (", left" if client.left else f", {self.client(request_id).ended!s}")
            for request_id, client in self.clients.items()
        ]
        return "; ".join([*parts, f"{self.origin.num_replayed} replays"])
