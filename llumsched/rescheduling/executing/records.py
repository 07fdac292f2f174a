# SPDX-License-Identifier: Apache-2.0
"""Records of the rescheduler's passes and moves, for `/debug/rescheduling`, the web page, `llumnix top` and the log.

Only the last passes and moves are kept.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as PrometheusCounter

from llumsched.rescheduling.planning.moves import Move
from llumsched.rescheduling.planning.planner import PolicyResult

logger = logging.getLogger(__name__)

NUM_PASSES: Final = 600
NUM_MOVES: Final = 1000
_MS_BUCKETS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)

_T = TypeVar("_T")


class Outcome(enum.StrEnum):
    OPEN = "open"
    MOVED = "moved"
    """At least one request has moved."""
    STAYED = "stayed"
    """The source was asked, and no request moved; `refusals` has the reasons."""
    NOTHING = "nothing"
    """No request of the source fits."""
    TIMEOUT = "timeout"
    """The source fell silent. Moves that it had begun continue."""
    FAILED = "failed"
    """The source refused the call or could not be reached."""


@dataclass(slots=True)
class MoveRecord:
    """A call to a source. It changes until `outcome` is no longer OPEN."""

    number: int
    move: Move
    began_s: float
    """The beginning, in Unix time."""
    outcome: Outcome = Outcome.OPEN
    seconds: float = 0.0
    num_selected: int = 0
    num_moved: int = 0
    num_lost: int = 0
    moved_tokens: int = 0
    copied_bytes: int = 0
    requests: dict[str, str] = field(default_factory=dict)
    """Phase of each request, by `name_of`."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of the requests, by the engine's id."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests that stayed, by reason."""
    error: str = ""

    def name_of(self, request_id: str, external_id: str) -> str:
        """The client's id, or the engine's for further choices of the same request."""
        name = self.names.get(request_id)
        if name is None:
            name = self.names[request_id] = request_id if external_id in self.requests else external_id or request_id
        return name

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "number": self.number,
            **self.move.to_dict(),
            "began_s": self.began_s,
            "outcome": str(self.outcome),
            "seconds": self.seconds,
            "num_selected": self.num_selected,
            "num_moved": self.num_moved,
            "num_lost": self.num_lost,
            "moved_tokens": self.moved_tokens,
            "copied_bytes": self.copied_bytes,
            "requests": dict(self.requests),
            "refusals": dict(self.refusals),
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class PassRecord:
    number: int
    at_s: float
    """The beginning, in Unix time."""
    duration_ms: float
    woken_by: str
    """The cause: interval, load, or move (the end of one)."""
    num_instances: int
    results: tuple[PolicyResult, ...]
    moves: tuple[int, ...]
    """Numbers of the started moves."""
    skipped: str = ""
    """The reason why nothing was planned or begun."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "at_s": self.at_s,
            "duration_ms": self.duration_ms,
            "woken_by": self.woken_by,
            "num_instances": self.num_instances,
            "policies": [result.to_dict() for result in self.results],
            "moves": list(self.moves),
            "skipped": self.skipped,
        }


MoveObserver = Callable[[MoveRecord], None]
"""Called when a move begins or ends, and when one of its requests changes its phase. Must not wait."""


class Records:
    """The last passes and moves. Belongs to one event loop."""

    def __init__(self) -> None:
        self.passes: deque[PassRecord] = deque(maxlen=NUM_PASSES)
        self.moves: deque[MoveRecord] = deque(maxlen=NUM_MOVES)
        """Moves in the order in which they began."""
        self._observers: list[MoveObserver] = []

    def observe_moves(self, observer: MoveObserver) -> Callable[[], None]:
        """Tells `observer` of moves until the returned function is called."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def began(self, record: MoveRecord) -> None:
        self.moves.append(record)
        self.changed(record)

    def changed(self, record: MoveRecord) -> None:
        for observer in list(self._observers):
            observer(record)

    def to_dict(self, num_passes: int = 20, num_moves: int = 100) -> dict[str, Any]:
        """The latest passes and moves, newest last."""
        passes, moves = _newest(self.passes, num_passes), _newest(self.moves, num_moves)
        return {"passes": [one.to_dict() for one in passes], "moves": [one.to_dict() for one in moves]}


def _newest(records: Collection[_T], number: int) -> list[_T]:
    return list(records)[max(len(records) - number, 0) :]


class RescheduleCounters:
    """Registers in `registry`; one per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = PrometheusCounter(
            "scheduler_rescheduling",
            "Moves that were asked for.",
            ("rescheduling_req_select_rule", "rescheduling_req_select_order"),
            registry=registry,
        )
        self._failed = PrometheusCounter(
            "scheduler_rescheduling_failed",
            "Calls to sources that failed, and those that moved nothing of what they selected; timeouts included.",
            registry=registry,
        )
        self._timeouts = PrometheusCounter(
            "scheduler_rescheduling_timeouts",
            "Calls in which the source fell silent.",
            registry=registry,
        )
        self._outcomes = PrometheusCounter(
            "scheduler_rescheduling_outcomes",
            "Calls that ended, by policy and outcome.",
            ("policy", "outcome"),
            registry=registry,
        )
        self._requests = PrometheusCounter(
            "scheduler_rescheduling_requests",
            "Requests that changed place.",
            ("policy",),
            registry=registry,
        )
        self._refusals = PrometheusCounter(
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

        self._broken = PrometheusCounter(
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
