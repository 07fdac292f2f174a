# SPDX-License-Identifier: Apache-2.0
"""Measurements: a record for each request, all gaps between tokens, and a sample of the cluster each second.

Gaps are pooled over all tokens: a mean per request hides the stall in it. An hour of a thousand instances has a billion
gaps, so they are counted by size, each within one percent.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TextIO

import numpy as np

from llumsim import PS
from llumsim.cluster.truth import Miss, Regret
from llumsim.engine.instance import ModelledInstance

_LEAST_PS: Final = 1000_000
"""A microsecond. What is shorter counts as that."""
_WIDTH: Final = math.log(1.01)
_NUM_SIZES: Final = 2200
_MOST_SHOWN: Final = 64
"""Instances whose load is in each sample."""


class Gaps:
    """Counts of gaps by size."""

    def __init__(self) -> None:
        self.counts = [0] * _NUM_SIZES

    def gap(self, ps: int, count: int) -> None:
        self.counts[_size(ps)] += count

    def gaps(self, first_ps: int, growth_ps: int, num_steps: int, count: int) -> None:
        """`count` in each of so many steps, each longer than the one before by `growth_ps`."""
        size, last = _size(first_ps), _size(first_ps + growth_ps * (num_steps - 1))
        done = 0
        while size < last:
            below = math.ceil((_end(size) - first_ps) / growth_ps)
            if below > done:
                self.counts[size] += (below - done) * count
                done = below
            size += 1
        self.counts[last] += (num_steps - done) * count

    @property
    def number(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Seconds; 0 if there were none."""
        left = share * self.number
        for size, count in enumerate(self.counts):
            left -= count
            if left < 0 or (count and left <= 0):
                return math.sqrt(_end(size) * _end(size - 1)) / PS
        return 0.0


def _size(ps: int) -> int:
    if ps <= _LEAST_PS:
        return 0
    return min(int(math.log(ps / _LEAST_PS) / _WIDTH), _NUM_SIZES - 1)


def _end(size: int) -> float:
    return _LEAST_PS * math.exp((size + 1) * _WIDTH)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A line of the records. Times are seconds from the request's arrival at the gateway to the client; None without a
    token."""

    id: str
    arrived_s: float
    model: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    outcome: str
    """finished, refused (no instance took it), or lost (its instance died, and no other took it over)."""
    instances: list[str]
    """Instances that ran the request, in order."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean time of a token after the first; None for a single one."""
    e2e_s: float | None = None
    num_moves: int = 0
    num_restarts: int = 0
    """Restarts after the death of an instance."""
    num_preemptions: int = 0
    preemption_loss_s: float = 0.0
    """Seconds between each preemption and the next token."""
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_preemptions_after_move: int = 0
    """Preemptions since the first move, on instances to which the request was not dispatched."""

    @property
    def has_moved(self) -> bool:
        """True if the request moved. A restart after the death of an instance is no move."""
        return self.num_moves > 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment."""

    at_s: float
    num_instances: int
    num_running: int
    num_waiting: int
    used_share: float
    """Share of all KV blocks that are in use."""
    fragmented_share: float
    """Share of all blocks that are free but in the wrong place: the demand of the queues' heads, as far as the free
    blocks of the whole cluster would cover it (Llumnix, OSDI'24)."""
    loads: tuple[float, ...] = ()
    """Used share of each instance, if there are few."""


def sampled(instances: Collection[ModelledInstance], now_ps: int) -> Sample:
    """Look at all instances at this moment."""
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


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float = 5.0
    tpot_s: float = 0.1

    def is_met(self, ttft_s: float, tpot_s: float) -> bool:
        return ttft_s <= self.ttft_s and tpot_s <= self.tpot_s


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Seconds. Quantiles are over finished requests, of gaps over all tokens."""

    num_requests: int
    num_finished: int
    num_refused: int
    num_lost: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    gap_p999_s: float
    preemptions: int
    preempted_share: float
    """Share of requests preempted at least once."""
    preemption_loss: float
    """Seconds, mean of all requests."""
    recompute_share: float
    """Share of computed tokens that were computed again."""
    cached_share: float
    """Share of prompt tokens found in the prefix cache."""
    fragmentation: float
    """Mean of the samples until the last arrival, like `kv_used`."""
    kv_used: float
    moves: int
    moves_failed: int
    """Moves whose request stayed, or ended on the way."""
    move_p50_s: float
    """Duration of moves whose request changed place, like `move_p99_s`."""
    move_p99_s: float
    move_stall_p50_s: float
    move_stall_p99_s: float
    moved_requests: int
    """Finished requests that moved. The `moved_` values describe these, the `stayed_` values all other finished
    requests. Policies choose which requests move, so their difference is not the effect of moving."""
    moved_tpot_mean_s: float
    moved_tpot_p99_s: float
    moved_preemption_loss: float
    moved_preempted_share: float
    """Share of moved requests preempted on an instance to which they had moved."""
    stayed_tpot_mean_s: float
    stayed_tpot_p99_s: float
    stayed_preemption_loss: float
    statuses: int
    """Statuses sent by instances."""
    goodput: float
    """Requests a second that met the objectives, until the last arrival."""
    slo_attainment: float
    """Share of all requests that met the SLO."""
    instance_s: float
    virtual_s: float

    def to_dict(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


class _Requests:
    """Finished requests of one kind."""

    def __init__(self) -> None:
        self.number = 0
        self.tpot_s = array("d")
        self.preemption_loss_s = 0.0
        self.num_preempted_after_move = 0

    def add(self, record: RequestRecord) -> None:
        self.number += 1
        if record.tpot_s is not None:
            self.tpot_s.append(record.tpot_s)
        self.preemption_loss_s += record.preemption_loss_s
        self.num_preempted_after_move += record.num_preemptions_after_move > 0

    def mean(self, total: float) -> float:
        return total / max(self.number, 1)


class Metrics:
    """`records`: where a line of JSON is written for each request."""

    def __init__(self, slo: Slo, records: TextIO | None = None) -> None:
        self.gaps = Gaps()
        self.samples: list[Sample] = []
        self.move_stalls_s, self.move_s = array("d"), array("d")
        self.num_moves_failed = self.num_statuses = 0
        self.ttft_s, self.tpot_s, self.e2e_s = array("d"), array("d"), array("d")
        self.regrets: Sequence[Regret] = ()
        """Regrets of dispatch decisions, with hindsight."""
        self.misses: Sequence[Miss] = ()
        """Misses of the first scheduler's view, with foresight."""
        self.num_refused = self.num_lost = 0
        self._slo = slo
        self._records = records
        self._num_met = 0
        self._num_preemptions = self._num_preempted = 0
        self._moved, self._stayed = _Requests(), _Requests()
        self._num_tokens = self._num_recomputed = self._num_prompt = self._num_cached = 0

    def ended(self, record: RequestRecord) -> None:
        if self._records is not None:
            self._records.write(json.dumps(asdict(record)) + "\n")
        self.num_refused += record.outcome == "refused"
        self.num_lost += record.outcome == "lost"
        if record.ttft_s is None or record.outcome != "finished":
            return
        self.ttft_s.append(record.ttft_s)
        tpot_s = record.tpot_s or 0.0
        if record.tpot_s is not None:
            self.tpot_s.append(tpot_s)
        self.e2e_s.append(record.e2e_s or 0.0)
        self._num_met += self._slo.is_met(record.ttft_s, tpot_s)
        self._num_preemptions += record.num_preemptions
        self._num_preempted += record.num_preemptions > 0
        (self._moved if record.has_moved else self._stayed).add(record)
        self._num_tokens += record.prompt_tokens + record.output_tokens - record.cached_tokens
        self._num_recomputed += record.recomputed_tokens
        self._num_prompt += record.prompt_tokens
        self._num_cached += record.cached_tokens

    def summary(self, *, last_arrival_s: float, instance_s: float, virtual_s: float) -> Summary:
        num_finished = len(self.ttft_s)
        num_requests = num_finished + self.num_refused + self.num_lost
        samples = [one for one in self.samples if one.at_s <= last_arrival_s] or self.samples
        moved, stayed = self._moved, self._stayed
        return Summary(
            num_requests=num_requests,
            num_finished=num_finished,
            num_refused=self.num_refused,
            num_lost=self.num_lost,
            ttft_mean_s=_mean(self.ttft_s),
            ttft_p50_s=quantile(self.ttft_s, 0.5),
            ttft_p99_s=quantile(self.ttft_s, 0.99),
            tpot_p50_s=quantile(self.tpot_s, 0.5),
            tpot_p99_s=quantile(self.tpot_s, 0.99),
            e2e_mean_s=_mean(self.e2e_s),
            e2e_p99_s=quantile(self.e2e_s, 0.99),
            gap_p50_s=self.gaps.quantile(0.5),
            gap_p99_s=self.gaps.quantile(0.99),
            gap_p999_s=self.gaps.quantile(0.999),
            preemptions=self._num_preemptions,
            preempted_share=self._num_preempted / max(num_finished, 1),
            preemption_loss=(moved.preemption_loss_s + stayed.preemption_loss_s) / max(num_finished, 1),
            recompute_share=self._num_recomputed / max(self._num_tokens + self._num_recomputed, 1),
            cached_share=self._num_cached / max(self._num_prompt, 1),
            fragmentation=_mean([one.fragmented_share for one in samples]),
            kv_used=_mean([one.used_share for one in samples]),
            moves=len(self.move_s),
            moves_failed=self.num_moves_failed,
            move_p50_s=quantile(self.move_s, 0.5),
            move_p99_s=quantile(self.move_s, 0.99),
            move_stall_p50_s=quantile(self.move_stalls_s, 0.5),
            move_stall_p99_s=quantile(self.move_stalls_s, 0.99),
            moved_requests=moved.number,
            moved_tpot_mean_s=_mean(moved.tpot_s),
            moved_tpot_p99_s=quantile(moved.tpot_s, 0.99),
            moved_preemption_loss=moved.mean(moved.preemption_loss_s),
            moved_preempted_share=moved.mean(moved.num_preempted_after_move),
            stayed_tpot_mean_s=_mean(stayed.tpot_s),
            stayed_tpot_p99_s=quantile(stayed.tpot_s, 0.99),
            stayed_preemption_loss=stayed.mean(stayed.preemption_loss_s),
            statuses=self.num_statuses,
            goodput=self._num_met / max(last_arrival_s, 1e-9),
            slo_attainment=self._num_met / max(num_requests, 1),
            instance_s=instance_s,
            virtual_s=virtual_s,
        )


def quantile(values: Sequence[float], share: float) -> float:
    """0 if there are none."""
    return float(np.quantile(np.asarray(values), share)) if len(values) else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values))) if len(values) else 0.0
