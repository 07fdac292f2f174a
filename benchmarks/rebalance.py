# SPDX-License-Identifier: Apache-2.0
"""What do moves bring to the users of a cluster whose load is skewed, and what does load-aware dispatch alone?

    python -m benchmarks.rebalance --json rebalance.json

Two real engines with small KV caches behind a real gateway and scheduler. Requests come at random times; every second
one is long, so that round robin sends all long ones to the same engine. The same requests, at the same times, with
dispatch by round robin and by load, without and with rescheduling (its defaults), in the order A B C D D C B A. By the
client's clock: time to the first token, and time between tokens, p99 over all requests of a case.

How many requests come follows from how fast the engines are here, which is measured first: so many that the long ones,
spread evenly, need half of `--load` of each KV cache. Above 1 there is no room for all of them in one of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulated import MOVES
from llumlet.contract.client import LlumletClient
from llumsched.up.ports import free_port
from tests.support.client import Client, Stream
from tests.support.control import Control, rescheduling
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.model import PRESETS, build
from tests.support.progress import Say, saying
from tests.support.stats import quantile

LONG = (400, 700)
"""Tokens of the prompt and of the output."""
SHORT = (60, 40)
TOKEN_IDS = range(100, 1000)
END_SECONDS = 300.0
PROBE_SECONDS = 12.0
WARM_SECONDS = 3.0
"""Seconds at the beginning that do not count."""


@dataclasses.dataclass(frozen=True)
class Case:
    dispatch: str
    rescheduling: bool

    @property
    def name(self) -> str:
        return Path(self.dispatch).stem + (MOVES if self.rescheduling else "")

    @property
    def scheduler_arguments(self) -> list[str]:
        more = ["--colocated-rescheduling-mode", "--enable-rescheduling"] if self.rescheduling else []
        return ["--scheduling-policy", self.dispatch, *more]


CASES = [Case(dispatch, moves) for dispatch in ("round-robin", "load-balance") for moves in (False, True)]


@dataclasses.dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: list[int]
    num_output: int


async def rate_for(load: float, engines: Sequence[Server], blocks: int) -> float:
    """Requests a second at which long ones, spread evenly, need `load` / 2 of each KV cache: as many as come to an end
    while just so many run (Little's law), with the short ones and the prefills between them."""
    num_prompt, num_output = LONG
    running = max(1, round(load / 2 * blocks * engines[0].spec.block_size / (num_prompt + num_output / 2)))
    streams: list[Stream] = []

    async def keep_busy(client: Client, seed: int) -> None:
        chance = random.Random(seed)
        length = LONG[0], chance.randrange(1, num_output)  # not all of them begin together for ever
        while True:
            for long, (prompt, output) in ((True, length), (False, SHORT)):
                stream = await client.complete(chance.choices(TOKEN_IDS, k=prompt), output, ignore_eos=True)
                if long:
                    streams.append(stream)
                await stream.result(END_SECONDS)
            length = LONG

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(engine.base_url)) for engine in engines]
        tasks = [asyncio.create_task(keep_busy(client, seed)) for client in clients for seed in range(running)]
        ended, _ = await asyncio.wait(tasks, timeout=PROBE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended:
            task.result()
        times = sorted(at for stream in streams for at in stream.times)
    begins = times[0] + WARM_SECONDS
    return 2 * sum(at > begins for at in times) / (times[-1] - begins) / num_output


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals; every second one is long."""
    chance = random.Random(seed)
    found, at_s = [], 0.0
    for length in itertools.cycle((LONG, SHORT)):
        at_s += chance.expovariate(rate)
        if at_s > seconds:
            return found
        num_prompt, num_output = length
        found.append(Arrival(at_s, chance.choices(TOKEN_IDS, k=num_prompt), num_output))
    return found


@dataclasses.dataclass
class Outcome:
    """The outcome of all runs of one case."""

    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    itl_ms: list[float] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    moves: int = 0

    def row(self, case: Case) -> dict[str, Any]:
        return {
            "bench": "rebalance",
            "rescheduling": case.rescheduling,
            "dispatch": case.dispatch,
            "ttft_p99_ms": round(quantile(self.ttft_ms, 0.99), 1),
            "itl_p99_ms": round(quantile(self.itl_ms, 0.99), 1),
            "preemptions": self.preemptions,
            "moves": self.moves,
            "requests": len(self.ttft_ms),
        }


async def play(url: str, requests: Sequence[Arrival]) -> list[tuple[float, Stream]]:
    """Each request's stream, with the seconds to its first token."""

    async def one(arrival: Arrival) -> tuple[float, Stream]:
        await asyncio.sleep(arrival.at_s)
        began = asyncio.get_running_loop().time()
        stream = await client.complete(arrival.prompt, arrival.num_output, ignore_eos=True)
        await stream.result(END_SECONDS)
        return stream.times[0] - began, stream

    async with Client(url) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(arrival)) for arrival in requests]
    return [task.result() for task in tasks]


async def preemptions(engines: Sequence[Server]) -> int:
    """Since the engines started."""
    total = 0
    for engine in engines:
        async with LlumletClient(str(engine.llumlet)) as client:
            total += (await client.get_instance_status()).num_preemptions
    return total


async def run(case: Case, outcome: Outcome, engines: Sequence[Server], cms_port: int, logs: Path,
              requests: Sequence[Arrival]) -> None:  # fmt: skip
    before = await preemptions(engines)
    cms = f"listen://127.0.0.1:{cms_port}"
    async with Control(logs, cms, schedulers=[case.scheduler_arguments], name=f"{case.name}-") as control:
        await control.knows(len(engines))
        for ttft_s, stream in await play(control.gateway_url, requests):
            outcome.ttft_ms.append(ttft_s * 1e3)
            outcome.itl_ms += [gap * 1e3 for gap in stream.gaps]
        if case.rescheduling:
            outcome.moves += sum(move["num_moved"] for move in (await rescheduling(control.scheduler_url))["moves"])
    outcome.preemptions += await preemptions(engines) - before


async def compare(options: argparse.Namespace, engines: Sequence[Server], cms_port: int, logs: Path,
                  say: Say) -> list[dict[str, Any]]:  # fmt: skip
    outcomes = {case: Outcome() for case in CASES}
    say("measuring how fast they are")
    rate = await rate_for(options.load, engines, options.blocks)
    say(f"{rate:.2f} requests will come a second")
    requests = arrivals(rate, options.seconds, options.seed)
    order = [case for round_ in range(options.rounds) for case in (CASES if round_ % 2 == 0 else CASES[::-1])]
    for number, case in enumerate(order, start=1):
        moves = "with" if case.rescheduling else "without"
        say(f"{number} of {len(order)}: {len(requests)} requests, {case.dispatch}, {moves} rescheduling")
        await run(case, outcomes[case], engines, cms_port, logs, requests)
    return [outcome.row(case) | {"rate": round(rate, 3)} for case, outcome in outcomes.items()]


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Two engines, skewed load")
    for name in ("dispatch", "rescheduling", "TTFT p99", "inter-token p99", "preemptions", "moves"):
        table.add_column(name, justify="left" if name == "dispatch" else "right")
    for row in rows:
        table.add_row(
            row["dispatch"], "on" if row["rescheduling"] else "off", f"{row['ttft_p99_ms']:.0f} ms",
            f"{row['itl_p99_ms']:.0f} ms", str(row["preemptions"]), str(row["moves"]),
        )  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rebalance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--load", type=float, default=0.9, help="of one KV cache, by all long requests")
    add("--seconds", type=float, default=40.0, help="in which requests come, of each case in each round")
    add("--rounds", type=int, default=2)
    add("--blocks", type=int, default=200, help="of 32 tokens, of each engine's KV cache")
    add("--seed", type=int, default=1)
    add("--json", type=Path, metavar="FILE")
    add("--logs", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="llumnix-logs-"))
    cms_port = free_port()
    with Fleet(logs) as fleet, saying("starting two engines") as say:
        model = build(PRESETS["tiny"])
        flags = ("--llumlet-cms", f"127.0.0.1:{cms_port}", "--no-enable-prefix-caching")
        spec = ServerSpec(model, max_model_len=2048, num_kv_blocks=options.blocks, max_num_seqs=32, flags=flags)
        engines = fleet.start(*(dataclasses.replace(spec, name=name, instance_id=name) for name in ("a", "b")))
        rows = asyncio.run(compare(options, engines, cms_port, logs, say))
    Console(width=100, markup=False).print(table_of(rows))
    lines = [json.dumps(row) for row in rows]
    print("\n".join(lines))
    if options.json is not None:
        options.json.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
