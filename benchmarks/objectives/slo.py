# SPDX-License-Identifier: Apache-2.0
"""How many requests a second meet their objectives, with dispatch by load, and by objectives?

Simulated: the cluster of Llumnix's paper, and traces of conversations, at rates from where nearly all are in time to
beyond what the cluster bears. Thresholds of the policy were chosen on the first load alone. Goodput is that of
`vllm bench serve --goodput`: requests a second that met every objective. Real: two engines, each step as long as a
device's (`benchmarks.calibrate.steps_on_cpu`), behind a gateway that gives all requests the same objectives; baseline
and ours get the same requests, one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.calibrate.engines import spec
from benchmarks.calibrate.load import Played, skewed
from benchmarks.calibrate.real import Cluster, CountedStatuses
from benchmarks.objectives.outcome import Outcome
from benchmarks.paper.lab import Lab, Run
from benchmarks.rebalance import Case
from benchmarks.simulated import Load, read_setting
from llumsched.up.ports import free_port
from llumsim.cluster.metrics import Slo
from tests.support.harness import Fleet
from tests.support.progress import Say

BASELINE, OURS = "load-balance", "slo"
TARGET: Final = 1.3


@dataclass(frozen=True)
class Knee:
    """A load that nearly all of which is in time at the first rate, and much of it late at the last."""

    name: str
    load: Load
    rates: Sequence[float]
    slo: Slo
    is_target: bool = False
    """Whether the goodput at the last rate is what something was said of."""


def knees(lab: Lab) -> Iterator[Knee]:
    number = lab.requests(6_000)
    made_up = Slo(1.0, 0.08)
    yield Knee("m-m", Load(lengths="m-m", num_requests=number), (9.0, 10.0, 11.0, 12.0), made_up, is_target=True)
    yield Knee("s-l", Load(lengths="s-l", num_requests=number), (3.4, 3.8, 4.2, 4.6), made_up)
    yield Knee("m-m, CV 4", Load(lengths="m-m", num_requests=number, cv=4.0), (9.0, 10.0, 11.0, 12.0), made_up)
    for name, rates, slo in (
        ("azure2023_conv.csv", (5.5, 6.5, 7.5, 8.5), Slo(2.0, 0.08)),
        # Prompts of two thousand tokens, a step each: nobody decodes in 80 ms beside them.
        ("azure2023_code.csv", (3.0, 4.0, 5.0, 6.0), Slo(5.0, 0.3)),
    ):
        if (trace := lab.trace(name)) is not None:
            load = Load(trace=trace, seconds=lab.seconds or 600.0)
            yield Knee(name.removesuffix(".csv"), load, rates, slo)


def simulated(lab: Lab) -> list[Outcome]:
    found = []
    settings = [read_setting(name) for name in (BASELINE, OURS)]
    for knee in knees(lab):
        rates = lab.cells(*knee.rates)
        runs = lab.play(
            Run(
                labels={"load": knee.name, "rate": rate, "setting": setting.name},
                load=_at(knee.load, rate),
                setting=setting,
                slo=knee.slo,
            )
            for rate, setting in itertools.product(rates, settings)
        )
        for rate, (baseline, ours) in zip(rates, zip(runs[::2], runs[1::2], strict=True), strict=True):
            found.append(
                Outcome(
                    "slo",
                    f"goodput, {knee.name} at {rate:g}/s",
                    baseline["goodput"],
                    ours["goodput"],
                    TARGET * baseline["goodput"] if knee.is_target and rate == rates[-1] else None,
                    is_at_least=True,
                    more={
                        "attainment": ours["slo_attainment"],
                        "baseline attainment": baseline["slo_attainment"],
                        "TTFT p99 s": ours["ttft_p99_s"],
                        "baseline TTFT p99 s": baseline["ttft_p99_s"],
                    },
                )
            )
    return found


def _at(load: Load, rate: float) -> Load:
    return replace(load, rate=rate)


NUM_ENGINES: Final = 2
REAL_SLO: Final = Slo(0.5, 0.06)
REAL_RATES: Final = (1.6, 2.0, 2.4)
REAL_SECONDS: Final = 40.0


async def real(
    logs: Path, rates: Sequence[float], seconds: float, overlap: float, seed: int, say: Say
) -> list[Outcome]:
    cms_port, counting = free_port(), free_port()
    stores = [f"127.0.0.1:{port}" for port in (cms_port, counting)]
    specs = [spec(number, stores, logs, overlap) for number in range(NUM_ENGINES)]
    objectives = ["--ttft-slo", f"{REAL_SLO.ttft_s * 1e3:g}", "--tpot-slo", f"{REAL_SLO.tpot_s * 1e3:g}"]
    fleet = Fleet(logs)
    say(f"starting {NUM_ENGINES} engines")
    async with CountedStatuses(counting) as statuses:
        try:
            engines = await asyncio.to_thread(fleet.start, *specs)
            cluster = Cluster(engines, cms_port, logs, objectives)
            found = []
            for rate in rates:
                requests = skewed(rate, seconds, NUM_ENGINES, seed)
                shares = []
                for policy in (BASELINE, OURS, OURS, BASELINE):
                    say(f"{rate:g} requests a second for each engine, {len(requests)} in all: {policy}")
                    shares.append(_share_in_time(await cluster.play(Case(policy, False), requests, statuses)))
                baseline, ours = (shares[0] + shares[3]) / 2, (shares[1] + shares[2]) / 2
                spread = {"runs of ours": abs(shares[1] - shares[2]), "runs of baseline": abs(shares[0] - shares[3])}
                found.append(
                    Outcome("slo", f"attainment, real, {rate:g}/s", baseline, ours, is_at_least=True, more=spread)
                )
            return found
        finally:
            await asyncio.to_thread(fleet.close)


def _share_in_time(played: Played) -> float:
    return sum(REAL_SLO.is_met(one.ttft_s, one.tpot_s) for one in played.requests) / len(played.requests)
