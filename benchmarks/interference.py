# SPDX-License-Identifier: Apache-2.0
"""What do moves do to the requests that stay?

    python -m benchmarks.interference --at-once 1,2,4,8 --limits none,25%,1.25G --json interference.jsonl

Two instances, on each some neighbours that stay and one stream of every lane. A lane swaps its two streams for ever:
one goes there, the other comes back, one move at a time; so both instances keep their load, and as many moves are under
way as there are lanes. Costs are the inter-token gaps of the neighbours, as their clients see them, p50 and p99 of each
window of a few seconds. Windows come in blocks, quiet, moves, moves, quiet, so that drift cancels; a quiet block
next to each is the control. Ratios are geometric means over the blocks, with 95 % bootstrap bounds. In quiet windows
the same streams run.

A limit is what `--llumlet-bandwidth-limit-local` takes, and stands for a link: 1.25G is 10 Gb/s, 3.125G is 25 Gb/s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.client import Client, Stream
from benchmarks.downtime import prompt_of
from benchmarks.harness import Fleet, Server, ServerSpec
from benchmarks.model import PRESETS, build
from benchmarks.moves import Move, engine_id, move_stream
from benchmarks.progress import saying
from benchmarks.stats import compare, quantile

BAR = 1.01
SETTLE_SECONDS = 0.5
"""Between two windows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Seconds; `moves` were settled in it."""

    p50: float
    p99: float
    moves: tuple[Move, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    at_once: int
    limit: str
    context: int


@dataclasses.dataclass(slots=True)
class Company:
    """The streams of a block. `lanes`: of each, where its two streams are now."""

    neighbours: list[Stream]
    lanes: list[dict[Server, Stream]]


@contextlib.asynccontextmanager
async def company(pair: tuple[Server, Server], case: Case, neighbours: int, max_tokens: int) -> AsyncIterator[Company]:
    async with contextlib.AsyncExitStack() as stack:
        clients = {server: await stack.enter_async_context(Client(server.base_url)) for server in pair}
        seeds = itertools.count()

        async def stream(server: Server, prompt: int) -> Stream:
            return await clients[server].complete(prompt_of(prompt, next(seeds)), max_tokens, ignore_eos=True)

        staying = [await stream(server, 64) for server in pair for _ in range(neighbours)]
        lanes = [{server: await stream(server, case.context) for server in pair} for _ in range(case.at_once)]
        for one in [*staying, *(one for lane in lanes for one in lane.values())]:
            await one.wait_for(8)
        for lane in lanes:
            for server, one in lane.items():
                one.engine_id = await engine_id(server, one)
        yield Company(staying, lanes)


async def window(present: Company, pair: tuple[Server, Server], seconds: float, *, moving: bool) -> Window:
    moves: list[Move] = []
    began = time.monotonic()
    if moving:
        await asyncio.gather(*(swap(lane, pair, began + seconds, moves) for lane in present.lanes))
    else:
        await asyncio.sleep(seconds)
    ended = time.monotonic()
    gaps = [
        after - before
        for one in present.neighbours
        for before, after in itertools.pairwise(one.times)
        if began <= before and after <= ended
    ]
    await asyncio.sleep(SETTLE_SECONDS)
    return Window(quantile(gaps, 0.5), quantile(gaps, 0.99), tuple(moves))


async def swap(lane: dict[Server, Stream], pair: tuple[Server, Server], until: float, moves: list[Move]) -> None:
    """The lane's streams change places, until it is time, and then once more if they are both at one place."""
    one, other = pair
    while time.monotonic() < until:
        there, back = lane[one], lane[other]
        for stream, source, destination in ((there, one, other), (back, other, one)):
            move = await move_stream(source, destination, stream)
            if not move.live:
                raise RuntimeError(f"a move was not live: {move.phase}, {move.reason} {move.detail}")
            moves.append(move)
        lane[one], lane[other] = back, there


def result(case: Case, ours: list[list[Window]], control: list[list[Window]], seconds: float) -> dict[str, Any]:
    """The JSON object. Ratios are of gaps with moves over gaps without."""
    row: dict[str, Any] = {
        "bench": "interference",
        "moves_at_once": case.at_once,
        "limit": case.limit,
        "context_tokens": case.context,
    }
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
    moves = [move for block in ours for window in block for move in window.moves]
    moving_seconds = seconds * 2 * len(ours)
    return row | {
        "itl_p50_ms": round(1e3 * quantile([window.p50 for block in ours for window in (block[0], block[3])], 0.5), 3),
        "moves": len(moves),
        "copied_gb_s": round(sum(move.copied_bytes for move in moves) / moving_seconds / 1e9, 3),
        "blocks": len(ours),
    }


async def measure(
    pair: tuple[Server, Server], case: Case, neighbours: int, blocks: int, seconds: float
) -> dict[str, Any]:
    ours: list[list[Window]] = []
    control: list[list[Window]] = []
    for _ in range(blocks):
        # Long enough at two milliseconds a token.
        max_tokens = min(int(8 * (seconds + SETTLE_SECONDS) * 500), pair[0].spec.max_model_len - case.context - 1)
        async with company(pair, case, neighbours, max_tokens) as present:
            for taken, moving in ((ours, True), (control, False)):
                order = (False, moving, moving, False)
                windows = [await window(present, pair, seconds, moving=inner) for inner in order]
                taken.append(windows)
    return result(case, ours, control, seconds)


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Neighbours' inter-token gaps with moves, over without")
    for heading in (
        "at once",
        "limit",
        "context",
        "p50",
        "95 %",
        "A/A",
        "p99",
        "95 %",
        "A/A",
        "moves",
        "GB/s",
        "p50 is",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [str(row["moves_at_once"]), row["limit"], str(row["context_tokens"])]
        for name in ("p50", "p99"):
            low, high = row[f"itl_{name}_bounds"]
            cells += [f"{row[f'itl_{name}_ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{row[f'aa_{name}_ratio']:.3f}"]
        table.add_row(*cells, str(row["moves"]), f"{row['copied_gb_s']:.2f}", row["p50_verdict"])
    table.caption = f"p50 at most {BAR - 1:.0%} longer is within the bar"
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--at-once", default="1,2,4,8", help="moves at a time")
    add("--limits", default="none,25%", help="bandwidth limits, or none")
    add("--context", type=int, default=1024, help="tokens of a stream that moves")
    add("--neighbours", type=int, default=2, help="streams that stay, on each instance")
    add("--blocks", type=int, default=5, help="ABBA blocks, of moves and of the control each")
    add("--seconds", type=float, default=4.0, help="of a window")
    add("--max-model-len", type=int, default=16384)
    add("--preset", choices=sorted(PRESETS), default="bench", help="which model")
    add("--json", type=Path, metavar="FILE")
    add("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    options = parser.parse_args(arguments)
    at_once = [int(part) for part in options.at_once.split(",")]
    rows = []
    with saying("building the model") as say, Fleet(options.logs) as fleet:
        model = build(PRESETS[options.preset])
        for limit in options.limits.split(","):
            say(f"limit {limit}: starting two vLLM servers")
            most = str(2 * max(at_once))
            flags = ["--llumlet-max-migrations-in", most, "--llumlet-max-migrations-out", most]
            if limit != "none":
                flags += ["--llumlet-bandwidth-limit-local", limit]
            spec = ServerSpec(
                model,
                max_num_seqs=options.neighbours + 2 * max(at_once),
                max_model_len=options.max_model_len,
                flags=tuple(flags),
            )
            one, other = fleet.start(dataclasses.replace(spec, name="a"), dataclasses.replace(spec, name="b"))
            for count in at_once:
                say(f"limit {limit}, {count} at once")
                case = Case(count, limit, options.context)
                rows.append(
                    asyncio.run(measure((one, other), case, options.neighbours, options.blocks, options.seconds))
                )
            fleet.stop(one, other)
    Console(width=140).print(table_of(rows))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    print(lines, end="")
    if options.json is not None:
        options.json.write_text(lines)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
