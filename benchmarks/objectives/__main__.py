# SPDX-License-Identifier: Apache-2.0
"""What do predictions, and what is built on them, come to? Baseline and ours in one run.

python -m benchmarks.objectives                  all cases
python -m benchmarks.objectives latency          how near predictions come to what clients of real engines see
python -m benchmarks.objectives scale            how many instances fewer do with moves, and what a ramp takes
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.objectives import latency, scale
from benchmarks.objectives.outcome import Outcome, table
from tests.support.progress import saying
from tests.support.report import add_json, print_json

CASES: Final = ("latency", "scale")
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
    add("--seed", type=int, default=1)
    add("--logs", type=Path, metavar="DIR")
    add_json(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: no such case; there are {', '.join(CASES)}")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="llumnix-logs-"))
    loads = latency.LOADS
    if options.quick:
        loads = tuple(replace(load, seconds=_QUICK_SECONDS) for load in loads[:1])
    console = Console(stderr=True, width=180)
    console.print(f"load average: {os.getloadavg()}; logs: {logs}", highlight=False)
    cases, outcomes = options.cases or CASES, list[Outcome]()
    with saying("objectives") as say:
        if "latency" in cases:
            outcomes += asyncio.run(latency.measure(logs, loads, options.overlap, options.seed, say))
        if "scale" in cases:
            outcomes += scale.measure(quick=options.quick, seed=options.seed, say=say)
    console.print(table(outcomes))
    print_json(options.json, *(one.to_dict() for one in outcomes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
