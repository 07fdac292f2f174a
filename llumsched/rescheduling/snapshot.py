# SPDX-License-Identifier: Apache-2.0
"""The cluster as one pass sees it: a row per instance, a column per number.

Rows are in the order of the instances' ids, so a stable sort of a column breaks ties by id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llumlet.types import Health
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
    running: Column
    """Requests that could move with a KV cache, those on their way excluded."""
    running_tokens: Column
    waiting: Column
    waiting_tokens: Column
    total_tokens: Column
    free_tokens: Column
    max_out: Column
    """Moves at a time; NO_LIMIT if it does not say."""
    max_in: Column
    moving_out: Column
    moving_in: Column
    bytes_per_token: Column
    stall_s: Column
    """Longest stall that the instance allows in a move."""

    def __len__(self) -> int:
        return len(self.ids)


def take(
    instances: Iterable[Instance], measure: Measure, now_s: float, *, staleness_s: float, domain: Domain
) -> Snapshot:
    """Instances without a status are left out: nothing is known of them yet."""
    by_id = {instance.metadata.instance_id: instance for instance in instances if instance.status is not None}
    ids = sorted(by_id)
    known = [by_id[instance_id] for instance_id in ids]
    rows = np.array([_row(instance, measure, now_s, staleness_s) for instance in known], dtype=np.float64)
    columns = rows.reshape(len(known), _NUM_COLUMNS).T
    metadata = [instance.metadata for instance in known]
    sick = columns[1].astype(bool)
    units = codes_of([data.unit_id if data.data_parallel_size > 1 else "" for data in metadata])
    return Snapshot(
        ids,
        {instance_id: row for row, instance_id in enumerate(ids)},
        np.array([data.instance_type or "neutral" for data in metadata], dtype=np.str_),
        codes_of([f"{data.instance_type}\n{data.compatibility_digest}" for data in metadata]),
        codes_of([data.unit_id for data in metadata]),
        columns[0],
        sick,
        failing(domain, sick, codes_of([data.node_id for data in metadata]), units),
        columns[2].astype(bool),
        *columns[3:],
    )


_NUM_COLUMNS = 15


def _row(instance: Instance, measure: Measure, now_s: float, staleness_s: float) -> tuple[float, ...]:
    status, metadata = instance.status, instance.metadata
    assert status is not None
    block_tokens = max(metadata.block_size, 1)
    return (
        measure(instance),
        not status.schedulable or now_s - instance.received_s > staleness_s,
        status.health != _HUNG,
        status.scheduler_running_to_decode_requests_num,
        status.scheduler_running_to_decode_tokens_num,
        status.num_waiting_requests,
        status.num_uncomputed_tokens_all_waiting_prefills,
        status.num_total_gpu_tokens,
        status.num_total_gpu_tokens - status.num_used_gpu_tokens,
        metadata.max_migrations_out or NO_LIMIT,
        metadata.max_migrations_in or NO_LIMIT,
        status.num_migrate_out_reqs,
        status.num_migrate_in_reqs,
        metadata.bytes_per_block / block_tokens,
        (metadata.stall_budget_ms or _STALL_BUDGET_MS) / 1000,
    )


_HUNG = Health.HUNG
_STALL_BUDGET_MS = 200.0
"""An engine's default."""
