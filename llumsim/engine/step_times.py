# SPDX-License-Identifier: Apache-2.0
"""What a modelled engine tells of its steps, as a real one does (`vllm_llumnix.engine.load.step_times`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from llumlet.contract.types import InstanceStatus, StepSample
from llumsched.latency.fitting import pairs
from llumsim import PS
from llumsim.engine.requests import EngineRequest

_SAMPLE_PS: Final = PS // 10
_KEPT: Final = 4


class Batch(NamedTuple):
    """What a step computes, in the terms of `step_model`."""

    prefill_tokens: int = 0
    pairs: int = 0
    num_decodes: int = 0
    decode_kv: int = 0


def batch_of(num_decodes: int, decode_kv: int, chunks: Iterable[tuple[EngineRequest, int]]) -> Batch:
    """Decodes, and chunks that are counted as computed already; one of a single token is a decode, too."""
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
    def __init__(self) -> None:
        self._samples: deque[StepSample] = deque(maxlen=_KEPT)
        self._sampled_ps = {True: -PS, False: -PS}
        """The end of the last sample with prefills, and without."""
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
        """So many steps alike have ended, the `first` after the one with this batch, of which each read `growth` tokens
        more than the one before."""
        if not batch.num_decodes:
            return
        self._number += number
        self._requests += number * batch.num_decodes
        self._kv += number * batch.decode_kv + growth * (number * (2 * first + number - 1) // 2)
        self._lasted_ps += lasted_ps

    def gone(self, num_tokens: int) -> None:
        """A request of so many tokens that ran is gone."""
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
