# SPDX-License-Identifier: Apache-2.0
"""Cost of taking statuses, for each scheduler that follows a Redis or is the CMS of its instances.

    python -m benchmarks.status_intake --instances 1000
    python -m benchmarks.status_intake --instances 1000 --embedded

Redis: CPU time of this thread for each status: its message on the channel and its share of the reads, through a real
Redis on this machine, and what is then done with it (parsed, checked, told to all that observe the view of a
dispatcher; a column is read for every ten). The baseline parses both records each time, reads the numbers once to
check them and once for the table, and writes each row at once; every instance writes as often as its load changes, 25
times a second. Ours is the store as it is, with the pace that writers keep among so many instances
(`redis_reports`). Both are measured in turns, and the least of the rounds counts: what other processes do to
caches and clocks only adds to it. A core's share is the time for a status times the statuses that all instances write
in a second.

Embedded: reporters, each with a connection of its own and always something new to say, in a process of their own. CPU
time of the scheduler's process, all threads, while they report at the pace that the store asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.scheduler import _Cluster
from llumlet.contract import channels
from llumlet.contract.cms.redis_reports import LEAST_INTERVAL_S, MOST_WRITES_PER_S, Layout
from llumlet.contract.cms.reporter import Reporter
from llumlet.contract.cms.stores import DESCRIBE_EVERY_S
from llumlet.contract.cms.stores import LEAST_INTERVAL_S as LEAST_GRPC_INTERVAL_S
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.redis_client import connect
from llumsched.cluster import table as tables
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.account import Account
from llumsched.cluster.view import View
from llumsched.cms.embedded import MOST_STATUSES_PER_S, EmbeddedStore
from llumsched.cms.redis import RedisStore
from llumsched.cms.validation import status_faults
from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.policy.document import Mode, load_policy
from tests.support.redis_server import RedisServer
from tests.support.report import add_json, print_json

_STATUSES_PER_LOOK = 10
_START_S = 120.0
_Record = tuple[str, bytes, bytes]


@dataclasses.dataclass(frozen=True)
class StatusIntake:
    instances: int
    message_us: float
    """For the message of a status on the channel, and its share of the reads."""
    baseline_us: float
    ours_us: float
    """Microseconds to take one status, after it was read."""
    ratio: float
    baseline_cores: float
    """Share of a core that one scheduler needs, with every instance busy."""
    ours_cores: float
    ours_interval_s: float
    """Between two writes of one busy instance."""


@dataclasses.dataclass(frozen=True)
class EmbeddedIntake:
    instances: int
    status_us: float
    """CPU time of the scheduler's process for one status, from the socket to the table of the dispatcher."""
    statuses_per_s: float
    interval_s: float
    """Between two statuses of one busy instance, as the store asks for it."""
    cores: float
    """Share of a core at that interval."""


def _table(view: View) -> tables.Table:
    policy, account = load_policy("load-balance", Mode.FULL), Account(time.monotonic, 10.0)
    return Dispatcher(view, policy, account, time.monotonic).table


class _Follower:
    """A scheduler's store, and what observes it."""

    def __init__(self) -> None:
        self.store = RedisStore("redis://127.0.0.1:1")
        self.table = _table(self.store.view)

    def ours(self, record: _Record) -> None:
        self.store._take(*record, published=True)

    def baseline(self, record: _Record) -> None:
        instance_id, metadata_bytes, status_bytes = record
        metadata, status = InstanceMetadata(), InstanceStatus()
        metadata.ParseFromString(metadata_bytes)
        known = self.store.view[instance_id]
        assert known.metadata == metadata
        status.ParseFromString(status_bytes)
        assert not status_faults(status, instance_id, metadata.incarnation)
        self.store.view.put_status(status)
        self.store._intake.heard(instance_id)
        self.table["reported"]


def _records(cluster: _Cluster) -> list[_Record]:
    found = []
    for name in cluster.names:
        cluster.arrive(f"request-{time.monotonic_ns()}", name)
        status = cluster.status(name)
        status.timestamp_ms = int(time.time() * 1e3)
        found.append((name, cluster.view[name].metadata.SerializeToString(), status.SerializeToString()))
    return found


def _timed(take: Callable[[_Record], None], follower: _Follower, records: Sequence[_Record]) -> float:
    began_s = time.thread_time()
    for number, record in enumerate(records):
        take(record)
        if not number % _STATUSES_PER_LOOK:
            follower.table["num_used_gpu_tokens"]
    return (time.thread_time() - began_s) / len(records) * 1e6


async def _messages(records: Sequence[_Record]) -> float:
    async with RedisServer() as server:
        writer, reader = connect(server.url), connect(server.url)
        layout, values = Layout.of(server.url), {}
        for name, metadata, status in records:
            values |= {layout.metadata + name: metadata, layout.status + name: status}
        await writer.mset(values)
        async with reader.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(layout.channel)
            pipeline = writer.pipeline(transaction=False)
            for name, _, _ in records:
                pipeline.publish(layout.channel, name)
            await pipeline.execute()
            began_s, num_left = time.thread_time(), len(records)
            async for _ in channel.listen():
                num_left -= 1
                if not num_left:
                    break
            await reader.mget(list(values))
            took_s = time.thread_time() - began_s
        await writer.aclose()
        await reader.aclose()
    return took_s / len(records) * 1e6


def measure(instances: int, rounds: int) -> StatusIntake:
    cluster, follower = _Cluster(instances), _Follower()
    for record in _records(cluster):
        follower.ours(record)
    messages = median(uvloop.run(_messages(_records(cluster))) for _ in range(3))
    baseline, ours = [], []
    for _ in track(range(rounds), "rounds", console=Console(stderr=True, markup=False)):
        for take, times in ((follower.baseline, baseline), (follower.ours, ours)):
            records = _records(cluster)
            gc.collect()
            times.append(_timed(take, follower, records))
    least_s = LEAST_INTERVAL_S
    paced_s = max(least_s, instances / MOST_WRITES_PER_S)
    before, now = min(baseline), min(ours)
    return StatusIntake(
        instances,
        message_us=messages,
        baseline_us=before,
        ours_us=now,
        ratio=now / before,
        baseline_cores=(messages + before) * instances / least_s / 1e6,
        ours_cores=(messages + now) * instances / paced_s / 1e6,
        ours_interval_s=paced_s,
    )


class _Count:
    """An observer of statuses, and a reader of a column for every ten."""

    def __init__(self, view: View) -> None:
        self.table, self.num_statuses = _table(view), 0

    def appeared(self, instance: Instance) -> None: ...

    def left(self, instance: Instance) -> None: ...

    def changed(self, instance: Instance) -> None:
        self.num_statuses += 1
        if not self.num_statuses % _STATUSES_PER_LOOK:
            self.table["num_used_gpu_tokens"]


async def _play(address: str, instances: int) -> None:
    """Reports without an end, as often as the store lets it."""
    logging.disable()
    channels._OPTIONS.append(("grpc.use_local_subchannel_pool", 1))
    cluster = _Cluster(instances)

    def reporter(name: str) -> Reporter:
        def status() -> InstanceStatus:
            asyncio.get_running_loop().call_soon(busy.changed)
            return cluster.status(name)

        busy = Reporter(address, lambda: cluster.view[name].metadata, status)
        return busy

    await asyncio.gather(*(reporter(name).run() for name in cluster.names))


async def _embedded(instances: int, seconds: float) -> EmbeddedIntake:
    store = EmbeddedStore()
    await store.start()
    count = _Count(store.view)
    store.view.observe(count)
    command = ("-m", "benchmarks.status_intake", "--instances", str(instances), "--play", str(store.address))
    player = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        async with asyncio.timeout(_START_S):
            while len(store.view) < instances:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(2 * DESCRIBE_EVERY_S)
        num_before, cpu_s, began_s = count.num_statuses, time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        num_statuses, cpu_s = count.num_statuses - num_before, time.process_time() - cpu_s
        elapsed_s = time.monotonic() - began_s
    finally:
        player.kill()
        await player.wait()
        await store.close()
    interval_s = max(LEAST_GRPC_INTERVAL_S, instances / MOST_STATUSES_PER_S)
    status_us = cpu_s / num_statuses * 1e6
    return EmbeddedIntake(
        instances, status_us, num_statuses / elapsed_s, interval_s, status_us * instances / interval_s / 1e6
    )


def measure_embedded(instances: int, seconds: float) -> EmbeddedIntake:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    return uvloop.run(_embedded(instances, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--embedded", action="store_true", help="the CMS of the scheduler itself, instead of a Redis")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the measurement of an embedded CMS")
    parser.add_argument("--play", metavar="ADDRESS", help=argparse.SUPPRESS)
    add_json(parser)
    options = parser.parse_args()
    if options.play:
        uvloop.run(_play(options.play, options.instances))
        return
    if options.embedded:
        taken = measure_embedded(options.instances, options.seconds)
        table = Table("a status, µs", "statuses a second", "interval, ms", "share of a core", title="Embedded CMS")
        figures = (taken.status_us, taken.statuses_per_s, 1e3 * taken.interval_s, taken.cores)
        table.add_row(*(f"{figure:,.2f}" for figure in figures))
        Console(markup=False).print(table)
        print_json(options.json, dataclasses.asdict(taken))
        return
    found = measure(options.instances, options.rounds)
    table = Table(title=f"Statuses of {found.instances} busy instances")
    for name in ("", "message and read, µs", "taken, µs", "statuses a second", "share of a core"):
        table.add_column(name, justify="right" if name else "left")
    rows = (
        ("baseline", found.baseline_us, LEAST_INTERVAL_S, found.baseline_cores),
        ("ours", found.ours_us, found.ours_interval_s, found.ours_cores),
    )
    for name, taken_us, interval_s, cores in rows:
        rate = found.instances / interval_s
        table.add_row(name, f"{found.message_us:.1f}", f"{taken_us:.1f}", f"{rate:.0f}", f"{cores:.2f}")
    Console(markup=False).print(table)
    print_json(options.json, dataclasses.asdict(found))


if __name__ == "__main__":
    main()
