# SPDX-License-Identifier: Apache-2.0
"""How old is what a scheduler sees?

    python -m benchmarks.status_to_view --instances 100 --rate 10 --seconds 10

From the moment at which the load of an instance changes to the moment at which the scheduler's view shows it, over the
embedded CMS: reporters with a gRPC stream each, in a process of their own, and the CMS in this one. With `--cms
redis://…` over that Redis instead. A change that is
coalesced into a later push counts from its own time, not from that push. Both processes read the same monotonic clock.
The CPU time per change says what the CMS costs the scheduler; unlike the latency, it does not depend on what else the
machine is doing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import time
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from llumlet.contract.cms.reporter import Reporter
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.cms.embedded import EmbeddedStore
from llumsched.cms.store import open_store
from tests.support.report import add_json, print_json
from tests.support.stats import quantile

EMBEDDED = "listen://127.0.0.1:0"
_BURST_S = 0.001
"""The sender makes its changes in bursts so far apart."""
_WARM_UP_S = 1.0
_ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, slots=True)
class StatusToView:
    instances: int
    rate: float
    pushes_per_s: float
    """Pushes that came; less than instances times rate if changes were coalesced."""
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_us_per_push: float
    """CPU time of the process that holds the view."""


class _Ages:
    """An observer: when a status that left at `step_duration` by the monotonic clock is seen."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.listening = False
        self._ids: set[str] = set()
        self._more = asyncio.Event()

    async def reported(self, instances: int) -> None:
        """Wait until so many have reported a status."""
        while len(self._ids) < instances:
            self._more.clear()
            await self._more.wait()

    def appeared(self, instance: Instance) -> None: ...

    def left(self, instance: Instance) -> None: ...

    def changed(self, instance: Instance) -> None:
        status = instance.status
        if not self.listening:
            self._ids.add(instance.id)
            self._more.set()
        elif status is not None and status.step_duration:
            self.seconds.append(time.monotonic() - status.step_duration)


class _Source:
    """A load that changes when told to; `step_duration` is the time of the first change that was not pushed yet."""

    def __init__(self, name: str, cms: str, requests: int) -> None:
        self._name = name
        self._changed_s = 0.0
        self._update_id = 0
        self._requests = [f"cmpl-{index:032x}" for index in range(requests)]
        self.reporter = Reporter(cms, self._metadata, self._status)

    def change(self) -> None:
        if not self._changed_s:
            self._changed_s = time.monotonic()
        self._update_id += 1
        self.reporter.changed()

    def _metadata(self) -> InstanceMetadata:
        return InstanceMetadata(
            instance_id=self._name, incarnation="1", ip="127.0.0.1", instance_type="neutral", utc_create=1.0
        )

    def _status(self) -> InstanceStatus:
        changed_s, self._changed_s = self._changed_s, 0.0
        return InstanceStatus(
            instance_id=self._name,
            incarnation="1",
            schedulable=True,
            update_id=self._update_id,
            recent_waiting_requests=self._requests,
            num_running_requests=64,
            num_total_gpu_tokens=1 << 20,
            num_used_gpu_tokens=1 << 19,
            scheduler_running_to_decode_tokens_num=1 << 18,
            step_duration=changed_s,
            num_total_blocks=1 << 16,
            num_free_blocks=1 << 15,
        )


async def _send(cms: str, instances: int, rate: float, requests: int) -> None:
    """Sends until it is killed."""
    sources = [_Source(f"i-{index}", cms, requests) for index in range(instances)]
    runs = [asyncio.create_task(source.reporter.run()) for source in sources]
    begun, made = time.monotonic(), 0
    while not any(run.done() for run in runs):
        due = int((time.monotonic() - begun) * instances * rate)
        # Behind by more than a round, it says nothing about the CMS any more to catch up.
        for number in range(max(made, due - instances), due):
            sources[number % instances].change()
        made = due
        await asyncio.sleep(_BURST_S)


async def measure(
    instances: int = 100,
    rate: float = 10.0,
    seconds: float = 10.0,
    requests: int = 10,
    *,
    cms: str = EMBEDDED,
    quiet: bool = False,
) -> StatusToView:
    """`requests`: ids in each status. Raises RuntimeError if the sender ends early."""
    store, ages = open_store(cms), _Ages()
    await store.start()
    store.view.observe(ages)
    address = str(store.address) if isinstance(store, EmbeddedStore) else cms
    arguments = ["--send", address, "--instances", str(instances), "--rate", str(rate)]
    sender = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.status_to_view", *arguments, "--requests", str(requests),
        cwd=_ROOT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            await ages.reported(instances)
        await asyncio.sleep(_WARM_UP_S)
        cpu_s, begun = _cpu_s(), time.monotonic()
        ages.listening = True
        for _ in track(
            range(int(seconds * 10)), "status to view", console=Console(stderr=True, quiet=quiet, markup=False)
        ):
            await asyncio.sleep(0.1)
        elapsed, cpu_s = time.monotonic() - begun, _cpu_s() - cpu_s
        if sender.returncode is not None:
            raise RuntimeError(f"the sender has ended with status {sender.returncode}")
    finally:
        if sender.returncode is None:
            sender.kill()
        await sender.wait()
        await store.close()
    return StatusToView(
        instances=instances,
        rate=rate,
        pushes_per_s=len(ages.seconds) / elapsed,
        p50_ms=quantile(ages.seconds, 0.5) * 1e3,
        p99_ms=quantile(ages.seconds, 0.99) * 1e3,
        max_ms=max(ages.seconds) * 1e3,
        cpu_us_per_push=cpu_s / len(ages.seconds) * 1e6,
    )


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--rate", type=float, default=10.0, help="changes per second of each instance")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=10, help="request ids in each status")
    parser.add_argument("--cms", default=EMBEDDED, help="listen://HOST:PORT (default: embedded, any port) or redis://…")
    add_json(parser)
    parser.add_argument("--send", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        uvloop.run(_send(args.send, args.instances, args.rate, args.requests))
        return
    result = uvloop.run(measure(args.instances, args.rate, args.seconds, args.requests, cms=args.cms))
    table = Table("instances", "changes/s each", "pushes/s", "p50 ms", "p99 ms", "max ms", "CPU µs/push")
    figures = (result.pushes_per_s, result.p50_ms, result.p99_ms, result.max_ms, result.cpu_us_per_push)
    table.add_row(str(result.instances), f"{result.rate:g}", *(f"{figure:,.2f}" for figure in figures))
    Console(markup=False).print(table)
    print_json(
        args.json, {"bench": "status_to_view", **dataclasses.asdict(result), "status_to_view_p99_ms": result.p99_ms}
    )


if __name__ == "__main__":
    main()
