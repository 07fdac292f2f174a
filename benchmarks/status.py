# SPDX-License-Identifier: Apache-2.0
"""What do the load counters cost a step of the engine?

    python -m benchmarks.status --batch 128 --json status.json

The same requests go through two of vLLM's schedulers, in turn, step by step: a stock one, and one that the counters
follow. The model takes no time. Two loads: a batch that decodes (`decode`), and short requests that come and go
(`churn`, a request for every eighth slot and step). Times are CPU of one thread; a step is `schedule` and
`update_from_output`, and in `churn` also what comes before them, of which an engine does a part on its input thread. A
second stock scheduler next to the first shows what this machine can resolve. And what a reader pays: a look at the
counters, and the ids of a status as it is pushed, made and serialised.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from llumlet.contract.types import InstanceStatus
from tests.engine.rig import FakeRunner, new_request, new_scheduler
from tests.support.model import PRESETS, build
from vllm_llumnix.engine.load.load_counters import LoadCounters
from vllm_llumnix.engine.load.scheduler_events import SchedulerEvents, counters_of

PROMPT_TOKENS = 48
CHURN_TOKENS = 8
MAX_TOKENS = 1900
WARM_STEPS = 20


class Engine:
    """One scheduler, and a model that answers at once."""

    def __init__(self, model: Path, batch: int, *, followed: bool) -> None:
        blocks = batch * (2048 // 32) + 64
        self.scheduler, self._hasher = new_scheduler(
            model, False, blocks, max_num_seqs=batch, max_num_batched_tokens=8192
        )
        self.load: LoadCounters | None = None
        if followed:
            self.load = SchedulerEvents(self.scheduler, counters_of(self.scheduler)).load
        self._runner = FakeRunner()
        self._names = 0

    def add(self, max_tokens: int) -> None:
        self._names += 1
        prompt = [5 + (self._names * 7 + index) % 90 for index in range(PROMPT_TOKENS)]
        request = new_request(f"cmpl-{self._names}-0", prompt, max_tokens, block_hasher=self._hasher)
        if self.load is not None:
            self.load.received(request)
        self.scheduler.add_request(request)

    def step(self) -> float:
        """CPU seconds."""
        scheduler = self.scheduler
        began = time.thread_time()
        output = scheduler.schedule()
        scheduled = time.thread_time()
        answer = self._runner.run(output, frozenset())
        computed = time.thread_time()
        scheduler.update_from_output(output, answer)
        return scheduled - began + time.thread_time() - computed


def decode(engine: Engine, batch: int) -> Callable[[], float]:
    for _ in range(batch):
        engine.add(MAX_TOKENS)
    return engine.step


def arrivals(batch: int) -> int:
    """Requests that come, and go, in each step of `churn`."""
    return max(1, batch // CHURN_TOKENS)


def churn(engine: Engine, batch: int) -> Callable[[], float]:
    """A load of as many requests as slots, of `CHURN_TOKENS` tokens; those that have ended are replaced before each
    step."""

    def step() -> float:
        began = time.thread_time()
        for _ in range(arrivals(batch)):
            engine.add(CHURN_TOKENS)
        return time.thread_time() - began + engine.step()

    return step


LOADS = {"decode": decode, "churn": churn}


def measure(model: Path, name: str, batch: int, steps: int) -> dict[str, float]:
    """Microseconds of CPU a step, medians: of the stock scheduler, of the followed one, and of the second stock one."""
    kinds = {"stock": False, "counted": True, "control": False}
    runs = {kind: LOADS[name](Engine(model, batch, followed=followed), batch) for kind, followed in kinds.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    gc.collect()
    gc.disable()
    try:
        for turn in track(range(-WARM_STEPS, steps), f"{name}, batch {batch}"):
            # Who goes first finds the caches cold.
            for kind in (*kinds,)[turn % 3 :] + (*kinds,)[: turn % 3]:
                took = runs[kind]()
                if turn >= 0:
                    seconds[kind].append(took)
    finally:
        gc.enable()
    return {kind: 1e6 * statistics.median(values) for kind, values in seconds.items()}


def measure_reader(model: Path, batch: int) -> dict[str, float]:
    """Microseconds of CPU."""
    engine = Engine(model, batch, followed=True)
    for _ in range(2 * batch):
        engine.add(MAX_TOKENS)
    engine.step()
    load = engine.load
    assert load is not None

    def status() -> None:
        snapshot = load.snapshot()
        message = InstanceStatus(waiting_requests=snapshot.waiting, recent_waiting_requests=snapshot.recent)
        message.SerializeToString()

    return {"snapshot_us": _each(load.snapshot), "status_us": _each(status)}


def _each(function: Callable[[], Any], times: int = 2000) -> float:
    began = time.thread_time()
    for _ in range(times):
        function()
    return 1e6 * (time.thread_time() - began) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="sequences at once (default 128)")
    parser.add_argument("--steps", type=int, default=1200, metavar="N", help="of each scheduler (default 1200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON line there")
    args = parser.parse_args()
    if not 0 < args.steps + WARM_STEPS <= MAX_TOKENS:
        parser.error(f"--steps must be from 1 to {MAX_TOKENS - WARM_STEPS}")
    model = build(PRESETS["tiny"])
    console = Console(markup=False)
    table = Table("load", "stock, µs a step", "counted", "added", "added, %", "control, %")
    line: dict[str, Any] = {"bench": "status", "batch": args.batch, "steps": args.steps}
    for name in LOADS:
        found = measure(model, name, args.batch, args.steps)
        stock, counted, control = found["stock"], found["counted"], found["control"]
        added, noise = counted - stock, 100 * (control / stock - 1)
        table.add_row(
            name, f"{stock:.1f}", f"{counted:.1f}", f"{added:+.1f}", f"{100 * added / stock:+.2f}", f"{noise:+.2f}"
        )
        line |= {f"{name}_stock_us": stock, f"{name}_added_us": added, f"{name}_control_us": control - stock}
    line["added_us_per_request"] = line["churn_added_us"] / arrivals(args.batch)
    reader = measure_reader(model, args.batch)
    console.print(table)
    console.print(f"added for each request that comes and goes {line['added_us_per_request']:.1f} µs")
    console.print(", ".join(f"{name.removesuffix('_us')} {value:.1f} µs" for name, value in reader.items()))
    text = json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in
                       (line | reader).items()})  # fmt: skip
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
