# SPDX-License-Identifier: Apache-2.0
"""Is the cluster simulator true? docs/operate/simulator.md, "Calibration".

    python -m benchmarks.calibrate                       20 minutes
    python -m benchmarks.calibrate --quick               3 minutes: fewer engines, loads and settings, no repetition
    python -m benchmarks.calibrate --write mine.json     for `python -m benchmarks.cluster --hardware mine.json`

Real engines behind a real gateway and scheduler, whose steps last as long as those of a device (`steps_on_cpu`). A
probe measures what the simulator has to be told; then both worlds get the same other requests, at the same times, with
each of several settings of dispatch and rescheduling, reality twice. Compared are the requests, one by one, the
distributions, and the order of the settings. Errors are relative to reality, above 0 where the simulator is slower.

At the end the same, with round robin only, for engines as fast as they can.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.calibrate.comparison import (
    Outcome,
    errors,
    median_size,
    quantile_error,
    quantile_spread,
    rankings,
    run_spread,
    tpot,
    ttft,
)
from benchmarks.calibrate.engines import spec
from benchmarks.calibrate.load import Played, simulated, skewed
from benchmarks.calibrate.probe import Probed, probe
from benchmarks.calibrate.real import Cluster, CountedStatuses
from benchmarks.calibrate.tables import tables
from benchmarks.rebalance import Arrival, Case
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.up.ports import free_port
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.run import ClusterConfig
from llumsim.engine.step_model import describe_hardware
from tests.support.harness import Fleet
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json
from tests.support.stats import median

SETTINGS: Final = (
    Case("round-robin", False),
    Case("load-balance", False),
    Case(str(Path(__file__).with_name("fullest-first.yaml")), False),
    Case("round-robin", True),
    Case("load-balance", True),
)


@dataclass(frozen=True)
class Load:
    name: str
    rate: float
    """Requests a second for each engine."""


@dataclass(frozen=True)
class Size:
    """How much of it all. Rates are requests a second for each engine."""

    clusters: Sequence[int]
    settings: Sequence[Case]
    loads: Sequence[Load]
    seconds: float
    """Seconds of each run in which requests come."""
    repeats: int
    probe_rates: Sequence[float]
    probe_seconds: float
    """Seconds of the probe at each rate."""
    unpaced: Sequence[int]
    """Clusters of engines as fast as they can."""
    unpaced_rates: Sequence[float] = (2.0, 5.0, 8.0)
    unpaced_rate: float = 5.0


MODERATE, SATURATED = Load("moderate", 0.9), Load("near saturation", 1.6)
FULL: Final = Size(
    clusters=(2, 3), settings=SETTINGS, loads=(MODERATE, SATURATED), seconds=40.0, repeats=2,
    probe_rates=(0.5, 1.0, 2.0), probe_seconds=10.0, unpaced=(1,),
)  # fmt: skip
QUICK: Final = Size(
    clusters=(2,), settings=SETTINGS[:2], loads=(MODERATE,), seconds=20.0, repeats=1,
    probe_rates=(1.0, 2.0), probe_seconds=10.0, unpaced=(),
)  # fmt: skip


@dataclass(frozen=True)
class RealRuns:
    """Real runs of one setting under one load."""

    num_instances: int
    load: str
    case: Case
    requests: Sequence[Arrival]
    runs: Sequence[Played]


async def _play(
    clusters: Sequence[Cluster], size: Size, loads: Sequence[Load], settings: Sequence[Case], seed: int,
    statuses: CountedStatuses, say: Say,
) -> list[RealRuns]:  # fmt: skip
    found = []
    cells = list(itertools.product(clusters, loads, settings))
    for number, (cluster, load, case) in enumerate(cells, start=1):
        num_instances = len(cluster.engines)
        requests = skewed(load.rate, size.seconds, num_instances, seed)
        where = f"{number} of {len(cells)}: {num_instances} engines, {load.name}, {case.name}, {len(requests)} requests"
        runs = []
        for again in range(size.repeats):
            say(f"{where}, run {again + 1} of {size.repeats}")
            runs.append(await cluster.play(case, requests, statuses))
        found.append(RealRuns(num_instances, load.name, case, requests, runs))
    return found


def _compared(probed: Probed, real: RealRuns) -> Outcome:
    """Real runs beside the same in the simulator."""
    rescheduling = ReschedulingConfig() if real.case.rescheduling else None
    config = ClusterConfig(
        groups=[("", probed.hardware, real.num_instances)],
        control=ControlConfig(policy=real.case.dispatch, rescheduling=rescheduling),
        cadence=probed.cadence,
    )
    runs = simulated(config, real.requests)
    return Outcome(real.num_instances, real.load, real.case.name, real.runs, runs)


@asynccontextmanager
async def _world(
    sizes: Sequence[int], logs: Path, overlap: float | None
) -> AsyncIterator[tuple[list[Cluster], CountedStatuses]]:
    """Clusters of that many engines each, which share their engines, and a store that all engines tell their load."""
    counting, ports = free_port(), {size: free_port() for size in sizes}
    specs = []
    for number in range(max(sizes)):
        stores = [f"127.0.0.1:{port}" for size, port in ports.items() if number < size]
        specs.append(spec(number, [*stores, f"127.0.0.1:{counting}"], logs, overlap))
    fleet = Fleet(logs)
    async with CountedStatuses(counting) as statuses:
        try:
            engines = await asyncio.to_thread(fleet.start, *specs)
            yield [Cluster(engines[:size], port, logs) for size, port in ports.items()], statuses
        finally:
            await asyncio.to_thread(fleet.close)


async def _paced(size: Size, logs: Path, overlap: float, seed: int, say: Say) -> tuple[Probed, list[RealRuns]]:
    say(f"starting {max(size.clusters)} engines")
    async with _world(size.clusters, logs, overlap) as (clusters, statuses):
        probed = await probe(clusters[-1], size.probe_rates, size.probe_seconds, say, "paced")
        return probed, await _play(clusters, size, size.loads, size.settings, seed, statuses, say)


async def _unpaced(number: int, size: Size, logs: Path, seed: int, say: Say) -> tuple[Probed, list[RealRuns]]:
    say(f"starting {number} engines as fast as they can")
    async with _world([number], logs, None) as (clusters, statuses):
        probed = await probe(clusters[0], size.unpaced_rates, size.probe_seconds, say, f"{number} unpaced")
        load = Load("unpaced", size.unpaced_rate)
        return probed, await _play(clusters, size, [load], size.settings[:1], seed, statuses, say)


def _row(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, of in (("ttft", ttft), ("tpot", tpot)):
        row[f"{name}_median_error"] = round(median_size(errors(outcomes, of)), 4)
        row[f"{name}_bias"] = round(median(errors(outcomes, of)), 4)
        between = run_spread(outcomes, of)
        row[f"{name}_real_spread"] = round(median_size(between), 4) if between else None
        for share in (0.5, 0.99):
            key = f"{name}_p{share * 100:.0f}"
            row[f"{key}_error"] = round(median_size(quantile_error(one, of, share) for one in outcomes), 4)
            apart = median(quantile_spread(one, of, share) for one in outcomes)
            row[f"{key}_real_spread"] = round(apart, 4) if between else None
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true")
    add("--write", type=Path, metavar="FILE", help="the instance as it was measured, for `benchmarks.cluster`")
    add(
        "--overlap", type=float, default=0.0, metavar="SHARE",
        help="of memory traffic and arithmetic of the device, that run at the same time; with 1 it is a roofline",
    )  # fmt: skip
    add("--seed", type=int, default=1, help="of the requests that both worlds get")
    add("--logs", type=Path, metavar="DIR")
    add_json(parser)
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    logs = options.logs or Path(tempfile.mkdtemp(prefix="llumnix-logs-"))
    load_before = os.getloadavg()
    console = Console(stderr=True, width=180, markup=False)
    console.print(f"load average: {load_before}; logs: {logs}", highlight=False)
    with saying("calibrating") as say:
        probed, real = asyncio.run(_paced(size, logs / "paced", options.overlap, options.seed, say))
        outcomes = [_compared(probed, runs) for runs in real]
        unpaced = []
        for number in size.unpaced:
            its_probe, its_real = asyncio.run(_unpaced(number, size, logs / f"unpaced{number}", options.seed, say))
            unpaced.append((number, its_probe, [_compared(its_probe, runs) for runs in its_real]))
    ranked = rankings(outcomes)
    for table in tables(probed, outcomes, ranked):
        console.print(table)
    for _, its_probe, its_outcomes in unpaced:
        for table in tables(its_probe, its_outcomes, []):
            console.print(table)
    load_after = os.getloadavg()
    console.print(f"load average: {load_after}", highlight=False)
    row = {
        "bench": "calibrate",
        **_row(outcomes),
        "ranking_same": not any(one.wrong for one in ranked),
        "pairs_told_apart": sum(one.num_told_apart for one in ranked),
        "pairs_wrong": sum(len(one.wrong) for one in ranked),
        "probe": probed.to_dict(),
        "loads": {load.name: _row([one for one in outcomes if one.load == load.name]) for load in size.loads},
        "unpaced": {
            number: {**_row(its_outcomes), "probe": its_probe.to_dict()} for number, its_probe, its_outcomes in unpaced
        },
        "requests": sum(len(one.real[0].requests) for one in outcomes),
        "load_average": [round(value, 2) for value in (load_before[0], load_after[0])],
        "overlap": options.overlap,
        "seed": options.seed,
    }
    if options.write is not None:
        hardware = replace(probed.hardware, name=options.write.stem)
        options.write.write_text(describe_hardware(hardware, probed.coefficients._asdict()))
    print_json(options.json, row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
