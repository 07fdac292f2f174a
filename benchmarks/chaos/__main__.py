# SPDX-License-Identifier: Apache-2.0
"""What is lost when everything around the engines fails, again and again?

    python -m benchmarks.chaos --instances 100 --minutes 5

Real gateways, schedulers (each with a rescheduler inside) and a Redis around simulated instances, whose tokens are
known. Meanwhile, by chance: instances are killed, hang, answer 500, become fifty times slower or are cut off, a tenth
of them at a time; schedulers are killed, gateways replaced, the Redis stands still or loses its memory. Every stream is
accounted for. Afterwards all is mended, and what is still held anywhere is a leak.

The last line is one JSON object; the exit code is 0 only if no stream was truncated, none had a wrong token, at most
one in a thousand failed, and nothing is held.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.chaos.faults import Faults
from benchmarks.chaos.load import Load
from benchmarks.chaos.parts import Cluster, cluster_of
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json
from tests.support.stats import quantile

MOST_FAILED: Final = 0.001
_SETTLE_S: Final = 60.0
_SAMPLE_S: Final = 2.0
_MIB: Final = 1 << 20


async def run(
    instances: int, seconds: float, concurrency: int, seed: int, logs: Path, say: Say, *, spares_first: bool = False
) -> dict[str, Any]:
    draw = random.Random(seed)
    async with cluster_of(instances, logs) as cluster:
        load = Load(cluster.urls, concurrency, random.Random(seed + 1))
        faults = Faults(cluster, draw, say, spares_first=spares_first)
        say("load")
        sampling = asyncio.create_task(faults.sample(_SAMPLE_S))
        await asyncio.gather(load.run(seconds), faults.run(seconds))
        sampling.cancel()
        say("what is left")
        await cluster.until_whole()
        held = await _settled(cluster)
        verdicts = load.verdicts
        return {
            "bench": "chaos",
            "instances": instances,
            "seconds": seconds,
            "requests": verdicts.requests,
            "failed_share": verdicts.failed / max(1, verdicts.requests),
            "truncated": verdicts.truncated,
            "duplicated_tokens": verdicts.wrong_tokens,
            "longest_gap_s": round(verdicts.longest_gap_s, 2),
            "latency_p50_s": round(quantile(verdicts.latencies_s, 0.5), 2),
            "latency_p99_s": round(quantile(verdicts.latencies_s, 0.99), 2),
            "leaked": sum(held.values()),
            "held": held,
            "harm": dict(faults.counts),
            "errors": dict(verdicts.errors),
            "rss_mib_per_min": _slopes(cluster, 1, _MIB),
            "descriptors_per_min": _slopes(cluster, 2, 1),
            "examples": verdicts.examples,
        }


async def _settled(cluster: Cluster) -> dict[str, float]:
    """What is held when nothing changes any more, or after a minute."""
    until_s = time.monotonic() + _SETTLE_S
    while True:
        held = await cluster.held()
        if not any(held.values()) or time.monotonic() > until_s:
            return held
        await asyncio.sleep(1.0)


def _slopes(cluster: Cluster, column: int, unit: int) -> dict[str, float]:
    """Per minute, over the last half of what was sampled of each process that lived for half a minute."""
    slopes = {}
    for name, samples in cluster.sizes.items():
        late = np.array(samples[len(samples) // 2 :], dtype=np.float64)
        if len(late) * _SAMPLE_S >= 15.0:
            slopes[name] = round(float(np.polyfit(late[:, 0] - late[0, 0], late[:, column], 1)[0]) * 60 / unit, 2)
    return slopes


def passed(result: dict[str, Any]) -> bool:
    lost = (result["truncated"], result["duplicated_tokens"], result["leaked"])
    return not any(lost) and result["failed_share"] <= MOST_FAILED


def show(result: dict[str, Any]) -> None:
    table = Table("figure", "value", "to reach")
    for row in (
        ("requests", f"{result['requests']:,}", ""),
        ("failed", f"{result['failed_share']:.3%}", f"{MOST_FAILED:.1%}"),
        ("truncated", str(result["truncated"]), "0"),
        ("wrong tokens", str(result["duplicated_tokens"]), "0"),
        ("still held at the end", f"{result['leaked']:g}", "0"),
        ("longest gap within a stream", f"{result['longest_gap_s']} s", ""),
        ("latency, p50 and p99", f"{result['latency_p50_s']} s, {result['latency_p99_s']} s", ""),
        ("harm done", ", ".join(f"{name} {number}" for name, number in sorted(result["harm"].items())), ""),
        ("errors", ", ".join(f"{name} {number}" for name, number in sorted(result["errors"].items())) or "none", ""),
    ):
        table.add_row(*row)
    console = Console(markup=False)
    console.print(table)
    for example in result["examples"][:10]:
        console.print(example, markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=0, help="at once; 0: two for each instance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--spare-first",
        action="store_true",
        help="the first scheduler and the first gateway live through all of it: for slopes of memory and descriptors",
    )
    parser.add_argument("--logs", type=Path, help="directory (default: a new one)")
    add_json(parser)
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="llumnix-chaos-"))
    streams = args.streams or 2 * args.instances
    with saying(f"chaos: logs in {logs}") as say:
        chaos = run(args.instances, args.minutes * 60, streams, args.seed, logs, say, spares_first=args.spare_first)
        result = uvloop.run(chaos)
    show(result)
    print_json(args.json, {name: value for name, value in result.items() if name != "examples"})
    sys.exit(0 if passed(result) else 1)


if __name__ == "__main__":
    main()
