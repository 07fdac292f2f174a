# SPDX-License-Identifier: Apache-2.0
"""What do predictions, and what is built on them, come to? Baseline and ours in one run.

python -m benchmarks.objectives                  all cases
python -m benchmarks.objectives latency          how near predictions come to what clients of real engines see
python -m benchmarks.objectives slo              goodput and attainment, simulated, and on real engines
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

from benchmarks.objectives import latency, slo
from benchmarks.objectives.outcome import Outcome, table
from benchmarks.paper.lab import Lab
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json

_QUICK_SECONDS: Final = 12.0

Options = argparse.Namespace


def _latency(options: Options, say: Say) -> list[Outcome]:
    loads = latency.LOADS
    if options.quick:
        loads = tuple(replace(load, seconds=_QUICK_SECONDS) for load in loads[:1])
    return asyncio.run(latency.measure(options.logs, loads, options.overlap, options.seed, say))


def _slo(options: Options, say: Say) -> list[Outcome]:
    rates, seconds = slo.REAL_RATES, slo.REAL_SECONDS
    if options.quick:
        rates, seconds = rates[:1], _QUICK_SECONDS
    outcomes = slo.simulated(_lab(options))
    return outcomes + asyncio.run(slo.real(options.logs, rates, seconds, options.seed, say))


def _lab(options: Options) -> Lab:
    return Lab(
        experiment="objectives",
        is_quick=options.quick,
        num_seeds=1 if options.quick else options.seeds,
        jobs=options.jobs,
        traces=options.traces,
    )


CASES: Final[Mapping[str, Callable[[Options, Say], list[Outcome]]]] = {"latency": _latency, "slo": _slo}


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
    add("--seed", type=int, default=1, help="of what real engines are asked")
    add("--seeds", type=int, default=3, help="simulated runs of each setting, of which the mean is shown")
    add("--jobs", type=int, default=1, help="simulated runs at a time")
    add("--traces", type=Path, metavar="DIR", help="with Azure's traces; without it, made-up loads only")
    add("--logs", type=Path, metavar="DIR")
    add_json(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: no such case; there are {', '.join(CASES)}")
    options.logs = options.logs or Path(tempfile.mkdtemp(prefix="llumnix-logs-"))
    console = Console(stderr=True, width=180)
    console.print(f"load average: {os.getloadavg()}; logs: {options.logs}", highlight=False)
    with saying("objectives") as say:
        for case in options.cases or CASES:
            outcomes = CASES[case](options, say)
            console.print(table(outcomes))
            print_json(options.json, *(one.to_dict() for one in outcomes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
