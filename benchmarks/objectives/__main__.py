# SPDX-License-Identifier: Apache-2.0
"""What do predictions, and what is built on them, come to? Baseline and ours in one run.

python -m benchmarks.objectives                  all cases
python -m benchmarks.objectives latency          how near predictions come to what clients of real engines see
python -m benchmarks.objectives prefix           what it is worth to send prompts where their prefix is cached
python -m benchmarks.objectives prefix-index     what it takes to know where that is
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.objectives import latency, prefix, prefix_index
from benchmarks.objectives.outcome import Outcome, table
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json

CASES: Final = ("latency", "prefix", "prefix-index")
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
    loads, shares = latency.LOADS, prefix.LOADS
    if options.quick:
        loads = tuple(replace(load, seconds=_QUICK_SECONDS) for load in loads[:1])
        shares = tuple(replace(load, seconds=_QUICK_SECONDS) for load in shares[:1])
    cases: dict[str, Callable[[Say], list[Outcome]]] = {
        "latency": lambda say: asyncio.run(latency.measure(logs, loads, options.overlap, options.seed, say)),
        "prefix": lambda say: asyncio.run(prefix.measure(logs, shares, options.overlap, options.seed, say)),
        "prefix-index": lambda _: prefix_index.measure(options.seed),
    }
    console = Console(stderr=True, width=180)
    console.print(f"load average: {os.getloadavg()}; logs: {logs}", highlight=False)
    with saying("objectives") as say:
        outcomes = [one for name in options.cases or CASES for one in cases[name](say)]
    console.print(table(outcomes))
    print_json(options.json, *(one.to_dict() for one in outcomes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
