# SPDX-License-Identifier: Apache-2.0
"""The cluster as one pass sees it: a row per instance, a column per number.

Rows are in the order of the instances' ids, so a stable sort of a column breaks ties by id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from llumlet.types import Health, InstanceMetadata
from llumsched.cms.view import Instance
from llumsched.rescheduling.config import Domain
from llumsched.rescheduling.domains import Codes, Mask, codes_of, failing

Column = npt.NDArray[np.float64]
Measure = Callable[[Instance], float]
"""Load of an instance, in the metric of its infer type."""

NO_LIMIT = 1e9
"""Slots for moves of an instance that does not say how many it has."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    ids: list[str]
    index: dict[str, int]
    infer_types: npt.NDArray[np.str_]
    groups: Codes
    """Equal where requests can be exchanged: the same infer type and compatibility digest."""
    units: Codes
    load: Column
    sick: Mask
    """Takes nothing new: not schedulable, or silent for too long."""
    failing: Mask
    """Sick, or in a failure domain with one that is."""
    reachable: Mask
    """Its loop turns, as far as is known, so it can be asked for moves."""
    moves: Mask
    """Its requests can go elsewhere at all."""
    carries_kv: Mask
    """… and bring their KV cache along; if not, those that have one cost a prefill."""
    running: Column
    """Requests that could move with a KV cache, those on their way excluded."""
    running_tokens: Column
    waiting: Column
    waiting_tokens: Column
    moving_out: Column
    moving_in: Column
    total_tokens: Column
    free_tokens: Column
    max_out: Column
    """Moves at a time; NO_LIMIT if it does not say."""
    max_in: Column
    bytes_per_token: Column
    stall_s: Column
    """Longest stall that the instance allows in a move."""

    def __len__(self) -> int:
        return len(self.ids)


class Camera:
    """Takes snapshots. What comes of the metadata changes seldom and is kept from one to the next."""

    def __init__(self, measure: Measure, *, staleness_s: float, domain: Domain) -> None:
        self._measure = measure
        self._staleness_s = staleness_s
        self._domain = domain
        self._roster = _Roster([])

    def take(self, instances: Iterable[Instance], now_s: float, lost: Sequence[Instance] = ()) -> Snapshot:
        """Instances without a status are left out: nothing is known of them yet. Those that are `lost` are sick, and
        beyond reach."""
        lost_ids = {instance.id for instance in lost}
        known = sorted((one for one in chain(instances, lost) if one.status is not None), key=_ID)
        metadata = [instance.metadata for instance in known]
        # The same objects, as a rule, and then this is a comparison of pointers.
        if metadata != self._roster.metadata:
            self._roster = _Roster(metadata)
        roster = self._roster
        numbers = _table([_NUMBERS(instance.status) for instance in known], len(_INTO_OTHERS) + len(_AS_THEY_ARE))
        schedulable, health, total, used, *as_they_are = numbers
        silent = now_s - np.array([instance.received_s for instance in known], dtype=np.float64) > self._staleness_s
        gone = np.array([instance.id in lost_ids for instance in known], dtype=np.bool_)
        sick = (schedulable == 0) | silent | gone
        return Snapshot(
            roster.ids,
            roster.index,
            roster.infer_types,
            roster.groups,
            roster.units,
            np.array(list(map(self._measure, known)), dtype=np.float64),
            sick,
            failing(self._domain, sick, roster.nodes, roster.failing_units),
            (health != Health.HUNG) & ~gone,
            roster.moves,
            roster.moves & ~np.array(list(map(_KV_UNSUPPORTED, known)), dtype=np.bool_),
            *[*as_they_are, total, total - used, *roster.limits],
        )


_ID = attrgetter("metadata.instance_id")
_KV_UNSUPPORTED = attrgetter("status.kv_unsupported")
_INTO_OTHERS = ("schedulable", "health", "num_total_gpu_tokens", "num_used_gpu_tokens")
_AS_THEY_ARE = (  # in the order of Snapshot
    "scheduler_running_to_decode_requests_num",
    "scheduler_running_to_decode_tokens_num",
    "num_waiting_requests",
    "num_uncomputed_tokens_all_waiting_prefills",
    "num_migrate_out_reqs",
    "num_migrate_in_reqs",
)
_NUMBERS = attrgetter(*_INTO_OTHERS, *_AS_THEY_ARE)


class _Roster:
    """Columns of the metadata."""

    def __init__(self, metadata: list[InstanceMetadata]) -> None:
        """`metadata` in the order of the ids."""
        self.metadata = metadata
        self.ids = [data.instance_id for data in metadata]
        self.index = {instance_id: row for row, instance_id in enumerate(self.ids)}
        self.infer_types = np.array([data.instance_type or "neutral" for data in metadata], dtype=np.str_)
        self.groups = codes_of([f"{data.instance_type}\n{data.compatibility_digest}" for data in metadata])
        self.nodes = codes_of([data.node_id for data in metadata])
        self.units = codes_of([data.unit_id for data in metadata])
        self.failing_units = codes_of([data.unit_id if data.data_parallel_size > 1 else "" for data in metadata])
        self.moves = np.array([not data.unsupported for data in metadata], dtype=np.bool_)
        self.limits = _table([_limits(data) for data in metadata], 4)


def _limits(metadata: InstanceMetadata) -> tuple[float, ...]:
    return (
        metadata.max_migrations_out or NO_LIMIT,
        metadata.max_migrations_in or NO_LIMIT,
        metadata.bytes_per_block / max(metadata.block_size, 1),
        (metadata.stall_budget_ms or _STALL_BUDGET_MS) / 1000,
    )


def _table(rows: list[tuple[float, ...]], num_columns: int) -> npt.NDArray[np.float64]:
    """Column by column."""
    return np.ascontiguousarray(np.array(rows, dtype=np.float64).reshape(len(rows), num_columns).T)


_STALL_BUDGET_MS = 200.0
"""An engine's default."""
