# SPDX-License-Identifier: Apache-2.0
"""Columns of an instance's step times (`llumsched.latency`) and of the rate at which its requests end.

Both are learnt from statuses and shared by instances of one kind: same engine, model and settings. `step_stretch` is an
instance's own slowness, including the share of prefills in the time between two tokens: the recent duration of its
steps with decodes over that of the decodes alone.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.latency.fading import Fading
from llumsched.latency.fitting import Coefficients, MeasuredStep
from llumsched.latency.online import LearntModel, OnlineFit
from llumsched.latency.profile import Profile

_log = logging.getLogger(__name__)

REFIT_S: Final = 2.0
"""Shortest time between two fits of one kind; the first comes as soon as possible."""
HALF_LIFE_S: Final = 10.0
"""Half-life of `step_stretch`."""
GONE_HALF_LIFE_S: Final = 30.0
"""Half-life of `gone_per_s`."""
_MOST_UNSEEN: Final = 128
"""Largest number of steps of one kind between two fits: a thousand instances report twenty thousand a second."""
_MOST_TOLD: Final = 16
"""Largest number of steps read from a status; engines report four."""
_LEAST_STRETCH: Final = 0.5
_MOST_STRETCH: Final = 20.0
_UNKNOWN: Final = Coefficients(*[math.nan] * 5)


class EngineKind(NamedTuple):
    """The shared model of instances of one kind."""

    model: str
    backend_type: str
    engine_version: str
    compatibility_digest: str
    cache_digest: str
    tensor_parallel_size: int
    max_num_batched_tokens: int


def kind_of(metadata: InstanceMetadata) -> EngineKind:
    return EngineKind(*(getattr(metadata, name) for name in EngineKind._fields))


@dataclass(slots=True)
class _Fit:
    online: OnlineFit
    due_s: float = -math.inf
    members: set[str] = field(default_factory=set)
    profile: Profile | None = None
    """The initial profile, unless it was given up."""
    ends: Fading = field(default_factory=lambda: Fading(GONE_HALF_LIFE_S, 4))
    """Sums: tokens of requests that ended, tokens in the KV cache of decodes times how long they were there, requests
    that ended, decodes times how long they were there."""


class _Sums(NamedTuple):
    """Steps with decodes, these decodes, their KV tokens and seconds; and the ended requests and their tokens."""

    steps: float = 0.0
    decodes: float = 0.0
    decode_kv: float = 0.0
    seconds: float = 0.0
    gone_tokens: float = 0.0
    ended: float = 0.0


_sums_of: Final = operator.attrgetter(
    "num_decode_steps", "decode_steps_requests", "decode_steps_kv", "decode_steps_s", "gone_tokens", "num_gone"
)


@dataclass(slots=True)
class _Recent:
    """The last report of an instance."""

    metadata: InstanceMetadata
    fit: _Fit
    told: _Sums
    """Sums since its start, and the time of the report."""
    told_ms: int
    last_number: int = 0
    """Number of the last step that was learnt from."""
    sums: _Sums = _Sums()
    """Recent sums, halved for each `HALF_LIFE_S`."""


class StepModels:
    """A provider that observes a view. `clock` in seconds, monotonic."""

    columns: Final[Sequence[str]] = (
        "step_s",
        "step_prefill_token_s",
        "step_pair_s",
        "step_decode_s",
        "step_decode_token_s",
        "step_stretch",
        "gone_per_s",
        "ended_per_s",
    )
    """Seconds of a step: constant, per prefill token, per pair of a query and a key there, per decode, per token of its
    KV cache. `gone_per_s`: share of the decodes' tokens that goes each second as requests end; `ended_per_s`: share of
    these requests that ends. NaN while unknown."""

    def __init__(self, clock: Callable[[], float], profiles: Sequence[Profile] = ()) -> None:
        """`profiles`: prior knowledge; the first of a model counts."""
        self._clock = clock
        self._profiles = profiles
        self._fits: dict[EngineKind, _Fit] = {}
        self._recent: dict[str, _Recent] = {}
        self._listeners: list[Callable[[str], None]] = []

    def model_of(self, instance: Instance) -> LearntModel | None:
        """The step model of an instance's kind."""
        recent = self._recent.get(instance.id)
        if recent is not None and recent.metadata is instance.metadata:
            return recent.fit.online.model
        fit = self._fits.get(kind_of(instance.metadata))
        return None if fit is None else fit.online.model

    # As a provider

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float]:
        model = self.model_of(instance)
        coefficients = _UNKNOWN if model is None else model.coefficients
        recent = self._recent.get(instance.id)
        ends = (
            (math.nan, math.nan) if recent is None else [recent.fit.ends.ratio(of, of + 1, math.nan) for of in (0, 2)]
        )
        return (*coefficients, self._stretch(instance, coefficients), *ends)

    def on_change(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    # From the view

    def appeared(self, instance: Instance) -> None:
        self._fit_of(instance).members.add(instance.id)
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        status = instance.status
        if status is None:
            return
        recent = self._recent.get(instance.id)
        if recent is None or recent.metadata is not instance.metadata:
            recent = self._recent[instance.id] = self._begun(instance, status, recent)
        online = recent.fit.online
        if online.num_unseen < _MOST_UNSEEN:
            for sample in status.steps[-_MOST_TOLD:]:
                if sample.number > recent.last_number:
                    recent.last_number = sample.number
                    online.add(MeasuredStep.of(sample))
        self._note(recent, status)
        self._refit(recent.fit)

    def left(self, instance: Instance) -> None:
        self._leave(instance.id)
        self._recent.pop(instance.id, None)

    def _begun(self, instance: Instance, status: InstanceStatus, before: _Recent | None) -> _Recent:
        """The record of a new instance, or of one that reported something else about itself."""
        fit = self._fit_of(instance)
        self._leave(instance.id)
        fit.members.add(instance.id)
        if before is None:
            return _Recent(instance.metadata, fit, _Sums._make(_sums_of(status)), status.timestamp_ms)
        return replace(before, metadata=instance.metadata, fit=fit)

    def _fit_of(self, instance: Instance) -> _Fit:
        kind = kind_of(instance.metadata)
        fit = self._fits.get(kind)
        if fit is None:
            fit = self._fits[kind] = self._started(kind)
        return fit

    def _started(self, kind: EngineKind) -> _Fit:
        profile = next((one for one in self._profiles if one.fits(kind.model)), None)
        if profile is None:
            return _Fit(OnlineFit())
        _log.info("Steps of %s are taken to be as profile %s says, until they are seen", kind.model, profile.source)
        return _Fit(OnlineFit(profile.coefficients), profile=profile)

    def _leave(self, instance_id: str) -> None:
        for fit in self._fits.values():
            fit.members.discard(instance_id)

    def _refit(self, fit: _Fit) -> None:
        online, now_s = fit.online, self._clock()
        if not online.num_unseen or (online.model is not None and now_s < fit.due_s):
            return
        fit.due_s = now_s + REFIT_S
        changed = online.refit()
        if fit.profile is not None and online.prior_off is not None:
            _log.warning(
                "Profile %s is used no more: what it expects of most steps is off by %+.0f %%",
                fit.profile.source, 100 * online.prior_off,
            )  # fmt: skip
            fit.profile = None
        if changed:
            for instance_id in fit.members:
                for listener in self._listeners:
                    listener(instance_id)

    def _stretch(self, instance: Instance, coefficients: Coefficients) -> float:
        recent = self._recent.get(instance.id)
        if recent is None or recent.sums.steps < 1 or math.isnan(coefficients.a):
            return 1.0
        sums = recent.sums
        alone_s = coefficients.a * sums.steps + coefficients.d * sums.decodes + coefficients.e * sums.decode_kv
        return min(max(sums.seconds / alone_s, _LEAST_STRETCH), _MOST_STRETCH)

    def _note(self, recent: _Recent, status: InstanceStatus) -> None:
        """Adds the difference between the last status and this one; older sums are discounted."""
        then, now = recent.told, _Sums._make(_sums_of(status))
        if now == then:
            recent.told_ms = status.timestamp_ms
            return
        if now.steps <= then.steps or min(map(operator.sub, now, then)) < 0:
            recent.told, recent.told_ms = now, status.timestamp_ms
            return
        passed_s = (status.timestamp_ms - recent.told_ms) / 1000
        kept, old = 0.5 ** (max(passed_s, 0.0) / HALF_LIFE_S), recent.sums
        recent.told, recent.told_ms = now, status.timestamp_ms
        steps, seconds = now.steps - then.steps, now.seconds - then.seconds
        decodes, decode_kv = now.decodes - then.decodes, now.decode_kv - then.decode_kv
        recent.sums = _Sums(
            old.steps * kept + steps,
            old.decodes * kept + decodes,
            old.decode_kv * kept + decode_kv,
            old.seconds * kept + seconds,
        )
        ended = now.ended - then.ended, decodes * seconds / steps
        recent.fit.ends.add(self._clock(), now.gone_tokens - then.gone_tokens, decode_kv * seconds / steps, *ended)
