# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the rescheduler. The first two are Llumnix's, by name and labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from llumsched.rescheduling.executing.records import MoveRecord, Outcome
from llumsched.rescheduling.planning.moves import Move

_MS_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class RescheduleCounters:
    """Registers in `registry`; one per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "scheduler_rescheduling",
            "Moves that were asked for.",
            ("rescheduling_req_select_rule", "rescheduling_req_select_order"),
            registry=registry,
        )
        self._failed = Counter(
            "scheduler_rescheduling_failed",
            "Calls to sources that failed, and those that moved nothing of what they selected; timeouts included.",
            registry=registry,
        )
        self._timeouts = Counter(
            "scheduler_rescheduling_timeouts",
            "Calls in which the source fell silent.",
            registry=registry,
        )
        self._outcomes = Counter(
            "scheduler_rescheduling_outcomes",
            "Calls that ended, by policy and outcome.",
            ("policy", "outcome"),
            registry=registry,
        )
        self._requests = Counter(
            "scheduler_rescheduling_requests",
            "Requests that changed place.",
            ("policy",),
            registry=registry,
        )
        self._refusals = Counter(
            "scheduler_rescheduling_refusals",
            "Requests that stayed, by reason.",
            ("reason",),
            registry=registry,
        )
        self._open = Gauge("scheduler_rescheduling_open_moves", "Calls under way.", registry=registry)
        self._pass = Histogram(
            "scheduler_rescheduling_pass_duration_milliseconds",
            "Planning, without the moves.",
            buckets=_MS_BUCKETS,
            registry=registry,
        )

        self._broken = Counter(
            "scheduler_rescheduling_broken_passes",
            "Passes that ended with an error of the rescheduler's own; the log has it.",
            registry=registry,
        )

    def broke(self) -> None:
        self._broken.inc()

    def began(self, move: Move) -> None:
        self._total.labels(str(move.selection.unit), str(move.selection.order)).inc()
        self._open.inc()

    def ended(self, record: MoveRecord) -> None:
        self._open.dec()
        if record.outcome in (Outcome.FAILED, Outcome.TIMEOUT, Outcome.STAYED):
            self._failed.inc()
        if record.outcome is Outcome.TIMEOUT:
            self._timeouts.inc()
        self._outcomes.labels(record.move.policy, str(record.outcome)).inc()
        self._requests.labels(record.move.policy).inc(record.num_moved)
        for reason, number in record.refusals.items():
            self._refusals.labels(reason).inc(number)

    def passed(self, duration_ms: float) -> None:
        self._pass.observe(duration_ms)
