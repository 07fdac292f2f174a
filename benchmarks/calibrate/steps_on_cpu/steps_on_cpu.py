# SPDX-License-Identifier: Apache-2.0
"""Every step of a real engine written down, and stretched to what a device would take for it.

This distribution, on `PYTHONPATH`, wraps the two calls between which vLLM's model runs: `execute_model` and
`sample_tokens` of the executor that has its worker in the engine's own process (`uni`). What each step computed is read
off vLLM's `SchedulerOutput`, and a line for it is appended to the file of `STEPS_FILE` (`StepRecord`, as JSON).

With `STEPS_DEVICE`, arguments of `Device` as JSON, the second call returns when the step has lasted as long as that
says, unless the real model took longer. The engine sleeps until then, and leaves the cores to others: several engines
do not slow each other down, as on devices of their own. The real model runs all the same; its tokens and its KV cache
are real.

Nothing of this is installed with the project: it lies in its benchmarks. `PATH` is what goes onto `PYTHONPATH`.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).resolve().parent
FILE, DEVICE = "STEPS_FILE", "STEPS_DEVICE"


class Batch(NamedTuple):
    """Work of one step, in the terms of `llumsim.engine.step_model`."""

    prefill_tokens: int
    pairs: int
    num_decodes: int
    decode_kv: int


class StepRecord(NamedTuple):
    """`began_s`, `ended_s`: when the model was given the batch, and when it had sampled its tokens, in seconds of
    CLOCK_MONOTONIC, which all processes of a machine share. `follows`: the engine came from another step, and had not
    idled."""

    began_s: float
    ended_s: float
    follows: bool
    prefill_tokens: int
    pairs: int
    num_decodes: int
    decode_kv: int

    @property
    def batch(self) -> Batch:
        return Batch(*self[3:])


class Device:
    """How long a step takes, at the scale of an A10 with a model of 7 billion parameters. Not a sum of five terms: a
    batch of decodes is padded to the next captured graph, a prefill to whole tiles, and no two steps take the same.

    `overlap`: share of the shorter of the two, memory traffic and arithmetic, that runs beside the longer. The more of
    it, the less a short prefill adds to a step, which five numbers cannot say."""

    LAUNCH_S = 0.006
    WEIGHTS_S = 0.030
    KV_S = 2e-6
    """Seconds for each token in the cache that is read."""
    TOKEN_S = 0.000216
    PAIR_S = 8.4e-9
    TILE = 16
    GRAPH = 8
    NOISE = 0.03
    """Standard deviation of the logarithm."""

    def __init__(self, seed: int, overlap: float) -> None:
        self._chance = random.Random(seed)
        self._overlap = overlap

    def seconds(self, batch: Batch) -> float:
        tokens = _up(batch.prefill_tokens, self.TILE) + _up(batch.num_decodes, self.GRAPH)
        arithmetic = self.TOKEN_S * tokens + self.PAIR_S * batch.pairs
        memory = self.WEIGHTS_S + self.KV_S * batch.decode_kv
        busy = arithmetic + memory - self._overlap * min(arithmetic, memory)
        return (self.LAUNCH_S + busy) * math.exp(self._chance.gauss(0.0, self.NOISE))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def batch_of(scheduled: Any) -> Batch:
    """The batch of vLLM's SchedulerOutput."""
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    prefill_tokens = pairs = num_decodes = decode_kv = 0
    for name, number in scheduled.num_scheduled_tokens.items():
        if number == 1:
            num_decodes += 1
            decode_kv += computed[name] + 1
        else:
            prefill_tokens += number
            pairs += number * computed[name] + number * (number + 1) // 2
    return Batch(prefill_tokens, pairs, num_decodes, decode_kv)


def register() -> None:
    """What vLLM calls in each of its processes, once or several times."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if FILE not in os.environ or hasattr(UniProcExecutor, "steps_on_cpu"):
        return
    device = Device(**json.loads(os.environ[DEVICE])) if DEVICE in os.environ else None
    execute_model, sample_tokens = UniProcExecutor.execute_model, UniProcExecutor.sample_tokens
    file = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115 (open as long as the process lives)
    began_s, follows, batch = 0.0, False, Batch(0, 0, 0, 0)

    def execute(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal began_s, follows, batch
        began_s = time.monotonic()
        batch, follows = batch_of(scheduled), bool(scheduled.scheduled_cached_reqs.req_ids)
        return execute_model(self, scheduled, *args, **kwargs)

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(self, *args, **kwargs)
        if device is not None:
            time.sleep(max(began_s + device.seconds(batch) - time.monotonic(), 0.0))
        file.write(json.dumps(StepRecord(began_s, time.monotonic(), follows, *batch)) + "\n")
        return output

    UniProcExecutor.execute_model, UniProcExecutor.sample_tokens = execute, sample
    UniProcExecutor.steps_on_cpu = True
