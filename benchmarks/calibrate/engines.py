# SPDX-License-Identifier: Apache-2.0
"""Real engines whose steps are written down, and what they are in the simulator's terms.

An engine has its worker in its own process: between the processes of vLLM's other executor one waits for the other by
spinning, which takes the time of the other engines.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.calibrate.steps_on_cpu import steps_on_cpu
from benchmarks.calibrate.steps_on_cpu.steps_on_cpu import StepRecord
from llumsched.latency.fitting import MeasuredStep
from llumsim.engine.step_model import EngineConfig
from tests.support.harness import Server, ServerSpec
from tests.support.model import PRESETS, build

MODEL: Final = PRESETS["tiny"]
ENGINE: Final = EngineConfig(
    num_blocks=99,
    block_size=32,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    max_model_len=1024,
    prefix_caching=False,
)
"""Small, so that memory runs short: 3,168 tokens."""


def name_of(number: int) -> str:
    """The name by which the simulator knows an instance: round robin goes by these."""
    return f"i{number:04}"


def spec(number: int, stores: Sequence[str], steps: Path, overlap: float | None) -> ServerSpec:
    """`stores`: where it reports to. `steps`: the directory for what it writes down. `overlap`: of the device that it
    is as slow as; None: as fast as it can."""
    name = name_of(number)
    path = os.pathsep.join(filter(None, [str(steps_on_cpu.PATH), os.environ.get("PYTHONPATH")]))
    environment = {
        # vLLM's platform for CPUs makes every `uni` an `mp`, except where this says that all is one process;
        # `vllm serve` asks it for nothing else.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": path,
        steps_on_cpu.FILE: str(steps / name),
    }
    if overlap is not None:
        environment[steps_on_cpu.DEVICE] = json.dumps({"seed": number, "overlap": overlap})
    flags = ["--llumlet-cms", ",".join(stores), "--no-enable-prefix-caching", "--no-async-scheduling"]
    flags += ["--distributed-executor-backend", "uni", "--max-num-batched-tokens", str(ENGINE.max_num_batched_tokens)]
    return ServerSpec(
        build(MODEL),
        name=name,
        instance_id=name,
        block_size=ENGINE.block_size,
        max_model_len=ENGINE.max_model_len,
        num_kv_blocks=ENGINE.num_blocks + 1,  # vLLM's null block is among them
        max_num_seqs=ENGINE.max_num_seqs,
        flags=tuple(flags),
        env=environment,
    )


def records_of(engine: Server) -> list[StepRecord]:
    """All steps so far. A line that is being written is left out."""
    lines = Path(engine.spec.env[steps_on_cpu.FILE]).read_text().split("\n")[:-1]
    return [StepRecord(*json.loads(line)) for line in lines]


def measured(records: Sequence[StepRecord], since_s: float, until_s: float) -> Iterator[MeasuredStep]:
    """Steps that began then, of which the next one followed at once. Times of CLOCK_MONOTONIC."""
    for step, after in itertools.pairwise(records):
        if after.follows and since_s <= step.began_s < until_s:
            yield MeasuredStep(*step.batch, after.began_s - step.began_s)


def loop_gap_s(records: Sequence[StepRecord]) -> list[float]:
    """Time from the end of each step's model to the beginning of the next one that followed at once."""
    return [after.began_s - step.ended_s for step, after in itertools.pairwise(records) if after.follows]
