# SPDX-License-Identifier: Apache-2.0
"""What do urgent requests get from engines that heed priorities, and does moving take it away or add to it?

One request in ten is urgent, and the same ones are where nobody heeds it: the paper's share, under bursts. Engines let
urgent ones in first and preempt them last. That is all there is: neither dispatch nor the rescheduler knows of
priorities. The paper's 1.2 to 1.5 for the mean urgent request, against itself without priorities, comes of an instance
that keeps room free beside an urgent request, so that others move away from it (a virtual usage that is greater than
the real one): `benchmarks.objectives priorities`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.paper.lab import Lab, Outcome, Run, mean, ratio
from benchmarks.simulated import Load
from llumsched.simulator.metrics import Metrics, RequestRecord, quantile
from llumsched.simulator.step_model import load_hardware

_URGENT: Final = 0.1
_LOADS: Final = ((7.4, 2), (10.0, 2), (7.4, 8))
"""Requests a second, and the variation of the time between two: the second is more than the cluster bears."""
_KINDS: Final = ("urgent", "other")
_COLUMNS: Final[dict[str, str]] = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "p99",
    "tpot_mean_s": "TPOT mean",
    "tpot_p99_s": "p99",
    "e2e_mean_s": "request mean",
    "e2e_p99_s": "p99",
    "preemption_loss": "preemption loss",
    "moves_per_request": "moves per request",
}


def play(lab: Lab) -> None:
    hardware = load_hardware("a10-llama-7b")
    settings = lab.compared("load-balance", "load-balance+moves")
    outcomes = lab.play(
        Run(
            labels={"rate": rate, "cv": cv, "setting": setting.name, "priorities": by_priority},
            load=Load(lengths="m-m", rate=rate, num_requests=lab.requests(10_000), cv=cv, urgent=_URGENT),
            setting=setting,
            hardware=replace(hardware, engine=replace(hardware.engine, by_priority=by_priority)),
            measure=measure_kinds,
        )
        for (rate, cv), setting, by_priority in itertools.product(lab.cells(*_LOADS), settings, (False, True))
    )
    lab.rows(
        (*outcomes[0].run.labels, "requests", *_COLUMNS.values()),
        (
            (*outcome.run.labels.values(), kind, *(outcome[f"{kind}_{name}"] for name in _COLUMNS))
            for outcome, kind in itertools.product(outcomes, _KINDS)
        ),
    )
    _compare(lab, outcomes)


def measure_kinds(metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    """Figures of urgent requests, and of the others."""
    found: dict[str, float] = {}
    for kind in _KINDS:
        those = [one for one in records if (one.priority < 0) == (kind == "urgent")]
        ttft_s = [one.ttft_s for one in those if one.ttft_s is not None]
        tpot_s = [one.tpot_s for one in those if one.tpot_s is not None]
        e2e_s = [one.e2e_s for one in those if one.e2e_s is not None]
        found |= {
            f"{kind}_ttft_mean_s": mean(ttft_s),
            f"{kind}_ttft_p99_s": quantile(ttft_s, 0.99),
            f"{kind}_tpot_mean_s": mean(tpot_s),
            f"{kind}_tpot_p99_s": quantile(tpot_s, 0.99),
            f"{kind}_e2e_mean_s": mean(e2e_s),
            f"{kind}_e2e_p99_s": quantile(e2e_s, 0.99),
            f"{kind}_preemption_loss": mean([one.preemption_loss_s for one in those]),
            f"{kind}_moves_per_request": mean([one.num_moves for one in those]),
        }
    return found


def _compare(lab: Lab, outcomes: Sequence[Outcome]) -> None:
    """The last setting with priorities, against itself without; each where the difference is the greatest."""
    last = [outcome for outcome in outcomes if outcome.run.setting == outcomes[-1].run.setting]
    pairs = list(zip(last[0::2], last[1::2], strict=True))

    def most(name: str) -> float:
        return max(ratio(without[name], with_them[name]) for without, with_them in pairs)

    slowed = max(ratio(with_them["other_e2e_mean_s"], without["other_e2e_mean_s"]) for without, with_them in pairs)
    lab.compare(
        ("urgent: request mean, without over with, up to", "1.2 to 1.5", most("urgent_e2e_mean_s")),
        ("urgent: TTFT mean, up to", "2.9 to 8.6", most("urgent_ttft_mean_s")),
        ("urgent: TTFT p99, up to", "3.6 to 10", most("urgent_ttft_p99_s")),
        ("others: request mean, with over without, up to", "1.13", slowed),
    )
