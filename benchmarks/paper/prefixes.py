# SPDX-License-Identifier: Apache-2.0
"""How much of shared prefixes does a cluster use, and how much of that do moves break?

Mooncake's published trace, on H100s. Dispatch does not know where a prefix is cached; a request that moves takes its
blocks along, destinations do not share them with others, and the source keeps them cached as if it had ended there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.paper.lab import Lab, Run
from benchmarks.simulated import Load
from llumsim.cluster.metrics import Metrics, RequestRecord
from llumsim.engine.step_model import load_hardware

TRACE: Final = "mooncake_fast25_synthetic.jsonl"
_INSTANCES: Final = 4


def play(lab: Lab) -> None:
    trace = lab.trace(TRACE)
    if trace is None:
        return
    hardware = load_hardware("h100-llama-8b")
    seconds = lab.seconds or (120.0 if lab.is_quick else None)
    outcomes = lab.play(
        Run(
            labels={"caching": has_cache, "setting": setting.name},
            load=Load(trace=trace, seconds=seconds),
            setting=setting,
            instances=_INSTANCES,
            hardware=replace(hardware, engine=replace(hardware.engine, prefix_caching=has_cache)),
            measure=_measure,
        )
        for has_cache, setting in itertools.product(
            (False, True), lab.compared("round-robin", "load-balance", "load-balance+moves")
        )
    )
    lab.table(
        outcomes,
        {
            "cached_share": "prompts cached",
            "ttft_p50_s": "TTFT p50",
            "ttft_p99_s": "p99",
            "tpot_p99_s": "TPOT p99",
            "kv_used": "KV used",
            "moves": "moves",
            "moved_share": "requests moved",
        },
    )


def _measure(metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    return {"moved_share": sum(one.num_moves > 0 for one in records) / max(len(records), 1)}
