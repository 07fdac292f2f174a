# SPDX-License-Identifier: Apache-2.0
"""Columns of how long an instance's steps take, learnt from the steps that statuses tell of (`llumsched.latency`).

Instances of one kind share a model: the same engine, model and settings. What makes one of them slower than the others,
and what prefills take of the time between two tokens, is in its `step_stretch`: how long its steps with decodes took
lately, over what their decodes alone would have taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from llumlet.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.latency.fitting import Coefficients, MeasuredStep
from llumsched.latency.online import OnlineFit, StepModel

REFIT_S: Final = 2.0
"""Between two fits of one kind, while steps come; the first comes as soon as it can."""
HALF_LIFE_S: Final = 10.0
"""Of what `step_stretch` remembers."""
_LEAST_STRETCH: Final = 0.5
_MOST_STRETCH: Final = 20.0
_UNKNOWN: Final = Coefficients(*[math.nan] * 5)


class Kind(NamedTuple):
    """What instances with one step model have in common."""

    model: str
    backend_type: str
    engine_version: str
    compatibility_digest: str
    tensor_parallel_size: int
    max_num_batched_tokens: int


def kind_of(metadata: InstanceMetadata) -> Kind:
    return Kind(*(getattr(metadata, name) for name in Kind._fields))


@dataclass(slots=True)
class _Fit:
    online: OnlineFit
    due_s: float = -math.inf
    members: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Recent:
    """Steps with decodes of one instance, weighted by how long they are ago."""

    status: InstanceStatus
    last_number: int
    """Of the steps that were learnt from."""
    sums: np.ndarray[tuple[int], np.dtype[np.float64]]
    """Steps, their decodes, the tokens in these decodes' KV cache, and the seconds that they took."""


class StepModels:
    """A provider that observes a view. `clock` in seconds, monotonic; `priors`: what profiles say."""

    columns: Final[Sequence[str]] = (
        "step_s",
        "step_prefill_token_s",
        "step_pair_s",
        "step_decode_s",
        "step_decode_token_s",
        "step_stretch",
    )
    """Seconds of a step: for itself, for each token of a prefill, pair of a query and a key there, request that
    decodes, and token of its KV cache. Not a number before anything is known."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fits: dict[Kind, _Fit] = {}
        self._recent: dict[str, _Recent] = {}
        self._listeners: list[Callable[[str], None]] = []

    def model_of(self, instance: Instance) -> StepModel | None:
        """What is known of the steps of an instance and its like."""
        fit = self._fits.get(kind_of(instance.metadata))
        return None if fit is None else fit.online.model

    # As a provider

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float]:
        model = self.model_of(instance)
        coefficients = _UNKNOWN if model is None else model.coefficients
        return (*coefficients, self._stretch(instance, coefficients))

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
        fit = self._fit_of(instance)
        if instance.id not in fit.members:  # its metadata became another
            self._leave(instance.id)
            fit.members.add(instance.id)
        recent = self._recent.get(instance.id)
        if recent is None:
            recent = self._recent[instance.id] = _Recent(status, 0, np.zeros(4))
        for sample in status.steps:
            if sample.number > recent.last_number:
                recent.last_number = sample.number
                fit.online.add(_step_of(sample))
        _note(recent, status)
        self._refit(fit)

    def left(self, instance: Instance) -> None:
        self._leave(instance.id)
        self._recent.pop(instance.id, None)

    def _fit_of(self, instance: Instance) -> _Fit:
        kind = kind_of(instance.metadata)
        fit = self._fits.get(kind)
        if fit is None:
            fit = self._fits[kind] = _Fit(OnlineFit())
        return fit

    def _leave(self, instance_id: str) -> None:
        for fit in self._fits.values():
            fit.members.discard(instance_id)

    def _refit(self, fit: _Fit) -> None:
        online, now_s = fit.online, self._clock()
        if not online.num_unseen or (online.model is not None and now_s < fit.due_s):
            return
        fit.due_s = now_s + REFIT_S
        if online.refit():
            for instance_id in fit.members:
                for listener in self._listeners:
                    listener(instance_id)

    def _stretch(self, instance: Instance, coefficients: Coefficients) -> float:
        recent = self._recent.get(instance.id)
        if recent is None or recent.sums[0] < 1 or math.isnan(coefficients.a):
            return 1.0
        steps, decodes, decode_kv, seconds = recent.sums
        alone_s = coefficients.a * steps + coefficients.d * decodes + coefficients.e * decode_kv
        return min(max(float(seconds) / float(alone_s), _LEAST_STRETCH), _MOST_STRETCH)


def _step_of(sample: object) -> MeasuredStep:
    return MeasuredStep(*(getattr(sample, name) for name in MeasuredStep._fields))


def _note(recent: _Recent, status: InstanceStatus) -> None:
    """Adds the steps between the last status and this one; what came before weighs less, by the time between them."""
    before, recent.status = recent.status, status
    if status.num_decode_steps <= before.num_decode_steps:
        return
    passed_s = max(status.timestamp_ms - before.timestamp_ms, 0) / 1000
    recent.sums *= 0.5 ** (passed_s / HALF_LIFE_S)
    recent.sums += (
        status.num_decode_steps - before.num_decode_steps,
        status.decode_steps_requests - before.decode_steps_requests,
        status.decode_steps_kv - before.decode_steps_kv,
        status.decode_steps_s - before.decode_steps_s,
    )
