# SPDX-License-Identifier: Apache-2.0
"""Why move requests at all? One instance with memory to spare preempts, and who is preempted waits for long.

Llumnix's motivating experiment (§3): LLaMA-7B on an A10, 2,000 Poisson requests of power-law lengths of mean 256, 0.42
a second. The scale of the step model was set by its first two figures, so that only the others are evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.paper.lab import Lab, Run
from benchmarks.simulated import Load, read_setting
from llumsim.cluster.metrics import Metrics, RequestRecord


def play(lab: Lab) -> None:
    load = Load(lengths="m-m", rate=0.42, num_requests=lab.requests(2_000))
    setting = read_setting("round-robin")
    (outcome,) = lab.play([Run(labels={"load": "m-m"}, load=load, setting=setting, instances=1, measure=_measure)])
    lab.compare(
        ("memory used", "62 %", 100 * outcome["kv_used"]),
        ("requests preempted", "8 %", 100 * outcome["preempted_share"]),
        ("P99 per token, over P50", "3.8", outcome["tpot_p99_s"] / outcome["tpot_p50_s"]),
        ("of the slowest 1 % per token: lost to preemption", "70 %", 100 * outcome["slowest_lost_share"]),
        ("of those: lost to preemption, mean, s", "50 s", outcome["slowest_lost_s"]),
        ("of those: preemptions, mean", "2", outcome["slowest_preemptions"]),
        ("lost to preemption, most of one request, s", "", outcome["most_lost_s"]),
    )


def _measure(metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    decoding = sorted((one for one in records if one.tpot_s), key=lambda one: one.tpot_s or 0.0)
    slowest = decoding[-max(len(decoding) // 100, 1) :]
    lost_s = [one.preemption_loss_s for one in slowest]
    decode_s = [(one.tpot_s or 0.0) * (one.output_tokens - 1) for one in slowest]
    # One that is preempted before its first token loses that time, too, and its decode time begins later.
    shares = [min(lost / decode, 1.0) for lost, decode in zip(lost_s, decode_s, strict=True)]
    return {
        "slowest_lost_share": float(np.mean(shares)),
        "slowest_lost_s": float(np.mean(lost_s)),
        "slowest_preemptions": float(np.mean([one.num_preemptions for one in slowest])),
        "most_lost_s": max(one.preemption_loss_s for one in records),
    }
