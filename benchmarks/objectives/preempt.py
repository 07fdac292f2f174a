# SPDX-License-Identifier: Apache-2.0
"""What does it bring to move the request that would be preempted, on real engines under memory pressure?

Two real engines, each step as long as a device's (`benchmarks.calibrate.steps_on_cpu`), behind a real gateway and
scheduler. Every second request is long, so that round robin sends all long ones to the same engine; together they need
`PRESSURE` of its KV cache. Copies are as slow as that device's would be over 64 Gbit/s. The same requests, at the same
times, with each setting; a second round, with other requests, goes backwards.

    stock     nothing moves: vLLM preempts
    load      the rescheduler's defaults
    victims   these, and `neutral_preemption`

Engines ask before they preempt in all three, in vain where nothing moves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import operator
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.calibrate.engines import ENGINE, spec
from benchmarks.objectives.outcome import Outcome
from benchmarks.rebalance import TOKEN_IDS, Arrival
from benchmarks.rebalance import play as play_all
from llumlet.contract.client import LlumletClient
from llumsched.rescheduling.rescheduling_config import USUAL
from llumsched.up.ports import free_port
from tests.support.control import Control, rescheduling
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.progress import Say
from tests.support.stats import quantile

NUM_ENGINES: Final = 2
LONG: Final = (150, 450)
SHORT: Final = (60, 40)
"""Tokens of the prompt and of the output."""
PRESSURE: Final = 1.3
LONG_SECONDS: Final = 18.0
"""How long a long request runs, by the device's steps: with that, a rate follows from a pressure."""
LINK: Final = "62M"
"""Bytes a second of what is copied: 4 KiB a token here, 512 KiB a token in a 7B model on 64 Gbit/s."""
SECONDS: Final = 70.0
"""In which requests come, of each setting in each round."""
ROUNDS: Final = 1
POLICY: Final = "neutral_preemption"


@dataclass(frozen=True)
class Setting:
    name: str
    flags: Sequence[str] = ()


_MOVES: Final = ("--enable-rescheduling", "--colocated-rescheduling-mode")
_WITH_VICTIMS: Final = ",".join((POLICY, *USUAL))
SETTINGS: Final = (
    Setting("stock"),
    Setting("load", _MOVES),
    Setting("victims", (*_MOVES, "--rescheduling-policies", _WITH_VICTIMS)),
)


@dataclass(frozen=True)
class Counts:
    """Of both engines, since their start."""

    preemptions: int
    averted: int
    computed: int
    recomputed: int

    def minus(self, before: Counts) -> Counts:
        return Counts(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(before)))

    def plus(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclass
class Played:
    """All rounds of one setting."""

    counts: Counts = field(default_factory=lambda: Counts(0, 0, 0, 0))
    num_requests: int = 0
    moves: dict[str, int] = field(default_factory=dict)
    """Requests that changed place, by policy."""
    gaps_ms: list[float] = field(default_factory=list)
    tpots_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        counts = self.counts
        return {
            "preemptions": counts.preemptions,
            "recomputed share": counts.recomputed / max(counts.computed, 1),
            "gap p99, ms": quantile(self.gaps_ms, 0.99),
            "gap p99.9, ms": quantile(self.gaps_ms, 0.999),
            "longest gap, ms": max(self.gaps_ms),
            "TPOT p99, ms": quantile(self.tpots_ms, 0.99),
            "request, mean, s": statistics.fmean(self.seconds),
        }


def engine(number: int, cms: str, logs: Path, overlap: float) -> ServerSpec:
    """As the calibration has them, but with vLLM's prefix cache, in which a preempted request may find itself again."""
    made = spec(number, [cms], logs, overlap)
    flags = [flag for flag in made.flags if flag != "--no-enable-prefix-caching"]
    return dataclasses.replace(
        made, flags=(*flags, "--llumlet-bandwidth-limit-local", LINK, "--llumlet-ask-before-preemption")
    )


def arrivals(seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals; every second one is long."""
    chance = random.Random(seed)
    num_prompt, num_output = LONG
    kv_tokens = ENGINE.num_blocks * ENGINE.block_size
    rate = 2 * PRESSURE * kv_tokens / (num_prompt + num_output / 2) / LONG_SECONDS
    found, at_s = [], 0.0
    for num_prompt, num_output in itertools.cycle((LONG, SHORT)):
        at_s += chance.expovariate(rate)
        if at_s > seconds:
            return found
        found.append(Arrival(at_s, chance.choices(TOKEN_IDS, k=num_prompt), num_output))
    raise AssertionError("a cycle does not end")


async def counts_of(engines: Sequence[Server]) -> Counts:
    total = Counts(0, 0, 0, 0)
    for one in engines:
        async with LlumletClient(str(one.llumlet)) as client:
            status = await client.get_instance_status()
        total = total.plus(
            Counts(
                status.num_preemptions,
                status.num_averted_preemptions,
                status.num_computed_tokens,
                status.num_recomputed_tokens,
            )
        )
    return total


async def play(
    setting: Setting, played: Played, engines: Sequence[Server], cms: str, logs: Path, requests: Sequence[Arrival]
) -> None:
    before = await counts_of(engines)
    flags = ["--scheduling-policy", "round-robin", *setting.flags]
    async with Control(logs, f"listen://{cms}", schedulers=[flags], name=f"{setting.name}-") as control:
        await control.knows(len(engines))
        streams = await play_all(control.gateway_url, requests)
        if setting.flags:
            for move in (await rescheduling(control.scheduler_url))["moves"]:
                policy, number = move["policy"], move["num_moved"]
                played.moves[policy] = played.moves.get(policy, 0) + number
    played.counts = played.counts.plus((await counts_of(engines)).minus(before))
    played.num_requests += len(streams)
    for ttft_s, stream in streams:
        lasted_s = stream.times[-1] - stream.times[0]
        played.gaps_ms += [gap * 1e3 for gap in stream.gaps]
        played.tpots_ms.append(lasted_s / (len(stream.times) - 1) * 1e3)
        played.seconds.append(ttft_s + lasted_s)


async def measure(logs: Path, seconds: float, rounds: int, overlap: float, seed: int, say: Say) -> list[Outcome]:
    cms, fleet = f"127.0.0.1:{free_port()}", Fleet(logs)
    played = {setting: Played() for setting in SETTINGS}
    try:
        say(f"preempt: starting {NUM_ENGINES} engines")
        specs = [engine(number, cms, logs, overlap) for number in range(NUM_ENGINES)]
        engines = await asyncio.to_thread(fleet.start, *specs)
        order = [setting for round_ in range(rounds) for setting in SETTINGS[:: 1 if round_ % 2 == 0 else -1]]
        for number, setting in enumerate(order, start=1):
            requests = arrivals(seconds, seed + (number - 1) // len(SETTINGS))
            say(f"preempt: {number} of {len(order)}: {len(requests)} requests, {setting.name}")
            await play(setting, played[setting], engines, cms, logs, requests)
    finally:
        await asyncio.to_thread(fleet.close)
    return outcomes(list(played.values()))


def outcomes(played: Sequence[Played]) -> list[Outcome]:
    """`played`: by `SETTINGS`. Each figure with nothing moved and with load alone evened out, against all moves."""
    stock, load, victims = played
    found = []
    for name, baseline in (("stock", stock), ("load", load)):
        more = {
            "requests": float(victims.num_requests),
            "averted": float(victims.counts.averted),
            "moved_victims": float(victims.moves.get(POLICY, 0)),
            "moved": float(sum(victims.moves.values())),
            "baseline_moved": float(sum(baseline.moves.values())),
        }
        found += [
            Outcome(f"preempt: against {name}", figure, before, victims.figures[figure], more=more)
            for figure, before in baseline.figures.items()
        ]
    return found
