# SPDX-License-Identifier: Apache-2.0
"""Instances as a view would hold them, and a cluster that obeys plans at once: for tests of the planner."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llumlet.contract.types import InstanceMetadata, InstanceStatus, RequestInfo
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers import Provider
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.snapshot import Snapshot
from llumsched.cluster.table import standard_table
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.executing.orders import choose
from llumsched.rescheduling.planning.draft import caches_unknown
from llumsched.rescheduling.planning.moves import Move
from llumsched.rescheduling.planning.planner import Plan, plan
from llumsched.rescheduling.planning.policies import ReschedulingPolicy, load_policies
from llumsched.rescheduling.rescheduling_config import SHORTEST_AS_NEEDED, LoadTarget, ReschedulingConfig
from tests.llumsched.cases import UNKNOWN, Known

CAPACITY = 100_000


def instance(instance_id: str, load: float = 0.0, *, received_s: float = 0.0, **more: Any) -> Instance:
    """A neutral one with so much of its KV cache in use, by 20 requests of equal length."""
    tokens = round(load * CAPACITY)
    status: dict[str, Any] = {
        "instance_id": instance_id,
        "schedulable": True,
        "num_total_gpu_tokens": CAPACITY,
        "num_used_gpu_tokens": tokens,
        "num_running_requests": 20 if tokens else 0,
        "scheduler_running_to_decode_requests_num": 20 if tokens else 0,
        "scheduler_running_to_decode_tokens_num": tokens,
    }
    metadata: dict[str, Any] = {
        "instance_id": instance_id,
        "instance_type": "neutral",
        "ip": "127.0.0.1",
        "llumlet_port": 1,
        "block_size": 16,
        "bytes_per_block": 16 << 10,
        "data_parallel_size": 1,
        "stall_budget_ms": 50.0,
    }
    for name, value in more.items():
        for fields, message in ((status, InstanceStatus), (metadata, InstanceMetadata)):
            if name in message.DESCRIPTOR.fields_by_name:
                fields[name] = value
    return Instance(InstanceMetadata(**metadata), InstanceStatus(**status), received_s)


def balancing(infer_type: str = "neutral", threshold: float = 0.0, **more: Any) -> ReschedulingConfig:
    config = ReschedulingConfig(policies=(f"{infer_type}_load",), **more)
    return replace(config, **{infer_type: LoadTarget(threshold=threshold)})


_policies = functools.lru_cache(maxsize=64)(load_policies)


def snapshot(instances: Iterable[Instance], known: Provider | None = None) -> Snapshot:
    table = standard_table(InFlight(), known or Known(UNKNOWN))
    for one in instances:
        table.appeared(one)
    return table.snapshot()


def planned(
    instances: Iterable[Instance],
    config: ReschedulingConfig,
    history: History | None = None,
    now_s: float = 0.0,
    policies: Sequence[ReschedulingPolicy] | None = None,
    known: Provider | None = None,
    shares: Mapping[str, Mapping[str, float]] | None = None,
) -> Plan:
    """`policies`: instead of those of the configuration. `known`: how long steps take; None: nothing is known of it.
    `shares`: what prefix caches have of each instance's; None: that is not known."""
    used = _policies(config) if policies is None else policies
    return plan(
        snapshot(instances, known),
        used,
        history or History(config),
        config,
        now_s,
        shares=caches_unknown if shares is None else lambda one: shares.get(one, {}),
    )


def pairs(made: Plan) -> list[tuple[str, str]]:
    return [(move.source, move.destination) for move in made.moves]


@dataclass
class Cluster:
    """Requests by instance, in the order in which they came; a plan is obeyed within one pass, by the executor's own
    choice of requests."""

    lengths: dict[str, list[int]]
    config: ReschedulingConfig = field(default_factory=lambda: balancing(selection=SHORTEST_AS_NEEDED))
    now_s: float = 0.0
    num_passes: int = 0
    trips: list[tuple[float, str, str, int]] = field(default_factory=list)
    """(when, source, destination, serial number of the request)"""

    def __post_init__(self) -> None:
        self.history = History(self.config)
        self.serial = 0
        self.requests: dict[str, dict[int, int]] = {}
        for name, lengths in self.lengths.items():
            self.requests[name] = {}
            for length in lengths:
                self.add(name, length)

    def add(self, name: str, length: int) -> int:
        self.serial += 1
        self.requests[name][self.serial] = length
        return self.serial

    def load(self, name: str) -> float:
        return sum(self.requests[name].values()) / CAPACITY

    @property
    def imbalance(self) -> float:
        return sum(self.load(name) ** 2 for name in self.requests)

    def instances(self) -> list[Instance]:
        return [self._instance(name) for name in self.requests]

    def _instance(self, name: str) -> Instance:
        number = len(self.requests[name])
        return instance(
            name,
            self.load(name),
            received_s=self.now_s,
            scheduler_running_to_decode_requests_num=number,
            num_running_requests=number,
        )

    def step(self, seconds: float = 0.5) -> list[Move]:
        self.now_s += seconds
        self.history.seen(self.instances())
        made = planned(self.instances(), self.config, self.history, self.now_s)
        for move in made.moves:
            self.num_passes += 1
            self.history.began(self.num_passes, move, self.now_s)
            self.obey(move)
            self.history.ended(self.num_passes, self.now_s)
        return list(made.moves)

    def obey(self, move: Move) -> None:
        here = self.requests[move.source]
        listed = [
            RequestInfo(request_id=str(one), prompt_tokens=here[one], phase=RequestInfo.DECODE, movable=True)
            for one in sorted(here)
        ]
        cooling = self.history.cooling_requests(move.source, self.now_s)
        for one in (int(info.request_id) for info in choose(listed, move, CAPACITY, cooling)):
            self.requests[move.destination][one] = here.pop(one)
            self.history.moved(move.destination, str(one), self.now_s)
            self.trips.append((self.now_s, move.source, move.destination, one))
