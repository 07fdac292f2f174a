# SPDX-License-Identifier: Apache-2.0
"""How many instances fewer do moves need for the same tail?

The paper scales by load, sweeps the threshold, and pays 36 % less where the P99 of TTFT is 5 s. Nothing scales
here: each setting has 16 instances, and those named after it the fewest that serve the same requests with no longer a
tail. Without scaling, fewer instances are as many instance-seconds fewer; what a quiet hour saves is not in it.

A P99 of TTFT differs by factors between seeds: geometric means are compared. Where nobody queues it is the time of one
long prompt, whatever the setting, so that a few percent more count as no longer. The search is a bisection, and takes
for granted that more instances do no worse.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.paper.lab import INFAAS, INFAAS_MEMORY, Lab, Outcome, Run
from benchmarks.simulated import Load, Setting

_RATES: Final = (8.2, 9.0)
"""Requests a second: the knee (`serving`), and where `infaas` has a P99 of TTFT of some seconds, as in the paper."""
_INSTANCES: Final = 16
_SIZES: Final = range(9, 21)
"""Numbers of instances that are searched."""
_AS_GOOD: Final = 1.05
"""A tail so many times as long."""


def play(lab: Lab) -> None:
    settings = lab.compared("round-robin", INFAAS_MEMORY, INFAAS, "load-balance", "load-balance+moves")
    lab.rows(
        ("rate", "16 instances of", "TTFT p99", "TPOT p99", "as good", "instances", "TTFT p99", "TPOT p99", "saved, %"),
        [row for rate in lab.cells(*_RATES) for row in _compared(lab, rate, settings)],
    )


def _compared(lab: Lab, rate: float, settings: Sequence[Setting]) -> Iterator[Sequence[object]]:
    """A row for each pair of settings: the earlier with all instances, the later with as many as it needs."""

    @functools.cache
    def played(number: int, size: int) -> Outcome:
        setting = settings[number]
        run = Run(
            labels={"rate": rate, "setting": setting.name, "size": size},
            load=Load(lengths="m-m", rate=rate, num_requests=lab.requests(10_000)),
            setting=setting,
            instances=size,
        )
        (outcome,) = lab.play([run])
        return outcome

    for one, other in itertools.combinations(range(len(settings)), 2):
        baseline = played(one, _INSTANCES)
        bound_s = _AS_GOOD * _tail_s(baseline)
        size = fewest(_SIZES, lambda size, other=other, bound_s=bound_s: _tail_s(played(other, size)) <= bound_s)
        told = rate, settings[one].name, _tail_s(baseline), baseline["tpot_p99_s"], settings[other].name
        if size is None:
            yield *told, f"over {_SIZES[-1]}", "", "", ""
        else:
            found = played(other, size)
            known = size if size > _SIZES[0] else f"{size} or fewer"
            yield *told, known, _tail_s(found), found["tpot_p99_s"], 100 * (1 - size / _INSTANCES)


def fewest(sizes: Sequence[int], is_enough: Callable[[int], bool]) -> int | None:
    """The first of `sizes`, which grow, that is enough: as every later one is, so that half of the rest is ruled out
    each time. None if none is."""
    index = bisect_left(sizes, True, key=is_enough)
    return sizes[index] if index < len(sizes) else None


def _tail_s(outcome: Outcome) -> float:
    return outcome.geometric("ttft_p99_s")
