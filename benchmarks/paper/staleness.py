# SPDX-License-Identifier: Apache-2.0
"""How old may statuses be, and what does the account of what is on its way do about it?

Statuses come in production's cadence and arrive late by so much, for dispatch and rescheduler alike. Without the
account (`llumsched.cluster.providers.account`) the scheduler does not remember what it has sent until a status shows
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.paper.lab import INFAAS, Lab, Run
from benchmarks.simulated import Load, Setting
from llumsim.cluster.member import Cadence


def runs(lab: Lab, settings: Iterable[Setting], lates: Iterable[float], **more: Any) -> Iterator[Run]:
    """Runs with statuses so many seconds late, with and without the account. `more`: of `Run`."""
    for setting, late_s, has_account in itertools.product(settings, lates, (True, False)):
        yield Run(
            labels={"setting": setting.name, "late_s": late_s, "account": has_account},
            load=Load(lengths="m-m", rate=6.7, num_requests=lab.requests(10_000)),
            setting=setting,
            cadence=Cadence(late_s=late_s),
            has_account=has_account,
            **more,
        )


def play(lab: Lab) -> None:
    settings = lab.compared(INFAAS, "load-balance", "load-balance+moves")
    lates = lab.cells(0.0, 0.05, 0.2, 1.0, 5.0)
    lab.table(
        lab.play(runs(lab, settings, lates)),
        {
            "ttft_p50_s": "TTFT p50",
            "ttft_p99_s": "p99",
            "tpot_p99_s": "TPOT p99",
            "preempted_share": "preempted",
            "fragmentation": "fragmented",
            "moves": "moves",
            "moves_failed": "failed",
        },
    )
