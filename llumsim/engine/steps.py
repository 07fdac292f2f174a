# SPDX-License-Identifier: Apache-2.0
"""The steps of an engine: spans of similar ones, what a step computes, and what the status tells of steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from llumlet.contract.types import InstanceStatus, StepSample
from llumsched.latency.fitting import pairs
from llumsim import PS
from llumsim.engine.requests import EngineRequest

_SAMPLE_PS: Final = PS // 10
_KEPT: Final = 4


@dataclass(slots=True)
class Span:
    """Consecutive steps, each longer than the one before by a constant."""

    began_ps: int
    first_ps: int
    """Duration of the first step."""
    growth_ps: int
    length: int
    """Number of steps; smaller once an event interrupts the span."""
    num_settled: int = 0
    """Steps that are accounted for."""
    num_supplied: int = 1
    """Steps whose blocks have been taken."""

    def end_of(self, num_steps: int) -> int:
        """The time at which `num_steps` steps have ended."""
        return self.began_ps + num_steps * self.first_ps + self.growth_ps * (num_steps * (num_steps - 1) // 2)

    def lasting(self, number: int) -> int:
        """Duration of the step after `number` others."""
        return self.first_ps + self.growth_ps * number

    def age(self, now_ps: int) -> int:
        """Time since the step under way began."""
        return now_ps - self.end_of(min(self.num_ended(now_ps), self.length - 1))

    def num_ended(self, now_ps: int) -> int:
        """The greatest number, however long the span is, with `end_of(number) <= now_ps`."""
        passed, growth = now_ps - self.began_ps, self.growth_ps
        if not growth:
            return passed // self.first_ps
        # growth · n² + (2 · first - growth) · n <= 2 · passed
        linear = 2 * self.first_ps - growth
        return max((math.isqrt(linear * linear + 8 * growth * passed) - linear) // (2 * growth), 0)


class Batch(NamedTuple):
    """The work of a step, in the terms of `step_model`."""

    prefill_tokens: int = 0
    pairs: int = 0
    num_decodes: int = 0
    decode_kv: int = 0


def batch_of(num_decodes: int, decode_kv: int, chunks: Iterable[tuple[EngineRequest, int]]) -> Batch:
    """Sum up decodes and chunks, whose tokens are counted as computed already. A chunk of one token is a decode."""
    prefill_tokens = num_pairs = 0
    for request, number in chunks:
        if number == 1:
            num_decodes += 1
            decode_kv += request.num_computed
        else:
            prefill_tokens += number
            num_pairs += pairs(request.num_computed - number, number)
    return Batch(prefill_tokens, num_pairs, num_decodes, decode_kv)


class StepTimes:
    """The engine's report on its steps, like production's (`vllm_llumnix.engine.load.step_times`)."""

    def __init__(self) -> None:
        self._samples: deque[StepSample] = deque(maxlen=_KEPT)
        self._sampled_ps = {True: -PS, False: -PS}
        """End of the last sample with prefills, and without."""
        self.num_gone = self.gone_tokens = 0
        """Requests that ran and are gone, and their tokens."""
        self._number = self._requests = self._kv = self._lasted_ps = 0
        """Sums over the steps with decodes."""

    def ended(self, batch: Batch, number: int, now_ps: int, lasted_ps: int) -> None:
        """Step `number` of the engine has ended."""
        prefills = batch.prefill_tokens > 0
        if now_ps - self._sampled_ps[prefills] >= _SAMPLE_PS:
            self._sampled_ps[prefills] = now_ps
            self._samples.append(StepSample(number=number, seconds=lasted_ps / PS, **batch._asdict()))

    def decoded(self, batch: Batch, growth: int, first: int, number: int, lasted_ps: int) -> None:
        """`number` similar steps have ended, the first of them `first` steps after the one with this batch. Each read
        `growth` tokens more than the one before."""
        if not batch.num_decodes:
            return
        self._number += number
        self._requests += number * batch.num_decodes
        self._kv += number * batch.decode_kv + growth * (number * (2 * first + number - 1) // 2)
        self._lasted_ps += lasted_ps

    def gone(self, num_tokens: int) -> None:
        """A request of `num_tokens` that ran is gone."""
        self.num_gone += 1
        self.gone_tokens += num_tokens

    def tell(self, status: InstanceStatus) -> None:
        status.num_decode_steps, status.decode_steps_s = self._number, self._lasted_ps / PS
        status.decode_steps_requests, status.decode_steps_kv = self._requests, self._kv
        if self._samples:
            status.steps.extend(self._samples)
            latest = self._samples[-1]
            status.profiling_id, status.step_duration = latest.number, latest.seconds * 1e3
            status.num_scheduled_prefill_tokens = latest.prefill_tokens
