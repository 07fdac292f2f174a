# SPDX-License-Identifier: Apache-2.0
"""Cost of taking statuses, for each scheduler that follows a Redis.

    python -m benchmarks.status_intake --instances 1000

CPU time of this thread for each status: its message on the channel and its share of the reads, through a real Redis on
this machine, and what is then done with it (parsed, checked, told to all that observe the view of a dispatcher; a
column is read for every ten). The baseline parses both records each time, reads the numbers once to check them and
once for the table, and writes each row at once; every instance writes as often as its load changes, 25 times a second.
Ours is the store as it is, with the pace that writers keep among so many instances (`redis_link`). Both are
measured in turns, and the least of the rounds counts: what other processes do to caches and clocks only adds to it. A
core's share is the time for a status times the statuses that all instances write in a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from statistics import median

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.scheduler import _Cluster
from llumlet.contract.cms.redis_layout import Layout
from llumlet.contract.cms.redis_link import LEAST_INTERVAL_S, MOST_WRITES_PER_S
from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.redis_client import connect
from llumsched.cluster.providers.account import Account
from llumsched.cms.redis import RedisStore
from llumsched.cms.validation import status_faults
from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.policy.document import Mode, load_policy
from tests.support.redis_server import RedisServer
from tests.support.report import add_json, print_json

_STATUSES_PER_LOOK = 10
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


class _Follower:
    """A scheduler's store, and what observes it."""

    def __init__(self) -> None:
        self.store = RedisStore("redis://127.0.0.1:1")
        view = self.store.view
        self.table = Dispatcher(
            view, load_policy("load-balance", Mode.FULL), Account(time.monotonic, 10.0), time.monotonic
        ).table

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=11)
    add_json(parser)
    options = parser.parse_args()
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
