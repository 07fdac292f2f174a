# SPDX-License-Identifier: Apache-2.0
"""What do moves do when the load comes and goes: in the valleys, at the peaks, and on the slopes between?

A day in an hour, or less with fewer requests: the rate is a wave between the knee (`serving`) and three tenths of it,
and begins in the valley. The number of instances does not follow it. A request belongs to the part of the day in which
it came: valley and peak are the third of the day around each, the slopes are the rest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.paper.lab import INFAAS, Lab, Run, mean
from benchmarks.simulated import Load
from llumsim.cluster.metrics import Metrics, RequestRecord, quantile

_PEAK_RATE: Final = 8.2
_VALLEY: Final = 0.3
_DAY_S: Final = 3600.0
_PARTS: Final = ("valley", "slope", "peak")
_COLUMNS: Final[dict[str, str]] = {
    "rate": "rate",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p99_s": "p99",
    "preemption_loss": "preemption loss",
    "kv_used": "KV used",
    "spread": "fullest less emptiest",
    "moves_per_request": "moves per request",
}


def play(lab: Lab) -> None:
    mean_rate = _PEAK_RATE * (1 + _VALLEY) / 2
    num_requests = lab.requests(round(_DAY_S * mean_rate))
    day_s = num_requests / mean_rate
    outcomes = lab.play(
        Run(
            labels={"setting": setting.name},
            load=Load(lengths="m-m", rate=_PEAK_RATE, num_requests=num_requests, valley=_VALLEY, period_s=day_s),
            setting=setting,
            measure=functools.partial(_measure, day_s),
        )
        for setting in lab.compared(INFAAS, "load-balance", "load-balance+moves")
    )
    lab.rows(
        ("part", "setting", *_COLUMNS.values()),
        (
            (part, outcome.run.setting.name, *(outcome[f"{part}_{name}"] for name in _COLUMNS))
            for part, outcome in itertools.product(_PARTS, outcomes)
        ),
    )


def part_of(at_s: float, day_s: float) -> str:
    """Of `_PARTS`."""
    from_valley = abs((at_s / day_s + 0.5) % 1 - 0.5)
    return _PARTS[(from_valley >= 1 / 6) + (from_valley > 1 / 3)]


def _measure(day_s: float, metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    last_s = max(one.arrived_s for one in records)
    found: dict[str, float] = {}
    for part in _PARTS:
        those = [one for one in records if part_of(one.arrived_s, day_s) == part]
        samples = [one for one in metrics.samples if one.at_s <= last_s and part_of(one.at_s, day_s) == part]
        ttft_s = [one.ttft_s for one in those if one.ttft_s is not None]
        tpot_s = [one.tpot_s for one in those if one.tpot_s is not None]
        found |= {
            f"{part}_rate": len(those) / max(len(samples), 1),
            f"{part}_ttft_p50_s": quantile(ttft_s, 0.5),
            f"{part}_ttft_p99_s": quantile(ttft_s, 0.99),
            f"{part}_tpot_p50_s": quantile(tpot_s, 0.5),
            f"{part}_tpot_p99_s": quantile(tpot_s, 0.99),
            f"{part}_preemption_loss": mean([one.preemption_loss_s for one in those]),
            f"{part}_kv_used": mean([one.used_share for one in samples]),
            f"{part}_spread": mean([max(one.loads) - min(one.loads) for one in samples]),
            f"{part}_moves_per_request": mean([one.num_moves for one in those]),
        }
    return found
