# SPDX-License-Identifier: Apache-2.0
"""What do predictions, and what is built on them, come to? Baseline and ours in one run.

python -m benchmarks.objectives                  all cases
python -m benchmarks.objectives latency          how near predictions come to what clients of real engines see
python -m benchmarks.objectives priorities       what urgent requests get, and the others pay: simulated
python -m benchmarks.objectives fragmentation    free memory in the wrong place, and preemptions: simulated
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.objectives import fragmentation, latency, priorities
from benchmarks.objectives.outcome import Outcome, table
from benchmarks.paper.lab import Lab
from tests.support.progress import saying
from tests.support.report import add_json, print_json

_SIMULATED: Final[Mapping[str, Callable[[Lab], list[Outcome]]]] = {
    "priorities": priorities.measure,
    "fragmentation": fragmentation.measure,
}
CASES: Final = ("latency", *_SIMULATED)
_QUICK_SECONDS: Final = 12.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.objectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    add("--quick", action="store_true", help="a short run: whether it works, not what it comes to")
    add(
        "--overlap", type=float, default=0.0, metavar="SHARE",
        help="of memory traffic and arithmetic of the device, that run at the same time; with 1 it is a roofline",
    )  # fmt: skip
    add("--seed", type=int, default=1, help="of what real engines serve")
    add("--seeds", type=int, default=1, metavar="N", help="simulated cases: runs of each, with seeds from 0")
    add("--requests", type=int, metavar="N", help="simulated cases: how many")
    add("--jobs", type=int, default=1, metavar="N", help="simulated cases: processes")
    add("--logs", type=Path, metavar="DIR")
    add_json(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: no such case; there are {', '.join(CASES)}")
    console = Console(stderr=True, width=180)
    lab = Lab(
        is_quick=options.quick, num_seeds=options.seeds, jobs=options.jobs, most_requests=options.requests,
    )  # fmt: skip
    for case in [case for case in CASES if case in (options.cases or CASES)]:
        simulate = _SIMULATED.get(case)
        outcomes = simulate(replace(lab, experiment=case)) if simulate else _latency(options, console)
        console.print(table(outcomes))
        print_json(options.json, *(one.to_dict() for one in outcomes))
    return 0


def _latency(options: argparse.Namespace, console: Console) -> list[Outcome]:
    logs = options.logs or Path(tempfile.mkdtemp(prefix="llumnix-logs-"))
    loads = latency.LOADS
    if options.quick:
        loads = tuple(replace(load, seconds=_QUICK_SECONDS) for load in loads[:1])
    console.print(f"load average: {os.getloadavg()}; logs: {logs}", highlight=False)
    with saying("objectives") as say:
        return asyncio.run(latency.measure(logs, loads, options.overlap, options.seed, say))


if __name__ == "__main__":
    raise SystemExit(main())
