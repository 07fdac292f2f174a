# SPDX-License-Identifier: Apache-2.0
"""Inputs that come in parts: the origin against engines that answer a part at a time, move between two, and tell of it
over ways of their own, in any order."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from typing import Any, NamedTuple

import pytest

from llumlet.protocol import wire
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.origin.gate import Arrival, Gate
from llumlet.protocol.origin.inputs import SendPart
from llumlet.protocol.origin.origin import Deliver, Fail, OriginEffect, Send
from llumlet.protocol.origin.streams import Input, Part, Stream
from tests.protocol.test_origin import Bench, Output

STOPPED = 0
NUM_SCHEDULES = 1500


class Token(NamedTuple):
    """As the client sees it: of which answer, and whether that ends with it."""

    part: int
    index: int
    ends: bool


def value(part: int, index: int) -> int:
    return part * 100 + index


@dataclasses.dataclass
class Session:
    """At its engine. `parts`: those that wait to be answered; None is the end of the input."""

    epoch: Epoch
    base: int
    num_parts: int = 1
    parts: deque[int | None] = dataclasses.field(default_factory=deque)
    answering: int | None = 0
    index: int = 0
    num_tokens: int = 0
    frozen: bool = False
    held: list[int | None] = dataclasses.field(default_factory=list)

    @property
    def stands(self) -> bool:
        return self.answering is None

    def take(self, part: int | None) -> bool:
        """Returns whether the session ends with this."""
        if self.frozen:
            self.held.append(part)
            return False
        self.num_parts += part is not None
        self.parts.append(part)
        return self.stands and self.next()

    def next(self) -> bool:
        if not self.parts:
            return False
        part = self.parts.popleft()
        self.answering, self.index = part, 0
        return part is None


class World:
    """One session. Everything that is on its way is in `ways`, each in order, none of them waits for another."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lengths = [self.random.randint(1, 4) for _ in range(self.random.randint(1, 5))]
        self.bench = Bench("B", "C")
        self.origin = self.bench.origin
        self.engines: dict[str, Session | None] = {"A": Session(HOME, 0), "B": None, "C": None}
        self.ways: dict[str, deque[Any]] = {f"{way} {name}": deque() for way in ("to", "from") for name in "ABC"}
        self.ways["home to"] = deque()
        self.ways["home from"] = deque()
        self.left: set[str] = set()
        self.heard: list[Token] = []
        self.hops = 0
        self.moving: tuple[str, str] | None = None
        self.said = 1
        self.over = False
        self.count: Counter[str] = Counter()
        self.stream = Stream("r", 3, "A", never="in parts", input=Input())
        self.origin.open(self.stream, 0.0)
        self.origin.add_input(self.stream, 0)

    def play(self) -> None:
        for _ in range(400):
            self.turn()
            if self.over and not self.origin.streams.is_open(self.stream):
                break
        self.settle()

    def settle(self) -> None:
        """Nothing more happens but that what is on its way arrives, and heartbeats."""
        while not self.over:
            self.say()
        for _ in range(60):
            if self.moving is not None:
                self.end_move(stays=False)
            for name in self.engines:
                self.beat(name)
                while self.works(name):
                    self.compute(name)
            for way in self.ways:
                while self.ways[way]:
                    self.arrive(way)

    def turn(self) -> None:
        acts: list[tuple[Any, ...]] = [(self.arrive, way) for way, queue in self.ways.items() if queue]
        acts += [(self.compute, name) for name in self.engines if self.works(name)]
        acts += [(self.beat, self.random.choice("ABC"))]
        if not self.over:
            acts.append((self.say,))
        if self.moving is None:
            acts += [(self.begin_move, name) for name, session in self.engines.items() if session and session.stands]
        else:
            acts.append((self.end_move, self.random.random() < 0.3))
        act, *arguments = self.random.choice(acts)
        act(*arguments)

    # The client, by way of its API server

    def say(self) -> None:
        """The next part, or that there is none."""
        if not self.origin.streams.is_open(self.stream):
            self.over = True
            return
        if self.said < len(self.lengths):
            part: int | None = self.said
            self.said += 1
            goes_home = self.origin.add_input(self.stream, part)
        else:
            part, self.over = None, True
            goes_home = self.origin.end_input(self.stream, 0.0)
        if goes_home:
            self.ways["home to"].append(part)
        self.carry_out(self.origin.ready())

    def carry_out(self, effects: list[OriginEffect]) -> None:
        for effect in effects:
            match effect:
                case SendPart():
                    name = effect.identity.decode()[0]
                    self.ways[f"to {name}"].append((effect.number, effect.part, effect.stream.epoch))
                case Send(message=wire.Dismissal() | wire.HeartbeatAck()):
                    self.ways[f"to {effect.identity.decode()[0]}"].append(effect.message)
                case Deliver():
                    self.deliver(effect.parts)
                case Fail():
                    raise AssertionError("the stream fails")

    def deliver(self, parts: list[Part]) -> None:
        for part in parts:
            payload: Any = part.payload
            tokens = payload.token_ids if isinstance(payload, wire.TokenOutput) else payload.new_token_ids
            for token in tokens[part.skip : part.skip + part.count]:
                self.heard.append(Token(token // 100, token % 100, ends=False))
            if part.finished:
                self.heard[-1] = self.heard[-1]._replace(ends=True)

    # Engines

    def works(self, name: str) -> bool:
        session = self.engines[name]
        return session is not None and not session.stands

    def compute(self, name: str) -> None:
        """A token."""
        session = self.engines[name]
        assert session is not None
        assert session.answering is not None
        part, index = session.answering, session.index
        ends = index + 1 == self.lengths[part]
        finish = STOPPED if ends else None
        if session.epoch == HOME:
            self.ways["home from"].append(Output("r", [value(part, index)], finish))
        else:
            token = wire.TokenOutput("r", session.epoch, session.base, session.num_tokens, [value(part, index)], finish)
            self.ways[f"from {name}"].append(wire.TokenBatch(name, "1", name, [token]))
        session.index += 1
        session.num_tokens += 1
        if ends:
            session.answering = None
            if session.next():
                self.engines[name] = None

    def beat(self, name: str) -> None:
        session = self.engines[name]
        guest = session if session is not None and session.epoch != HOME else None
        requests = [("r", guest.epoch)] if guest else []
        parts = {"r": guest.num_parts} if guest else {}
        self.ways[f"from {name}"].append(wire.Heartbeat(name, "1", wire.Health.OK, requests, parts))

    def begin_move(self, name: str) -> None:
        session = self.engines[name]
        assert session is not None
        session.frozen = True
        self.moving = name, self.random.choice([other for other in "ABC" if other != name])

    def end_move(self, stays: bool) -> None:
        assert self.moving is not None
        source, destination = self.moving
        self.moving = None
        session = self.engines[source]
        if session is None:
            return
        session.frozen = False
        held, session.held = session.held, []
        if stays:
            self.count["stayed"] += 1
            for part in held:
                if session.take(part):
                    self.engines[source] = None
            return
        self.count["moved"] += 1
        self.count["held"] += len(held)
        self.hops += 1
        epoch = Epoch(0, self.hops)
        self.engines[destination] = Session(
            epoch, session.num_tokens, session.num_parts, answering=None, num_tokens=session.num_tokens
        )
        self.engines[source] = None
        self.left.add(source)
        self.left.discard(destination)
        self.ways[f"from {source}"].append(wire.HandedOver("r", epoch, destination, "1", destination))
        if self.random.random() < 0.5:
            self.beat(destination)

    def arrive(self, way: str) -> None:
        message = self.ways[way].popleft()
        if way == "home from":
            taken = self.origin.take_home([message], None, 0.0)
            self.deliver(
                [Part(None, message, 0, 1, message.finish_reason is not None)] if taken is None else taken.parts
            )
            self.carry_out(self.origin.ready())
        elif way == "home to":
            self.arrive_home(message)
        elif way.startswith("from"):
            self.carry_out(self.bench.hear(way[-1], message))
        else:
            self.arrive_at(way[-1], message)

    def arrive_home(self, part: int | None) -> None:
        session = self.engines["A"]
        if session is not None and session.epoch == HOME:
            if session.take(part):
                self.engines["A"] = None
        else:
            self.count["dropped"] += 1
            assert "A" in self.left or session is not None or not self.origin.streams.is_open(self.stream)

    def arrive_at(self, name: str, message: Any) -> None:
        session = self.engines[name]
        if isinstance(message, wire.Dismissal | wire.HeartbeatAck):
            unwanted = isinstance(message, wire.HeartbeatAck) and message.unknown
            if session is not None and session.epoch != HOME and (unwanted or isinstance(message, wire.Dismissal)):
                assert not self.origin.streams.is_open(self.stream)
                self.engines[name] = None
            return
        number, part, epoch = message
        if session is None or session.epoch != epoch or number != session.num_parts + len(session.held):
            self.count["again"] += 1
            return
        if part is None and session.frozen:
            self.count["again"] += 1
        elif session.take(part):
            self.engines[name] = None


def test_every_answer_reaches_the_client_once_and_in_order() -> None:
    """Whatever is said when, and wherever the session is by then."""
    count: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        world = World(seed)
        world.play()
        expected = [
            Token(part, index, index + 1 == length)
            for part, length in enumerate(world.lengths)
            for index in range(length)
        ]
        assert world.heard == expected, f"seed {seed}"
        assert not world.origin.streams.is_open(world.stream), f"seed {seed}: it has not ended"
        assert not any(world.engines.values()), f"seed {seed}: an engine still has it"
        assert not world.stream.input.kept, f"seed {seed}: answered parts are kept"
        count += world.count
    assert min(count[name] for name in ("moved", "stayed", "held", "dropped", "again")) > NUM_SCHEDULES // 20, count


def arrival(epoch: Epoch, base: int, first: int, count: int, *, finished: bool) -> Arrival:
    return Arrival(epoch, base=base, first=first, count=count, finished=finished, payload=None)


def test_the_end_of_a_part_is_not_that_of_the_request() -> None:
    gate = Gate()
    gate.ends_left = None
    (first,) = gate.offer(arrival(HOME, 0, 0, 2, finished=True)).deliver
    assert first.finished
    assert not gate.finished
    gate.ends_left = 1
    (second,) = gate.offer(arrival(Epoch(0, 1), 2, 2, 1, finished=True)).deliver
    assert second.finished
    assert gate.finished


def test_an_end_counts_once() -> None:
    gate = Gate()
    gate.ends_left = 2
    one = arrival(Epoch(0, 1), 0, 0, 2, finished=True)
    assert gate.offer(one).deliver
    assert gate.offer(one).deliver == ()
    assert (gate.ends_left, gate.finished) == (1, False)


def test_parts_of_who_is_not_known_yet_wait() -> None:
    """The former owner names the next one, which has not been heard of."""
    bench = Bench()
    stream = Stream("r", 3, "A", input=Input())
    bench.origin.open(stream, 0.0)
    assert bench.origin.add_input(stream, "zero")
    bench.origin.take_home([Output("r", [1], STOPPED)], None, 0.0)
    bench.hear("A", wire.HandedOver("r", Epoch(0, 1), "B", "1", "B"))
    assert not bench.origin.add_input(stream, "one")
    assert bench.origin.ready() == []
    bench.hello("B")
    beat = wire.Heartbeat("B", "1", wire.Health.OK, [("r", Epoch(0, 1))], {"r": 1})
    sent = [effect for effect in bench.hear("B", beat) if isinstance(effect, SendPart)]
    assert [(part.identity, part.number, part.part) for part in sent] == [(b"B1", 1, "one")]


@pytest.mark.parametrize("count", [-1, 10**6])
def test_a_peer_that_says_it_has_other_parts(count: int) -> None:
    """Only what there is is sent; and only to the owner."""
    bench = Bench("B", "C")
    stream = Stream("r", 3, "A", input=Input())
    bench.origin.open(stream, 0.0)
    bench.origin.add_input(stream, "zero")
    bench.hear("A", wire.HandedOver("r", Epoch(0, 1), "B", "1", "B"))
    for name, expected in (("C", []), ("B", [0] if count < 0 else [])):
        beat = wire.Heartbeat(name, "1", wire.Health.OK, [("r", Epoch(0, 1))] if name == "B" else [], {"r": count})
        sent = [effect for effect in bench.hear(name, beat) if isinstance(effect, SendPart)]
        assert [part.number for part in sent] == expected


def test_a_part_that_cannot_be_sent_ends_the_stream() -> None:
    bench = Bench("B")
    stream = Stream("r", 3, "A", input=Input())
    bench.origin.open(stream, 0.0)
    bench.origin.add_input(stream, "zero")
    bench.hear("A", wire.HandedOver("r", Epoch(0, 1), "B", "1", "B"))
    assert not bench.origin.add_input(stream, "large")
    (part,) = bench.origin.ready()
    assert isinstance(part, SendPart)
    bench.origin.cannot_send(part, "it is too large", 0.0)
    effects = bench.origin.ready()
    assert Send(b"B1", wire.Dismissal([("r", Epoch(0, 1))])) in effects
    assert [effect.stream for effect in effects if isinstance(effect, Fail)] == [stream]
