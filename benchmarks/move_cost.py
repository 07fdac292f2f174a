# SPDX-License-Identifier: Apache-2.0
"""How much of a core does a move take, and where?

    python -m benchmarks.move_cost --json FILE
    python -m benchmarks.move_cost --context 7000 --transport tcp --blocks 12

Two instances, on each one stream that stays. Another one moves there and back, one move after the other; in
quiet windows it stays, half of the time at home and half of the time away. Windows come in blocks, quiet, moves, moves,
quiet, so that drift cancels.

The system's accounts tell what every thread of both instances has run, and of the process that asks for the moves. What
a part has run in a window of moves, less what it runs for as many steps in the quiet windows of the same block, over
the number of moves, is what a move costs of it. A step is a token of a stream that stays: its engine never rests.

    copy      the movers, and the threads that send blocks to them
    llumlets  the threads of the llumlets: state machines, gRPC, messages to movers and origins
    asker     the process that asks for moves, as a scheduler would
    api       the API servers: tokens that come by the relay
    libraries what gRPC and ZeroMQ run in threads of their own
    loops     the engines' loops; they spin while they wait for a model, so this is an estimate
    models    the workers' model threads: the destination's one-token batch, and caches that a copy has emptied

A line of JSON holds the medians over the blocks, in milliseconds a move; `rest_ms` is all that is neither copy nor
llumlets. Beside it, as the column "gRPC alone", what the same calls cost with nothing behind them (`call_floor`),
between other processes, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.call_floor import Calls
from benchmarks.downtime import prompt_of
from benchmarks.interference import NEIGHBOUR_TOKENS, model_for
from benchmarks.mover import MoveFailed, Mover
from tests.support.client import Client, Stream, StreamFailed
from tests.support.harness import Fleet, Server, ServerSpec, command_line
from tests.support.model import build
from tests.support.moves import Move
from tests.support.progress import saying
from tests.support.stats import bootstrap, median
from tests.support.threads import threads_of
from vllm_llumnix.config import TRANSPORTS

PARTS = ("copy", "llumlets", "asker", "api", "libraries", "loops", "models")
REST = PARTS[2:]
MIN_BLOCKS = 3
FLOOR_MOVES = 40
ATTEMPTS = 50
RETRY_SECONDS = 0.05
PAUSE_SECONDS = 0.25
"""Between two moves. One that is asked for before the last is closed is refused, and asking again is no part of it."""

_OURS = {
    "llumnix-mover": "copy",
    "llumnix-blocks": "copy",
    "llumnix-llumlet": "llumlets",
    "llumnix-helper": "llumlets",
}
"""Names that the product gives to its threads; the system keeps 15 bytes of them."""
_LIBRARIES = ("ZMQbg", "grpc", "event_engine", "resolver-exec", "timer")
"""Beginnings of the names of gRPC's and ZeroMQ's own threads begin."""
_PROCESSES = {"EngineCore": "loops", "Worker": "models"}

Times = Counter[str]
"""Seconds that each part has run."""


def part_of(process: str, thread: str) -> str:
    """The part to which a thread belongs, by its name and its process's title."""
    for name, part in _OURS.items():
        if thread.startswith(name):
            return part
    if thread.startswith(_LIBRARIES):
        return "libraries"
    return next((part for title, part in _PROCESSES.items() if title in process), "api")


class Accounts:
    """The threads of all that takes part."""

    def __init__(self, servers: Sequence[Server], asker: int) -> None:
        self._processes = {pid: command_line(pid) for server in servers for pid in server.pids()}
        self._asker = asker

    def read(self) -> Times:
        """What all of them have run so far."""
        times = Times({"asker": sum(thread.seconds for thread in threads_of(self._asker))})
        for pid, title in self._processes.items():
            for thread in threads_of(pid):
                times[part_of(title, thread.name)] += thread.seconds
        return times


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """What was run while the engines made so many steps, and moves were made."""

    times: Mapping[str, float]
    num_steps: int
    moves: tuple[Move, ...] = ()


Block = tuple[Window, Window, Window, Window]
"""Quiet, moves, moves, quiet."""


def costs(block: Block) -> dict[str, float]:
    """Milliseconds a move, of each part."""
    first, *moving, last = block
    quiet_steps = first.num_steps + last.num_steps
    steps, moves = sum(one.num_steps for one in moving), sum(len(one.moves) for one in moving)
    if not quiet_steps or not moves:
        raise StreamFailed(f"{quiet_steps} steps in quiet windows, {moves} moves in the others: nothing to compare")
    return {
        part: 1e3
        * (
            sum(one.times.get(part, 0.0) for one in moving)
            - (first.times.get(part, 0.0) + last.times.get(part, 0.0)) * steps / quiet_steps
        )
        / moves
        for part in PARTS
    }


class Company:
    """One stream that moves, and two that stay."""

    def __init__(self, mover: Mover, pair: tuple[Server, Server], moving: Stream, staying: Sequence[Stream]) -> None:
        self._mover = mover
        self._pair = pair
        self._moving = moving
        self._staying = staying
        self._away = False

    @property
    def num_steps(self) -> int:
        return sum(len(stream.token_ids) for stream in self._staying)

    @property
    def ended(self) -> bool:
        return any(stream.done for stream in (self._moving, *self._staying))

    async def move(self) -> Move:
        """There, or back. Raises MoveFailed."""
        source, destination = reversed(self._pair) if self._away else self._pair
        for attempt in range(1, ATTEMPTS + 1):
            try:
                move = await self._mover.move(source, destination, self._moving)
                break
            except MoveFailed:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
        if not move.live or move.hit_tokens:
            raise MoveFailed(f"a move that measures nothing: {move.mode}, {move.hit_tokens} tokens found in a cache")
        self._away = not self._away
        return move

    async def window(self, accounts: Accounts, seconds: float, *, moving: bool) -> Window:
        before, steps = accounts.read(), self.num_steps
        until = time.monotonic() + seconds
        moves: list[Move] = []
        while moving and time.monotonic() < until - PAUSE_SECONDS:
            moves.append(await self.move())
            await asyncio.sleep(PAUSE_SECONDS)
        await asyncio.sleep(until - time.monotonic())
        if self.ended:
            raise StreamFailed("a stream ended before its window")
        times = accounts.read()
        times.subtract(before)
        return Window(times, self.num_steps - steps, tuple(moves))

    async def block(self, accounts: Accounts, seconds: float) -> Block:
        """The stream is at home in one of the quiet windows, and away in the other."""
        first = await self.window(accounts, seconds, moving=False)
        began_away = self._away
        moving = [await self.window(accounts, seconds, moving=True) for _ in range(2)]
        if self._away == began_away:
            await self.move()
        return first, *moving, await self.window(accounts, seconds, moving=False)


@contextlib.asynccontextmanager
async def company(pair: tuple[Server, Server], context: int, tokens: int) -> AsyncIterator[tuple[Company, Accounts]]:
    async with contextlib.AsyncExitStack() as stack:
        mover = await stack.enter_async_context(Mover(pair))
        one, other = [await stack.enter_async_context(Client(server.base_url)) for server in pair]
        moving = await one.complete(prompt_of(context, 1), tokens, ignore_eos=True)
        staying = [
            await client.complete(prompt_of(NEIGHBOUR_TOKENS, seed), tokens, ignore_eos=True)
            for seed, client in enumerate((one, other), 2)
        ]
        for stream in (moving, *staying):
            await stream.wait_for(8)
        present = Company(mover, pair, moving, staying)
        for _ in range(2):  # for what only the first moves do
            await present.move()
        yield present, Accounts(pair, mover.pid)


async def measure(pair: tuple[Server, Server], options: argparse.Namespace) -> list[Block]:
    """The streams begin anew with each block, so that contexts stay as they are said to be."""
    blocks: list[Block] = []
    room = model_for(options.context).max_position - options.context - 1
    while len(blocks) < max(MIN_BLOCKS, options.blocks):
        async with company(pair, options.context, room) as (present, accounts):
            blocks.append(await present.block(accounts, options.window))
    return blocks


def result(blocks: Sequence[Block], context: int, floor: Mapping[str, float]) -> dict[str, Any]:
    """The JSON object. `floor`: milliseconds a move of gRPC alone, by part."""
    found = [costs(block) for block in blocks]
    parts = {part: round(median(one[part] for one in found), 3) for part in PARTS}
    total = bootstrap([sum(one.values()) for one in found])
    moves = [move for block in blocks for window in block for move in window.moves]
    return {
        "bench": "move_cost",
        "cpu_ms_per_move": round(sum(parts.values()), 3),
        "cpu_ms_bounds": [round(total.low, 3), round(total.high, 3)],
        "copy_ms": parts["copy"],
        "llumlets_ms": parts["llumlets"],
        "rest_ms": round(sum(parts[part] for part in REST), 3),
        "moves": len(moves),
        "parts_ms": parts,
        "grpc_alone_ms": {part: round(milliseconds, 3) for part, milliseconds in floor.items()},
        "context_tokens": context,
        "copied_mib": round(median(move.copied_bytes for move in moves) / (1 << 20), 1),
        "transport": ",".join(sorted({move.transport for move in moves})),
        "blocks": len(blocks),
    }


def table_of(row: Mapping[str, Any]) -> Table:
    table = Table(title=f"CPU time of a move, {row['context_tokens']} tokens, {row['transport']}, {row['moves']} moves")
    table.add_column("part")
    table.add_column("ms a move", justify="right")
    table.add_column("gRPC alone", justify="right")
    floor = row["grpc_alone_ms"]
    for part, milliseconds in row["parts_ms"].items():
        table.add_row(part, f"{milliseconds:.2f}", f"{floor[part]:.2f}" if part in floor else "")
    table.add_row("all", f"{row['cpu_ms_per_move']:.2f}", f"{sum(floor.values()):.2f}", style="bold")
    low, high = row["cpu_ms_bounds"]
    table.caption = f"95 % of all: {low:.1f} to {high:.1f} ms; {row['copied_mib']} MiB copied"
    return table


def server_of(context: int, transport: str) -> ServerSpec:
    model = model_for(context)
    flags = ("--no-enable-prefix-caching", "--llumlet-transport", transport)
    return ServerSpec(build(model), max_model_len=model.max_position, kv_cache_gib=2, flags=flags)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.move_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--context", type=int, default=1024, help="tokens of the stream that moves")
    add("--blocks", type=int, default=8, help=f"of four windows each; at least {MIN_BLOCKS}")
    add("--window", type=float, default=4.0, metavar="SECONDS")
    add("--transport", choices=TRANSPORTS, default="auto", help="how blocks travel")
    add("--json", type=Path, metavar="FILE")
    add("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with saying("starting two vLLM servers") as say, Fleet(options.logs) as fleet:
        spec = server_of(options.context, options.transport)
        one, other = fleet.start(dataclasses.replace(spec, name="a"), dataclasses.replace(spec, name="b"))
        say(f"measuring {max(MIN_BLOCKS, options.blocks)} blocks")
        try:
            blocks = asyncio.run(measure((one, other), options))
        except (MoveFailed, StreamFailed) as error:
            print(f"not measured: {error}", file=sys.stderr)
            return 1
        say("measuring gRPC alone")
        with Calls() as calls:
            floor = calls.cost(FLOOR_MOVES, PAUSE_SECONDS)
    row = result(blocks, options.context, floor)
    if options.json is not None:
        options.json.write_text(json.dumps(row) + "\n")
    print(json.dumps(row))
    Console(stderr=True, markup=False).print(table_of(row))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
