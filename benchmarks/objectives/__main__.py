# SPDX-License-Identifier: Apache-2.0
"""What do predictions, and what is built on them, come to? Baseline and ours in one run.

python -m benchmarks.objectives                  all cases
python -m benchmarks.objectives latency          how near predictions come to what clients of real engines see
python -m benchmarks.objectives forward          how near statuses are to the truth, as told and moved on; simulated
python -m benchmarks.objectives engines          the same on real engines
python -m benchmarks.objectives slo              goodput, simulated, and attainment on real engines
python -m benchmarks.objectives priorities       what urgent requests get, and the others pay; simulated
python -m benchmarks.objectives fragmentation    what de-fragmentation brings; simulated
python -m benchmarks.objectives preempt          what it brings to move requests that would be preempted; real engines
python -m benchmarks.objectives prefix           what it brings to go where a prefix is cached; real engines
python -m benchmarks.objectives prefix-index     what the scheduler's index of prefix caches costs
python -m benchmarks.objectives scale            how many instances fewer do with moves, and what a ramp takes
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console

from benchmarks.objectives import (
    forward,
    forward_engines,
    fragmentation,
    latency,
    preempt,
    prefix,
    prefix_index,
    priorities,
    scale,
    slo,
)
from benchmarks.objectives.outcome import Outcome, table
from benchmarks.paper.lab import Lab
from benchmarks.simulated import share
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json

_QUICK_SECONDS: Final = 12.0

Options = argparse.Namespace
Case = Callable[[Options, Say], list[Outcome]]
_Load = TypeVar("_Load", latency.Load, prefix.Load)


def _lab(case: str, options: Options) -> Lab:
    return Lab(
        experiment=case,
        is_quick=options.quick,
        num_seeds=options.seeds,
        jobs=options.jobs,
        most_requests=options.requests,
        urgent=options.urgent,
        traces=options.traces,
    )


def _played(loads: Sequence[_Load], options: Options) -> Sequence[_Load]:
    """Those that are played."""
    return [replace(loads[0], seconds=_QUICK_SECONDS)] if options.quick else loads


def _latency(options: Options, say: Say) -> list[Outcome]:
    loads = _played(latency.LOADS, options)
    return asyncio.run(latency.measure(options.logs, loads, options.overlap, options.seed, say))


def _forward(options: Options, say: Say) -> list[Outcome]:
    return forward.measure(options.quick, options.seed, say)


def _engines(options: Options, say: Say) -> list[Outcome]:
    runs = _played(forward_engines.RUNS, options)
    return asyncio.run(forward_engines.measure(options.logs, runs, options.overlap, options.seed, say))


def _slo(options: Options, say: Say) -> list[Outcome]:
    rates, seconds = slo.REAL_RATES, slo.REAL_SECONDS
    if options.quick:
        rates, seconds = rates[:1], _QUICK_SECONDS
    outcomes = slo.simulated(_lab("slo", options))
    return outcomes + asyncio.run(slo.real(options.logs, rates, seconds, options.overlap, options.seed, say))


def _preempt(options: Options, say: Say) -> list[Outcome]:
    seconds, rounds = (_QUICK_SECONDS, 1) if options.quick else (preempt.SECONDS, preempt.ROUNDS)
    return asyncio.run(preempt.measure(options.logs, seconds, rounds, options.overlap, options.seed, say))


def _prefix(options: Options, say: Say) -> list[Outcome]:
    loads = _played(prefix.LOADS, options)
    return asyncio.run(prefix.measure(options.logs, loads, options.overlap, options.seed, say))


def _scale(options: Options, say: Say) -> list[Outcome]:
    return scale.measure(quick=options.quick, seed=options.seed, say=say)


CASES: Final[Mapping[str, Case]] = {
    "latency": _latency,
    "forward": _forward,
    "engines": _engines,
    "slo": _slo,
    "priorities": lambda options, _: priorities.measure(_lab("priorities", options)),
    "fragmentation": lambda options, _: fragmentation.measure(_lab("fragmentation", options)),
    "preempt": _preempt,
    "prefix": _prefix,
    "prefix-index": lambda options, _: prefix_index.measure(options.seed),
    "scale": _scale,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.objectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    add("--quick", action="store_true", help="a short run: whether it works, not what it comes to")
    add("--logs", type=Path, metavar="DIR")
    add_json(parser)
    real = parser.add_argument_group("real engines")
    real.add_argument(
        "--overlap", type=float, default=0.0, metavar="SHARE",
        help="of memory traffic and arithmetic of the device, that run at the same time; with 1 it is a roofline",
    )  # fmt: skip
    real.add_argument("--seed", type=int, default=1, help="of what they are asked; of `forward` and `scale`, too")
    simulated = parser.add_argument_group("slo, priorities and fragmentation, simulated")
    simulated.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each, with seeds from 0")
    simulated.add_argument("--requests", type=int, metavar="N", help="how many")
    simulated.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    simulated.add_argument(
        "--urgent", type=share, default=Lab.urgent, metavar="SHARE",
        help="of the requests in `priorities`; %(default)s if left out",
    )  # fmt: skip
    simulated.add_argument(
        "--traces", type=Path, metavar="DIR", help="with Azure's traces; without it, made-up loads only"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: no such case; there are {', '.join(CASES)}")
    options.logs = options.logs or Path(tempfile.mkdtemp(prefix="llumnix-logs-"))
    console = Console(stderr=True, width=180, markup=False)
    console.print(f"load average: {os.getloadavg()}; logs: {options.logs}", highlight=False)
    for case in options.cases or CASES:
        with saying("objectives") as say:
            outcomes = CASES[case](options, say)
        console.print(table(outcomes))
        print_json(options.json, *(one.to_dict() for one in outcomes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
