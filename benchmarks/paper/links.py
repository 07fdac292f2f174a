# SPDX-License-Identifier: Apache-2.0
"""When do moves between nodes pay?

The paper's cluster, with every instance a node of its own behind links of several speeds. Beside the rescheduler as it
is, two with other horizons, for which a better balance counts against the time of the copy: one of 2 s, and one of an
hour, which takes everything for worth it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from benchmarks.paper.lab import Lab, Run
from benchmarks.simulated import Load
from llumsim.engine.step_model import load_hardware


def play(lab: Lab) -> None:
    hardware = replace(load_hardware("a10-llama-7b"), instances_per_node=1)
    settings = lab.compared(
        "load-balance",
        "load-balance+moves",
        "horizon-2=load-balance+moves --rescheduling-horizon-seconds 2",
        "unweighed=load-balance+moves --rescheduling-horizon-seconds 3600",
    )
    outcomes = lab.play(
        Run(
            labels={"gbit_per_s": gbit, "setting": setting.name},
            load=Load(lengths="m-m", rate=6.7, num_requests=lab.requests(10_000)),
            setting=setting,
            hardware=replace(hardware, link_bytes_per_s=gbit * 1e9 / 8),
        )
        for gbit, setting in itertools.product(lab.cells(100, 25, 10, 3, 1), settings)
        if setting.rescheduling is not None or gbit == 100
    )
    lab.table(
        outcomes,
        {
            "moves": "moves",
            "moves_failed": "failed",
            "move_p50_s": "move p50",
            "move_p99_s": "p99",
            "move_stall_p50_s": "stall p50",
            "move_stall_p99_s": "p99",
            "ttft_p99_s": "TTFT p99",
            "tpot_p99_s": "TPOT p99",
            "gap_p999_s": "gap p99.9",
            "preemption_loss": "preemption loss",
        },
    )
