# SPDX-License-Identifier: Apache-2.0
"""Outlier detection: an instance that fails where others do not gets no new requests for a while. Pure.

    IN --faults--> OUT --its time is over--> ASKED --answers the gateway's own request--> TRIAL --successes--> IN
                    ^                          |                                            |
                    |______ longer each time __|________________ the next fault ____________|

A fast failure attracts requests: an instance that refuses everything has the emptiest engine. The rules are those of
Envoy's outlier detection (consecutive failures; a share of failures far above the fleet's; a bound on the ejected
share), with a half-open trial.

At most half of the fleet is ejected for failures that may be the requests' or the gateway's own. Unreachable instances
are ejected without a bound, as trying them gains nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from llumsched.causes import Cause

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of the detection. Times in seconds."""

    max_ejected: float
    """Largest ejected share of the instances that can be reached."""
    consecutive: int = 5
    """Failures in a row that eject an instance."""
    share: float = 0.2
    """Share of failures in the window that ejects an instance, if it is also `times_fleet` that of all others."""
    times_fleet: float = 5.0
    min_volume: float = 20.0
    """Smallest number of answers in the window that makes a share count."""
    window_s: float = 10.0
    """Time constant with which answers are forgotten."""
    ejection_s: float = 2.0
    """Time of the first ejection; each further one is twice as long."""
    longest_ejection_s: float = 20.0
    forgiven_s: float = 60.0
    """Time in the fleet after which earlier ejections are forgotten."""
    trial_successes: int = 3
    trusted_refusals: int = 2
    """Refusals in a row that are believed; further ones of the same instance are doubted."""


@dataclass(frozen=True, slots=True)
class Ejection:
    cause: Cause
    why: str
    """The reason, for logs."""
    since_s: float


class _State(Enum):
    IN = auto()
    OUT = auto()
    ASKED = auto()
    TRIAL = auto()


@dataclass(slots=True)
class _Sum:
    """A sum that is forgotten exponentially."""

    value: float = 0.0
    at_s: float = 0.0

    def add(self, amount: float, now_s: float, window_s: float) -> float:
        self.value = self.value * math.exp((self.at_s - now_s) / window_s) + amount
        self.at_s = now_s
        return self.value


@dataclass(slots=True)
class _Record:
    """The record of one instance."""

    state: _State = _State.IN
    faults: _Sum = field(default_factory=_Sum)
    answers: _Sum = field(default_factory=_Sum)
    num_consecutive: int = 0
    num_refused: int = 0
    """Requests in a row that only this instance refused."""
    num_ejections: int = 0
    in_since_s: float = 0.0
    until_s: float = 0.0
    num_passed: int = 0


class Outliers(Generic[Key]):
    """The states of all instances. `size`: instances in the fleet. `clock`: monotonic seconds."""

    def __init__(
        self,
        limits: Limits,
        size: Callable[[], int],
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._limits = limits
        self._size = size
        self._clock = clock
        self._draw = draw
        self._records: dict[Key, _Record] = {}
        self._out: dict[Key, Ejection] = {}
        self._faults = _Sum()
        self._answers = _Sum()

    @property
    def ejected(self) -> Mapping[Key, Ejection]:
        return self._out

    def is_out(self, key: Key) -> bool:
        return key in self._out

    def forget(self, key: Key) -> None:
        """Forgets an instance that has left the fleet."""
        self._records.pop(key, None)
        self._out.pop(key, None)

    # What its answers say

    def succeeded(self, key: Key) -> None:
        record = self._of(key)
        record.num_consecutive = record.num_refused = 0
        self._count(record, 0.0)
        if record.state is _State.TRIAL:
            record.num_passed += 1
            if record.num_passed >= self._limits.trial_successes:
                record.state = _State.IN

    def failed(self, key: Key, cause: Cause, why: str) -> None:
        record = self._of(key)
        record.num_consecutive += 1
        self._count(record, 1.0)
        limits = self._limits
        if record.state is _State.TRIAL or cause is Cause.UNREACHABLE:
            self._eject(key, record, cause, why)
        elif record.num_consecutive >= limits.consecutive:
            self._eject(key, record, cause, f"{record.num_consecutive} failures in a row, the last: {why}")
        elif self._stands_out(record):
            share = record.faults.value / record.answers.value
            self._eject(key, record, cause, f"{share:.0%} of its answers are failures, the last: {why}")

    def is_doubted(self, key: Key) -> bool:
        """True if another instance should be asked after this one refused a request: it is on trial, or has refused
        several in a row without confirmation."""
        record = self._of(key)
        record.num_refused += 1
        return record.num_refused > self._limits.trusted_refusals or record.state is _State.TRIAL

    def confirmed(self, key: Key) -> None:
        """Notes that another instance refused the same request."""
        self._of(key).num_refused = 0

    def broken(self, key: Key, why: str) -> None:
        """Notes that an instance failed the gateway's own request, which proves its fault."""
        self._eject(key, self._of(key), Cause.ERRORS, why)

    def slow(self, key: Key, why: str) -> None:
        self._eject(key, self._of(key), Cause.SLOWNESS, why)

    def silent(self, key: Key, why: str) -> None:
        self._eject(key, self._of(key), Cause.SILENCE, why)

    def moved(self, key: Key) -> None:
        """Notes that an instance has sent something."""
        ejection = self._out.get(key)
        if ejection is not None and ejection.cause is Cause.SILENCE:
            self._admit(key, _State.IN)

    # The way back

    def due(self) -> list[Key]:
        """Instances whose ejection is over. The caller asks each if it takes a request and calls `asked`."""
        now_s = self._clock()
        found = [key for key in self._out if self._records[key].state is _State.OUT]
        found = [key for key in found if self._records[key].until_s <= now_s]
        for key in found:
            self._records[key].state = _State.ASKED
        return found

    def asked(self, key: Key, *, takes: bool | None) -> None:
        """Notes if an instance `takes` a request; None if it could not be asked, so that it is due again."""
        record = self._records.get(key)
        if record is None or record.state is not _State.ASKED:
            return
        if takes:
            self._admit(key, _State.TRIAL)
            return
        record.state = _State.OUT
        if takes is not None:
            self._begin(record)

    # Within

    def _of(self, key: Key) -> _Record:
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(in_since_s=self._clock())
        return record

    def _count(self, record: _Record, fault: float) -> None:
        now_s, window_s = self._clock(), self._limits.window_s
        for faults, answers in ((record.faults, record.answers), (self._faults, self._answers)):
            faults.add(fault, now_s, window_s)
            answers.add(1.0, now_s, window_s)

    def _stands_out(self, record: _Record) -> bool:
        limits, answers = self._limits, record.answers.value
        if answers < limits.min_volume or record.faults.value < limits.share * answers:
            return False
        other_faults = max(0.0, self._faults.value - record.faults.value)
        other_answers = max(1.0, self._answers.value - answers)
        return record.faults.value / answers > limits.times_fleet * other_faults / other_answers

    def _eject(self, key: Key, record: _Record, cause: Cause, why: str) -> None:
        if key in self._out:
            return
        if cause is not Cause.UNREACHABLE and not self._may_eject():
            return
        now_s = self._clock()
        if record.state is _State.IN and now_s - record.in_since_s > self._limits.forgiven_s:
            record.num_ejections = 0
        record.state = _State.OUT
        self._begin(record)
        self._out[key] = Ejection(cause, why, now_s)

    def _may_eject(self) -> bool:
        """True if another instance that can be reached may be ejected. Unreachable ones do not count as fleet: after
        crashes and changes of address they may be the majority."""
        num_unreachable = sum(ejection.cause is Cause.UNREACHABLE for ejection in self._out.values())
        allowed = math.floor(self._limits.max_ejected * (self._size() - num_unreachable))
        return len(self._out) - num_unreachable < allowed

    def _begin(self, record: _Record) -> None:
        """Begins an ejection, longer each time, with a random part that differs between gateways."""
        limits = self._limits
        length_s = min(limits.longest_ejection_s, limits.ejection_s * 2.0**record.num_ejections)
        record.num_ejections += 1
        record.until_s = self._clock() + length_s * (0.75 + 0.5 * self._draw())

    def _admit(self, key: Key, state: _State) -> None:
        record = self._records[key]
        record.state = state
        record.in_since_s = self._clock()
        record.num_consecutive = record.num_refused = record.num_passed = 0
        record.faults, record.answers = _Sum(), _Sum()
        del self._out[key]


_FEW_STEPS: Final = 8
_REMEMBERED_STEPS: Final = 32
_TIMES_MEDIAN: Final = 10.0
_NOTICEABLE_S: Final = 0.05
_RECENT_S: Final = 10.0


@dataclass(slots=True)
class _Mean:
    seconds: float = 0.0
    num_steps: int = 0
    at_s: float = 0.0


class Pace(Generic[Key]):
    """The exponential mean of the time between two parts of a stream, in seconds, by instance."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._means: dict[Key, _Mean] = {}

    def step(self, key: Key, seconds: float, now_s: float) -> None:
        mean = self._means.get(key)
        if mean is None:
            mean = self._means[key] = _Mean()
        mean.num_steps += 1
        mean.seconds += (seconds - mean.seconds) / min(mean.num_steps, _REMEMBERED_STEPS)
        mean.at_s = now_s

    def forget(self, key: Key) -> None:
        self._means.pop(key, None)

    def slow_among(self, keys: Iterable[Key]) -> dict[Key, str]:
        """Instances ten times slower than the median of at least three that stream now, with the numbers."""
        now_s = self._clock()
        means = {key: mean for key in keys if (mean := self._means.get(key)) is not None}
        recent = {
            key: mean.seconds
            for key, mean in means.items()
            if mean.num_steps >= _FEW_STEPS and now_s - mean.at_s < _RECENT_S
        }
        if len(recent) < 3:
            return {}
        median_s = sorted(recent.values())[(len(recent) - 1) // 2]
        limit_s = max(_TIMES_MEDIAN * median_s, median_s + _NOTICEABLE_S)
        return {
            key: f"{seconds * 1e3:.0f} ms a step, where the median is {median_s * 1e3:.0f}"
            for key, seconds in recent.items()
            if seconds > limit_s
        }
