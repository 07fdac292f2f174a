# SPDX-License-Identifier: Apache-2.0
"""What does an idle llumlet cost?

    python -m benchmarks.overhead --blocks 8 --json overhead.json

CPU seconds per generated token, of all processes of a server, with the llumlet on and never asked
for anything, over stock vLLM. Tokens per second would drift with the machine; CPU time per token
does so less. Three servers are up, on one core: two stock ones and ours. A block runs the same load on
stock, ours, ours, stock, one after the other while the others idle, and next to it stock against the
other stock server: the A/A control shows what this machine can resolve. Ratios come with 95 % bootstrap
bounds over the blocks. The answer is good, and the exit status 0, if the ratio is at most 1.01 or within
the bounds of the control. `--runner v2` measures vLLM's V2 runner with asynchronous scheduling, as on a GPU, by means
of Triton's interpreter: all that takes much longer there, but what a llumlet adds to it is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.downtime import prompt_of
from tests.support.client import Client
from tests.support.harness import Fleet, Runner, Server, ServerSpec, add_runner
from tests.support.model import PRESETS, build
from tests.support.progress import saying
from tests.support.stats import Comparison, compare, median

BAR = 1.01
MIN_BLOCKS = 3
QUIET_S = 1.5
"""Engines spin for a second after their last message; only then is a server idle."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One load on one server."""

    cpu_s_per_token: float
    s_per_token: float


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """`streams` completions at once, each of `prompt_tokens` and `output_tokens`."""

    streams: int
    prompt_tokens: int
    output_tokens: int


async def _load(server: Server, load: Load) -> int:
    async with Client(server.base_url) as client:
        prompts = [prompt_of(load.prompt_tokens, seed) for seed in range(load.streams)]
        running = [await client.complete(p, load.output_tokens, ignore_eos=True) for p in prompts]
        return sum([len((await stream.result()).token_ids) for stream in running])


def measure(server: Server, load: Load) -> Run:
    time.sleep(QUIET_S)
    cpu, wall = server.cpu_seconds(), time.monotonic()
    num_tokens = asyncio.run(_load(server, load))
    wall = time.monotonic() - wall
    return Run((server.cpu_seconds() - cpu) / num_tokens, wall / num_tokens)


def specs(preset: str, load: Load, runner: Runner = "") -> tuple[ServerSpec, ServerSpec, ServerSpec]:
    """Stock, stock again, ours. All on one core, because cores differ; the first one serves most of the interrupts."""
    model = PRESETS[preset]
    stock = ServerSpec(
        build(model),
        name="stock",
        llumlet=False,
        max_num_seqs=load.streams,
        max_model_len=model.max_position,
        core=max(os.sched_getaffinity(0)),
        runner=runner,
    )
    again = dataclasses.replace(stock, name="stock-again")
    return stock, again, dataclasses.replace(stock, name="ours", llumlet=True)


Block = tuple[Run, Run, Run, Run]


def block(a: Server, b: Server, load: Load) -> Block:
    """A B B A: a linear drift of the machine cancels."""
    return measure(a, load), measure(b, load), measure(b, load), measure(a, load)


def result(ours: list[Block], control: list[Block], load: Load, runner: Runner = "") -> dict[str, Any]:
    """The JSON object. Ratios are ours over stock; a throughput ratio below 1 means slower."""

    def compared(field: str) -> Comparison:
        pick = [[getattr(run, field) for run in runs] for runs in ours]
        pick_control = [[getattr(run, field) for run in runs] for runs in control]
        return compare(pick, pick_control)

    cpu, wall = compared("cpu_s_per_token"), compared("s_per_token")
    stock = [run for runs in ours for run in (runs[0], runs[3])]
    mine = [run for runs in ours for run in (runs[1], runs[2])]
    return {
        "bench": "overhead",
        "cpu_s_per_token_ratio": round(cpu.ratio.value, 5),
        "cpu_s_per_token_bounds": [round(cpu.ratio.low, 5), round(cpu.ratio.high, 5)],
        "aa_ratio": round(cpu.control.value, 5),
        "aa_bounds": [round(cpu.control.low, 5), round(cpu.control.high, 5)],
        "throughput_ratio": round(1 / wall.ratio.value, 5),
        "throughput_bounds": [round(1 / wall.ratio.high, 5), round(1 / wall.ratio.low, 5)],
        "aa_throughput_ratio": round(1 / wall.control.value, 5),
        "aa_throughput_bounds": [round(1 / wall.control.high, 5), round(1 / wall.control.low, 5)],
        "verdict": cpu.against(BAR),
        "bar": BAR,
        "cpu_ms_per_token_stock": round(median(run.cpu_s_per_token * 1e3 for run in stock), 4),
        "cpu_ms_per_token_ours": round(median(run.cpu_s_per_token * 1e3 for run in mine), 4),
        "runner": runner,
        "blocks": len(ours),
        **dataclasses.asdict(load),
    }


def table_of(answer: dict[str, Any]) -> Table:
    table = Table(title="An idle llumlet against stock vLLM")
    for heading in ("", "ours / stock", "95 % bounds", "stock / stock", "95 % bounds"):
        table.add_column(heading, justify="right")
    rows = (
        ("CPU seconds per token", "cpu_s_per_token", "aa"),
        ("tokens per second", "throughput", "aa_throughput"),
    )
    for title, ours, control in rows:
        table.add_row(
            title,
            f"{answer[f'{ours}_ratio']:.4f}",
            "{:.4f} to {:.4f}".format(*answer[f"{ours}_bounds"]),
            f"{answer[f'{control}_ratio']:.4f}",
            "{:.4f} to {:.4f}".format(*answer[f"{control}_bounds"]),
        )
    table.caption = f"CPU time per token at most {BAR - 1:.0%} above stock: {answer['verdict']}"
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--blocks", type=int, default=8, help="ABBA blocks, of ours and of the control each, at most")
    add("--minutes", type=float, default=9, help=f"for everything, but at least {MIN_BLOCKS} blocks")
    add("--streams", type=int, default=4, help="requests at once")
    add("--prompt", type=int, default=128, help="tokens")
    add("--output", type=int, default=200, help="tokens per request")
    add("--preset", choices=sorted(PRESETS), default="bench", help="which model")
    add_runner(parser)
    add("--json", type=Path, metavar="FILE")
    add("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    options = parser.parse_args(arguments)
    load = Load(options.streams, options.prompt, options.output)
    ends = time.monotonic() + 60 * options.minutes
    ours: list[Block] = []
    control: list[Block] = []
    with Fleet(options.logs) as fleet:
        with saying("starting three vLLM servers") as say:
            stock, again, mine = fleet.start(*specs(options.preset, load, options.runner))
            say("warming up")
            for server in (stock, again, mine):
                measure(server, load)
        progress = Console(stderr=True, markup=False)
        for number in track(range(options.blocks), description="ABBA blocks", console=progress):
            began = time.monotonic()
            ours.append(block(stock, mine, load))
            control.append(block(stock, again, load))
            took = time.monotonic() - began
            if number + 1 >= MIN_BLOCKS and began + 2 * took > ends:
                break
    answer = result(ours, control, load, options.runner)
    Console(width=100, markup=False).print(table_of(answer))
    line = json.dumps(answer)
    print(line)
    if options.json is not None:
        options.json.write_text(f"{line}\n")
    return 0 if answer["verdict"] != "outside" else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
