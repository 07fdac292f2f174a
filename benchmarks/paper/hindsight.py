# SPDX-License-Identifier: Apache-2.0
"""How often does an old status make dispatch choose another instance, and how much worse is that one?

The paper names the lag of what its scheduler sees, and a review of it misses how often that misleads. Each decision is
made twice: on the statuses that have arrived, so many seconds late, with or without the account of what is on its way
(`staleness`); and by the same policy on statuses of that very moment, the account included. Where the two differ, the
loads of both instances at that moment are compared. Requests go by the first decision: the second only judges it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.paper.lab import INFAAS, Lab, mean
from benchmarks.paper.staleness import runs
from llumsim.cluster.metrics import Metrics, RequestRecord, quantile


def play(lab: Lab) -> None:
    settings = lab.compared(INFAAS, "load-balance")
    lates = lab.cells(0.0, 0.2, 1.0, 5.0)
    lab.table(
        lab.play(runs(lab, settings, lates, has_hindsight=True, measure=_measure)),
        {
            "misled_share": "misled",
            "regret_prefill_tokens": "of those: prompt tokens ahead",
            "regret_prefill_tokens_p99": "p99",
            "regret_memory": "memory",
            "regret_memory_p99": "p99",
            "ttft_p99_s": "TTFT p99",
            "tpot_p99_s": "TPOT p99",
        },
    )


def _measure(metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    misled = [one for one in metrics.regrets if one.is_misled]
    prefill_tokens, memory = [one.prefill_tokens for one in misled], [one.memory for one in misled]
    return {
        "misled_share": len(misled) / max(len(metrics.regrets), 1),
        "regret_prefill_tokens": mean(prefill_tokens),
        "regret_prefill_tokens_p99": quantile(prefill_tokens, 0.99),
        "regret_memory": mean(memory),
        "regret_memory_p99": quantile(memory, 0.99),
    }
