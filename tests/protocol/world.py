# SPDX-License-Identifier: Apache-2.0
"""A tiny cluster around the production machines, gate and ledger: engines, a network that loses and reorders, a clock.

One request lives in it, or several. What is real: `Source`, `Destination`, `Gate`, `Ledger`. What is modelled:

- A block holds `BLOCK_SIZE` cells, one per token position. A cell is a hash of the cell before it (as found in memory)
  and the token; the next token is a hash of every cell. So a token depends on the whole prefix *and* on every byte of
  the KV cache: one foreign byte anywhere changes all that follows, as with a real model.
- An engine's loop runs what was asked of it (`commands`, in order) and then decodes a token. Effects of the machines
  that concern the scheduler wait in `commands`, as they do for the real loop.
- A world may have KV cache groups beside that of all tokens: one of a window, which lets go of the blocks that it has
  left behind, and one of a state, a single block with the latest cell. Their bytes must agree with the cells, else the
  token comes out wrong. A row is a block of each group that keeps tokens.
- A mover copies one block at a time, so that anything may happen between two blocks.
- Messages wait in `network` until they are delivered, dropped or duplicated. Nothing happens by itself: whoever drives
  the world (a transcript, a random schedule) decides what is next.

`violations()` is what must never be true.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Call, Gone, Settlement
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.machine import Machine
from llumlet.protocol.move.destination import Destination
from llumlet.protocol.move.destination import State as DestinationState
from llumlet.protocol.move.ledger import BlockOwner
from llumlet.protocol.move.plan import Method, Plan, Terms
from llumlet.protocol.move.source import Source, State
from llumlet.protocol.origin.gate import Arrival, Gate
from tests.protocol.ledger import Ledger

BLOCK_SIZE = 4
NUM_BLOCKS = 24
NOTHING = -1
"""In the place of a block that a window has left behind."""
Row = list[int]
LEASE_S = 30.0
REQUEST = "r"


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def cell(before: int, token: int) -> int:
    # Hashes of tuples of integers are the same in every process.
    return hash((before, token))


def next_token(cells: list[int]) -> int:
    return hash(tuple(cells)) % 1000


def prompt_of(length: int) -> list[int]:
    return [digest("prompt", index) % 1000 for index in range(length)]


def reference(prompt: list[int], num_output: int) -> list[int]:
    """The output of a request that never moved."""
    cells: list[int] = []
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_output:
        for token in tokens[len(cells) :]:
            cells.append(cell(cells[-1] if cells else 0, token))
        tokens.append(next_token(cells))
    return tokens[len(prompt) :]


def cells_of(tokens: list[int]) -> list[int]:
    cells: list[int] = []
    for token in tokens:
        cells.append(cell(cells[-1] if cells else 0, token))
    return cells


@dataclasses.dataclass
class Request:
    """The request as one engine's scheduler holds it."""

    id: str
    prompt: list[int]
    max_output: int
    output: list[int]
    epoch: Epoch = HOME
    base: int = 0
    computed: int = 0
    rows: list[Row] = dataclasses.field(default_factory=list)
    states: list[int] = dataclasses.field(default_factory=list)
    frozen: bool = False
    open_handover: bool = False
    leaving: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def held(self) -> list[int]:
        """Its blocks, of all groups."""
        return [*present(self.rows), *self.states]


def present(rows: list[Row]) -> list[int]:
    return [block for row in rows for block in row if block != NOTHING]


class Client:
    """Whoever waits for a request at the origin, and what it should get."""

    def __init__(self, prompt: list[int], num_output: int, gate: Gate) -> None:
        self.prompt = prompt
        self.num_output = num_output
        self.gate = gate
        self.received: list[int] = []
        self.left = False

    @functools.cached_property
    def reference(self) -> list[int]:
        return reference(self.prompt, self.num_output)


@dataclasses.dataclass
class Message:
    """`kind` is what a transcript calls it: `reserve`, `reserve answer`, `out`, `fence`, `dismissal` …"""

    number: int
    sender: str
    receiver: str
    kind: str
    body: Any = None
    move: str = ""
    request: str = REQUEST
    life: str = ""
    """The incarnation of the engine that has sent it."""

    def __str__(self) -> str:
        return f"{self.sender}>{self.receiver} {self.kind}"


@dataclasses.dataclass
class Job:
    """A pull under way at a mover."""

    number: int
    source: str
    source_life: int
    pairs: list[tuple[int, int]]
    copied: int = 0
    stopping: bool = False


class Outgoing:
    """The source's shell."""

    def __init__(self, move: str, to: str, machine: Source, request: str) -> None:
        self.move, self.to, self.machine, self.request = move, to, machine, request
        self.calls: set[Call] = set()
        self.timers: dict[str, float] = {}
        self.rows: list[Row] = []
        self.states: list[int] = []
        self.tokens: list[int] = []
        self.reported = False


class Incoming:
    """The destination's shell."""

    def __init__(self, move: str, source: str, machine: Destination, request_id: str) -> None:
        self.move, self.source, self.machine, self.request_id = move, source, machine, request_id
        self.source_life = 0
        self.timers: dict[str, float] = {}
        self.request: Request | None = None
        self.rows: list[Row] = []
        self.states: list[int] = []
        self.source_rows: dict[int, Row] = {}
        self.source_states: list[int] = []
        self.commit_tokens: list[int] = []
        self.waiting: dict[object, int] = {}
        self.job: Job | None = None


class Engine:
    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.life = 0
        self.up = True
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.up = True
        self.ledger = Ledger(self.num_blocks)
        garbage = digest("garbage", self.name, self.life)
        self.memory = {block: [garbage + block] * BLOCK_SIZE for block in range(self.num_blocks)}
        self.commands: list[tuple[str, Callable[[], None]]] = []
        self.requests: dict[str, Request] = {}
        self.out: dict[str, Outgoing] = {}
        self.into: dict[str, Incoming] = {}

    @property
    def incarnation(self) -> str:
        return f"{self.name}{self.life}"

    def cells(self, rows: list[Row], count: int) -> list[int]:
        """Those of the group of all tokens."""
        return [c for row in rows for c in self.memory[row[0]]][:count]

    def write(self, block: int, offset: int, value: int) -> None:
        cells = self.memory[block] = list(self.memory[block])
        cells[offset] = value


class World:
    """Engines A, B, C …; A is the request's home, and its API server, O, holds the client's stream."""

    source_class: type[Source] = Source
    destination_class: type[Destination] = Destination
    gate_class: type[Gate] = Gate
    pins_at_freeze = True
    checks_lease = True
    checks_reads = True
    moves_while_open = False
    window: int | None = None
    """Tokens that a group of its own keeps, if there is one."""
    has_states = False
    starts_over = True
    """Whether a source that goes on in doubt leaves its states as they are."""
    num_repeated = 2
    """Output tokens before `base` that a new owner repeats, in case the last one's were lost."""
    traced = True
    """Whether a transcript is kept: it costs more than everything else together."""
    step_s = 0.0
    """Time that passes while engines decode, on the way to rest."""

    def __init__(self, engines: str = "ABC", prompt: int = 6, output: int = 24, requests: int = 1) -> None:
        num_blocks = NUM_BLOCKS * (1 + (self.window is not None)) + 4 * self.has_states
        self.engines = {name: Engine(name, num_blocks) for name in engines}
        self.network: list[Message] = []
        self.now = 0.0
        self.log: list[str] = []
        self.clients: dict[str, Client] = {}
        self.faults: list[str] = []
        self.outcomes: list[State] = []
        self.crashed = False
        self.cuts: set[frozenset[str]] = set()
        self._numbers = itertools.count(1)
        self._moves = itertools.count(1)
        for number in range(requests):
            self._arrives(REQUEST + str(number) * (number > 0), prompt + number, output)

    def _arrives(self, request_id: str, prompt: int, output: int) -> None:
        """A client's request, at A."""
        home = self.engines["A"]
        client = self.clients[request_id] = Client(prompt_of(prompt), output, self.gate_class(max_buffered=64))
        home.requests[request_id] = Request(request_id, client.prompt, output, [])
        self._allocate(home, home.requests[request_id])

    # What a driver may do

    def step(self, name: str) -> bool:
        """One turn of an engine's loop: what was asked of it, then a token of each request. False if there is none."""
        self.loop(name)
        engine = self.engines[name]
        decoded = [self._decode(engine, request) for request in list(engine.requests.values())]
        return any(decoded)

    def _decode(self, engine: Engine, request: Request) -> bool:
        if request.frozen or not self._allocate(engine, request):
            return False
        tokens = request.tokens
        for position in range(request.computed, len(tokens)):
            request.computed = position
            before = self.read(engine, request)
            value = cell(before[-1] if before else 0, tokens[position])
            row, offset = divmod(position, BLOCK_SIZE)
            for block in request.rows[row]:
                engine.write(block, offset, value)
            for block in request.states:
                engine.write(block, 0, value)
        request.computed = len(tokens)
        self._leave_behind(engine, request)
        token = self._sample(engine, request)
        request.output.append(token)
        finished = len(request.output) == request.max_output
        self._emit(engine, request, len(request.output) - 1, [token], finished)
        if finished:
            self._end(engine, request, Gone.FINISHED)
        return True

    def _sample(self, engine: Engine, request: Request) -> int:
        return next_token(self.read(engine, request))

    def read(self, engine: Engine, request: Request) -> list[int]:
        """The cells of what is computed; others if a window or a state does not agree with them."""
        cells = engine.cells(request.rows, request.computed)
        agrees = all(engine.memory[block][0] == cells[-1] for block in request.states if cells)
        if self.window is not None:
            for position in range(max(0, request.computed - self.window), request.computed):
                row, offset = divmod(position, BLOCK_SIZE)
                block = request.rows[row][1]
                agrees = agrees and block != NOTHING and engine.memory[block][offset] == cells[position]
        return cells if agrees else [~value for value in cells]

    def _leave_behind(self, engine: Engine, request: Request) -> None:
        """The window goes on."""
        if self.window is None:
            return
        left = [row[1] for row in request.rows[: max(0, request.computed - self.window) // BLOCK_SIZE]]
        engine.ledger.let_go(BlockOwner.SCHEDULER, request.id, [block for block in left if block != NOTHING])
        for row in request.rows[: len(left)]:
            row[1] = NOTHING

    def loop(self, name: str) -> None:
        """A turn that schedules nothing."""
        engine = self.engines[name]
        asked, engine.commands = engine.commands, []
        for _, command in asked:
            command()

    def move(
        self, source: str, to: str, method: Method = Method.LIVE, request_id: str = REQUEST, **plan: Any
    ) -> str | None:
        """Start a migration; None if the request cannot start one now."""
        engine = self.engines[source]
        request = engine.requests.get(request_id)
        if request is None or not request.output or request.leaving or self._leaves(engine, request_id):
            return None
        if request.open_handover and not self.moves_while_open:
            return None
        move = f"m{next(self._moves)}"
        bytes_per_block = plan.pop("bytes_per_block", 100)
        plan["state_bytes"] = bytes_per_block * self.has_states
        terms = Plan(method=method, epoch_next=request.epoch.next_hop(), bytes_per_block=bytes_per_block, **plan)
        engine.out[move] = Outgoing(move, to, self.source_class(terms), request_id)
        self._tell_source(engine, move, ev.Start())
        return move

    def _leaves(self, engine: Engine, request_id: str) -> list[str]:
        """Its moves away from this engine that are not over."""
        return [move for move, out in engine.out.items() if out.request == request_id]

    def deliver(self, message: Message, *, keep: bool = False) -> None:
        """Hand a message over; `keep` leaves a copy in the network: a duplicate."""
        if not keep:
            self.network.remove(message)
        if frozenset((message.sender, message.receiver)) in self.cuts and message.kind != "out":
            return
        if message.receiver == "O":
            self._at_origin(message)
            return
        engine = self.engines[message.receiver]
        if engine.up:
            self._at_engine(engine, message)

    def duplicate(self, message: Message) -> None:
        self.deliver(message, keep=True)

    def advance(self, seconds: float) -> None:
        """Time passes; timers do not fire by themselves."""
        self.now += seconds

    def drop(self, message: Message) -> None:
        self.network.remove(message)

    def unreachable(self, name: str, move: str, call: Call) -> None:
        """The caller's own deadline for a call passes."""
        self.engines[name].out[move].calls.discard(call)
        self._tell_source(self.engines[name], move, ev.PeerUnreachable(call))

    def fire(self, name: str, move: str, timer: str) -> None:
        """A timer fires, whatever the clock says."""
        engine = self.engines[name]
        if move in engine.out:
            engine.out[move].timers.pop(timer, None)
            self._tell_source(engine, move, ev.TimerFired(timer))
        else:
            engine.into[move].timers.pop(timer, None)
            self._tell_destination(engine, move, ev.TimerFired(timer))

    def pull_block(self, name: str, move: str) -> None:
        """A mover copies one more block, or reports that it is done, or quiet."""
        engine = self.engines[name]
        incoming = engine.into[move]
        job = incoming.job
        assert job is not None
        if job.stopping and job.copied == len(job.pairs):
            incoming.job = None
            self._tell_destination(engine, move, ev.PullQuiesced(job.number))
            return
        if job.copied < len(job.pairs):
            if self.engines[job.source].life != job.source_life:
                # Another process by now: pid, start time and nonce tell.
                job.copied = len(job.pairs)
                if not job.stopping:
                    self.fail_pull(name, move)
                return
            self._copy_block(engine, incoming, job)
            job.copied += 1
            return
        incoming.job = None
        lease_valid = not self.checks_lease or self.now < incoming.timers.get("lease", 0.0)
        seconds = 0.01 * len(job.pairs)
        self._tell_destination(engine, move, ev.PullDone(job.number, 100 * len(job.pairs), seconds, lease_valid))

    def fail_pull(self, name: str, move: str) -> None:
        """One mover reports an error; others may go on writing."""
        job = self.engines[name].into[move].job
        assert job is not None
        self._tell_destination(self.engines[name], move, ev.PullFailed(job.number, Reason.TRANSFER_FAILED))

    def cut(self, one: str, other: str) -> None:
        """Cut the way between two, or repair it. Outputs wait until it is repaired, everything else is lost."""
        self.cuts ^= {frozenset((one, other))}

    def cancel(self, name: str, move: str) -> None:
        self._tell_source(self.engines[name], move, ev.CancelRequested())

    def revoke(self, name: str, move: str) -> None:
        self._tell_destination(self.engines[name], move, ev.Revoked(Reason.DESTINATION_NEEDS_BLOCKS))

    def preempt(self, name: str, request_id: str = REQUEST) -> None:
        """The engine's own scheduler takes the request's blocks."""
        engine = self.engines[name]
        request = engine.requests[request_id]
        engine.ledger.give_back(BlockOwner.SCHEDULER, request_id)
        request.rows, request.states, request.computed = [], [], 0
        if not request.frozen:
            for move in self._leaves(engine, request_id):
                self._tell_source(engine, move, ev.RequestGone(Gone.PREEMPTED))

    def client_leaves(self, request_id: str = REQUEST) -> None:
        """The client goes away: the home engine is told, and the gate wants nothing any more."""
        client = self.clients[request_id]
        client.left = True
        client.gate.finish()
        self._send("O", "A", "abort", request=request_id)

    def churn(self, name: str) -> None:
        """Other requests come and go: every free block is overwritten."""
        engine = self.engines[name]
        for block in engine.ledger.free():
            engine.memory[block] = [digest("foreign", self.now, block)] * BLOCK_SIZE

    def hog(self, name: str) -> None:
        """Other requests take every free block, or give theirs back."""
        ledger = self.engines[name].ledger
        if ledger.held(BlockOwner.SCHEDULER, "others"):
            ledger.give_back(BlockOwner.SCHEDULER, "others")
        else:
            ledger.hold(BlockOwner.SCHEDULER, "others", ledger.free())

    def crash(self, name: str) -> None:
        """The engine dies with everything it knew, and comes back as another life. What it sent is still on its way."""
        self.crashed = True
        self.engines[name].restart()

    def forbid(self, name: str, move: str) -> None:
        """An operator calls a move off at its destination, whether or not that has heard of it."""
        engine = self.engines[name]
        self._incoming(engine, move, "", REQUEST)
        self._tell_destination(engine, move, ev.CancelRequested())

    # Shells

    def _tell_source(self, engine: Engine, move: str, event: ev.SourceEvent) -> None:
        outgoing = engine.out.get(move)
        if outgoing is None:
            return
        for effect in self._feed(f"{engine.name} {move} source", outgoing.machine, event):
            self._do_at_source(engine, outgoing, effect)
        if outgoing.machine.settled and not outgoing.reported:
            outgoing.reported = True
            outcome = outgoing.machine.outcome
            assert outcome is not None
            self.outcomes.append(outcome.state)
            why = f" ({outcome.reason})" if outcome.reason else ""
            self.note(f"{engine.name} {move} outcome: {outcome.state}{why}")
        if outgoing.machine.over:
            engine.out.pop(move, None)

    def _tell_destination(self, engine: Engine, move: str, event: ev.DestinationEvent) -> None:
        incoming = engine.into.get(move)
        if incoming is None:
            return
        for effect in self._feed(f"{engine.name} {move} destination", incoming.machine, event):
            self._do_at_destination(engine, incoming, effect)
        if incoming.machine.state is DestinationState.DRAINING and engine.ledger.held(BlockOwner.RESERVATION, move):
            engine.ledger.pass_on(move, BlockOwner.DRAINING)
        if incoming.machine.over:
            engine.into.pop(move, None)

    def _feed(self, who: str, machine: Machine[Any, Any, Any], event: ev.Event) -> list[do.Effect]:
        before = machine.state
        effects = machine.on(event)
        if self.traced:
            arrow = f"{before} -> {machine.state}" if machine.state is not before else f"{before}"
            self.note(f"{who}: {show(event)}: {arrow}")
            self.log.extend(f"    {show(effect)}" for effect in effects if not _is_deadline(effect))
        return effects

    def note(self, line: str) -> None:
        """A line of the transcript."""
        if self.traced:
            self.log.append(line)

    def _do_at_source(self, engine: Engine, out: Outgoing, effect: do.Effect) -> None:
        def call(kind: Call, body: object = None) -> None:
            out.calls.add(kind)
            self._send(engine.name, out.to, str(kind), body, out.move, out.request)

        def command(what: str, action: Callable[[], None]) -> None:
            engine.commands.append((what, action))

        request = engine.requests.get(out.request)
        match effect:
            case do.SendReserve():
                assert request is not None
                call(Call.RESERVE, (list(request.output), request.max_output, engine.life, request.computed))
            case do.SendRound():
                call(Call.ROUND, (effect, self._of_round(out, effect)))
            case do.SendCommit():
                call(Call.COMMIT, (effect, self._of_commit(out, effect), list(out.states), list(out.tokens)))
            case do.SendWithdraw():
                call(Call.WITHDRAW)
            case do.SendQuery():
                call(Call.QUERY)
            case do.SendCancel():
                call(Call.CANCEL)
            case do.SendAbort():
                call(Call.ABORT)
            case do.SendClose():
                command("close", lambda: call(Call.CLOSE))
            case do.AskFence(epoch=epoch):
                self._send(engine.name, "O", "fence", epoch, out.move, out.request)
            case do.PinBlocks(from_block=from_block):
                command("pin", lambda: self._pin(engine, out, from_block))
            case do.Freeze():
                command("freeze", lambda: self._freeze(engine, out))
            case do.Unfreeze(epoch=epoch):
                if epoch is not None and request is not None:
                    request.epoch, request.base = epoch, len(request.output)
                # The destination may be reading: a step would change the state under it.
                starts_over = epoch is not None and self.has_states and self.starts_over
                command("unfreeze", lambda: self._unfreeze(engine, out.request, starts_over))
            case do.Unpin():
                command("unpin", lambda: engine.ledger.give_back(BlockOwner.PIN, out.move))
            case do.Release() | do.Drop():
                if request is not None:
                    request.leaving = True
                command("release", lambda: self._release(engine, out.request))
            case do.SetTimer(name=name, seconds=seconds):
                out.timers[name] = self.now + seconds
            case do.ClearTimer(name=name):
                out.timers.pop(name, None)
            case _:
                raise AssertionError(effect)

    def _pin(self, engine: Engine, out: Outgoing, from_block: int) -> None:
        request = engine.requests.get(out.request)
        if request is None or request.computed == 0:
            self._tell_source(engine, out.move, ev.PinFailed(Reason.NOT_STARTED))
            return
        frontier = request.computed // BLOCK_SIZE
        engine.ledger.hold(BlockOwner.PIN, out.move, present(request.rows[from_block:frontier]))
        out.rows, out.states = [list(row) for row in request.rows], list(request.states)
        self._tell_source(engine, out.move, ev.BlocksPinned(frontier, len(request.tokens)))

    def _freeze(self, engine: Engine, out: Outgoing) -> None:
        request = engine.requests.get(out.request)
        if request is None or request.computed == 0:
            self._tell_source(engine, out.move, ev.PinFailed(Reason.NOT_STARTED))
            return
        request.frozen = True
        rows = request.rows[: -(-request.computed // BLOCK_SIZE)]
        if self.pins_at_freeze:
            engine.ledger.hold(BlockOwner.PIN, out.move, [*present(rows), *request.states])
        out.rows, out.states = [list(row) for row in rows], list(request.states)
        out.tokens = list(request.output)
        frozen = ev.Frozen(len(request.tokens), request.computed, len(rows), len(request.output))
        self._tell_source(engine, out.move, frozen)

    def _of_round(self, out: Outgoing, effect: do.SendRound) -> list[Row]:
        """Rows that a round copies."""
        return out.rows[effect.from_block : effect.to_block]

    def _of_commit(self, out: Outgoing, effect: do.SendCommit) -> list[Row]:
        return out.rows[effect.from_block : effect.num_blocks]

    def _unfreeze(self, engine: Engine, request_id: str, starts_over: bool) -> None:
        request = engine.requests.get(request_id)
        if request is not None:
            request.frozen = False
            if starts_over:
                engine.ledger.give_back(BlockOwner.SCHEDULER, request_id)
                request.rows, request.states, request.computed = [], [], 0

    def _release(self, engine: Engine, request_id: str) -> None:
        engine.ledger.give_back(BlockOwner.SCHEDULER, request_id)
        engine.requests.pop(request_id, None)

    def _do_at_destination(self, engine: Engine, into: Incoming, effect: do.Effect) -> None:
        def command(what: str, action: Callable[[], None]) -> None:
            engine.commands.append((what, action))

        def answer(key: object, kind: Call, body: object) -> None:
            for _ in range(into.waiting.pop(key, 0)):
                self._send(
                    engine.name, into.source, f"{kind} answer", (body, engine.incarnation), into.move, into.request_id
                )

        match effect:
            case do.ReserveBlocks():
                command("reserve", lambda: self._reserve(engine, into))
            case do.GrowReservation(num_tokens=num_tokens):
                command("grow", lambda: self._grow(engine, into, num_tokens))
            case do.Pull(job=number, from_block=from_block, to_block=to_block):
                into.job = Job(number, into.source, into.source_life, self._pairs(into, range(from_block, to_block)))
            case do.StopPull():
                assert into.job is not None
                into.job.stopping = True
            case do.Admit():
                command(f"admit {into.move}", lambda: self._admit(engine, into, effect))
            case do.RevokeAdmit():
                before = len(engine.commands)
                engine.commands = [command for command in engine.commands if command[0] != f"admit {into.move}"]
                if len(engine.commands) < before:
                    self._tell_destination(engine, into.move, ev.AdmitFailed(Reason.BARRED))
            case do.FreeReservation():
                command("free", lambda: self._free(engine, into.move))
            case do.AbortAdmitted():
                command("abort", lambda: self._abort(engine, into.request_id))
            case do.AnswerReserve() | do.RefuseReserve():
                answer(Call.RESERVE, Call.RESERVE, effect)
            case do.AnswerRound(round=number) | do.RefuseRound(round=number):
                answer((Call.ROUND, number), Call.ROUND, effect)
            case do.AnswerCommit():
                answer(Call.COMMIT, Call.COMMIT, effect)
            case do.AnswerSettle(call=kind):
                if kind is Call.CLOSE and into.request_id in engine.requests:
                    engine.requests[into.request_id].open_handover = False
                answer(kind, kind, effect)
            case do.SetTimer(name=name, seconds=seconds):
                into.timers[name] = self.now + seconds
            case do.ClearTimer(name=name):
                into.timers.pop(name, None)
            case _:
                raise AssertionError(effect)

    def _pairs(self, into: Incoming, span: range) -> list[tuple[int, int]]:
        """Blocks that a pull copies: of rows, what neither side has left behind; the latest states with the last."""
        pairs = [pair for row in span for pair in zip(into.source_rows[row], into.rows[row], strict=True)]
        copied = [pair for pair in pairs if NOTHING not in pair]
        if into.machine.state is DestinationState.COMMITTING:
            copied += zip(into.source_states, into.states, strict=True)
        return copied

    def _free(self, engine: Engine, move: str) -> None:
        engine.ledger.give_back(BlockOwner.RESERVATION, move)
        engine.ledger.give_back(BlockOwner.DRAINING, move)

    def _reserve(self, engine: Engine, into: Incoming) -> None:
        request = into.request
        assert request is not None
        if into.request_id in engine.requests:
            self._tell_destination(engine, into.move, ev.ReserveFailed(Reason.ALREADY_MIGRATING))
            return
        hits = sorted(engine.ledger.held(BlockOwner.SCHEDULER, "cache"))[: (len(request.prompt) - 1) // BLOCK_SIZE]
        if self.window is None and not self.has_states:
            into.rows = [[block] for block in hits]
        hits = hits[: len(into.rows)]
        missing = len(request.tokens) // BLOCK_SIZE + 1 - len(into.rows)
        # A window before what the source has computed is not looked at any more.
        left = max(0, request.computed - self.window) // BLOCK_SIZE if self.window is not None else 0
        taken = self._take(engine, BlockOwner.RESERVATION, into.move, missing, left, with_states=True)
        if taken is None:
            self._tell_destination(engine, into.move, ev.ReserveFailed(Reason.DESTINATION_FULL))
            return
        rows, into.states = taken
        into.rows += rows
        self._tell_destination(engine, into.move, ev.BlocksReserved(len(hits), len(into.rows)))

    def _grow(self, engine: Engine, into: Incoming, num_tokens: int) -> None:
        missing = num_tokens // BLOCK_SIZE + 1 - len(into.rows)
        taken = self._take(engine, BlockOwner.RESERVATION, into.move, missing)
        if taken is None:
            self._tell_destination(engine, into.move, ev.GrowFailed(Reason.DESTINATION_FULL))
            return
        into.rows += taken[0]
        self._tell_destination(engine, into.move, ev.Grown(len(into.rows)))

    def _take(
        self, engine: Engine, owner: BlockOwner, key: str, num_rows: int, left: int = 0, *, with_states: bool = False
    ) -> tuple[list[Row], list[int]] | None:
        """So many rows more, the first `left` of them without a window, and a state; None if there is no room."""
        free = iter(engine.ledger.free())
        try:
            rows = [[next(free)] for _ in range(num_rows)]
            if self.window is not None:
                for number, row in enumerate(rows):
                    row.append(NOTHING if number < left else next(free))
            states = [next(free)] if with_states and self.has_states else []
        except StopIteration:
            return None
        engine.ledger.hold(owner, key, [*present(rows), *states])
        return rows, states

    def _admit(self, engine: Engine, into: Incoming, admit: do.Admit) -> None:
        request = into.request
        assert request is not None
        if into.request_id in engine.requests:
            self._tell_destination(engine, into.move, ev.AdmitFailed(Reason.ALREADY_MIGRATING))
            return
        request.output = list(into.commit_tokens)
        request.epoch, request.base, request.computed = admit.epoch, admit.base, admit.computed_tokens
        request.rows, request.states = into.rows, into.states
        request.open_handover = True
        published = self.read(engine, request)
        if published != cells_of(request.tokens)[: request.computed]:
            self.faults.append(f"{engine.name} published bytes that are not the request's")
        hits = present(into.rows[: into.machine.hit_blocks])
        engine.ledger.pass_on(into.move, BlockOwner.SCHEDULER, request.id)
        engine.ledger.hold(BlockOwner.SCHEDULER, request.id, hits)
        if not request.computed and self.window is not None:
            # What was reserved for a request with KV is not enough for one without.
            engine.ledger.give_back(BlockOwner.SCHEDULER, request.id)
            request.rows, request.states = [], []
        engine.requests[request.id] = request
        first = max(0, request.base - self.num_repeated)
        if first < request.base:
            self._emit(engine, request, first, request.output[first : request.base], False)
        self._tell_destination(engine, into.move, ev.Admitted())

    def _copy_block(self, engine: Engine, into: Incoming, job: Job) -> None:
        source = self.engines[job.source]
        read, write = job.pairs[job.copied]
        if not engine.ledger.writable(into.move, [write]):
            self.faults.append(f"a mover of {engine.name} wrote block {write}, which is not reserved for it any more")
        # A read counts if its bytes may be published: a round's while the source still waits for it, the last one's
        # until its lease is over.
        out = source.out.get(into.move)
        awaited = out is not None and not out.machine.settled
        last = into.machine.state is DestinationState.COMMITTING and self.now < into.timers.get("lease", 0.0)
        if not job.stopping and (awaited or last) and self.checks_reads:
            held = source.ledger.of(BlockOwner.PIN) | source.ledger.of(BlockOwner.SCHEDULER)
            if read not in held:
                self.faults.append(f"a mover of {engine.name} reads block {read} of {source.name}, which nobody holds")
        engine.memory[write] = list(source.memory[read])

    # The engine and the origin

    def _allocate(self, engine: Engine, request: Request) -> bool:
        """Room for every token and the next."""
        missing = len(request.tokens) // BLOCK_SIZE + 1 - len(request.rows)
        if missing <= 0:
            return True
        taken = self._take(engine, BlockOwner.SCHEDULER, request.id, missing, with_states=not request.states)
        if taken is None:
            return False
        request.rows += taken[0]
        request.states += taken[1]
        return True

    def _emit(self, engine: Engine, request: Request, first: int, tokens: list[int], finished: bool) -> None:
        arrival = Arrival(request.epoch, request.base, first, len(tokens), finished, tokens)
        self._send(engine.name, "O", "out", arrival, request=request.id)

    def _end(self, engine: Engine, request: Request, kind: Gone) -> None:
        engine.ledger.give_back(BlockOwner.SCHEDULER, request.id)
        del engine.requests[request.id]
        for move in self._leaves(engine, request.id):
            self._tell_source(engine, move, ev.RequestGone(kind))

    def _abort(self, engine: Engine, request_id: str, epoch: Epoch | None = None) -> None:
        """End it, whatever its epoch or only under this one."""
        request = engine.requests.get(request_id)
        if request is not None and epoch in (None, request.epoch):
            self._end(engine, request, Gone.ABORTED)

    def _at_origin(self, message: Message) -> None:
        client = self.clients[message.request]
        if message.kind == "fence":
            raised = client.gate.fence(message.body)
            answer = client.gate.finished, raised
            self._send("O", message.sender, "fence answer", answer, message.move, message.request)
            return
        arrival: Arrival = message.body
        verdict = client.gate.offer(arrival)
        for delivery in verdict.deliver:
            tokens = delivery.payload
            assert isinstance(tokens, list)
            client.received += tokens[delivery.skip : delivery.skip + delivery.count]
        if verdict.deliver:
            self.note(f"O: {message} {_span(arrival)}: client has {len(client.received)}")
        elif verdict.stale:
            self.note(f"O: {message} {_span(arrival)}: stale")
        else:
            self.note(f"O: {message} {_span(arrival)}: nothing new, or too early")
        if verdict.stale and message.sender in self.engines:
            self._send("O", message.sender, "dismissal", arrival.epoch, request=message.request)

    def _at_engine(self, engine: Engine, message: Message) -> None:
        move = message.move
        match message.kind:
            case "abort" if message.sender == "O":
                engine.commands.append(("abort", lambda: self._abort(engine, message.request)))
            case "dismissal":
                engine.commands.append(("abort", lambda: self._abort(engine, message.request, message.body)))
            case "fence answer":
                finished, raised = message.body
                event: ev.SourceEvent = ev.FenceStarted()
                if finished:
                    event = ev.OriginFinished()
                elif raised is not None:
                    event = ev.FenceRaised(raised)
                self._answered(engine, move, event)
            case kind if kind.endswith(" answer"):
                body, incarnation = message.body
                if move in engine.out:
                    engine.out[move].calls.discard(Call(kind.removesuffix(" answer")))
                reply = self._reply(body, incarnation)
                if reply is not None:
                    self._answered(engine, move, reply)
            case _:
                self._peer_call(engine, message)

    def _answered(self, engine: Engine, move: str, event: ev.SourceEvent) -> None:
        out = engine.out.get(move)
        # An answer to the life of the source that asked; a restarted one does not know the call.
        if out is None:
            self.note(f"{engine.name} {move}: {show(event)} means nothing here")
            return
        self._tell_source(engine, move, event)

    def _reply(self, body: do.Effect, incarnation: str) -> ev.SourceEvent | None:
        match body:
            case do.AnswerReserve():
                return ev.Reserved(body.hit_blocks, body.lease_s, incarnation)
            case do.RefuseReserve():
                return ev.ReserveRefused(body.reason)
            case do.AnswerRound():
                return ev.RoundDone(body.round, body.num_bytes, body.seconds)
            case do.RefuseRound():
                return ev.RoundFailed(body.round, body.reason)
            case do.AnswerSettle(call=Call.CANCEL | Call.CLOSE):
                return None
            case do.AnswerCommit(state=state, reason=reason) | do.AnswerSettle(state=state, reason=reason):
                match state:
                    case Settlement.COMMITTED:
                        return ev.Committed(incarnation)
                    case Settlement.BARRED:
                        return ev.Barred(reason or Reason.BARRED, incarnation)
                    case Settlement.UNKNOWN:
                        return ev.Forgotten()
                    case _:
                        return ev.Unsettled()
        raise AssertionError(body)

    def _peer_call(self, engine: Engine, message: Message) -> None:
        move = message.move
        incoming = self._incoming(engine, move, message.sender, message.request)
        key: object = Call(message.kind)
        event: ev.DestinationEvent
        match key:
            case Call.RESERVE:
                output, max_output, incoming.source_life, computed = message.body
                if incoming.request is None:
                    prompt = self.clients[message.request].prompt
                    incoming.request = Request(message.request, prompt, max_output, list(output), computed=computed)
                event = ev.ReserveRequested()
            case Call.ROUND:
                effect, rows = message.body
                key = (Call.ROUND, effect.round)
                incoming.source_rows.update(enumerate(rows, effect.from_block))
                event = ev.RoundRequested(effect.round, effect.from_block, effect.to_block, effect.num_tokens)
            case Call.COMMIT:
                effect, rows, incoming.source_states, tokens = message.body
                incoming.source_rows.update(enumerate(rows, effect.from_block))
                incoming.commit_tokens = tokens
                event = ev.CommitRequested(
                    effect.epoch, effect.base, effect.computed_tokens, effect.from_block, effect.num_blocks
                )
            case Call.WITHDRAW:
                event = ev.WithdrawRequested()
            case Call.CANCEL:
                event = ev.CancelRequested()
            case Call.ABORT:
                event = ev.AbortRequested()
            case Call.CLOSE:
                event = ev.CloseRequested()
            case _:
                event = ev.QueryRequested()
        incoming.waiting[key] = incoming.waiting.get(key, 0) + 1
        self._tell_destination(engine, move, event)

    def _incoming(self, engine: Engine, move: str, source: str, request_id: str) -> Incoming:
        """The record of a move, made when it is first named."""
        if move not in engine.into:
            terms = Terms(block_size=BLOCK_SIZE, has_states=self.has_states, lease_s=LEASE_S)
            engine.into[move] = Incoming(move, source, self.destination_class(terms), request_id)
        incoming = engine.into[move]
        incoming.source = incoming.source or source
        return incoming

    def _send(
        self, sender: str, receiver: str, kind: str, body: object = None, move: str = "", request: str = REQUEST
    ) -> None:
        life = self.engines[sender].incarnation if sender in self.engines else ""
        self.network.append(Message(next(self._numbers), sender, receiver, kind, body, move, request, life))

    # What must hold

    def owners(self, request_id: str = REQUEST) -> list[str]:
        """Engines that may emit something the gate would take."""
        return [
            name
            for name, engine in self.engines.items()
            if (request := engine.requests.get(request_id)) is not None
            and not request.frozen
            and not self._is_barred(request_id, request.epoch)
        ]

    def _is_barred(self, request_id: str, epoch: Epoch) -> bool:
        return self.clients[request_id].gate.is_barred(epoch)

    def violations(self) -> list[str]:
        for engine in self.engines.values():
            engine.ledger.check()
        return self.wrong_tokens_or_owners()

    def wrong_tokens_or_owners(self) -> list[str]:
        """The invariants that are cheap enough for every step of a random schedule; the ledger checks each change."""
        faults = list(self.faults)
        for client in self.clients.values():
            if client.received != client.reference[: len(client.received)]:
                faults.append("the client's tokens are not the reference's")
        return faults + self._several_owners()

    def _several_owners(self) -> list[str]:
        return [
            f"{names} own request {request_id}"
            for request_id in self.clients
            if len(names := self.owners(request_id)) > 1
        ]

    def left_at_rest(self) -> list[str]:
        """What must not be left when everything has come to its end."""
        faults = []
        for client in self.clients.values():
            lossless = not self.crashed and not client.left and State.LOST not in self.outcomes
            if lossless and client.received != client.reference:
                faults.append(f"the client has {len(client.received)} of {client.num_output} tokens")
        return faults + self._held_at_rest()

    def _held_at_rest(self) -> list[str]:
        faults = []
        for engine in self.engines.values():
            held = {str(owner): engine.ledger.of(owner) for owner in BlockOwner}
            held["scheduler"] -= engine.ledger.held(BlockOwner.SCHEDULER, "cache")
            if left := {owner: len(blocks) for owner, blocks in held.items() if blocks}:
                faults.append(f"{engine.name} still holds {left}")
            if engine.out or engine.into or engine.requests:
                faults.append(f"{engine.name} has not forgotten")
        return faults

    def due(self) -> Iterator[tuple[str, str, str]]:
        """Timers whose time has come."""
        for engine in self.engines.values():
            for shell in (*engine.out.values(), *engine.into.values()):
                for name, when in shell.timers.items():
                    if when <= self.now:
                        yield engine.name, shell.move, name

    def next_due(self) -> float | None:
        shells = [s for engine in self.engines.values() for s in (*engine.out.values(), *engine.into.values())]
        return min((when for shell in shells for when in shell.timers.values()), default=None)

    def tick(self) -> bool:
        """Do the next thing, in a fixed order: messages, loops, movers; then due timers; then decode; then time passes.

        False when there is nothing left to do.
        """
        if self.react():
            return True
        for due in self.due():
            self.fire(*due)
            return True
        decoding = [e.name for e in self.engines.values() if any(not r.frozen for r in e.requests.values())]
        decoded = [self.step(name) for name in decoding]
        self.now += self.step_s
        if not any(decoded):
            when = self.next_due()
            if when is None:
                return False
            self.now = max(self.now, when)
        return True

    def react(self) -> bool:
        """Deliver a message, or run what a loop was asked, or a mover; False if there is nothing of the kind."""
        if self.network:
            self.deliver(self.network[0])
            return True
        for engine in self.engines.values():
            if engine.commands:
                self.loop(engine.name)
                return True
            for incoming in engine.into.values():
                if incoming.job is not None:
                    self.pull_block(engine.name, incoming.move)
                    return True
        return False

    def settle(self) -> None:
        """Let everything come to its end: nothing is lost any more, everybody runs."""
        self.cuts.clear()
        for engine in self.engines.values():
            engine.ledger.give_back(BlockOwner.SCHEDULER, "others")
        for _ in range(5000):
            if not self.tick():
                return
        raise AssertionError("the world does not come to rest")

    def summary(self) -> str:
        client = self.clients[REQUEST]
        right = "as the reference" if client.received == client.reference[: len(client.received)] else "WRONG"
        parts = [f"client: {len(client.received)} of {client.num_output} tokens, {right}"]
        parts.append(f"owner: {', '.join(self.owners()) or 'nobody'}")
        for engine in self.engines.values():
            ledger = engine.ledger
            counts = {
                "of its scheduler": len(ledger.of(BlockOwner.SCHEDULER)),
                "pinned": len(ledger.of(BlockOwner.PIN)),
            }
            counts |= {
                "reserved": len(ledger.of(BlockOwner.RESERVATION)),
                "draining": len(ledger.of(BlockOwner.DRAINING)),
            }
            held = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            parts.append(f"{engine.name}: {held or 'all free'}")
        return "; ".join(parts)


def show(item: msgspec.Struct) -> str:
    """An event or effect in words, without the fields that have their default."""
    names = item.__struct_fields__
    defaults = (msgspec.NODEFAULT,) * (len(names) - len(item.__struct_defaults__)) + item.__struct_defaults__
    fields = {name: getattr(item, name) for name in names}
    pairs = zip(fields.items(), defaults, strict=True)
    given = ", ".join(f"{name}={value}" for (name, value), default in pairs if value != default)
    return f"{type(item).__name__}({given})"


def _is_deadline(effect: do.Effect) -> bool:
    """The timers that states set and clear by themselves would drown everything else."""
    return isinstance(effect, do.SetTimer | do.ClearTimer) and effect.name not in ("lease", "ask")


def _span(arrival: Arrival) -> str:
    finished = ", finished" if arrival.finished else ""
    return f"{arrival.epoch} [{arrival.first}, {arrival.end}){finished}"
