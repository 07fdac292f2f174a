# SPDX-License-Identifier: Apache-2.0
"""A `World` with an API server, O: the production origin holds the streams of clients whose requests arrive at A.

What is real on top of `Adopting`: `Origin`, with its streams, owners, suspects and replays. What is modelled: the relay
and the calls that it makes, which may come late or not at all, the records that engines keep of their steps, clients.

Every sample is a draw of its own: sampled twice after the same prefix, a token comes out differently. What a client
receives must have been sampled after exactly the prompt and the tokens that it received before, from KV that was right
in every byte. That says at once that nothing is missing, doubled, out of order or conditioned on what it never saw.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from typing import Any

from llumlet.protocol import wire
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.origin import replay_words as words
from llumlet.protocol.origin.gate import Gate
from llumlet.protocol.origin.origin import Deliver, Fail, Origin, OriginEffect, Probe, Send, Surroundings
from llumlet.protocol.origin.owners import Owner
from llumlet.protocol.origin.replay import Replay
from llumlet.protocol.origin.streams import Part, Stream
from llumlet.protocol.recovery.steps import LastSteps, name_of
from tests.protocol.world import Client, Engine, Message, Request, cell, cells_of
from tests.simulation.adopting import ORIGIN, Adopting, Holder

VOCABULARY = 1 << 48
DIGEST = "fits"
LOOK_S = 0.5
"""Between the origin's looks at its streams."""


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


class Comparing(Replay):
    """However short its request is."""

    compares_from = 1


class Watched(Origin):
    """Says whom it could not help."""

    replay_class: type[Replay] = Comparing

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self.helpless: set[str] = set()
        """Requests that their engine gave up when no other was there to take them."""

        self.guessed: set[str] = set()
        """Requests that ended for deaths of which one is of an engine that was never heard of."""

    def _give_up(self, stream: Stream, why: str, explanation: str = "") -> None:
        case = self.suspects._cases.get(stream.request_id)
        if explanation and case is not None and not all(owner.incarnation for owner in case.deaths):
            self.guessed.add(stream.request_id)
        super()._give_up(stream, why, explanation)

    def _gave_up(self, stream: Stream) -> bool:
        goes_on = super()._gave_up(stream)
        if not goes_on:
            self.helpless.add(stream.request_id)
        return goes_on


class Serving(Adopting):
    """O itself does not die: its clients would."""

    origin_class: type[Watched] = Watched
    hosts = 1
    """On how many the engines are: records of steps can be read on one's own host only, that of A."""

    def __init__(self, engines: str = "ABC", requests: int = 2, output: int = 14) -> None:
        self.now = 0.0
        self.complaints: list[str] = []
        self.samples: dict[int, int] = {}
        """Which draw a token is."""
        self.look_at = 0.0
        self.in_step: dict[str, LastSteps] = {}
        """Of lives that have died, or hang."""
        self.lost_ways: set[tuple[str, str]] = set()
        """Directions that are cut."""
        self.calls: dict[int, Call] = {}
        self.probes: list[tuple[Owner, float]] = []
        """Engines, and when they had been heard of last."""
        self.looks_for: list[words.AskWhetherGone] = []
        self.comparisons: list[words.AskCached] = []
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
        self._send("A", ORIGIN, "hello", self._hello("A", self.engines["A"].incarnation))

    def _hello(self, name: str, life: str) -> wire.Hello:
        return wire.Hello(wire.RELAY_VERSION, name, life, name, DIGEST)

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
        token = hash((draw, *self.read(engine, request))) % VOCABULARY
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
        body = message.body
        match body:
            case HomeWord():
                self._take_home(body)
            case (int() as number, answer):
                self._call_answered(number, answer)
            case Epoch():
                self._introduce(message)
                self._questions[message.number] = message.move
                question = wire.FenceQuestion(message.number, message.request, body)
                self.origin.hear(message.life.encode(), question, self.now)
            case wire.Hello():
                self.origin.hear(body.incarnation.encode(), body, self.now)
            case _:
                self._introduce(message)
                self.origin.hear(message.life.encode(), body, self.now)
        epochs = dict(body.requests) if isinstance(body, wire.Heartbeat) else {}
        self._carry_out(epochs)

    def _introduce(self, message: Message) -> None:
        """What is said first on a connection."""
        if self.origin.owners.at(message.life.encode()) is None:
            self.origin.hear(message.life.encode(), self._hello(message.sender, message.life), self.now)

    def _take_home(self, word: HomeWord) -> None:
        taken = self.origin.take_home([word], None, self.now)
        if taken is None:
            self._receive(word.request_id, word.new_token_ids, word.finish_reason)
        else:
            for part in taken.parts:
                self._receive_part(part)

    def look(self) -> None:
        """The origin looks after its streams."""
        self.look_at = self.now + LOOK_S
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
                self.probes.append((owner, owner.last_heard))
            case words.Log(text=text):
                self.note(f"O: {text}")
            case words.AskCached():
                self.comparisons.append(effect)
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
            case wire.Dismissal():
                for request_id, epoch in message.requests:
                    self._send(ORIGIN, name, "dismissal", epoch, request=request_id)
            case wire.HeartbeatAck():
                for request_id in message.unknown:
                    self._send(ORIGIN, name, "dismissal", epochs[request_id], request=request_id)
            case wire.FenceAnswer():
                move = self._questions.pop(message.question)
                answer = message.finished, message.raised
                self._send(ORIGIN, name, "fence answer", answer, move, message.request_id)

    def _fail(self, stream: Stream, explanation: str) -> None:
        client = self.client(stream.request_id)
        if explanation:
            self.num_guilty += 1
            # Of an engine on another host, or of which only the address is known, it cannot be told whether the request
            # had come as far as a step.
            readable = self.hosts == 1 and stream.request_id not in self.origin.guessed
            if readable and len(client.lost_lives) < 2:
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

    def compared(self) -> None:
        """Engines that are up say how much of a request they have cached: whatever they say, the choice is free."""
        effect = self.comparisons.pop(0)
        known = {name: len(self.engines[name].requests) for name in effect.addresses if self.engines[name].up}
        self.origin.answered(effect.request_id, effect.attempt, words.CachedKnown(known), self.now)
        self._carry_out()

    def probed(self) -> None:
        owner, last_heard = self.probes.pop(0)
        self.origin.probed(owner, last_heard, self._is_gone(owner.llumlet), self.now)
        self._carry_out()

    def _is_gone(self, name: str) -> bool:
        return not self.engines[name].up and self._reaches(ORIGIN, name) and self._reaches(name, ORIGIN)

    def _reaches(self, sender: str, receiver: str) -> bool:
        # A and its API server are one host.
        return (sender, receiver) not in self.lost_ways

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
