# SPDX-License-Identifier: Apache-2.0
"""Samples of the engine's steps, their content and duration, to predict latencies from.

Reading a batch costs a fraction of a microsecond per request, so it is done a few times a second; steps with prefills
have a quota of their own, as most steps have none at moderate load. All steps with decodes are summed, from counts that
are kept anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from llumlet.contract.types import StepSample
from vllm_llumnix.engine.load.load_sums import pairs
from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput

SAMPLE_SECONDS: Final = 0.1
"""Between two samples of steps with prefills, and between two of steps without."""
KEPT: Final = 4
"""Samples in a status: all of a fifth of a second. While tokens come, statuses are sent more often than that."""


class DecodeSteps(NamedTuple):
    """Sums over the steps in which requests decoded."""

    number: int = 0
    requests: int = 0
    kv: int = 0
    seconds: float = 0.0

    def plus(self, num_decodes: int, decode_kv: int, seconds: float) -> DecodeSteps:
        return DecodeSteps(self.number + 1, self.requests + num_decodes, self.kv + decode_kv, self.seconds + seconds)


class StepTimes:
    """Written by the loop thread, read by any other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.decodes = DecodeSteps()
        self.samples: tuple[StepSample, ...] = ()
        """The latest, oldest first."""
        self._clock = clock
        self._num_steps = 0
        self._sampled_at = {True: float("-inf"), False: float("-inf")}
        """The time of the last sample with prefills, and without."""

    def took(self, scheduled: SchedulerOutput, seconds: float | None, num_decodes: int, decode_kv: int) -> None:
        """A step over this batch has ended, `seconds` after the one before it, and in it `num_decodes` requests of the
        engine decoded, with that many tokens in their KV cache."""
        if seconds is None:
            return
        self._num_steps += 1
        if num_decodes:
            self.decodes = self.decodes.plus(num_decodes, decode_kv, seconds)
        now, prefills = self._clock(), scheduled.total_num_scheduled_tokens > len(scheduled.num_scheduled_tokens)
        if now - self._sampled_at[prefills] < SAMPLE_SECONDS:
            return
        self._sampled_at[prefills] = now
        sample = sample_of(scheduled)
        sample.number, sample.seconds = self._num_steps, seconds
        self.samples = (*self.samples, sample)[-KEPT:]


def sample_of(scheduled: SchedulerOutput) -> StepSample:
    """Sample of a batch. A request of which one token is computed decodes, and so does one with a draft. A request that
    vLLM does not describe counts as new: an error here would end the engine."""
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    known = scheduled.scheduled_cached_reqs
    computed |= zip(known.req_ids, known.num_computed_tokens, strict=True)
    drafts = scheduled.scheduled_spec_decode_tokens
    prefill_tokens = num_pairs = num_decodes = decode_kv = 0
    for name, number in scheduled.num_scheduled_tokens.items():
        if number == 1 or name in drafts:
            num_decodes += 1
            decode_kv += computed.get(name, 0) + number
        else:
            prefill_tokens += number
            num_pairs += pairs(computed.get(name, 0), number)
    return StepSample(prefill_tokens=prefill_tokens, pairs=num_pairs, num_decodes=num_decodes, decode_kv=decode_kv)
