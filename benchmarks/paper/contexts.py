# SPDX-License-Identifier: Apache-2.0
"""Does a move's stall stay flat when contexts are long, and do the requests that stay notice it?

Prompts of one length each, on H100s with a model that takes 128k tokens; the same share of time goes into prefills at
all lengths. Balancing moves few of the longest ones, as each is a large part of an instance; so there is a third case,
in which one of the instances is drained again and again, and everything leaves it. Copies share links, and do not slow
down the engines' steps: what moves do to others here is by way of batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from benchmarks.paper.lab import Lab, Run
from benchmarks.simulated import Load
from llumsched.latency.fitting import pairs
from llumsim import PS
from llumsim.cluster.run import Happening, What
from llumsim.cluster.workload import LENGTHS, Lengths
from llumsim.engine.step_model import Hardware, load_hardware

_INSTANCES: Final = 4
_PREFILL_SHARE: Final = 0.3
"""Share of an instance's time that prefills take."""
_DRAINS: Final = 10
_LEAST_S: Final = 900.0
"""Time that a run takes at least."""


def play(lab: Lab) -> None:
    hardware = replace(load_hardware("h100-llama-8b"), cold_start_s=0.0)
    runs = []
    for length in lab.cells(4_000, 16_000, 32_000, 64_000, 124_000):
        rate = _INSTANCES * _PREFILL_SHARE / _prefill_s(hardware, length)
        lengths = Lengths(length, (length,) * 6), LENGTHS["sharegpt-out"]
        load = Load(lengths=lengths, rate=rate, num_requests=lab.requests(max(1_000, round(rate * _LEAST_S))))
        for setting in lab.compared("load-balance", "load-balance+moves"):
            for has_drains in (False, True)[: 1 + (setting.rescheduling is not None)]:
                runs.append(
                    Run(
                        labels={"context": length, "setting": setting.name, "drains": has_drains},
                        load=load,
                        setting=setting,
                        instances=_INSTANCES,
                        hardware=hardware,
                        happenings=_drains(load.num_requests / rate) if has_drains else (),
                    )
                )
    outcomes = lab.play(runs)
    lab.table(
        outcomes,
        {
            "real_rate": "rate",
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


def _drains(seconds: float) -> list[Happening]:
    """Drains of the last instance; half of the time it is there."""
    period_s = seconds / (_DRAINS + 1)
    return [
        Happening((number + half) * period_s, what, _INSTANCES - 1)
        for number in range(1, _DRAINS + 1)
        for half, what in ((0.0, What.STOP), (0.5, What.START))
    ]


def _prefill_s(hardware: Hardware, length: int) -> float:
    step = hardware.step
    return (step.b * length + step.c * pairs(0, length)) / PS
