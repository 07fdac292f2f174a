# SPDX-License-Identifier: Apache-2.0
"""Columns of expectations from statuses: an instance's coming steps, the rate at which requests end, and whether
waiting requests were left out of a step. For `foresight.moved_on`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from llumlet.contract.coming_steps import NUM_STEPS
from llumlet.contract.types import InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.step_models import GONE_HALF_LIFE_S, EngineKind, kind_of
from llumsched.latency.fading import Fading

_MOST_NAMES: Final = 64
"""Largest number of remembered waiting requests."""


class _EndSums(NamedTuple):
    """Sums of an instance since its start: steps with decodes, and these decodes, each a token; ended requests, and
    their tokens."""

    steps: int
    decodes: int
    gone: int
    gone_tokens: int


_sums_of: Final = operator.attrgetter("num_decode_steps", "decode_steps_requests", "num_gone", "gone_tokens")


@dataclass(slots=True)
class _Told:
    """The last report of an instance."""

    ends: Fading
    """Sums over all instances of its kind: requests that ended without being foretold, tokens that were decoded
    meanwhile, requests that ended, and the tokens of these."""
    sums: _EndSums
    waiting: frozenset[str]
    """Waiting requests; the first ones if there are many."""
    step: int
    """Steps with decodes that had ended then."""
    num_preemptions: int
    coming_ends: Sequence[int]
    """Requests that end with each coming step, by the last report of its steps."""
    is_stuck: bool = False


class Outlook:
    """A provider that observes a view. `clock` in seconds, monotonic."""

    columns: Final[Sequence[str]] = (
        "ends_per_token",
        "ended_tokens",
        "queue_is_stuck",
        "foretold_steps",
        *(f"coming_blocks_{step}" for step in range(NUM_STEPS + 1)),
        *(f"coming_ends_{step}" for step in range(NUM_STEPS + 1)),
    )
    """`ends_per_token`: share of the tokens that requests decode which are their last without its being foretold, on
    all instances of the kind lately. `ended_tokens`: mean length of those that have ended. `queue_is_stuck`: 1 if a
    step has begun without the first request that waits: there was no room for it, or no place in the batch.
    `foretold_steps`: for how many steps the instance has told; `coming_blocks_N`: blocks that the next N of them take,
    less those that they give back; `coming_ends_N`: requests that end with them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: dict[EngineKind, Fading] = {}
        self._told: dict[str, _Told] = {}

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float]:
        told = self._told.get(instance.id)
        status = instance.status
        if told is None or status is None:
            return _NOTHING
        steps = len(status.coming_blocks[:NUM_STEPS])
        learnt = told.ends.ratio(0, 1, 0.0), told.ends.ratio(3, 2, 0.0)
        return (*learnt, told.is_stuck, steps, *_sums(status.coming_blocks), *_sums(status.coming_ends))

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Keeps no listener: changes come with reports only."""

    # From the view

    def appeared(self, instance: Instance) -> None:
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        status = instance.status
        if status is None:
            return
        told = self._told.get(instance.id)
        if told is None:
            ends = self._ends.setdefault(kind_of(instance.metadata), Fading(GONE_HALF_LIFE_S, 4))
            self._told[instance.id] = _Told(
                ends,
                _EndSums._make(_sums_of(status)),
                frozenset(status.waiting_requests[:_MOST_NAMES]),
                status.num_decode_steps,
                status.num_preemptions,
                list(status.coming_ends),
            )
            return
        self._look_at_queue(told, status)
        self._note(told, status)

    def left(self, instance: Instance) -> None:
        self._told.pop(instance.id, None)

    def _look_at_queue(self, told: _Told, status: InstanceStatus) -> None:
        """Detects waiting requests that a new step has left out: then the first one was."""
        waiting = frozenset(status.waiting_requests[:_MOST_NAMES])
        has_preempted = status.num_preemptions > told.num_preemptions
        if status.num_decode_steps > told.step:
            told.is_stuck = has_preempted or not told.waiting.isdisjoint(waiting)
        told.is_stuck = bool(waiting) and (told.is_stuck or has_preempted)
        told.waiting, told.step, told.num_preemptions = waiting, status.num_decode_steps, status.num_preemptions

    def _note(self, told: _Told, status: InstanceStatus) -> None:
        now = _EndSums._make(_sums_of(status))
        steps, decodes, gone, gone_tokens = map(operator.sub, now, told.sums)
        if steps > 0 <= min(decodes, gone, gone_tokens):
            unforeseen = max(gone - sum(told.coming_ends[:steps]), 0)
            told.ends.add(self._clock(), unforeseen, decodes, gone, gone_tokens)
        if steps:
            told.sums, told.coming_ends = now, list(status.coming_ends)


def _sums(numbers: Sequence[int]) -> Sequence[int]:
    """Sums of the first none, one, two, … numbers, at most `NUM_STEPS`; later sums equal the last."""
    sums = list(itertools.accumulate(numbers[:NUM_STEPS], initial=0))
    return sums + sums[-1:] * (NUM_STEPS + 1 - len(sums))


_NOTHING: Final = (0.0,) * len(Outlook.columns)
