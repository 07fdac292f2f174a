# SPDX-License-Identifier: Apache-2.0
"""How much free memory is in the wrong place, and what is lost to preemption, with and without virtual usage?

The made-up lengths of Llumnix's paper (§6.3), simulated, each a tenth below the highest rate at which the median
request does not queue (`benchmarks.paper serving`). The baseline is the paper's, by what is told of it: dispatch by
memory and queue, nothing moves. Beside it are the default policies with moves.
"""

from __future__ import annotations

from typing import Final

from benchmarks.objectives.outcome import Outcome
from benchmarks.objectives.priorities import VIRTUAL
from benchmarks.paper.lab import INFAAS, Lab, Run
from benchmarks.simulated import Load, read_setting

_RATES: Final = {"s-s": 27.1, "m-m": 7.38, "l-l": 2.61, "s-l": 3.85, "l-s": 15.1}
_MOST_FRAGMENTED: Final = 0.007
"""What the paper comes to, from 7.9 %."""
_LEFT: Final = 1 - 0.704
"""Of what is lost to preemption the paper saves 70.4 %."""


def measure(lab: Lab) -> list[Outcome]:
    names = (INFAAS, "load-balance+moves", VIRTUAL)
    loads = lab.cells(*_RATES)
    runs = [
        Run(
            labels={"lengths": lengths, "setting": setting.name},
            load=Load(lengths=lengths, rate=_RATES[lengths], num_requests=lab.requests(6_000)),
            setting=setting,
        )
        for lengths in loads
        for setting in map(read_setting, names)
    ]
    played = lab.play(runs, is_told=False)
    found = []
    for name, figure, times, most in (
        ("fragmentation", "fragmented, share", 0.0, _MOST_FRAGMENTED),
        ("preemption_loss", "lost to preemption, mean s", _LEFT, 0.0),
        ("ttft_p99_s", "TTFT p99 s", None, None),
        ("e2e_mean_s", "request, mean s", None, None),
    ):
        by_setting = [[one[name] for one in played[number :: len(names)]] for number in range(len(names))]
        rows = [*zip(loads, *by_setting, strict=True), ("mean of all", *(sum(each) / len(each) for each in by_setting))]
        for case, baseline, moves, ours in rows:
            target = None if times is None or case != "mean of all" else times * baseline + most
            found.append(
                Outcome(f"fragmentation: {case}", figure, baseline, ours, target, {"load-balance+moves": moves})
            )
    return found
