# SPDX-License-Identifier: Apache-2.0
"""Who is told of what happens in a modelled engine, in tests."""

from __future__ import annotations

from collections import Counter

from llumsim.engine.requests import EngineRequest, Watcher


class Noting(Watcher):
    """Everything that happened, in order, and how often each gap between two tokens occurred."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.num_gaps: Counter[int] = Counter()

    def gap(self, ps: int, count: int) -> None:
        self.num_gaps[ps] += count

    def gaps(self, first_ps: int, growth_ps: int, num_steps: int, count: int) -> None:
        for number in range(num_steps):
            self.num_gaps[first_ps + number * growth_ps] += count

    def preempted(self, request: EngineRequest, now_ps: int) -> None:
        self.events.append(("preempted", request.id, now_ps))

    def finished(self, request: EngineRequest, now_ps: int) -> None:
        outcome = request.num_preemptions, request.preemption_loss_ps, request.num_recomputed, request.num_hits
        self.events.append(("finished", request.id, now_ps, request.first_token_ps, *outcome))
