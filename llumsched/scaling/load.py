# SPDX-License-Identifier: Apache-2.0
"""The load of a group, as the number of instances that it needs.

The paper scales by freeness: with M tokens of KV cache in each of n instances, V tokens used or claimed by waiting
requests, and B requests, it is (n·M - V) / B, and must be at least a. Solved for n that is

    n ≥ (V + a·B) / M

which does not depend on the present number, so that starting and leaving instances do not change it and one step
reaches the right number, where the paper steps by one. An empty cluster needs none.

A latency with a limit needs n · latency / limit instances. It is not proportional to n, so the next evaluation corrects
the estimate, and one step at most doubles the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from llumsched.cluster.columns import Cluster, Mask, Rows, Values, base_model
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.metadata import type_of
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.metrics import METRICS
from llumsched.scaling.scaling_config import ScalingConfig

STALE_S: Final = 60.0
"""Silence after which an instance is ignored, as for dispatch."""
_CLAIMED: Final = METRICS["kv_cache_usage_ratio_projected"]
_REQUESTS: Final = METRICS["num_requests"]
_MOST_AT_ONCE: Final = 2.0
_COMFORT: Final = 0.7
"""Share of a latency limit below which one instance fewer is enough."""


class Group(NamedTuple):
    """Instances that can replace each other."""

    model: str
    infer_type: str


@dataclass(frozen=True, slots=True)
class Load:
    """A group at one moment."""

    rows: Rows
    """The instances that serve."""
    num_starting: int
    """Instances that have sent metadata but no status yet."""
    num_leaving: int
    """Instances that take nothing new; their load moves to the others."""
    num_requests: float
    needed: float
    """Below this number of instances there are too few."""
    reason: str
    """The reason why they are needed."""
    comfortable: float
    """Above this number of instances there are too many; at least `needed`."""


def group_of(instance: Instance) -> Group:
    return Group(base_model(instance), type_of(instance))


def measure(cluster: Cluster, config: ScalingConfig, now_s: float) -> dict[Group, Load]:
    """The load of each group. `now_s` is on the view's clock."""
    members: dict[Group, list[int]] = {}
    for row, instance in enumerate(cluster.instances):
        members.setdefault(group_of(instance), []).append(row)
    columns = Candidates(cluster, Context(now_s))
    heard = (cluster["reported"] > 0) & (now_s - cluster["received_s"] <= STALE_S)
    serves = heard & (cluster["schedulable"] > 0)
    return {
        group: _load(columns, np.array(rows, np.intp), heard, serves, config) for group, rows in sorted(members.items())
    }


def claimed_tokens(columns: Candidates) -> Values:
    """V by instance: tokens of KV cache in use, or claimed by requests that wait or are on their way."""
    shares, capacities = columns.values(_CLAIMED), columns["num_total_gpu_tokens"]
    return np.where(capacities > 0, np.where(np.isfinite(shares), shares, 0.0) * capacities, 0.0)


def _load(columns: Candidates, members: Rows, heard: Mask, serves: Mask, config: ScalingConfig) -> Load:
    rows, counted = members[serves[members]], members[heard[members]]
    claimed = float(claimed_tokens(columns)[counted].sum())
    requests = float(columns.values(_REQUESTS)[counted].sum())
    capacity = float(columns["num_total_gpu_tokens"][rows].mean()) if len(rows) else 0.0
    needs: list[tuple[float, float, str]] = [(0.0, 0.0, "idle")]
    if capacity > 0 and requests > 0:
        low, high = (
            (claimed + freeness * requests) / capacity for freeness in (config.low_freeness, config.high_freeness)
        )
        needs.append((low, high, "KV cache"))
    needs += _latencies(columns, rows, config)
    needed, _, reason = max(needs)
    starting = int((columns["reported"][members] == 0).sum())
    leaving = len(counted) - len(rows)
    return Load(rows, starting, leaving, requests, needed, reason, max(high for _, high, _ in needs))


def _latencies(columns: Candidates, rows: Rows, config: ScalingConfig) -> Sequence[tuple[float, float, str]]:
    """Instances needed and comfortable, by latencies that have a limit, of those instances whose steps are known."""
    found = []
    for name, limit_s, reason in (
        ("predicted_ttft", config.ttft_s, "time to first token"),
        ("predicted_tpot", config.tpot_s, "time per token"),
    ):
        if limit_s <= 0:
            continue
        latencies_ms = columns.values(METRICS[name])[rows]
        known_ms = latencies_ms[np.isfinite(latencies_ms)]
        if len(known_ms):
            share = float(known_ms.mean()) / 1e3 / limit_s
            needed, comfortable = (len(rows) * min(each, _MOST_AT_ONCE) for each in (share, share / _COMFORT))
            found.append((needed, comfortable, reason))
    return found
