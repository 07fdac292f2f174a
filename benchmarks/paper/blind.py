# SPDX-License-Identifier: Apache-2.0
"""How much do moves mend of what dispatch does that looks at no load?

Random dispatch is what remains when nothing is known, not even who was chosen last; round robin evens out numbers, not
lengths. The rescheduler is the same for all.

A prompt holds up whoever decodes beside it. So it is counted, too, how often another request is sent to the same
instance within a second, and what comes behind the slowest requests in this way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.paper.lab import RANDOM, RANDOM_MOVES, Lab, Run, mean
from benchmarks.simulated import MOVES, Load
from llumsim.cluster.metrics import Metrics, RequestRecord, quantile

_RATES: Final = (6.7, 8.2)
"""Requests a second. The second is the knee (`serving`)."""
_BEHIND_S: Final = 1.0


def play(lab: Lab) -> None:
    settings = lab.compared(
        RANDOM, RANDOM_MOVES, "round-robin", f"round-robin{MOVES}", "load-balance", f"load-balance{MOVES}"
    )
    outcomes = lab.play(
        Run(
            labels={"rate": rate, "setting": setting.name},
            load=Load(lengths="m-m", rate=rate, num_requests=lab.requests(10_000)),
            setting=setting,
            measure=_measure,
        )
        for rate, setting in itertools.product(lab.cells(*_RATES), settings)
    )
    lab.table(
        outcomes,
        {
            "ttft_mean_s": "TTFT mean",
            "ttft_p99_s": "p99",
            "tpot_p99_s": "TPOT p99",
            "gap_p99_s": "gap p99",
            "e2e_mean_s": "request mean",
            "preemption_loss": "preemption loss",
            "moves": "moves",
            "moves_failed": "failed",
            "followed_share": "followed",
            "slowest_tokens": "slowest: tokens, median",
            "slowest_behind": "prompt tokens behind",
        },
    )


def _measure(metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    behind = prompts_behind(records)
    decoding = sorted((one for one in records if one.tpot_s), key=lambda one: one.tpot_s or 0.0)
    slowest = decoding[-max(len(decoding) // 100, 1) :]
    return {
        "followed_share": mean([behind[one.id] > 0 for one in records]),
        "slowest_tokens": quantile([one.output_tokens for one in slowest], 0.5),
        "slowest_behind": mean([behind[one.id] for one in slowest]),
    }


def prompts_behind(records: Sequence[RequestRecord]) -> Mapping[str, int]:
    """Prompt tokens of the requests that were sent to the same instance at most `_BEHIND_S` after each, by its id."""
    behind = {one.id: 0 for one in records}
    latest: dict[str, deque[RequestRecord]] = {}
    for one in sorted(records, key=lambda one: one.arrived_s):
        before = latest.setdefault(one.instances[0], deque())
        while before and before[0].arrived_s < one.arrived_s - _BEHIND_S:
            before.popleft()
        for other in before:
            behind[other.id] += one.prompt_tokens
        before.append(one)
    return behind
