# SPDX-License-Identifier: Apache-2.0
"""A `World` that loses engines: production machines and origin, and everything that can go wrong around them.

Engines die (`crash`, and `kill` until `start`), are stopped as a process (`stop`: nothing happens there, and nobody
hears of it, but its memory can be read) or hang in their loop (`hang`: messages are answered, nothing is scheduled),
and `wake`; a request of one that hangs brings its KV cache along. Outputs that were on their way from an engine may die
with it. The way from one to another can be cut in one direction: what goes over the relay waits until it is repaired,
everything else is lost. What is modelled: heartbeats, and how their messages arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llumlet.protocol import effects as do
from llumlet.protocol import wire
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.move.ledger import BlockOwner
from llumlet.protocol.origin.replay import REPLAY_SECONDS
from tests.protocol.world import Engine, Message, Outgoing
from tests.simulation.adopting import CALLS, MESSAGES, ORIGIN, Attempt, Desk
from tests.simulation.serving import Finish, HomeWord, Serving, Waiting

BEAT_S = 0.5
"""Between an engine's heartbeats."""
HUNG_S = 4.5
"""After that long an engine says of itself that its loop hangs."""
MIGRATION_S = 10.0 + 16 * (10.0 + 30.0) + 10.0 + 5.0 + 5.0 + 30.0 + 30.0
"""The sum of a plan's deadlines and a lease: no migration takes longer."""
WAKE_S = 2 * REPLAY_SECONDS
"""Whoever is stopped wakes up after that long, for it may be the only one that can go on."""
RELAY = frozenset({"out", "hello", "heartbeat", "handed over"})
"""What an engine says to the origin over the relay's socket: it waits while the way is cut."""


class Cluster(Serving):
    traced = False
    step_s = 0.05
    answers_get_lost = False
    """Schedules that are about sources in doubt: other faults are left out while an answer can be lost."""

    def __init__(self, engines: str = "ABC", requests: int = 2, output: int = 14) -> None:
        self.stopped: dict[str, float] = {}
        """Engines that are stopped as a process, and since when."""
        self.hanging: dict[str, float] = {}
        self.beat_at = dict.fromkeys(engines, 0.0)
        super().__init__(engines, requests, output)

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
        if message.sender == ORIGIN and message.kind in ("abort", "dismissal"):
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
        if self.comparisons:
            yield "compare", None
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
            case "compare":
                self.compared()
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
