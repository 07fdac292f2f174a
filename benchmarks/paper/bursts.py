# SPDX-License-Identifier: Apache-2.0
"""Do moves help more when requests come in bursts, and do they come in storms then?

Gamma arrivals, as in the paper (§6.3). The mean rate is the same for all: what differs is how far the load is
above it at times.
"""

from __future__ import annotations

import itertools

from benchmarks.paper.lab import INFAAS, Lab, Run
from benchmarks.simulated import Load


def play(lab: Lab) -> None:
    settings = lab.compared("round-robin", INFAAS, "load-balance", "load-balance+moves")
    outcomes = lab.play(
        Run(
            labels={"cv": cv, "setting": setting.name},
            load=Load(lengths="m-m", rate=6.0, num_requests=lab.requests(10_000), cv=cv),
            setting=setting,
        )
        for cv, setting in itertools.product(lab.cells(1, 2, 4, 8), settings)
    )
    lab.table(
        outcomes,
        {
            "ttft_p50_s": "TTFT p50",
            "ttft_p99_s": "p99",
            "tpot_p99_s": "TPOT p99",
            "e2e_p99_s": "request p99",
            "preempted_share": "preempted",
            "preemption_loss": "preemption loss",
            "fragmentation": "fragmented",
            "kv_used": "KV used",
            "moves": "moves",
            "moves_failed": "failed",
        },
    )
