# SPDX-License-Identifier: Apache-2.0
"""What do moves do to the requests that stay?

    python -m benchmarks.interference --minutes 25 --json interference.jsonl
    python -m benchmarks.interference --cases 1024:8:none,25% 32768:1:1.25G --transport tcp
    python -m benchmarks.interference --cases 1024:2:none --every 2 --minutes 5    (one move a second)

Two instances, on each some neighbours that stay. Other streams move, in lanes of two that change places for ever, both
at the same time: half of the moves go there and half come back, and each instance keeps its load. (Of an odd number of
moves at once, one lane moves its streams one after the other. Between the two, one instance has a stream more; so gaps
are counted only while the first is on its way.) A lane moves again as soon as it has moved, or every so many seconds
(`--every`).

Costs are the inter-token gaps of the neighbours, as their clients see them, p50 and p99 of each window of a second, or
of `--every` seconds if that is longer. Windows come in blocks, quiet, moves, moves, quiet, so that drift cancels; a
block of quiet windows next to each is the control. Ratios are geometric means over the blocks, with 95 % bootstrap
bounds. In quiet windows the same streams run. Nothing is in a prefix cache, so a move copies all that its stream has:
it is checked that it does.

A case is a context in tokens, a number of moves at once, and a limit, which is what `--llumlet-bandwidth-limit` takes
and stands for a link: 1.25G is 10 Gb/s, 3.125G is 25 Gb/s. Each gets an equal share of the time, and at least
MIN_BLOCKS blocks. A line of JSON is written when a case has been measured, or has failed. The exit status is 0 if all
were measured and, without a limit, the p50 ratio is at most BAR or within the bounds of the control.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.downtime import prompt_of
from benchmarks.mover import MoveFailed, Mover
from tests.support.client import Client, Stream, StreamFailed
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.model import PRESETS, ModelSpec, build
from tests.support.moves import Move
from tests.support.progress import saying
from tests.support.stats import compare, quantile
from vllm_llumnix.config import TRANSPORTS

BAR = 1.01
DEFAULT_CASES = ("1024:1,2,4,8:none,25%,1.25G,3.125G", "32768:1,2:none,1.25G")
NO_LIMIT = "none"
"""The default of the llumlet."""
NEIGHBOUR_TOKENS = 64
WINDOW_SECONDS = 1.0
LONGEST_WINDOW_SECONDS = 2.0
SETTLE_SECONDS = 0.2
"""Between two windows."""
MIN_BLOCKS = 3
MOVES = (False, True, True, False)
QUIET = (False, False, False, False)
FASTEST_GAP_SECONDS = 0.002
BLOCK_TOKENS = int((len(MOVES) + len(QUIET)) * (WINDOW_SECONDS + SETTLE_SECONDS) / FASTEST_GAP_SECONDS)
"""A stream that begins with a block lives at least as long; with longer windows, if no gap is as short as that."""
ATTEMPTS = 50
RETRY_SECONDS = 0.02
"""Refusals are counted. One that is usual is handover_open: the move before is not closed yet."""
PREFILL_SECONDS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    at_once: int
    limit: str
    context: int

    @property
    def lanes(self) -> tuple[bool, ...]:
        """Whether, for each lane, both of its streams move at the same time."""
        return (True,) * (self.at_once // 2) + (False,) * (self.at_once % 2)

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "interference",
            "moves_at_once": self.at_once,
            "limit": self.limit,
            "context_tokens": self.context,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Cases that are measured on the same two servers."""

    context: int
    limit: str
    at_once: tuple[int, ...]

    @property
    def cases(self) -> list[Case]:
        return [Case(count, self.limit, self.context) for count in self.at_once]

    @property
    def model(self) -> ModelSpec:
        return model_for(self.context)

    @property
    def num_moving(self) -> int:
        """Streams that an instance has at most, of those that move: in the middle of a move, both of every lane."""
        return 2 * max(len(case.lanes) for case in self.cases)

    def kv_bytes(self, neighbours: int) -> int:
        """What an instance holds at most."""
        tokens = neighbours * (NEIGHBOUR_TOKENS + BLOCK_TOKENS) + self.num_moving * (self.context + BLOCK_TOKENS)
        return tokens * self.model.kv_bytes_per_token

    def server(self, neighbours: int, transport: str) -> ServerSpec:
        most = max(self.at_once)
        flags = ["--no-enable-prefix-caching", "--llumlet-transport", transport]
        flags += ["--llumlet-max-migrations-in", str(most), "--llumlet-max-migrations-out", str(most)]
        flags += ["--llumlet-max-migration-kv-ratio-in", "1", "--llumlet-max-migration-kv-ratio-out", "1"]
        if self.limit != NO_LIMIT:
            flags += ["--llumlet-bandwidth-limit", self.limit, "--llumlet-bandwidth-limit-local", self.limit]
        return ServerSpec(
            build(self.model),
            max_model_len=self.model.max_position,
            max_num_seqs=neighbours + self.num_moving,
            # An eighth more, for blocks that are not full.
            kv_cache_gib=math.ceil(self.kv_bytes(neighbours) * 9 / 8 / (1 << 30)),
            flags=tuple(flags),
        )


def groups_of(text: str) -> list[Group]:
    """CONTEXT:AT_ONCE,…:LIMIT,… means every number at once with every limit. Raises ValueError."""
    context, counts, limits = text.split(":")
    at_once = tuple(int(count) for count in counts.split(","))
    if int(context) < 1 or min(at_once) < 1:
        raise ValueError("counts from 1 on are possible")
    model_for(int(context))
    return [Group(int(context), limit, at_once) for limit in limits.split(",")]


def model_for(context: int) -> ModelSpec:
    """One that is slow enough to be measured, if it takes the context. Raises ValueError if none does."""
    for model in (PRESETS["bench"], PRESETS["long"]):
        if context + BLOCK_TOKENS < model.max_position:
            return model
    raise ValueError(f"no model takes {context} tokens and as many as it generates in a block")


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Gaps in seconds; `moves` were settled in its `seconds`, and others refused, for these reasons."""

    p50: float
    p99: float
    seconds: float = WINDOW_SECONDS
    moves: tuple[Move, ...] = ()
    refusals: tuple[str, ...] = ()


Pair = tuple[Server, Server]
Span = tuple[float, float]
"""`time.monotonic()` seconds."""


@dataclasses.dataclass(slots=True)
class Lane:
    """Two streams that change places: where they are now. Not `together`: one after the other."""

    streams: dict[Server, Stream]
    together: bool


@dataclasses.dataclass(slots=True)
class Company:
    """The streams of some blocks."""

    neighbours: list[Stream]
    lanes: list[Lane]

    @property
    def streams(self) -> list[Stream]:
        return [*self.neighbours, *(stream for lane in self.lanes for stream in lane.streams.values())]

    @property
    def grown(self) -> int:
        """Tokens that a stream has generated, the longest."""
        return max(len(stream.token_ids) for stream in self.streams)


@contextlib.asynccontextmanager
async def company(pair: Pair, case: Case, neighbours: int) -> AsyncIterator[Company]:
    async with contextlib.AsyncExitStack() as stack:
        clients = {server: await stack.enter_async_context(Client(server.base_url)) for server in pair}
        seeds = itertools.count()

        async def stream(server: Server, prompt: int) -> Stream:
            return await clients[server].complete(prompt_of(prompt, next(seeds)), BLOCK_TOKENS, ignore_eos=True)

        lanes = [
            Lane({server: await stream(server, case.context) for server in pair}, together) for together in case.lanes
        ]
        for lane in lanes:
            for one in lane.streams.values():
                await one.wait_for(1, PREFILL_SECONDS)
        staying = [await stream(server, NEIGHBOUR_TOKENS) for server in pair for _ in range(neighbours)]
        for one in staying:
            await one.wait_for(8)
        yield Company(staying, lanes)


class Traffic:
    """Makes the moves of a case, and keeps what came of them until it is asked."""

    def __init__(self, mover: Mover, pair: Pair, least_bytes: int, every_s: float = 0.0) -> None:
        self._mover = mover
        self._pair = pair
        self._least_bytes = least_bytes
        self._every_s = every_s
        self._moves: list[Move] = []
        self._refusals: list[str] = []
        self._balanced: list[Span] = []

    def taken(self) -> tuple[tuple[Move, ...], tuple[str, ...], list[Span]]:
        """Since the last call: moves, refusals, and when to count gaps if that is not always."""
        taken = tuple(self._moves), tuple(self._refusals), list(self._balanced)
        for kept in (self._moves, self._refusals, self._balanced):
            kept.clear()
        return taken

    async def flow(self, lane: Lane, until: float) -> None:
        """The lane's streams change places, until it is time. Raises MoveFailed."""
        while (began := time.monotonic()) < until:
            await self.swap(lane)
            await asyncio.sleep(min(began + self._every_s, until) - time.monotonic())

    async def swap(self, lane: Lane) -> None:
        one, other = self._pair
        there, back = lane.streams[one], lane.streams[other]
        journeys = ((there, one, other), (back, other, one))
        if lane.together:
            await asyncio.gather(*(self._carry(*journey) for journey in journeys))
        else:
            first, _ = [await self._carry(*journey) for journey in journeys]
            self._balanced.append((first.asked_at, first.settled_at))
        lane.streams = {one: back, other: there}

    async def _carry(self, stream: Stream, source: Server, destination: Server) -> Move:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                move = await self._mover.move(source, destination, stream)
                break
            except MoveFailed as error:
                self._refusals.append(error.reason or str(error))
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
        if not move.live or move.hit_tokens or move.copied_bytes < self._least_bytes:
            raise MoveFailed(
                f"a move that measures nothing: {move.mode}, {move.recomputed_tokens} tokens recomputed, "
                f"{move.hit_tokens} found in a cache, {move.copied_bytes} of {self._least_bytes} bytes copied"
            )
        self._moves.append(move)
        return move


async def window(present: Company, traffic: Traffic, seconds: float, *, moving: bool) -> Window:
    began = time.monotonic()
    if moving:
        await asyncio.gather(*(traffic.flow(lane, began + seconds) for lane in present.lanes))
    else:
        await asyncio.sleep(seconds)
    ended = time.monotonic()
    await asyncio.sleep(SETTLE_SECONDS)
    if any(stream.done for stream in present.streams):
        raise StreamFailed(f"{BLOCK_TOKENS} tokens came faster than thought possible")
    moves, refusals, balanced = traffic.taken()
    gaps = gaps_in(present.neighbours, balanced or [(began, ended)])
    return Window(quantile(gaps, 0.5), quantile(gaps, 0.99), ended - began, moves, refusals)


def gaps_in(streams: Sequence[Stream], spans: Sequence[Span]) -> list[float]:
    """Gaps that begin in one of the spans."""
    return [
        after - before
        for stream in streams
        for before, after in itertools.pairwise(stream.times)
        if any(start <= before < end for start, end in spans)
    ]


async def measure(pair: Pair, case: Case, neighbours: int, every_s: float, until: float) -> dict[str, Any]:
    """The row of a case. Streams are made anew when they are half as long again as at first, or might end too soon."""
    ours: list[list[Window]] = []
    control: list[list[Window]] = []
    longest = 0

    def wanted() -> bool:
        return len(ours) < MIN_BLOCKS or time.monotonic() < until

    seconds = max(WINDOW_SECONDS, every_s)
    async with Mover(pair) as mover:
        traffic = Traffic(mover, pair, case.context * model_for(case.context).kv_bytes_per_token, every_s)
        while wanted():
            async with company(pair, case, neighbours) as present:
                await window(present, traffic, seconds / 2, moving=True)  # for what only the first moves do
                while True:
                    before = present.grown
                    for taken, order in ((ours, MOVES), (control, QUIET)):
                        taken.append([await window(present, traffic, seconds, moving=one) for one in order])
                    longest = max(longest, present.grown - before)
                    room = min(BLOCK_TOKENS - longest * 5 // 4, case.context // 2)
                    if present.grown > room or not wanted():
                        break
    return result(case, every_s, ours, control)


def result(
    case: Case, every_s: float, ours: Sequence[Sequence[Window]], control: Sequence[Sequence[Window]]
) -> dict[str, Any]:
    """The JSON object. Ratios are of gaps with moves over gaps without."""
    row = case.as_json() | {"every_s": every_s}
    for name in ("p50", "p99"):
        pick = [[getattr(window, name) for window in block] for block in ours]
        pick_control = [[getattr(window, name) for window in block] for block in control]
        found = compare(pick, pick_control)
        row |= {
            f"itl_{name}_ratio": round(found.ratio.value, 4),
            f"itl_{name}_bounds": [round(found.ratio.low, 4), round(found.ratio.high, 4)],
            f"aa_{name}_ratio": round(found.control.value, 4),
            f"aa_{name}_bounds": [round(found.control.low, 4), round(found.control.high, 4)],
            f"{name}_verdict": found.against(BAR),
        }
    windows = [window for block in ours for window in block]
    moves = [move for window in windows for move in window.moves]
    moving_seconds = sum(window.seconds for block in ours for window in block[1:3])
    return row | {
        "itl_p50_ms": round(1e3 * quantile([window.p50 for block in ours for window in (block[0], block[3])], 0.5), 3),
        "moves": len(moves),
        "moves_per_s": round(len(moves) / moving_seconds, 2),
        "refused": dict(Counter(reason for window in windows for reason in window.refusals)),
        "transport": ",".join(sorted({move.transport for move in moves})),
        "copied_gb_s": round(sum(move.copied_bytes for move in moves) / moving_seconds / 1e9, 3),
        "blocks": len(ours),
    }


def is_good(row: dict[str, Any]) -> bool:
    """Whether the row was measured, and is as it has to be where nothing is limited."""
    return "failed" not in row and (row["limit"] != NO_LIMIT or row["p50_verdict"] != "outside")


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Neighbours' inter-token gaps with moves, over without")
    headings = ("at once", "limit", "context", "p50", "95 %", "A/A", "p99", "95 %", "A/A", "a second", "GB/s", "p50 is")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [str(row["moves_at_once"]), row["limit"], str(row["context_tokens"])]
        if "failed" in row:
            table.add_row(*cells, *[""] * 8, f"not measured: {row['failed']}", style="red")
            continue
        for name in ("p50", "p99"):
            low, high = row[f"itl_{name}_bounds"]
            cells += [f"{row[f'itl_{name}_ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{row[f'aa_{name}_ratio']:.3f}"]
        table.add_row(*cells, f"{row['moves_per_s']:.1f}", f"{row['copied_gb_s']:.2f}", row["p50_verdict"])
    table.caption = f"p50 at most {BAR - 1:.0%} longer is within the bar"
    return table


def run(options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure all cases; `write` gets each row when it is there."""
    ends = time.monotonic() + 60 * options.minutes
    groups = [group for groups in options.cases for group in groups]
    cases_left = sum(len(group.cases) for group in groups)
    with saying("starting") as say, Fleet(options.logs) as fleet:
        for number, group in enumerate(groups):
            say(f"{group.context} tokens, limit {group.limit}: starting two vLLM servers")
            began = time.monotonic()
            spec = group.server(options.neighbours, options.transport)
            one, other = fleet.start(dataclasses.replace(spec, name="a"), dataclasses.replace(spec, name="b"))
            starting_s = (time.monotonic() - began) * (len(groups) - number - 1)
            for case in group.cases:
                say(f"{group.context} tokens, limit {group.limit}, {case.at_once} at once")
                now = time.monotonic()
                until = now + (ends - now - starting_s) / cases_left
                try:
                    row = asyncio.run(measure((one, other), case, options.neighbours, options.every, until))
                except (MoveFailed, StreamFailed) as error:
                    row = case.as_json() | {"failed": str(error)}
                write(row)
                cases_left -= 1
            fleet.stop(one, other)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def cases(text: str) -> list[Group]:
        try:
            return groups_of(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from error

    add = parser.add_argument
    add(
        "--cases",
        nargs="+",
        type=cases,
        default=[groups_of(text) for text in DEFAULT_CASES],
        metavar="CONTEXT:AT_ONCE,…:LIMIT,…",
        help=f"limits, or {NO_LIMIT}; default: {' '.join(DEFAULT_CASES)}".replace("%", "%%"),
    )
    add("--minutes", type=float, default=24, help="for all of them")
    add("--neighbours", type=int, default=2, help="streams that stay, on each instance")
    add("--every", type=float, default=0.0, metavar="SECONDS", help="between the moves of a lane; default: none")
    add("--transport", choices=TRANSPORTS, default="auto", help="how blocks travel")
    add("--json", type=Path, metavar="FILE")
    add("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    options = parser.parse_args(arguments)
    if not 0 <= options.every <= LONGEST_WINDOW_SECONDS:
        parser.error(f"--every {options.every:g}: 0 to {LONGEST_WINDOW_SECONDS:g} s, the longest window")
    if options.every and any(count % 2 for groups in options.cases for group in groups for count in group.at_once):
        parser.error("--every: an odd number at once is measured only while it moves, so pauses would not count")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        files = [sys.stdout]
        if options.json is not None:
            files.append(stack.enter_context(options.json.open("w")))

        def write(row: dict[str, Any]) -> None:
            rows.append(row)
            for file in files:
                print(json.dumps(row), file=file, flush=True)

        run(options, write)
    Console(stderr=True, width=140, markup=False).print(table_of(rows))
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
