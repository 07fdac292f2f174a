# SPDX-License-Identifier: Apache-2.0
"""A look at all instances at one moment."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from llumsim import PS
from llumsim.cluster.metrics import Sample
from llumsim.engine.instance import ModelledInstance

_MOST_SHOWN: Final = 64
"""Instances whose load is in each sample."""


def sampled(instances: Collection[ModelledInstance], now_ps: int) -> Sample:
    free = total = running = num_waiting = 0
    demands: list[int] = []
    loads: list[float] = []
    for instance in instances:
        engine = instance.engine
        engine.advance(now_ps)
        engine.settle(now_ps)
        total += engine.config.num_blocks
        free += engine.blocks.num_free
        running += len(engine.running)
        if engine.waiting:
            num_waiting += len(engine.waiting)
            head = engine.waiting.head
            needed = engine.blocks_needed(head, *engine.blocks.hit(head, head.num_tokens - 1))
            if needed > engine.blocks.num_free:
                demands.append(needed)
        if len(instances) <= _MOST_SHOWN:
            loads.append(1 - engine.blocks.num_free / engine.config.num_blocks)
    fragmented = 0
    for demand in sorted(demands):
        if fragmented + demand > free:
            break
        fragmented += demand
    return Sample(
        now_ps / PS,
        len(instances),
        running,
        num_waiting,
        1 - free / max(total, 1),
        fragmented / max(total, 1),
        tuple(loads),
    )
