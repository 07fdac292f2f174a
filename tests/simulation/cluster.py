# SPDX-License-Identifier: Apache-2.0
"""A `World` that loses engines: the production watch over owners, replay, and everything that can go wrong.

What is real on top of `World`: `Streams` and `Owners` of the front-end, with their gates. What is modelled: the
front-end's relay, heartbeats, what its client knows of its home engine, and the order in which `Replay` tries engines.

Every sample is a draw of its own: sampled twice after the same prefix, a token comes out differently. What a client
receives must have been sampled after exactly the prompt and the tokens that it received before, from KV that was right
in every byte. That says at once that nothing is missing, doubled, out of order or conditioned on what it never saw.

Engines die (`crash`, and `kill` until `start`), are stopped as a process (`stop`: nothing happens there, and nobody
hears of it, but its memory can be read) or hang in their loop (`hang`: messages are answered, nothing is scheduled),
and `wake`; a request of one that hangs brings its KV cache along (`rescues`). Outputs that were on their way from an
engine may die with it. The way from one to another can be cut in one direction: what goes over the relay waits until it
is repaired, everything else is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterator
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol import wire
from llumlet.protocol.events import Settlement
from llumlet.protocol.gate import Gate
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.ledger import Owner as BlockOwner
from tests.protocol.world import Client, Engine, Message, Outgoing, Request, cell, cells_of
from tests.simulation.rescues import MESSAGES, Holder, Rescues
from vllm_llumnix.frontend.owners import PROBE_SECONDS, Owner, Owners
from vllm_llumnix.frontend.replay import CALL_SECONDS, REPLAY_SECONDS, RETRY_SECONDS
from vllm_llumnix.frontend.streams import Orphan, Stream, Streams

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

HOME_LIFE = "A1"
"""The life of A that its API server sends requests to. It outlives that one, and then has none of its own."""

Wait = tuple[float, int | None]
"""Seconds, and the number of the attempt that may be answered before they are over."""


class Waiting(Client):
    """A client, and what it has received so far."""

    def __init__(self, prompt: list[int], num_output: int, gate: Gate) -> None:
        super().__init__(prompt, num_output, gate)
        self.cells = cells_of(prompt)
        """Those of the prompt and of what was received."""
        self.ended: FinishReason | None = None
        self.nobody_else = False
        """Its engine gave it up when no other was there to take it."""


@dataclasses.dataclass
class Replaying:
    """A replay that waits `until` then, or for the answer to an attempt."""

    course: Generator[Wait, bool, None]
    until: float = 0.0
    attempt: int | None = None


class Cluster(Rescues):
    """Requests arrive at A, whose API server, O, holds their streams. O itself does not die: its clients would."""

    traced = False
    step_s = 0.05
    answers_get_lost = False
    """Schedules that are about sources in doubt: other faults are left out while an answer can be lost."""
    base_at_replay = 0
    """By how many tokens a replay begins too early; a mutant's."""

    def __init__(self, engines: str = "ABC", requests: int = 2, output: int = 14) -> None:
        self.now = 0.0
        self.known = Owners(lambda: self.now)
        self.complaints: list[str] = []
        self.streams = Streams(VOCABULARY, lambda kind, what: self.complaints.append(kind), lambda: self.now)
        self.samples: dict[int, int] = {}
        """Which draw a token is."""
        self.stopped: dict[str, float] = {}
        """Engines that are stopped as a process, and since when."""
        self.hanging: dict[str, float] = {}
        """Engines whose loop hangs, and since when."""
        self.lost_ways: set[tuple[str, str]] = set()
        self.replays: dict[str, Replaying] = {}
        self.num_replays = 0
        self.beat_at = dict.fromkeys(engines, 0.0)
        self.look_at = 0.0
        self._draws = itertools.count(1)
        self._attempts = itertools.count(1)
        self._asked: set[int] = set()
        """Attempts that have reached their engine."""
        super().__init__(engines, output=output, requests=requests)
        self.home_dead = False
        self._send("A", "O", "hello", wire.Hello(wire.RELAY_VERSION, "A", HOME_LIFE, "A", DIGEST))

    # Requests and their outputs

    def _arrives(self, request_id: str, prompt: int, output: int) -> None:
        super()._arrives(request_id, prompt, output)
        plain = self.clients[request_id]
        self.clients[request_id] = Waiting(plain.prompt, plain.num_output, plain.gate)
        request = EngineCoreRequest(request_id, plain.prompt, None, None, None, 0.0, None, None, None)
        self.streams.open(Stream(request))

    def _client(self, request_id: str) -> Waiting:
        client = self.clients[request_id]
        assert isinstance(client, Waiting)
        return client

    def _sample(self, engine: Engine, request: Request) -> int:
        draw = next(self._draws)
        token = hash((draw, *engine.cells(request.blocks, request.computed))) % VOCABULARY
        self.samples[token] = draw
        return token

    def _emit(self, engine: Engine, request: Request, first: int, tokens: list[int], finished: bool) -> None:
        self._report(engine, request, first, tokens, FinishReason.LENGTH if finished else None)

    def _report(
        self, engine: Engine, request: Request, first: int, tokens: list[int], finish: FinishReason | None
    ) -> None:
        body: EngineCoreOutput | wire.TokenBatch
        if request.epoch == HOME:
            body = EngineCoreOutput(request.id, tokens, finish_reason=finish)
        else:
            output = wire.TokenOutput(request.id, request.epoch, request.base, first, tokens, finish)
            body = wire.TokenBatch(engine.name, engine.incarnation, engine.name, [output])
        self._send(engine.name, "O", "out", body, request=request.id)

    def _receive(self, output: EngineCoreOutput) -> None:
        """The client gets something. vLLM passes nothing on to a client that has ended."""
        client = self._client(output.request_id)
        if client.ended is not None or client.left:
            return
        for token in output.new_token_ids:
            draw = self.samples.get(token)
            if token != hash((draw, *client.cells)) % VOCABULARY:
                self.faults.append(f"token {len(client.received)} of {output.request_id} follows something else")
            client.received.append(token)
            client.cells.append(cell(client.cells[-1], token))
        client.ended = output.finish_reason
        if client.ended is FinishReason.LENGTH and len(client.received) != client.num_output:
            self.faults.append(f"{output.request_id} ends with {len(client.received)} tokens")
        if client.ended is FinishReason.ABORT and not client.nobody_else:
            self.faults.append(f"{output.request_id} ends as aborted")

    # The origin

    def _at_origin(self, message: Message) -> None:
        body = message.body
        match body:
            case EngineCoreOutput():
                outputs = EngineCoreOutputs(outputs=[body])
                self.streams.take_home(outputs, self._gave_up)
                for output in outputs.outputs:
                    self._receive(output)
            case wire.TokenBatch():
                owner = self.known.heard(body.incarnation.encode(), body.instance, body.incarnation)
                owner.llumlet = body.llumlet
                taken = self.streams.take_batch(body, owner, self._gave_up)
                for _, output in taken.delivered:
                    self._receive(output)
                for request_id, epoch in taken.unwanted.items():
                    self._send("O", message.sender, "release", epoch, request=request_id)
            case wire.Heartbeat():
                owner = self.known.heard(body.incarnation.encode(), body.instance, body.incarnation)
                owner.says(body.health)
                owner.llumlet = body.instance
                epochs = dict(body.requests)
                for request_id in self.streams.claim(owner, body.requests):
                    self._send("O", message.sender, "release", epochs[request_id], request=request_id)
            case wire.Hello():
                owner = self.known.heard(body.incarnation.encode(), body.instance, body.incarnation)
                owner.llumlet, owner.digest = body.llumlet, body.digest
            case wire.HandedOver():
                self.streams.hand_over(body, self.known.expected(body.instance, body.incarnation, body.llumlet))
            case wire.FenceQuestion():
                asker = self.known.named(message.sender)
                answer = self.streams.fence(body, asker)
                self._send("O", message.sender, "fence answer", answer, message.move, message.request)
            case (int() as attempt, bool() as took, str() as incarnation):
                self._attempted(message, attempt, took, incarnation)
            case Epoch():
                question = wire.FenceQuestion(message.number, message.request, body)
                self._at_origin(dataclasses.replace(message, body=question))

    def _gave_up(self, stream: Stream) -> bool:
        goes_on = self._let_go_on(Orphan(stream, "its engine gave it up", stream.owner or self._home_of(stream)))
        if not goes_on:
            self._client(stream.request_id).nobody_else = True
        return goes_on

    def _home_of(self, stream: Stream) -> Owner | None:
        """As the client's."""
        home = next((owner for owner in self.known.all() if owner.incarnation == HOME_LIFE), None)
        if self.home_dead:
            home = home or self.known.expected("A", HOME_LIFE, llumlet="")
            home.died("its engine has died", self.now)
        return home

    def look(self) -> None:
        """The origin looks after its streams."""
        self.look_at = self.now + BEAT_S
        for owner in self.known.all():
            silent = self.now - owner.last_heard > PROBE_SECONDS
            if silent and owner.llumlet and not self.engines[owner.llumlet].up and self._reaches("O", owner.llumlet):
                owner.died("its process is gone", self.now)
        for orphan in self.streams.orphans(self._home_of):
            self.note(f"O: {orphan.stream.request_id} is an orphan: {orphan.reason}")
            self._let_go_on(orphan)

    def _targets(self, avoid: Owner | None) -> list[str]:
        ailing = {owner.llumlet for owner in self.known.all() if owner.is_ailing(self.now)}
        alive = {owner.llumlet for owner in self.known.all() if owner.takes_requests(self.now)}
        shunned = avoid.llumlet if avoid is not None else ""
        return [name for name in self.engines if name != shunned and (name in alive or name not in ailing)]

    def _let_go_on(self, orphan: Orphan) -> bool:
        stream, home = orphan.stream, self._home_of(orphan.stream)
        if home is None or not home.digest or not self._targets(orphan.lost):
            if orphan.hopeless:
                self._receive(self.streams.fail(stream))
            return False
        owner = orphan.lost or stream.owner or home
        self._send("O", owner.instance, "release", stream.epoch, request=stream.request_id)
        self.streams.depose(stream)
        self.num_replays += 1
        self.replays[stream.request_id] = Replaying(self._course(stream, orphan.lost))
        self._go_on(stream.request_id, answered=False)
        return True

    def _course(self, stream: Stream, lost: Owner | None) -> Generator[Wait, bool, None]:
        """As `Replay._run`."""
        deadline, first = float("inf"), True
        holder = Holder(lost.instance, lost.incarnation) if lost and lost.may_have_cache(self.now) else None
        while self.streams.get(stream.request_id) is stream:
            for name in dict.fromkeys(self._targets(lost) + self._targets(None)):
                if not first:
                    self.streams.depose(stream)
                first = False
                attempt = next(self._attempts)
                delivered = stream.delivered[: len(stream.delivered) - self.base_at_replay]
                self._send("O", name, "adopt", (attempt, stream.epoch, delivered, holder), request=stream.request_id)
                if (yield CALL_SECONDS, attempt):
                    return
                holder = None
            deadline = min(deadline, self.now + REPLAY_SECONDS)
            if self.now > deadline:
                self._receive(self.streams.fail(stream))
                return
            yield RETRY_SECONDS, None

    def _go_on(self, request_id: str, *, answered: bool) -> None:
        replaying = self.replays[request_id]
        try:
            seconds, replaying.attempt = replaying.course.send(answered) if replaying.until else next(replaying.course)
        except StopIteration:
            del self.replays[request_id]
        else:
            replaying.until = self.now + seconds

    def _attempted(self, message: Message, attempt: int, took: bool, incarnation: str) -> None:
        replaying, stream = self.replays.get(message.request), self.streams.get(message.request)
        if replaying is None or replaying.attempt != attempt:
            return
        if took and stream is None:
            self._send("O", message.sender, "abort", request=message.request)
        elif took and stream is not None:
            owner = self.known.expected(message.sender, incarnation, message.sender)
            stream.owned_by(owner, stream.epoch, self.now)
            stream.replaying = False
            stream.replays += 1
        self._go_on(message.request, answered=took)

    def replay_goes_on(self, request_id: str) -> None:
        """An attempt's deadline, or the pause before the next, is over."""
        self._go_on(request_id, answered=False)

    def client_leaves(self, request_id: str = "r") -> None:
        self._client(request_id).left = True
        for stream in self.streams.close([request_id]):
            if stream.owner is not None:
                self._send("O", stream.owner.instance, "release", stream.epoch, request=request_id)
        self._send("O", "A", "abort", request=request_id)

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
        self._send(name, "O", "heartbeat", wire.Heartbeat(name, engine.incarnation, health, requests))

    def gives_up(self, name: str, request_id: str) -> None:
        """An engine ends a request as aborted, and nobody asked it to."""
        engine = self.engines[name]
        request = engine.requests[request_id]
        if not request.frozen:
            self._report(engine, request, len(request.output), [], FinishReason.ABORT)
            self._abort(engine, request_id)

    def _do_at_source(self, engine: Engine, out: Outgoing, effect: do.Effect) -> None:
        super()._do_at_source(engine, out, effect)
        if isinstance(effect, do.Release | do.Drop):
            machine = out.machine
            handed_over = wire.HandedOver(out.request, machine.plan.epoch_next, out.to, machine._incarnation, out.to)
            self._send(engine.name, "O", "handed over", handed_over, request=out.request)

    def _at_engine(self, engine: Engine, message: Message) -> None:
        if message.kind == "adopt":
            # A call over gRPC arrives once at most, and each attempt of a replay is another call.
            if message.body[0] in self._asked:
                return
            self._asked.add(message.body[0])
            for incoming in list(engine.into.values()):
                if incoming.request_id == message.request and incoming.machine.settlement is Settlement.PENDING:
                    self._tell_destination(engine, incoming.move, ev.CancelRequested())
            engine.commands.append(("adopt", lambda: self._adopt(engine, message)))
        elif message.kind in MESSAGES:
            self._heard(engine, message)
        else:
            super()._at_engine(engine, message)

    def _adopt(self, engine: Engine, message: Message) -> None:
        attempt, epoch, delivered, holder = message.body
        client, request_id = self.clients[message.request], message.request
        here = request_id in engine.requests
        if here:
            self._abort(engine, request_id)
        reserved = any(
            incoming.request_id == request_id and incoming.machine.settlement is Settlement.PENDING
            for incoming in engine.into.values()
        )
        took = not (here or reserved or self.is_rescued_to(engine, request_id))
        request = Request(request_id, client.prompt, client.num_output, list(delivered), epoch, len(delivered))
        if took and holder is not None:
            self.begin_rescue(engine, attempt, request, holder)
            return
        if took:
            engine.requests[request_id] = request
        self._adopted(engine, attempt, request_id, took=took)

    def loop(self, name: str) -> None:
        if self.runs(name):
            super().loop(name)

    def runs(self, name: str) -> bool:
        """Whether its loop turns."""
        return self.engines[name].up and name not in self.stopped and name not in self.hanging

    # Faults

    def crash(self, name: str, num_lost: int = 0) -> None:
        """Dies, with the last `num_lost` of its words to the origin that are on their way, and is another life."""
        words = [message for message in self.network if message.sender == name and message.kind in RELAY]
        for message in words[max(len(words) - num_lost, 0) :]:
            self.network.remove(message)
        self.crashed = True
        self.stopped.pop(name, None)
        self.hanging.pop(name, None)
        if name == "A":
            self.home_dead = True
        self.engines[name].restart()
        self.forget_lives()

    def kill(self, name: str, num_lost: int) -> None:
        self.crash(name, num_lost)
        self.engines[name].up = False

    def start(self, name: str) -> None:
        self.engines[name].up = True

    def stop(self, name: str) -> None:
        self.stopped[name] = self.now

    def hang(self, name: str) -> None:
        self.hanging[name] = self.now

    def wake(self, name: str) -> None:
        self.stopped.pop(name, None)
        if self.hanging.pop(name, None) is not None:
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
            if isinstance(message.body, EngineCoreOutput):
                if home_is_first:
                    yield message
                home_is_first = False
            elif message.receiver in self.stopped:
                continue
            elif message.kind not in RELAY or self._reaches(message.sender, message.receiver):
                yield message

    def deliver(self, message: Message, *, keep: bool = False) -> None:
        home = isinstance(message.body, EngineCoreOutput)
        if not home and not self._reaches(message.sender, message.receiver):
            if not keep:
                self.network.remove(message)
            return
        super().deliver(message, keep=keep)

    # What must hold

    def wrong_tokens_or_owners(self) -> list[str]:
        return self.faults + self._several_owners()

    def _is_barred(self, request_id: str, epoch: Epoch) -> bool:
        stream = self.streams.get(request_id)
        # Whoever runs a request that has ended is told so when it emits.
        return stream is None or (stream.gate is not None and stream.gate.is_barred(epoch))

    def left_at_rest(self) -> list[str]:
        faults = [
            f"{request_id} has not ended: {len(client.received)} of {client.num_output} tokens"
            for request_id, client in self.clients.items()
            if isinstance(client, Waiting) and not client.left and client.ended is None
        ]
        if len(self.streams) or self.replays:
            faults.append(f"the origin holds {len(self.streams)} streams and {len(self.replays)} replays")
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
            if (self.stopped or self.hanging) and (not len(self.streams) or self.now > began + WAKE_S or not moved):
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
        return False

    def _answers(self, name: str) -> bool:
        return super()._answers(name) and name not in self.stopped

    def attentions(self) -> Iterator[tuple[str, Any]]:
        """Heartbeats, looks, replays and rescues whose time has come."""
        if self.look_at <= self.now:
            yield "look", ""
        for name, when in self.beat_at.items():
            if when <= self.now and self.engines[name].up and name not in self.stopped:
                yield "beat", name
        for request_id, replaying in self.replays.items():
            if replaying.until <= self.now:
                yield "replay", request_id
        yield from [(what, attempt) for when, what, attempt in self.deadlines() if when <= self.now]

    def attend(self, what: str, who: Any) -> None:
        if what == "look":
            self.look()
        elif what == "beat":
            self.beat(who)
        elif what == "rescue":
            self.rescue_due(who)
        elif what == "lease":
            self.claim_ends(who)
        else:
            self.replay_goes_on(who)

    def _is_busy(self) -> bool:
        busy = bool(len(self.streams)) or any(engine.requests for engine in self.engines.values())
        return busy or bool(self.rescues or self.claims)

    def _attend(self) -> bool:
        if not self._is_busy() and not self.replays:
            return False
        due = list(self.attentions())
        # The origin looks when it has heard those who have something to say.
        for what, who in reversed(due):
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
        if self._is_busy() or self.replays:
            times += [self.look_at, *(replaying.until for replaying in self.replays.values())]
            times += [when for name, when in self.beat_at.items() if name not in self.stopped]
            times += [when for when, _, _ in self.deadlines()]
        return min(times, default=None)

    def ended(self, request_id: str) -> str:
        """How the client's stream ended; "None" if it did not."""
        return str(self._client(request_id).ended)

    def summary(self) -> str:
        parts = [
            f"{request_id}: {len(client.received)} of {client.num_output} tokens"
            + (", left" if client.left else f", {self._client(request_id).ended!s}")
            for request_id, client in self.clients.items()
        ]
        return "; ".join([*parts, f"{self.num_replays} replays"])
