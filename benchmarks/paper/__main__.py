# SPDX-License-Identifier: Apache-2.0
"""Does this scheduler do what Llumnix's paper says, and what did the paper leave open?

Simulated: benchmarks/experiments.md.

    python -m benchmarks.paper motivation fragmentation --seeds 3
    python -m benchmarks.paper serving --jobs 2 --settings round-robin infaas=benchmarks/paper/infaas.yaml \\
        load-balance 'mine=load-balance+moves --rescheduling-policies neutral_load,mine.yaml'
    python -m benchmarks.paper prefixes scale --traces DIR
    python -m benchmarks.paper priorities --urgent 0.5

Tables go to stderr, as Markdown if that is a file; a line of JSON for each run goes to stdout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.paper import (
    blind,
    bursts,
    contexts,
    cost,
    day,
    fragmentation,
    hindsight,
    links,
    motivation,
    prefixes,
    priorities,
    scale,
    serving,
    staleness,
)  # fmt: skip
from benchmarks.paper.lab import QUICK_REQUESTS, Lab
from benchmarks.simulated import NOTATION, SETTING_HELP, read_setting, share
from tests.support.report import add_json

EXPERIMENTS: Final[dict[str, Callable[[Lab], None]]] = {
    "motivation": motivation.play,
    "serving": serving.play,
    "fragmentation": fragmentation.play,
    "staleness": staleness.play,
    "prefixes": prefixes.play,
    "contexts": contexts.play,
    "links": links.play,
    "scale": scale.play,
    "bursts": bursts.play,
    "cost": cost.play,
    "priorities": priorities.play,
    "blind": blind.play,
    "day": day.play,
    "hindsight": hindsight.play,
}


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if unknown := sorted(set(args.experiments) - set(EXPERIMENTS)):
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(EXPERIMENTS)}")
    try:
        settings = [read_setting(text) for text in args.settings]
    except ValueError as error:
        parser.error(str(error))
    lab = Lab(
        is_quick=args.quick,
        num_seeds=args.seeds,
        jobs=args.jobs,
        most_requests=args.requests,
        urgent=args.urgent,
        seconds=args.seconds,
        traces=args.traces,
        settings=settings,
        json_file=args.json,
    )
    for name in args.experiments or EXPERIMENTS:
        EXPERIMENTS[name](replace(lab, experiment=name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"all, if none is given: {', '.join(EXPERIMENTS)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_REQUESTS:,} requests, and few values of each parameter"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each; tables show means")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--requests", type=int, help="of each made-up load; else what the experiment thinks right")
    parser.add_argument(
        "--urgent", type=share, default=Lab.urgent, metavar="SHARE",
        help="of the requests in `priorities`; %(default)s if left out",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, help="cut traces after so long; else what the experiment thinks right")
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"with {', '.join((prefixes.TRACE, *scale.RATES))}")
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar=NOTATION,
        help=f"in the place of those that experiments compare: {SETTING_HELP}",
    )  # fmt: skip
    add_json(parser)
    return parser


if __name__ == "__main__":
    main()
