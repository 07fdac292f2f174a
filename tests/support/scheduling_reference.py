# SPDX-License-Identifier: Apache-2.0
"""What the columns must answer, by plain Python: one instance at a time, and no arrays. The reference of the built-in
metrics of which less is better, filters and selectors."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llumlet.contract.types import NOT_WELL, Health, InstanceStatus, word
from llumsched.cluster.domains import FailoverDomain
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.in_flight import NONE_IN_FLIGHT, Counters
from llumsched.policy import filters as f
from llumsched.policy.pipeline import Stage
from llumsched.policy.selectors import Draw, MetricBasedSelector
from llumsched.request import Request


@dataclass(frozen=True)
class Load:
    instance: Instance
    sent: Counters = NONE_IN_FLIGHT
    request: Request = field(default_factory=Request)
    """That asks for a place."""

    @property
    def status(self) -> InstanceStatus:
        return self.instance.status or InstanceStatus()


def _kv_cache_usage_ratio_projected(load: Load) -> float:
    status = load.status
    if status.num_total_gpu_tokens <= 0:
        return math.inf
    tokens = (
        status.num_used_gpu_tokens
        + max(status.num_uncomputed_tokens_all_waiting_prefills, status.num_unallocated_tokens_all_waiting_requests)
        + status.num_unallocated_tokens_scheduler_running_prefills
        + status.num_unallocated_tokens_hybrid_scheduler_waiting_decodes
        + load.sent.num_tokens
    )
    return tokens / status.num_total_gpu_tokens


def _urgent_headroom(load: Load) -> float:
    has_urgent = load.status.num_urgent_requests + load.sent.num_urgent_requests > 0
    return 1 / 2 if has_urgent or load.request.priority < 0 else 0.0


def _virtual_usage(load: Load) -> float:
    status = load.status
    if not status.schedulable or status.num_total_gpu_tokens <= 0:
        return math.inf
    tokens = (
        status.num_used_gpu_tokens
        + status.num_unallocated_tokens_scheduler_running_prefills
        + status.num_unallocated_tokens_hybrid_scheduler_waiting_decodes
        + status.num_unallocated_tokens_first_waiting_request
        + load.sent.num_tokens
    )
    return tokens / status.num_total_gpu_tokens + _urgent_headroom(load)


METRICS: dict[str, Callable[[Load], float]] = {
    "kv_cache_usage_ratio_projected": _kv_cache_usage_ratio_projected,
    "decode_batch_size": lambda load: (
        load.status.hybrid_scheduler_waiting_to_decode_requests_num
        + load.status.num_loading_requests
        + load.status.scheduler_waiting_to_decode_requests_num
        + load.status.scheduler_running_to_decode_requests_num
        + load.sent.num_decode_requests
    ),
    "num_waiting_requests": lambda load: load.status.num_waiting_requests + load.sent.num_requests,
    "all_prefills_tokens_num": lambda load: (
        load.status.num_uncomputed_tokens_all_waiting_prefills
        + load.status.num_uncomputed_tokens_scheduler_running_prefills
        + load.sent.num_uncomputed_prefill_tokens
    ),
    "num_requests": lambda load: (
        load.status.num_waiting_requests
        + load.status.num_loading_requests
        + load.status.num_running_requests
        + load.sent.num_requests
    ),
    "all_decodes_tokens_num": lambda load: (
        load.status.hybrid_scheduler_waiting_to_decode_tokens_num
        + load.status.scheduler_waiting_to_decode_tokens_num
        + load.status.scheduler_running_to_decode_tokens_num
        + load.status.num_tokens_loading_requests
        + load.sent.num_decode_tokens
    ),
    "num_tokens": lambda load: load.sent.num_tokens,
    "urgent_headroom": _urgent_headroom,
    "virtual_usage": _virtual_usage,
}


@dataclass(frozen=True)
class Situation:
    now_s: float
    request: Request = field(default_factory=Request)
    avoid: frozenset[str] = frozenset()
    complaints: dict[str, str] = field(default_factory=dict)
    lost: tuple[Instance, ...] = ()


def refusal(one: f.Filter, load: Load, seen: Situation) -> str | None:
    """The reason of a filter of one instance."""
    instance, status, request = load.instance, load.instance.status, seen.request
    metadata = instance.metadata
    match one:
        case f.ModelFilter():
            serves = not request.model or request.model in (metadata.served_models or (metadata.model,))
            return None if serves else f"does not serve {request.model!r}"
        case f.InferTypeFilter():
            found = metadata.instance_type or "neutral"
            return None if found == one.infer_type else f"is {found}, not {one.infer_type}"
        case f.CapacityFilter():
            limits = [limit for limit in (metadata.max_model_len, load.status.num_total_gpu_tokens) if limit > 0]
            if not limits or request.prompt_num_tokens <= min(limits) - 1:
                return None
            return f"a prompt of {request.prompt_num_tokens} tokens does not fit: {min(limits) - 1} at most"
        case f.RetryFilter():
            return "had this request before" if instance.id in seen.avoid else None
        case f.BreakerFilter():
            return seen.complaints.get(instance.id)
        case f.SchedulabilityFilter():
            if status is None:
                return "has not reported its status yet"
            if status.health in NOT_WELL:
                return f"{word(Health, status.health)}: its loop has not moved for {status.loop_age_ms / 1e3:.1f} s"
            return None if status.schedulable else "takes no new requests"
        case f.StalenessFilter():
            age_s = seen.now_s - instance.received_s
            return f"last status {age_s:.1f} s ago" if age_s > one.seconds else None
        case f.MetricBasedFilter():
            value = METRICS[one.metric.name](load)
            return None if value < one.threshold else f"{one.metric.name} is {value:g}, not below {one.threshold:g}"
    raise AssertionError(one)


def failing_with(instances: Sequence[Instance], failed: set[str], domain: FailoverDomain) -> set[str]:
    """Ids of those that fail together with `failed`."""

    def neighbours(ids: set[str], place: Callable[[Instance], str]) -> set[str]:
        places = {place(one) for one in instances if one.id in ids} - {""}
        return ids | {one.id for one in instances if place(one) in places}

    together = {one.id for one in instances if one.id in failed}
    if domain in (FailoverDomain.NODE, FailoverDomain.NODE_UNIT):
        together = neighbours(together, lambda one: one.metadata.node_id)
    if domain in (FailoverDomain.INSTANCE_UNIT, FailoverDomain.NODE_UNIT):
        together = neighbours(together, lambda one: one.metadata.unit_id if one.metadata.data_parallel_size > 1 else "")
    return together


def refusals(stage: Stage, loads: Sequence[Load], seen: Situation) -> dict[str, list[tuple[str, str, bool]]]:
    """By instance id: filter, reason, and whether a second pass does without it."""
    found: dict[str, list[tuple[str, str, bool]]] = {load.instance.id: [] for load in loads}
    failed = {one.id for one in seen.lost}
    for single in stage.filters.singles:
        for load in loads:
            reason = refusal(single, load, seen)
            if reason is not None:
                found[load.instance.id].append((single.name, reason, single.skip_in_fallback))
                if single.marks_failed and load.instance.status is not None:
                    failed.add(load.instance.id)
    instances = [*(load.instance for load in loads), *seen.lost]
    for group in stage.filters.groups:
        assert isinstance(group, f.FailoverFilter)
        for instance_id in failing_with(instances, failed, group.domain) & found.keys():
            said = "failed itself" if instance_id in failed else f"shares its {group.domain} with a failed instance"
            found[instance_id].append((group.name, said, False))
    return found


def choice(stage: Stage, loads: Sequence[Load], seen: Situation, draw: Draw) -> tuple[str | None, bool]:
    """The id of the chosen instance, and whether it took a second pass."""
    refused = refusals(stage, loads, seen)
    left = [load for load in loads if not refused[load.instance.id]]
    fallback = not left
    if fallback:
        left = [load for load in loads if all(skip for _, _, skip in refused[load.instance.id])]
    if not left:
        return None, fallback
    left.sort(key=lambda load: load.instance.id)
    if isinstance(stage.selector, MetricBasedSelector):
        left.sort(key=lambda load: [METRICS[metric.name](load) for metric in stage.metrics])
        best = left[: stage.selector.top_k]
        return (best[0] if len(best) == 1 else draw.random.choice(best)).instance.id, fallback
    ids = [load.instance.id for load in left]
    later = ids[bisect_right(ids, draw.last) :] if draw.last is not None else []
    return (later or ids)[0], fallback
