# SPDX-License-Identifier: Apache-2.0
"""What becomes of moves when the cluster grows? Azure's traces, with the same load for each instance.

Requests come as in the trace, many more of them; statuses tell once a second that requests have grown, as large
clusters may have it (`--tokens-told-s` of `benchmarks.cluster`).
"""

from __future__ import annotations

import itertools
from typing import Final

from benchmarks.paper.lab import Lab, Run
from benchmarks.simulated import Load
from llumsim.cluster.member import Cadence

RATES: Final = {"azure2023_conv.csv": 0.39, "azure2023_code.csv": 0.8}
"""Requests a second for each instance: about half of what one bears."""
_SECONDS: Final = 300.0


def play(lab: Lab) -> None:
    traces = {name: path for name in RATES if (path := lab.trace(name)) is not None}
    outcomes = lab.play(
        Run(
            labels={"trace": name, "size": size, "setting": setting.name},
            load=Load(trace=traces[name], seconds=lab.seconds or _SECONDS, rate=size * RATES[name]),
            setting=setting,
            instances=size,
            cadence=Cadence(tokens_s=1.0),
        )
        for name, size, setting in itertools.product(
            traces,
            (4, 16) if lab.is_quick else (16, 64, 256, 1000),
            lab.compared("load-balance", "load-balance+moves"),
        )
    )
    lab.table(
        outcomes,
        {
            "real_rate": "rate",
            "ttft_p50_s": "TTFT p50",
            "ttft_p99_s": "p99",
            "tpot_p99_s": "TPOT p99",
            "preemption_loss": "preemption loss",
            "kv_used": "KV used",
            "moves_per_instance_hour": "moves, instance and hour",
            "speed": "times real time",
        },
    )
