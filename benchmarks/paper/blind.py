# SPDX-License-Identifier: Apache-2.0
"""How much do moves mend of what dispatch does that looks at no load?

Random dispatch is what remains when nothing is known, not even who was chosen last; round robin evens out numbers, not
lengths. The rescheduler is the same for all.
"""

from __future__ import annotations

import itertools
from typing import Final

from benchmarks.paper.lab import RANDOM, RANDOM_MOVES, Lab, Run
from benchmarks.simulated import MOVES, Load

_RATES: Final = (6.7, 8.2)
"""Requests a second. The second is the knee (`serving`)."""


def play(lab: Lab) -> None:
    settings = lab.compared(
        RANDOM, RANDOM_MOVES, "round-robin", f"round-robin{MOVES}", "load-balance", f"load-balance{MOVES}"
    )
    outcomes = lab.play(
        Run(
            labels={"rate": rate, "setting": setting.name},
            load=Load(lengths="m-m", rate=rate, num_requests=lab.requests(10_000)),
            setting=setting,
        )
        for rate, setting in itertools.product(lab.cells(*_RATES), settings)
    )
    lab.table(
        outcomes,
        {
            "ttft_mean_s": "TTFT mean",
            "ttft_p50_s": "p50",
            "ttft_p99_s": "p99",
            "tpot_p99_s": "TPOT p99",
            "e2e_mean_s": "request mean",
            "preempted_share": "preempted",
            "preemption_loss": "preemption loss",
            "fragmentation": "fragmented",
            "kv_used": "KV used",
            "moves": "moves",
            "moves_failed": "failed",
        },
    )
