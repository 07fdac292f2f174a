# SPDX-License-Identifier: Apache-2.0
"""The gateway's metrics.

With several workers each process counts for itself and any of them shows the sum: PROMETHEUS_MULTIPROC_DIR must be set
before this module is imported (`workers` does).
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from llumlet.process.secret_files import num_refused
from llumsched.gateway.metric_files import MetricFiles
from llumsched.gateway.objectives import NONE, NOTHING_PREDICTED, Objectives, Predicted, Tally
from llumsched.gateway.sse import Usage

CLIENT_GONE: Final = 499
"""The status of a request whose client has left."""
_E2E_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 240, 300)
_TTFT_MS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 30000, 60000)
_ITL_MS = (1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500)
_TOKENS = tuple([1, 4] + [1 << power for power in range(4, 18)])
_STAGE_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4)
_QUEUE_MS = (1, 5, 10, 50, 100, 200, 500, 1000, 2000, 5000)
_LEAST_RENDER_S: Final = 1.0
"""Shortest time between two renderings, since each slows all streams a little."""
_SWITCH_S: Final = 0.0005
"""Time for which the event loop may wait for the rendering thread: a tenth of Python's usual value."""
_MOST_MODELS = 1000
_OVERFLOW = "_overflow"
"""Name for all models beyond the first thousand."""
_UNKNOWN = "_unknown"
"""Name for all models that no instance serves, since clients can send any name."""


@dataclass(slots=True)
class Record:
    """The course of one request. Times in seconds; None if it did not get so far."""

    id: str
    path: str
    api: str = ""
    """The form in which its body holds the prompt."""
    key: str = ""
    """The name of the API key."""
    model: str = ""
    status: int = 0
    instance: str = ""
    wants_stream: bool = False
    is_streamed: bool = False
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens in the engine's prefix cache, if the engine tells."""
    num_retries: int = 0
    num_continuations: int = 0
    is_fallback: bool = False
    preprocess_s: float = 0.0
    queue_s: float = 0.0
    schedule_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    objectives: Objectives = NONE
    placed_s: float = 0.0
    """Time until its place was known, the last one before it began."""
    predicted: Predicted = NOTHING_PREDICTED
    """The prediction from that moment on."""

    def used(self, usage: Usage) -> None:
        """Takes the usage that an answer tells."""
        self.num_input_tokens = usage.num_prompt or self.num_input_tokens
        self.num_output_tokens = usage.num_output or self.num_output_tokens
        self.num_cached_tokens = usage.num_cached or self.num_cached_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean time between two tokens of a stream."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def has_met_objectives(self) -> bool | None:
        """True if it was in time; None if it had no objectives, or this cannot be known because its client left in time
        or wanted its answer in one piece."""
        if not self.objectives or (self.status == 200 and self.ttft_s is None):
            return None
        if self.status == CLIENT_GONE:
            waited_s = self.e2e_s if self.ttft_s is None else self.ttft_s
            is_late = self.wants_stream and not self.objectives.are_met(waited_s * 1e3, 0.0)
            return False if is_late else None
        if self.status != 200 or self.ttft_s is None:
            return False
        return self.objectives.are_met(self.ttft_s * 1e3, (self.tpot_s or 0.0) * 1e3)


class Metrics:
    def __init__(self, is_listed: Callable[[str], bool] = lambda model: False) -> None:
        """`is_listed`: true for a model that an instance lists."""
        self._is_listed = is_listed
        self._registry = CollectorRegistry()
        self._started_s = time.time()
        self._models: dict[str, _OfModel] = {}
        self._rendering: asyncio.Task[bytes] | None = None
        self._rendered_s = -math.inf
        self.least_render_s = _LEAST_RENDER_S
        self.clock = time.monotonic
        self.requests = self._counter("request_total", "Requests that ended.", ["model", "status_code"])
        self.objectives = self._counter(
            "request_slo", "Requests with objectives that ended, by whether they met all of them.", ["model", "met"]
        )
        self.retries = self._counter("request_retry_total", "Attempts after the first.", ["model", "status_code"])
        self.fallbacks = self._counter(
            "request_fallback_total",
            "Requests placed without a scheduler, because none answered.",
            ["model", "status_code"],
        )
        self.continuations = self._counter(
            "request_continuation_total",
            "Streams that lost their engine, by outcome.",
            ["model", "outcome"],
        )
        self.unbudgeted = self._counter("request_retry_refused", "Retries that the retry budget refused.", [])
        self.ejections = self._counter("gateway_ejections", "Ejections of instances, by cause.", ["cause"])
        self.refused = self._counter(
            "gateway_key_refused", "Requests refused for a missing key or an exceeded limit.", ["key", "limit"]
        )
        self.refusals = self._counter(
            "gateway_refused",
            "Requests refused before their body was read.",
            ["status_code"],
        )
        self.tls_failures = self._counter("gateway_tls_failures", "Connections whose TLS handshake failed.", [])
        self.unlogged = self._counter(
            "gateway_access_log_dropped", "Lines of the access log dropped because stdout was blocked.", []
        )
        self.unnamed = self._counter(
            "gateway_prompts_unnamed",
            "Prompts whose blocks this gateway could not name for a scheduler that places by prefix caches, by API.",
            ["api"],
        )
        self.prefix_expected = self._counter(
            "gateway_prefix_expected_tokens",
            "Prompt tokens that the scheduler expected in the prefix cache of the chosen engine, by API.",
            ["api"],
        )
        self.prefix_cached = self._counter(
            "gateway_prefix_cached_tokens",
            "Prompt tokens that engines found in their prefix cache, by API, as --enable-prompt-tokens-details tells.",
            ["api"],
        )
        self.e2e = self._histogram(
            "request_e2e_latency_seconds", "Time from arrival to end of requests with status 200.", _E2E_S
        )
        self.ttft = self._histogram(
            "request_ttft_milliseconds", "Time from arrival to the first event of a stream.", _TTFT_MS
        )
        self.itl = self._histogram("request_itl_milliseconds", "Time between two parts of a stream.", _ITL_MS)
        self.tpot = self._histogram("request_tpot_milliseconds", "Mean time per output token after the first.", _ITL_MS)
        self.queue = self._histogram(
            "request_queue_duration_milliseconds", "Time spent waiting for an instance.", _QUEUE_MS
        )
        self.schedule = self._histogram("request_schedule_duration_milliseconds", "Time spent on placement.", _STAGE_MS)
        self.preprocess = self._histogram(
            "request_preprocess_duration_milliseconds", "Time spent before placement.", _STAGE_MS
        )
        self.input_lengths = self._histogram("request_input_tokens", "Prompt tokens per request.", _TOKENS)
        self.output_lengths = self._histogram("request_output_tokens", "Generated tokens per request.", _TOKENS)
        self.ttft_predictions = self._histogram(
            "request_ttft_prediction_ratio",
            "Time from placement to the first token, divided by the prediction.",
            _RATIOS,
        )
        self.tpot_predictions = self._histogram(
            "request_tpot_prediction_ratio", "Mean time between two tokens, divided by the prediction.", _RATIOS
        )
        self._pending = self._gauge("gateway_pending_requests", "Requests waiting for an instance.")
        self._current = self._gauge("gateway_current_requests", "Requests in flight.")
        self._avoided = self._gauge(
            "gateway_avoided_instances", "Instances that get no new requests now.", mode="livemax"
        )
        self._refused_files = self._gauge(
            "gateway_refused_files",
            "Secret and certificate files whose new contents are unusable, so that the old ones stay in use.",
            "livemax",
        )
        self._uptime = self._gauge("uptime_seconds", "Time since the process began.", mode="max")

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, ["model"], buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, text: str, mode: str = "livesum") -> Gauge:
        return Gauge(name, text, registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def of_model(self, model: str, *, is_served: bool = False) -> _OfModel:
        """A model's series. `is_served`: an instance has answered for it (instances that want a key do not list their
        models)."""
        found = self._models.get(model)
        if found is None:
            if model and not is_served and not self._is_listed(model):
                model = _UNKNOWN
            elif len(self._models) >= _MOST_MODELS:
                model = _OVERFLOW
            found = self._models[model] = self._models.get(model) or _OfModel(self, model)
        return found

    def attained(self) -> dict[str, Tally]:
        """Requests that met and missed their objectives so far, by model."""
        return {one.name: one.tally for one in self._models.values() if one.tally != Tally()}

    def ended(self, record: Record) -> None:
        self.of_model(record.model, is_served=record.status == 200).ended(record)

    def observe_load(self, num_in_flight: int, num_waiting: int, num_avoided: int) -> None:
        self._current.set(num_in_flight)
        self._pending.set(num_waiting)
        self._avoided.set(num_avoided)
        self._refused_files.set(num_refused())
        self._uptime.set(time.time() - self._started_s)

    @property
    def content_type(self) -> str:
        return CONTENT_TYPE_LATEST

    async def rendered(self) -> bytes:
        """`text`, rendered in a thread, once for all callers and at most once a second: it takes 90 ms for 100 models
        and 170 ms for several workers, while no turn of the event loop exceeds 13 ms."""
        now_s = self.clock()
        if self._rendering is None or (self._rendering.done() and now_s - self._rendered_s >= self.least_render_s):
            self._rendered_s = now_s
            self._rendering = asyncio.create_task(asyncio.to_thread(self.text))
        return await asyncio.shield(self._rendering)

    def text(self) -> bytes:
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            registry.register(MetricFiles(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            return generate_latest(_WithTotals(registry))
        finally:
            sys.setswitchinterval(usual_s)


class _WithTotals:
    """Adds `request_input_tokens_total` and its like, the sums of histograms of the same name: the library allows no
    counter with that name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            if metric.name in ("request_input_tokens", "request_output_tokens"):
                total = CounterMetricFamily(metric.name, metric.documentation, labels=["model"])
                for sample in metric.samples:
                    if sample.name.endswith("_sum"):
                        total.add_metric([sample.labels["model"]], sample.value)
                yield total


class _OfModel:
    """The series of one model, kept because looking up labels costs more than counting."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self.name = model
        self.tally = Tally()
        self._status: dict[int, Counter] = {}
        self.itl = metrics.itl.labels(model)
        self._e2e = metrics.e2e.labels(model)
        self._ttft = metrics.ttft.labels(model)
        self._tpot = metrics.tpot.labels(model)
        self._queue = metrics.queue.labels(model)
        self._schedule = metrics.schedule.labels(model)
        self._preprocess = metrics.preprocess.labels(model)
        self._input_lengths = metrics.input_lengths.labels(model)
        self._output_lengths = metrics.output_lengths.labels(model)
        self._ttft_predictions = metrics.ttft_predictions.labels(model)
        self._tpot_predictions = metrics.tpot_predictions.labels(model)

    def lost(self, outcome: str) -> None:
        """Counts a stream that lost its engine, by its outcome."""
        self._metrics.continuations.labels(self.name, outcome).inc()

    def ended(self, record: Record) -> None:
        status = record.status
        counter = self._status.get(status)
        if counter is None:
            counter = self._status[status] = self._metrics.requests.labels(self.name, str(status))
        counter.inc()
        has_met = record.has_met_objectives
        if has_met is not None:
            self._metrics.objectives.labels(self.name, str(has_met).lower()).inc()
            num_met, num_missed = self.tally
            self.tally = Tally(num_met + has_met, num_missed + (not has_met))
        if record.num_retries:
            self._metrics.retries.labels(self.name, str(status)).inc(record.num_retries)
        if record.is_fallback:
            self._metrics.fallbacks.labels(self.name, str(status)).inc()
        self._queue.observe(record.queue_s * 1e3)
        self._preprocess.observe(record.preprocess_s * 1e3)
        self._schedule.observe(record.schedule_s * 1e3)
        if status != 200:
            return
        if record.predicted.cached_tokens:
            self._metrics.prefix_expected.labels(record.api).inc(record.predicted.cached_tokens)
        if record.num_cached_tokens:
            self._metrics.prefix_cached.labels(record.api).inc(record.num_cached_tokens)
        self._e2e.observe(record.e2e_s)
        if record.num_input_tokens:
            self._input_lengths.observe(record.num_input_tokens)
        if record.num_output_tokens:
            self._output_lengths.observe(record.num_output_tokens)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s * 1e3)
            predicted = record.predicted
            if predicted.ttft_ms:
                self._ttft_predictions.observe((record.ttft_s - record.placed_s) * 1e3 / predicted.ttft_ms)
            if record.tpot_s is not None:
                self._tpot.observe(record.tpot_s * 1e3)
                if predicted.tpot_ms:
                    self._tpot_predictions.observe(record.tpot_s * 1e3 / predicted.tpot_ms)
