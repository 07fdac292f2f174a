# SPDX-License-Identifier: Apache-2.0
"""What do dispatch and moves bring on the paper's loads (§6.3), up to the rate that the cluster can just bear?

The paper chooses rates "such that P50 requests have no queuing". Here the highest such rate, the knee, is found by
bisection with the built-in `load-balance` and nothing moved: of the last quarter of the requests, which finds the
cluster as full as it gets, the median waits for its first token at most `_MOST_STEPS` median gaps between tokens longer
than in an idle cluster: for the rest of the step that it finds under way, and for other prompts in its own, but for
nobody's end. All settings are then played at shares of that rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.paper.lab import INFAAS, INFAAS_MEMORY, Lab, Outcome, Run, ratio
from benchmarks.simulated import Load, Setting, read_setting
from llumsim.cluster.metrics import Metrics, RequestRecord, quantile
from llumsim.cluster.workload import PAIRS

_COLUMNS: Final[dict[str, str]] = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "p50",
    "ttft_p99_s": "p99",
    "tpot_p99_s": "TPOT p99",
    "e2e_mean_s": "request mean",
    "e2e_p99_s": "p99",
    "preemption_loss": "preemption loss",
    "fragmentation": "fragmented",
    "kv_used": "KV used",
    "moves": "moves",
}
_MOST_STEPS: Final = 2.0
_HALVINGS: Final = 6
_IDLE_RATE, _GREATEST_RATE = 0.5, 32.0
_SHARES: Final = (0.9, 1.0)
_REAL: Final = ("sharegpt", "burstgpt")


def play(lab: Lab) -> None:
    settings = lab.compared("round-robin", INFAAS, INFAAS_MEMORY, "load-balance", "load-balance+moves")
    rates = {lengths: _knee(lab, lengths) for lengths in lab.cells(*PAIRS)}
    outcomes = lab.play(
        Run(
            labels={"load": lengths, "share": share, "setting": setting.name},
            load=Load(lengths=lengths, rate=round(share * rates[lengths], 2), num_requests=lab.requests(10_000)),
            setting=setting,
        )
        for lengths, share, setting in itertools.product(rates, lab.cells(*_SHARES), settings)
    )
    lab.table(outcomes, {"real_rate": "rate"} | _COLUMNS)
    _compare(lab, outcomes, settings)


def _knee(lab: Lab, lengths: str) -> float:
    """Requests a second."""

    def late(rate: float, num_requests: int) -> Outcome:
        load = Load(lengths=lengths, rate=rate, num_requests=num_requests)
        labels = {"knee": lengths, "at": round(rate, 2)}
        run = Run(labels=labels, load=load, setting=read_setting("load-balance"), measure=_late)
        (outcome,) = replace(lab, num_seeds=1).play([run], is_told=False)
        return outcome

    low, high = _IDLE_RATE, _GREATEST_RATE
    idle_s = late(low, min(lab.requests(1_000), 1_000))["late_ttft_p50_s"]
    for _ in range(2 if lab.is_quick else _HALVINGS):
        rate = (low * high) ** 0.5
        outcome = late(rate, lab.requests(10_000))
        if outcome["late_ttft_p50_s"] <= idle_s + _MOST_STEPS * outcome["gap_p50_s"]:
            low = rate
        else:
            high = rate
    return low


def _late(metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    last = sorted(records, key=lambda one: one.arrived_s)[-max(len(records) // 4, 1) :]
    return {"late_ttft_p50_s": quantile([one.ttft_s for one in last if one.ttft_s is not None], 0.5)}


def _compare(lab: Lab, outcomes: Sequence[Outcome], settings: Sequence[Setting]) -> None:
    """The last setting against the paper's baselines, each where the difference is the greatest."""
    names = [setting.name for setting in settings]
    if not {"round-robin", "infaas"} <= set(names):
        return
    found = {tuple(outcome.run.labels.values()): outcome for outcome in outcomes}

    def most(loads: Sequence[str], baseline: str, name: str) -> float:
        cells = [key[:2] for key in found if key[0] in loads and key[2] == names[-1]]
        return max((ratio(found[*cell, baseline][name], found[*cell, names[-1]][name]) for cell in cells), default=1.0)

    def mean(setting: str, name: str) -> float:
        values = [found[key][name] for key in found if key[0] in generated and key[2] == setting]
        return sum(values) / max(len(values), 1)

    generated = [lengths for lengths in PAIRS if lengths not in _REAL]
    lost, kept = mean("infaas", "preemption_loss"), mean(names[-1], "preemption_loss")
    lab.compare(
        ("generated: TTFT mean, infaas over ours, up to", "7.7", most(generated, "infaas", "ttft_mean_s")),
        ("generated: TTFT p99, up to", "14.8", most(generated, "infaas", "ttft_p99_s")),
        ("generated: TPOT p99, up to", "2", most(generated, "infaas", "tpot_p99_s")),
        ("generated: request mean, up to", "2", most(generated, "infaas", "e2e_mean_s")),
        ("generated: request p99, up to", "2.9", most(generated, "infaas", "e2e_p99_s")),
        ("generated: preemption loss, cut by", "70.4 %", 100 * (1 - ratio(kept, lost))),
        ("generated: fragmented, infaas", "7.9 %", 100 * mean("infaas", "fragmentation")),
        ("generated: fragmented, ours", "0.7 %", 100 * mean(names[-1], "fragmentation")),
        ("real: TTFT p99, up to", "5.5", most(_REAL, "infaas", "ttft_p99_s")),
        ("real: TPOT p99, up to", "1.3", most(_REAL, "infaas", "tpot_p99_s")),
        ("all: TTFT mean, round robin over ours, up to", "26.6", most(list(PAIRS), "round-robin", "ttft_mean_s")),
    )
