# SPDX-License-Identifier: Apache-2.0
"""Transcripts: scenario files that are run against `World`, and are the protocol's specification.

A file opens with a comment that says what it shows. Then come blocks: commands, `----`, what they must print, and an
empty line. `LLUMNIX_REWRITE=1` (or `pytest --rewrite`) writes what is printed into the files; review the diff.

    world [engines=AB] [prompt=N] [output=N] [open=1]    begin; without it: engines A, B and C, 6 prompt and 24 output
                                       tokens; open=1: a request may move on although its last hand-over is open
    step A [N]                         N turns of A's loop: what was asked of it, and a token each
    loop A                             a turn that schedules nothing
    decode A N                         N turns, and the client has the tokens; prints nothing
    move A>B [live|blocking|recompute] [plan field=value …]
    until A copying                    do what is next, in a fixed order, until a machine at A is in that state
    deliver|drop|duplicate A>B commit [all]     a message that waits in the network; `deliver rest`: all that wait now
    network                            what waits
    unreachable A commit               A's deadline for that call passes
    pull B [N]                         the mover at B: N blocks, or to the end
    pull-fails B
    timer A lease                      fires now, whatever the clock says
    advance SECONDS                    the clock; timers do not fire by themselves, a process may be stopped
    due                                every timer whose time has come fires
    cancel A, revoke B, preempt A, churn A, hog A, crash B, abort
    forbid B m1                        an operator calls move m1 off at B, which need not have heard of it
    cache B N                          B's prefix cache holds the first N blocks of the prompt
    quiet                              every message, loop and mover, until none is left; no decoding
    settle                             everything that is left, without losses; prints outcomes and the end
    show                               the client's tokens, the owner, every engine's blocks
    gate offer 0.1 base=5 first=5 count=2 [finished]     a gate alone; the payload is "first-end"
    gate fence 0.1 | gate depose | gate finish
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from llumlet.protocol.events import Call
from llumlet.protocol.ids import Epoch
from llumlet.protocol.move.ledger import BlockOwner
from llumlet.protocol.move.plan import Method
from llumlet.protocol.origin.gate import Arrival, Gate

from .world import BLOCK_SIZE, REQUEST, Engine, Incoming, Message, Outgoing, World, cells_of

SEPARATOR = "----"
SILENT = frozenset({"decode", "until", "quiet", "settle"})


@dataclasses.dataclass
class Block:
    commands: list[str]
    expected: list[str]


def parse(text: str) -> tuple[list[str], list[Block]]:
    """The opening comment and the blocks."""
    header: list[str] = []
    blocks: list[Block] = []
    lines = iter(text.splitlines())
    commands: list[str] = []
    for line in lines:
        if not line.strip():
            break
        header.append(line)
    for line in lines:
        if line == SEPARATOR:
            blocks.append(Block(commands, list(_until_empty(lines))))
            commands = []
        elif line.strip():
            commands.append(line)
    if commands:
        blocks.append(Block(commands, []))
    return header, blocks


def _until_empty(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            return
        yield line


def run(text: str, world_class: type[World] = World) -> str:
    """The file as it would be rewritten."""
    header, blocks = parse(text)
    session = Session(world_class)
    parts = ["\n".join(header).strip()]
    for block in blocks:
        printed = [line for command in block.commands if not command.startswith("#") for line in session.do(command)]
        parts.append("\n".join([*block.commands, SEPARATOR, *(printed or ["ok"])]))
    return "\n\n".join(parts) + "\n"


class Session:
    """One file's world and gate."""

    def __init__(self, world_class: type[World] = World) -> None:
        self.world_class = world_class
        self.world = world_class()
        self.gate: Gate = world_class.gate_class(max_buffered=4)

    def do(self, command: str) -> list[str]:
        """Run a command; returns what it prints, violations of an invariant included."""
        verb, *words = command.split()
        world = self.world
        start = len(world.log)
        printed: list[str] = getattr(self, "_" + verb.replace("-", "_"))(*words) or []
        if self.world is world:
            printed = world.log[start:] + printed if verb not in SILENT else printed
        return printed + [f"VIOLATION: {fault}" for fault in self.world.violations()]

    def _world(self, *words: str) -> None:
        options = dict(word.split("=") for word in words)
        engines = options.pop("engines", "ABC")
        moves_while_open = options.pop("open", "0") == "1"
        self.world = self.world_class(engines, **{name: int(value) for name, value in options.items()})
        self.world.moves_while_open = moves_while_open

    def _step(self, name: str, count: str = "1") -> None:
        for _ in range(int(count)):
            self.world.step(name)

    def _decode(self, name: str, count: str) -> None:
        for _ in range(int(count)):
            self.world.step(name)
            self._deliver(f"{name}>O", "out", "all")

    def _quiet(self) -> list[str]:
        start = len(self.world.log)
        while self.world.react():
            pass
        return self._told(start)

    def _loop(self, name: str) -> None:
        self.world.loop(name)

    def _move(self, way: str, *words: str) -> list[str]:
        source, to = way.split(">")
        method = Method.LIVE
        plan: dict[str, object] = {}
        for word in words:
            if "=" in word:
                name, value = word.split("=")
                plan[name] = value == "True" if name == "force" else float(value)
            else:
                method = Method(word)
        return [] if self.world.move(source, to, method, **plan) else ["not movable now"]

    def _until(self, name: str, state: str) -> list[str]:
        engine = self.world.engines[name]
        for _ in range(500):
            if any(shell.machine.state.value == state for shell in _shells(engine)):
                return []
            self.world.tick()
        raise AssertionError(f"{name} never is {state}")

    def _deliver(self, *words: str) -> list[str]:
        return self._each(words, self.world.deliver)

    def _drop(self, *words: str) -> list[str]:
        return self._each(words, self.world.drop)

    def _duplicate(self, *words: str) -> list[str]:
        return self._each(words, self.world.duplicate)

    def _network(self) -> list[str]:
        return [str(message) for message in self.world.network] or ["empty"]

    def _unreachable(self, name: str, call: str) -> None:
        self.world.unreachable(name, next(iter(self.world.engines[name].out)), Call(call))

    def _pull(self, name: str, count: str = "1000") -> None:
        incoming = _pulling(self.world.engines[name])
        job = incoming.job
        for _ in range(int(count)):
            if incoming.job is not job:
                return
            self.world.pull_block(name, incoming.move)

    def _pull_fails(self, name: str) -> None:
        self.world.fail_pull(name, _pulling(self.world.engines[name]).move)

    def _timer(self, name: str, timer: str) -> None:
        for shell in _shells(self.world.engines[name]):
            if timer in shell.timers:
                self.world.fire(name, shell.move, timer)
                return
        raise AssertionError(f"{name} has no timer {timer}")

    def _advance(self, seconds: str) -> None:
        self.world.advance(float(seconds))

    def _due(self) -> None:
        for due in list(self.world.due()):
            self.world.fire(*due)

    def _cancel(self, name: str) -> None:
        self.world.cancel(name, next(iter(self.world.engines[name].out)))

    def _revoke(self, name: str) -> None:
        self.world.revoke(name, next(reversed(self.world.engines[name].into)))

    def _forbid(self, name: str, move: str) -> None:
        self.world.forbid(name, move)

    def _preempt(self, name: str) -> None:
        self.world.preempt(name)

    def _churn(self, name: str) -> None:
        self.world.churn(name)

    def _hog(self, name: str) -> None:
        self.world.hog(name)

    def _crash(self, name: str) -> None:
        self.world.crash(name)

    def _abort(self) -> None:
        self.world.client_leaves()

    def _cache(self, name: str, count: str) -> None:
        engine = self.world.engines[name]
        blocks = engine.ledger.free()[: int(count)]
        engine.ledger.hold(BlockOwner.SCHEDULER, "cache", blocks)
        cells = cells_of(self.world.clients[REQUEST].prompt)
        for index, block in enumerate(blocks):
            engine.memory[block] = cells[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]

    def _settle(self) -> list[str]:
        start = len(self.world.log)
        self.world.settle()
        left = [f"VIOLATION: {fault}" for fault in self.world.left_at_rest()]
        return [*self._told(start), self.world.summary(), *left]

    def _told(self, start: int) -> list[str]:
        return [line for line in self.world.log[start:] if " outcome: " in line or line.endswith(": stale")]

    def _show(self) -> list[str]:
        return [self.world.summary()]

    def _gate(self, verb: str, *words: str) -> list[str]:
        gate = self.gate
        if verb == "offer":
            epoch, *fields = words
            numbers = dict(word.split("=") for word in fields if "=" in word)
            first, count = int(numbers["first"]), int(numbers["count"])
            payload = f"{first}-{first + count}"
            arrival = Arrival(_epoch(epoch), int(numbers["base"]), first, count, "finished" in fields, payload)
            verdict = gate.offer(arrival)
            told = [f"deliver {d.payload} skip={d.skip} count={d.count}" for d in verdict.deliver]
            told += ["finished"] * any(d.finished for d in verdict.deliver)
            told += ["stale"] * verdict.stale + ["overflow"] * verdict.overflow
            return [", ".join(told) or f"nothing; {gate.num_buffered} wait"]
        if verb == "fence":
            raised = gate.fence(_epoch(words[0]))
            what = f"raised to {raised}" if raised is not None else "finished" if gate.finished else "started"
            return [f"{what}; delivered {gate.next_index}"]
        if verb == "depose":
            return [f"{gate.depose()} goes on from {gate.next_index}"]
        gate.finish()
        return []

    def _each(self, words: tuple[str, ...], act: Callable[[Message], None]) -> list[str]:
        """Do something to the messages that a command names."""
        every = words[-1] == "all"
        pattern = " ".join(words[:-1] if every else words)
        found = [message for message in self.world.network if pattern in ("rest", str(message))]
        for message in found if every or pattern == "rest" else found[:1]:
            act(message)
        return [] if found else [f"no message {pattern}"]


def _shells(engine: Engine) -> list[Outgoing | Incoming]:
    return [*engine.out.values(), *engine.into.values()]


def _pulling(engine: Engine) -> Incoming:
    return next(incoming for incoming in engine.into.values() if incoming.job is not None)


def _epoch(text: str) -> Epoch:
    term, hop = text.split(".")
    return Epoch(int(term), int(hop))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.txt"))
