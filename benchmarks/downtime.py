# SPDX-License-Identifier: Apache-2.0
"""How long does a stream stand still when its request moves to another server?

    python -m benchmarks.downtime --lengths 128,256,1024,4096,7000 --moves 20 --json downtime.jsonl

Three methods in one run, on the same two servers: `live` (copied in rounds while the request
decodes), `blocking` (frozen, copied, resumed) and `recompute` (not copied: the destination computes
prompt and output again). `--link RATE` limits every copy to RATE GB/s, to stand for a network.

The stall is the client's: the gap between the last token of the source and the first of the
destination, by the client's own clock (the longest of three gaps from the hand-over on). Every move
counts except the first of each method and length, which is reported as `warm_up_stall_ms`. The
inter-token gap it is compared with comes from the same streams at the same length, outside the
moves; excess = stall - gap. A stream starts with a prompt of the wanted length and is moved back
and forth a few times, so the length stays within some tens of tokens. The servers' prefix caches
are off: a copy copies everything and a recomputation recomputes everything. The destination is
idle. `--runner v2` measures vLLM's V2 runner with asynchronous scheduling, as on a GPU, by means of
Triton's interpreter: each token takes several times as long there.

One JSON object per method and length: times in ms, `mode` as the servers report it,
`largest_gap_ms` over everything from the call to the settlement (what copying costs the source's
stream is in it), `phase_ms` medians by phase.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from benchmarks.mover import MoveFailed, Mover
from tests.support.client import Client, Stream, StreamFailed
from tests.support.harness import Fleet, Runner, Server, ServerSpec, add_runner
from tests.support.model import PRESETS, build
from tests.support.moves import HANDOVER_GAPS, Move, Stall, stall_of_move
from tests.support.progress import saying
from tests.support.stats import Summary, median
from vllm_llumnix.config import TRANSPORTS

Advance = Callable[[], None]
METHODS = ("live", "blocking", "recompute")
MOVES_PER_STREAM = 4
SETTLE_TOKENS = 16
"""Tokens of steady decoding before the first move of a stream and after each move."""
MARGIN_TOKENS = 200
"""Room between the longest length and the model's limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One move of the measurement."""

    move: Move
    stall: Stall
    largest_gap: float
    arrivals: tuple[float, ...]
    """Arrivals of the tokens around the move, in seconds from the arrival of the destination's first one."""


@dataclasses.dataclass(slots=True)
class Cell:
    """Everything measured for one method and length."""

    method: str
    length: int
    warm_up: Sample | None = None
    samples: list[Sample] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, sample: Sample) -> None:
        if self.warm_up is None:
            self.warm_up = sample
        else:
            self.samples.append(sample)

    @property
    def stall(self) -> Summary:
        """Milliseconds."""
        return Summary.of(sample.stall.stall * 1e3 for sample in self.samples)

    @property
    def itl_ms(self) -> float:
        return median(gap * 1e3 for sample in self.samples for gap in sample.stall.steady)

    @property
    def excess_ms(self) -> float:
        return median(sample.stall.excess * 1e3 for sample in self.samples)

    def as_json(self, link_gb_s: float | None, runner: Runner = "") -> dict[str, Any]:
        moves = [sample.move for sample in self.samples]
        result: dict[str, Any] = {
            "method": self.method,
            "context_tokens": self.length,
            "moves": len(self.samples),
            "link_gb_s": link_gb_s,
            "runner": runner,
            "destination": "idle",
            "failures": self.failures,
        }
        if not self.samples:
            return result
        phases = sorted({phase for move in moves for phase in move.phase_ms})
        ratios = [sample.stall.stall / sample.stall.itl for sample in self.samples]
        return result | {
            "mode": ",".join(sorted({move.mode for move in moves})),
            "stall_ms": self.stall.rounded(),
            "itl_ms_p50": round(self.itl_ms, 3),
            "excess_ms_p50": round(self.excess_ms, 3),
            "stall_over_itl_p50": round(median(ratios), 3),
            "phase_ms": {phase: round(median(move.phase_ms.get(phase, 0.0) for move in moves), 3) for phase in phases},
            "copied_bytes": int(median(move.copied_bytes for move in moves)),
            "recomputed_tokens": max(move.recomputed_tokens for move in moves),
            "rounds": median(move.rounds for move in moves),
            "largest_gap_ms": Summary.of(s.largest_gap * 1e3 for s in self.samples).rounded(),
            "warm_up_stall_ms": round(self.warm_up.stall.stall * 1e3, 3) if self.warm_up else None,
            "transport": ",".join(sorted({move.transport for move in moves})),
        }


def largest_gap(times: Sequence[float], start: float, end: float) -> float:
    """The longest gap between arrivals that touches [start, end]; 0 if there is none."""
    gaps = [b - a for a, b in itertools.pairwise(times) if b > start and a < end]
    return max(gaps, default=0.0)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(100, 1000), k=length)


async def measure_stream(
    mover: Mover, servers: Sequence[Server], cell: Cell, num_moves: int, seed: int, advance: Advance
) -> None:
    """One stream of the cell's length, moved `num_moves` times back and forth."""
    moves: list[Move] = []
    async with Client(servers[0].base_url) as client:
        # Decoding goes on while blocks are copied: the stream must outlast the slowest move, and is
        # closed when all are made.
        room = MARGIN_TOKENS + 16 * num_moves * SETTLE_TOKENS
        room = min(room, servers[0].spec.max_model_len - cell.length - 1)
        stream = await client.complete(prompt_of(cell.length, seed), room, ignore_eos=True)
        await stream.wait_for(SETTLE_TOKENS)
        for number in range(num_moves):
            source, destination = servers[number % 2], servers[(number + 1) % 2]
            force = cell.method != "live"
            try:
                moves.append(await mover.move(source, destination, stream, method=cell.method, force=force))
                await stream.wait_for(len(stream.token_ids) + SETTLE_TOKENS)
            except (MoveFailed, StreamFailed) as error:
                cell.failures.append(str(error))
                break
            advance()
        await stream.disconnect()
    for move in moves:
        cell.add(sample_of(stream, move))


def sample_of(stream: Stream, move: Move) -> Sample:
    stall = stall_of_move(stream, move)
    end = max(move.settled_at, stream.times[min(stall.index + HANDOVER_GAPS, len(stream.times)) - 1])
    first = stream.times[stall.index]
    near = [at - first for at in stream.times if move.asked_at - 0.05 <= at <= end + 0.05]
    return Sample(move, stall, largest_gap(stream.times, move.asked_at, end), tuple(near))


def trace(cell: Cell) -> str:
    """One move in full: the one whose stall is the median of the cell's."""
    ordered = sorted(cell.samples, key=lambda sample: sample.stall.stall)
    sample = ordered[(len(ordered) - 1) // 2]
    move = sample.move
    lines = [f"{cell.length} tokens, {cell.method}: a move with a stall of {sample.stall.stall * 1e3:.1f} ms"]
    last = move.asked_at
    for phase, at in move.phases:
        lines.append(f"  {(at - move.asked_at) * 1e3:8.1f} ms  +{(at - last) * 1e3:6.1f}  {phase}")
        last = at
    gaps = itertools.pairwise(sample.arrivals)
    shown = " ".join(f"{'|' if before < after == 0 else ''}{(after - before) * 1e3:.1f}" for before, after in gaps)
    lines.append(f"  gaps between tokens, ms, | before the destination's first: {shown}")
    lines.append("  phases, ms: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in sorted(move.phase_ms.items())))
    return "\n".join(lines)


async def measure_cell(servers: Sequence[Server], cell: Cell, num_moves: int, advance: Advance) -> None:
    wanted = num_moves + 1  # The first is the warm-up.
    async with Mover(servers) as mover:
        for seed, first in enumerate(range(0, wanted, MOVES_PER_STREAM)):
            count = min(MOVES_PER_STREAM, wanted - first)
            await measure_stream(mover, servers, cell, count, seed, advance)


def estimate_s(lengths: Sequence[int], num_moves: int, link_gb_s: float | None) -> float:
    """A guess for one core an engine: prefill, copies and the tokens in between."""
    kv = PRESETS["bench"].kv_bytes_per_token
    total = 60.0
    for length in lengths:
        prefill, gap = length * 4e-4, 0.015 + length * 4e-6
        copy = length * kv / ((link_gb_s or 4.0) * 1e9)
        streams = num_moves / MOVES_PER_STREAM + 1
        total += 3 * streams * prefill + 3 * num_moves * SETTLE_TOKENS * gap
        total += num_moves * (2 * copy + prefill)
    return total


def table_of(cells: Sequence[Cell], link_gb_s: float | None) -> Table:
    link = f"link limited to {link_gb_s:g} GB/s" if link_gb_s else "link not limited"
    table = Table(title=f"Stall of one move as the client sees it, ms ({link})")
    headings = ("context", "method", "moves", "stall p50", "p99", "max", "gap p50", "stall / gap")
    for heading in (*headings, "excess p50", "of live", "copied MiB", "recomputed", "rounds"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    live = {cell.length: cell.excess_ms for cell in cells if cell.method == "live" and cell.samples}
    for cell in cells:
        if not cell.samples:
            table.add_row(str(cell.length), cell.method, "0", *cell.failures[:1], style="red")
            continue
        values = cell.as_json(link_gb_s)
        base = live.get(cell.length, 0.0)
        table.add_row(
            str(cell.length),
            cell.method,
            str(len(cell.samples)),
            *(f"{values['stall_ms'][name]:.1f}" for name in ("p50", "p99", "max")),
            f"{values['itl_ms_p50']:.1f}",
            f"{values['stall_over_itl_p50']:.2f}",
            f"{values['excess_ms_p50']:.1f}",
            f"{values['excess_ms_p50'] / base:.1f}" if base > 0 else "",
            f"{values['copied_bytes'] / 2**20:.1f}",
            str(values["recomputed_tokens"]),
            f"{values['rounds']:g}",
            end_section=cell.method == METHODS[-1],
        )
    return table


def plot(cells: Sequence[Cell], link_gb_s: float | None, path: Path) -> bool:
    """Stall over context length, both logarithmic. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for method in METHODS:
        line = [cell for cell in cells if cell.method == method and cell.samples]
        lengths = [cell.length for cell in line]
        middle = [cell.stall.p50 for cell in line]
        above = [cell.stall.p99 - cell.stall.p50 for cell in line]
        spread = [[0.0] * len(line), above]
        axes.errorbar(lengths, middle, yerr=spread, marker="o", capsize=3, label=method)
    gaps = [(cell.length, cell.itl_ms) for cell in cells if cell.method == "live" and cell.samples]
    if gaps:
        axes.plot(*zip(*gaps, strict=True), "k--", label="gap between tokens")
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="stall, ms (p50 to p99)")
    axes.set_xticks(sorted({cell.length for cell in cells}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    limit = f", link {link_gb_s:g} GB/s" if link_gb_s else ""
    axes.set_title(f"One move between two vLLM servers{limit}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def server(preset: str, link_gb_s: float | None, transport: str, runner: Runner = "") -> ServerSpec:
    model = PRESETS[preset]
    return ServerSpec(
        build(model),
        runner=runner,
        max_model_len=model.max_position,
        bandwidth_limit=int(link_gb_s * 1e9) if link_gb_s else None,
        kv_cache_gib=2,
        max_num_seqs=4,
        flags=("--no-enable-prefix-caching", "--llumlet-transport", transport),
    )


def run(options: argparse.Namespace, say_to: Console) -> list[Cell]:
    """Start the servers, measure every cell; what was measured so far survives an interrupt."""
    cells = [Cell(method, length) for length in options.lengths for method in options.methods]
    with Fleet(options.logs) as fleet:
        with saying("building the model") as say:
            spec = server(options.preset, options.link, options.transport, options.runner)
            say("starting two vLLM servers")
            names = ("a", "b")
            servers = fleet.start(*(dataclasses.replace(spec, name=n, instance_id=n) for n in names))
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=say_to) as bar:
            task = bar.add_task("", total=len(cells) * (options.moves + 1))
            advance = functools.partial(bar.advance, task)
            for cell in cells:
                bar.update(task, description=f"{cell.length} tokens, {cell.method}")
                try:
                    asyncio.run(measure_cell(servers, cell, options.moves, advance))
                except KeyboardInterrupt:
                    say_to.print("interrupted: what follows is not complete")
                    break
                if not say_to.is_terminal:
                    say_to.print(_line(cell), highlight=False)
    return cells


def _line(cell: Cell) -> str:
    if not cell.samples:
        return f"{cell.length} tokens, {cell.method}: nothing measured: {cell.failures}"
    return (
        f"{cell.length} tokens, {cell.method}: {len(cell.samples)} moves, "
        f"stall p50 {cell.stall.p50:.1f} ms, gap {cell.itl_ms:.1f} ms"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.downtime",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def lengths(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def methods(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(METHODS):
            raise argparse.ArgumentTypeError(f"no such method: {', '.join(sorted(unknown))}")
        return text.split(",")

    add = parser.add_argument
    add("--lengths", type=lengths, default=lengths("128,256,1024,4096,7000"), metavar="N,N,…")
    add("--moves", type=int, default=20, help="moves per method and length, warm-up not counted")
    add("--methods", type=methods, default=list(METHODS), metavar="M,M,…")
    add("--link", type=float, metavar="GB_PER_S", help="limit every copy to this rate")
    add("--transport", choices=TRANSPORTS, default="auto", help="how blocks travel")
    add("--json", type=Path, metavar="FILE", help="write one JSON object per method and length")
    add("--plot", type=Path, metavar="PNG", help="default: beside the JSON file")
    add_runner(parser)
    add("--preset", choices=sorted(PRESETS), default="bench", help="which model")
    add("--trace", action="store_true", help="show one move of each method and length in full")
    add("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    options = parser.parse_args(arguments)
    longest = PRESETS[options.preset].max_position - MARGIN_TOKENS
    if not all(16 <= length <= longest for length in options.lengths):
        parser.error(f"--lengths: from 16 to {longest} tokens are possible")
    if options.moves < 1 or (options.link is not None and options.link <= 0):
        parser.error("--moves and --link must be positive")
    if options.plot is None and options.json is not None:
        options.plot = options.json.with_suffix(".png")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    progress = Console(stderr=True, markup=False)
    guess = estimate_s(options.lengths, options.moves, options.link) / 60
    progress.print(f"This takes about {guess:.0f} minutes.")
    started = time.monotonic()
    cells = run(options, progress)
    measured = [cell for cell in cells if cell.samples]
    Console(width=150, markup=False).print(table_of(cells, options.link))
    if options.trace:
        for cell in measured:
            print(trace(cell))
    for failure in sorted({f"{c.method}: {text}" for c in cells for text in c.failures}):
        progress.print(f"not moved: {failure}", highlight=False)
    lines = [json.dumps(cell.as_json(options.link, options.runner)) for cell in cells]
    if options.json is not None:
        options.json.write_text("".join(f"{line}\n" for line in lines))
    if options.plot is not None and measured:
        drawn = plot(cells, options.link, options.plot)
        progress.print(f"plot: {options.plot}" if drawn else "no plot: matplotlib is not installed")
    progress.print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    complete = all(len(cell.samples) == options.moves for cell in cells)
    return 0 if complete and not any(cell.failures for cell in cells) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
