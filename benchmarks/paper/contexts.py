# SPDX-License-Identifier: Apache-2.0
"""Does a move's stall stay flat when contexts are long, and do the requests that stay notice it?

Prompts of one length each, on H100s with a model that takes 128k tokens; the same share of time goes into prefills at
all lengths. Copies share links, and do not slow down the engines' steps: what moves do to others here is by way of
batches.
"""

from __future__ import annotations

import itertools
from typing import Final

from benchmarks.paper.lab import Lab, Run
from benchmarks.simulated import Load
from llumsched.simulator import PS
from llumsched.simulator.lengths import LENGTHS, Lengths
from llumsched.simulator.step_model import Hardware, load_hardware, pairs

_INSTANCES: Final = 4
_PREFILL_SHARE: Final = 0.3
"""Of an instance's time."""


def play(lab: Lab) -> None:
    hardware = load_hardware("h100-llama-8b")
    outcomes = lab.play(
        Run(
            labels={"context": length, "setting": setting.name},
            load=Load(
                lengths=(Lengths(length, (length,) * 6), LENGTHS["sharegpt-out"]),
                rate=_INSTANCES * _PREFILL_SHARE / _prefill_s(hardware, length),
                num_requests=lab.requests(1_000),
            ),
            setting=setting,
            instances=_INSTANCES,
            hardware=hardware,
        )
        for length, setting in itertools.product(
            lab.cells(1_000, 16_000, 32_000, 64_000, 124_000), lab.compared("load-balance", "load-balance+moves")
        )
    )
    lab.table(
        outcomes,
        {
            "rate": "rate",
            "kv_used": "KV used",
            "moves": "moves",
            "move_p50_s": "move p50",
            "move_p99_s": "p99",
            "move_stall_p50_s": "stall p50",
            "move_stall_p99_s": "p99",
            "gap_p50_s": "gaps, all, p50",
            "gap_p99_s": "p99",
            "gap_p999_s": "p99.9",
            "ttft_p99_s": "TTFT p99",
            "tpot_p99_s": "TPOT p99",
        },
    )


def _prefill_s(hardware: Hardware, length: int) -> float:
    step = hardware.step
    return (step.b * length + step.c * pairs(0, length)) / PS
