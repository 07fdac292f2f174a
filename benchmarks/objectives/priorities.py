# SPDX-License-Identifier: Apache-2.0
"""What do urgent requests get from room beside them, and what do the others pay?

One request in ten is urgent, or `--urgent` of them, in bursts (Gamma arrivals), as in Llumnix's paper (§6.4);
simulated. The baseline is everything that is there without priorities: dispatch by load, moves, engines that serve
first come, first served; the same requests are called urgent and nobody heeds it. Ours is the policy `virtual-usage`,
moves by it, and engines that heed priorities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.objectives.outcome import Outcome
from benchmarks.paper.lab import Lab, Run
from benchmarks.paper.lab import Outcome as Played
from benchmarks.paper.priorities import measure_kinds
from benchmarks.simulated import Load, read_setting
from llumsim.engine.step_model import load_hardware

VIRTUAL: Final = "virtual-usage+moves --rescheduling-neutral-load-metric virtual_usage"
_LOADS: Final = (("s-s", 26.0, 8), ("m-m", 8.2, 4), ("m-m", 10.0, 6))
"""Lengths, requests a second, variation of the time between two: the paper's, whose short requests leave most memory
free here; the knee of `benchmarks.paper serving`; and more than the cluster bears for long."""
_MOST_SLOWER: Final = 1.13
_FIGURES: Final = (
    ("urgent_e2e_mean_s", "urgent: request, mean s", 1 / 1.5),
    ("urgent_ttft_mean_s", "urgent: TTFT, mean s", None),
    ("urgent_ttft_p99_s", "urgent: TTFT p99 s", 1 / 10),
    ("urgent_tpot_mean_s", "urgent: TPOT, mean s", None),
    ("urgent_preemption_loss", "urgent: lost to preemption, mean s", None),
    ("other_e2e_mean_s", "others: request, mean s", _MOST_SLOWER),
    ("other_ttft_mean_s", "others: TTFT, mean s", None),
    ("other_ttft_p99_s", "others: TTFT p99 s", None),
    ("other_tpot_mean_s", "others: TPOT, mean s", None),
    ("urgent_slo_attainment", "urgent: in time, share", None),
    ("other_slo_attainment", "others: in time, share", None),
)
"""Names, titles, and what ours is to be at most, times the baseline."""


def measure(lab: Lab) -> list[Outcome]:
    hardware = load_hardware("a10-llama-7b")
    settings = [(read_setting("load-balance+moves"), False), (read_setting(VIRTUAL), True)]
    runs = [
        Run(
            labels={"lengths": lengths, "rate": rate, "cv": cv, "urgent": lab.urgent, "priorities": by_priority},
            load=Load(lengths=lengths, rate=rate, num_requests=lab.requests(5_000), cv=cv, urgent=lab.urgent),
            setting=setting,
            hardware=replace(hardware, engine=replace(hardware.engine, by_priority=by_priority)),
            measure=measure_kinds,
        )
        for lengths, rate, cv in lab.cells(*_LOADS)
        for setting, by_priority in settings
    ]
    return list(_outcomes(lab.play(runs, is_told=False)))


def _outcomes(played: Sequence[Played]) -> Iterator[Outcome]:
    for without, with_them in zip(played[0::2], played[1::2], strict=True):
        labels = without.run.labels
        for name, figure, most in _FIGURES:
            yield Outcome(
                case=(
                    f"priorities: {labels['lengths']}, {labels['rate']:g} a second, CV {labels['cv']}, "
                    f"{labels['urgent']:.0%} urgent"
                ),
                figure=figure,
                baseline=without[name],
                ours=with_them[name],
                target=None if most is None else most * without[name],
            )
