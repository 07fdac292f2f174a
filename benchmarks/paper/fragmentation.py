# SPDX-License-Identifier: Apache-2.0
"""Balance or pack? Spread requests leave no room for a long prompt anywhere; packed ones preempt one another.

The experiment that a review of the paper reports: 4 instances of LLaMA-7B, long inputs (power law, at most 4,096
tokens); balance has a P99 TTFT 3 to 5 times that of packing, packing 4 times the preemptions. The review gives neither
the rate nor the mean length: prompts here are the paper's Long set, cut.
"""

from __future__ import annotations

import itertools
from typing import Final

from benchmarks.paper.lab import INFAAS, INFAAS_MOVES, PACKING, PACKING_MOVES, Lab, Run, ratio
from benchmarks.simulated import MOVES, Load
from llumsim.cluster.workload import LENGTHS, Lengths

_INPUTS: Final = Lengths(512, (8, 55, 582, 3113, 4096, 4096))


def play(lab: Lab) -> None:
    settings = lab.compared(INFAAS, INFAAS_MOVES, "load-balance", f"load-balance{MOVES}", PACKING, PACKING_MOVES)
    rates = lab.cells(1.1, 1.3, 1.5, 1.7)
    outcomes = lab.play(
        Run(
            labels={"rate": rate, "setting": setting.name},
            load=Load(lengths=(_INPUTS, LENGTHS["medium"]), rate=rate, num_requests=lab.requests(5_000)),
            setting=setting,
            instances=4,
        )
        for rate, setting in itertools.product(rates, settings)
    )
    lab.table(
        outcomes,
        {
            "ttft_p50_s": "TTFT p50",
            "ttft_p99_s": "p99",
            "tpot_p99_s": "TPOT p99",
            "preempted_share": "preempted",
            "preemption_loss": "preemption loss",
            "fragmentation": "fragmented",
            "kv_used": "KV used",
            "moves": "moves",
        },
    )
    found = {tuple(outcome.run.labels.values()): outcome for outcome in outcomes}
    for rate in rates:
        balance, packing = found.get((rate, "infaas")), found.get((rate, "packing"))
        if balance is not None and packing is not None:
            ttft = ratio(balance["ttft_p99_s"], packing["ttft_p99_s"])
            preempted = ratio(packing["preempted_share"], balance["preempted_share"])
            lab.compare(
                (f"{rate}/s: TTFT p99, balance over packing", "3 to 5", ttft),
                (f"{rate}/s: requests preempted, packing over balance", "4", preempted),
            )
