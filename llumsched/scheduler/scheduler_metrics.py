# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the scheduler, under Llumnix's names. Gauges of instances are read when they are scraped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llumlet.process.secret_files import num_refused
from llumsched.cluster.columns import Columns, Values
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.metadata import type_of
from llumsched.dispatch.dispatcher import Assignment, Dispatcher, NotPlacedKind
from llumsched.policy import raised
from llumsched.policy.document import Mode
from llumsched.policy.metrics import METRICS
from llumsched.prefix.prefix_metrics import PrefixMetrics
from llumsched.scheduler.gauges import Gauge, exposition

_STAGE_MS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_TOKENS: Final = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SELECTED: Final = {
    "kv_cache_usage_ratio_projected": tuple(tenth / 10 for tenth in range(11)),
    "decode_batch_size": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
    "all_prefills_tokens_num": _TOKENS,
    "all_decodes_tokens_num": _TOKENS,
}
_PREDICTED: Final = {
    "predicted_ttft": (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 30000, 60000),
    "predicted_tpot": (1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500),
}
"""Bucket bounds in milliseconds, for requests placed by prediction."""
_OF_STATUS: Final = {
    "used_gpu_tokens": "num_used_gpu_tokens",
    "waiting_requests": "num_waiting_requests",
    "loading_requests": "num_loading_requests",
    "running_requests": "num_running_requests",
    "scheduler_waiting_to_decode_requests": "scheduler_waiting_to_decode_requests_num",
    "scheduler_running_to_decode_requests": "scheduler_running_to_decode_requests_num",
    "hybrid_scheduler_waiting_to_decode_requests": "hybrid_scheduler_waiting_to_decode_requests_num",
    "uncomputed_tokens_all_waiting_prefills": "num_uncomputed_tokens_all_waiting_prefills",
    "unallocated_tokens_all_waiting_requests": "num_unallocated_tokens_all_waiting_requests",
    "urgent_requests": "num_urgent_requests",
    "uncomputed_tokens_scheduler_running_prefills": "num_uncomputed_tokens_scheduler_running_prefills",
    "unallocated_tokens_scheduler_running_prefills": "num_unallocated_tokens_scheduler_running_prefills",
    "unallocated_tokens_hybrid_scheduler_waiting_decodes": "num_unallocated_tokens_hybrid_scheduler_waiting_decodes",
    "hybrid_scheduler_waiting_to_decode_tokens": "hybrid_scheduler_waiting_to_decode_tokens_num",
    "scheduler_waiting_to_decode_tokens": "scheduler_waiting_to_decode_tokens_num",
    "scheduler_running_to_decode_tokens": "scheduler_running_to_decode_tokens_num",
    "tokens_loading_requests": "num_tokens_loading_requests",
}
_OF_ACCOUNT: Final = {
    "inflight_dispatch_requests": "sent_requests",
    "inflight_dispatch_prefill_requests": "sent_prefill_requests",
    "inflight_dispatch_decode_requests": "sent_decode_requests",
    "uncomputed_tokens_inflight_dispatch_prefill_requests": "sent_uncomputed_prefill_tokens",
    "tokens_inflight_dispatch_decode_requests": "sent_decode_tokens",
}


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


_VALUES: Final[dict[str, Callable[[Columns], Values]]] = {
    **{suffix: itemgetter(column) for suffix, column in (_OF_STATUS | _OF_ACCOUNT).items()},
    **{name: METRICS[name].values for name in _SELECTED},
}
_FULL: Final = [
    Gauge(f"instance_cms_{suffix}", f"{_words(suffix)} of the instance{origin}.", _VALUES[suffix])
    for names, origin in (
        (_OF_STATUS, ", from its last status report"),
        (_OF_ACCOUNT, " that no status shows yet"),
        (_SELECTED, ", the metric of this name in policies"),
    )
    for suffix in names
]
_LITE_VALUES: Final[dict[str, Callable[[Columns], Values]]] = {
    "total_tokens": lambda columns: columns["sent_tokens"],
    "waiting_tokens": lambda columns: columns["sent_uncomputed_prefill_tokens"],
    "running_tokens": lambda columns: columns["sent_tokens"] - columns["sent_uncomputed_prefill_tokens"],
    "total_requests": lambda columns: columns["sent_requests"],
    "waiting_requests": lambda columns: columns["sent_prefill_requests"],
    "running_requests": lambda columns: columns["sent_requests"] - columns["sent_prefill_requests"],
}
"""Gauges of sent requests. Those whose prompt has not been computed count as waiting."""
_LITE: Final = [
    Gauge(f"instance_lrs_{name}", f"{_words(name)} of the instance, as gateways sent and report them.", value)
    for name, value in _LITE_VALUES.items()
]


class SchedulerMetrics:
    def __init__(self, dispatcher: Dispatcher, registry: CollectorRegistry) -> None:
        self._dispatcher = dispatcher
        self._total = Counter("scheduler_scheduling", "Requests that were placed.", registry=registry)
        self._failed = Counter(
            "scheduler_scheduling_failed",
            "Requests that could not be placed, by reason.",
            ("error_type",),
            registry=registry,
        )
        for kind in NotPlacedKind:
            self._failed.labels(kind)
        self._duration = Histogram(
            "request_full_mode_schedule_duration_milliseconds",
            "Duration of one placement decision, in full or lite mode.",
            buckets=_STAGE_MS,
            registry=registry,
        )
        self._selected = {
            name: Histogram(
                f"selected_instance_{name}",
                f"{_words(name)} of the chosen instance.",
                ("infer_type",),
                buckets=buckets,
                registry=registry,
            )
            for name, buckets in (_SELECTED | _PREDICTED).items()
        }
        self._prompt_tokens = Counter("scheduler_prompt_tokens", "Prompt tokens of placed requests.", registry=registry)
        self._hit_tokens = Counter(
            "scheduler_prefix_hit_tokens",
            "Prompt tokens of placed requests known to be in the prefix cache of the chosen instance.",
            registry=registry,
        )
        self._hit_percent = Histogram(
            "request_prefix_cache_hit_percent",
            "Share of a prompt in the prefix cache of the chosen instance, in percent.",
            buckets=range(0, 101, 10),
            registry=registry,
        )
        self._registry = registry
        registry.register(_Cluster(dispatcher))

    async def exposition(self) -> bytes:
        """All metrics in the text format. A scrape of many instances pauses, so that requests are placed meanwhile."""
        own = generate_latest(self._registry)
        await asyncio.sleep(0)
        table = self._dispatcher.table
        gauges, labels = (_LITE, _lite_labels) if self._dispatcher.policy.mode is Mode.LITE else (_FULL, _labels)
        return b"".join([own, *await exposition(gauges, table, table.instances, labels)])

    def placed(self, placements: Sequence[Assignment], num_prompt_tokens: int, duration_s: float) -> None:
        self._total.inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._hit_tokens.inc(placements[0].num_hit_tokens)
        if num_prompt_tokens:
            self._hit_percent.observe(100 * placements[0].num_hit_tokens / num_prompt_tokens)
        self._duration.observe(duration_s * 1e3)
        if self._dispatcher.policy.mode is Mode.LITE:
            return
        table = self._dispatcher.table
        for placement in placements:
            row = table.index[placement.instance.id]
            values = {name: METRICS[name].at(table, row) for name in _SELECTED} | placement.predicted
            for name, value in values.items():
                self._selected[name].labels(placement.infer_type).observe(value)

    def refused(self, kind: str) -> None:
        self._failed.labels(kind).inc()


class _Cluster(Collector):
    """Metrics of the whole view, collected on its event loop."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._started_s = time.monotonic()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        view = self._dispatcher.view
        yield _gauge("uptime_seconds", "Time since the process began.", time.monotonic() - self._started_s)
        refused = "Secret and certificate files whose new contents are unusable, so that the old ones stay in use."
        yield _gauge("scheduler_refused_files", refused, num_refused())
        yield _gauge("scheduler_instances", "Known instances.", len(view))
        yield _gauge(
            "scheduler_view_age_seconds", "Time since the last contact with the store; 0 while connected.", view.age_s
        )
        yield CounterMetricFamily(
            "scheduler_expired_requests",
            "Placed requests that were forgotten because nothing was heard of them.",
            value=self._dispatcher.ledger.num_expired,
        )
        faults = CounterMetricFamily(
            "scheduler_policy_raised",
            "Decisions in which a part of a policy raised an exception.",
            labels=["part"],
        )
        for part, number in raised.counts.items():
            faults.add_metric([part], number)
        yield faults
        if (hits := self._dispatcher.hits) is not None:
            yield from PrefixMetrics(hits).collect()


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _labels(instance: Instance) -> dict[str, str]:
    return {"infer_type": type_of(instance), "instance_id": instance.id}


def _lite_labels(instance: Instance) -> dict[str, str]:
    model = (*instance.metadata.served_models, instance.metadata.model)[0]
    return {"infer_type": type_of(instance), "instance_id": str(instance.api_server), "model": model}
