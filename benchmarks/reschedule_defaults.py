# SPDX-License-Identifier: Apache-2.0
"""What do the defaults of the rescheduler do for a skewed cluster, and what would others do?

Simulated instances behind real gRPC, one of which is nearly full while three are nearly empty and a fifth comes empty
after two seconds. Each row changes one default. Columns: seconds until no instance has more than 0.15 of a KV cache
above the mean; seconds from its coming until the new one has two thirds of the mean (a dash: never within the run);
the highest usage and the preemptions of the run; requests that moved, and how many of them more than once. Nothing of
a real engine is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Final

from rich.console import Console
from rich.table import Table

from llumlet.protocol.move.selection import Order, Unit
from llumsched.cms.embedded import EmbeddedStore
from llumsched.rescheduling.planning.moves import Selection
from llumsched.rescheduling.rescheduler import Rescheduler
from llumsched.rescheduling.rescheduling_config import LoadTarget, ReschedulingConfig
from llumsim.live import SimulatedCluster, SimulatedInstance, SimulatedRequest, engine_model
from tests.support.progress import saying

MODEL: Final = engine_model(num_blocks=4096)
"""Of 65,536 tokens; a step of 10 ms."""
JOINS_S: Final = 2.0
NEAR: Final = 0.15
FILLED: Final = 2 / 3
OURS: Final = ReschedulingConfig()
_LLUMNIX_1024: Final = Selection(Unit.TOKEN, Order.SR, 1024)
VARIANTS: Final = {
    "ours": OURS,
    "no rescheduling": replace(OURS, interval_ms=0),
    "threshold 1.0": replace(OURS, neutral=LoadTarget(threshold=1.0)),
    "threshold 0.7": replace(OURS, neutral=LoadTarget(threshold=0.7)),
    "difference 0.7": replace(OURS, balance_threshold=0.7),
    "TOKEN SR 1024": replace(OURS, selection=_LLUMNIX_1024),
    "without neutral_load": replace(OURS, policies=tuple(name for name in OURS.policies if name != "neutral_load")),
    "horizon 0.2 s": replace(OURS, horizon_s=0.2),
    "horizon 20 s": replace(OURS, horizon_s=20.0),
}


@dataclass
class Result:
    variant: str
    even_s: float | None = None
    filled_s: float | None = None
    highest: float = 0.0
    preemptions: int = 0
    moved: int = 0
    moved_again: int = 0


async def measure(variant: str, config: ReschedulingConfig, seconds: float) -> Result:
    store = EmbeddedStore()
    await store.start()
    result = Result(variant)
    async with SimulatedCluster(4, str(store.address), model=MODEL) as cluster:
        # 26 requests of 2,000 tokens on the first, four on each of the others; they grow by up to 1,200 tokens.
        requests = [
            cluster[number].submit(2000 + 10 * each, 1200)
            for number, count in enumerate((26, 4, 4, 4))
            for each in range(count)
        ]
        while not all(request.output for request in requests):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        rescheduler = Rescheduler(store.view, config)
        task = asyncio.create_task(rescheduler.run())
        await _watch(cluster, requests, result, seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rescheduler.close()
    await store.close()
    return result


async def _watch(cluster: SimulatedCluster, requests: list[SimulatedRequest], result: Result, seconds: float) -> None:
    began, joined = time.monotonic(), False
    while (elapsed := time.monotonic() - began) < seconds:
        if elapsed >= JOINS_S and not joined:
            joined = True
            await cluster.add()
        loads = [_usage(one) for one in cluster.instances.values()]
        result.highest = max(result.highest, *loads)
        mean = sum(loads) / len(loads)
        if result.even_s is None and max(loads) - mean < NEAR:
            result.even_s = elapsed
        if joined and result.filled_s is None and loads[-1] > FILLED * mean:
            result.filled_s = elapsed - JOINS_S
        await asyncio.sleep(0.01)
    result.preemptions = sum(one.engine.num_preemptions for one in cluster.instances.values())
    hops = [len(request.moved_through) for request in requests]
    result.moved, result.moved_again = sum(map(bool, hops)), sum(number > 1 for number in hops)


def _usage(one: SimulatedInstance) -> float:
    return 1 - one.engine.blocks.num_free / one.engine.config.num_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run (default %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    arguments = parser.parse_args()
    table = Table("defaults", "even after s", "filled after s", "highest", "preemptions", "moved", "more than once")
    results = []
    with saying("instances start") as say:
        for number, variant in enumerate(arguments.variants):
            say(f"{variant} ({number + 1} of {len(arguments.variants)})")
            result = asyncio.run(measure(variant, VARIANTS[variant], arguments.seconds))
            results.append(result)
            times = [f"{value:.2f}" if value is not None else "-" for value in (result.even_s, result.filled_s)]
            counts = (result.preemptions, result.moved, result.moved_again)
            table.add_row(variant, *times, f"{result.highest:.2f}", *map(str, counts))
    Console(stderr=True, markup=False).print(table)
    for result in results:
        print(json.dumps({"bench": "reschedule_defaults"} | asdict(result)))


if __name__ == "__main__":
    main()
