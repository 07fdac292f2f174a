# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llumsim import PS
from llumsim.cluster.metrics import Gaps, Metrics, RequestRecord, Slo

MS = PS // 1000


@settings(max_examples=100, deadline=None)
@given(
    st.integers(MS, 100 * MS), st.integers(0, MS), st.integers(1, 300), st.integers(1, 20)
)  # fmt: skip
def test_growing_steps_are_counted_like_single_ones(first: int, growth: int, num_steps: int, count: int) -> None:
    at_once, singly = Gaps(), Gaps()
    at_once.gaps(first, growth, num_steps, count)
    for number in range(num_steps):
        singly.gap(first + number * growth, count)
    assert at_once.number == singly.number == num_steps * count
    # At the edge of a size a float may fall either way.
    moved = sum(abs(a - b) for a, b in zip(at_once.counts, singly.counts, strict=True))
    assert moved <= 2 * count


def test_quantiles_are_within_a_percent() -> None:
    gaps = Gaps()
    for number in range(1, 1001):
        gaps.gap(number * MS, 3)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert gaps.quantile(share) == pytest.approx(share, rel=0.011)
    assert Gaps().quantile(0.5) == 0.0


def test_gaps_beyond_all_sizes_are_counted() -> None:
    gaps = Gaps()
    gaps.gap(1, 1)
    gaps.gap(10**9 * PS, 1)
    assert gaps.number == 2


def record(outcome: str = "finished", **more: object) -> RequestRecord:
    fields: dict[str, object] = {
        "id": "r", "arrived_s": 1.0, "model": "", "priority": 0, "prompt_tokens": 10, "output_tokens": 5,
        "outcome": outcome, "instances": [], "ttft_s": 0.1, "tpot_s": 0.02, "e2e_s": 0.2,
    }  # fmt: skip
    return RequestRecord(**(fields | more))  # type: ignore[arg-type]


def test_summary_counts_requests_that_met_the_objectives() -> None:
    metrics = Metrics(Slo(ttft_s=1.0, tpot_s=0.05))
    metrics.ended(record())
    metrics.ended(record(ttft_s=2.0, cached_tokens=4))
    metrics.ended(record(tpot_s=0.06, preemption_loss_s=3.0, num_preemptions=2, recomputed_tokens=15))
    metrics.ended(record(tpot_s=None))
    metrics.ended(record("refused", ttft_s=None, tpot_s=None, e2e_s=None))
    summary = metrics.summary(last_arrival_s=10.0, instance_s=40.0, virtual_s=20.0)
    assert (summary.num_requests, summary.num_finished, summary.num_refused) == (5, 4, 1)
    assert summary.slo_attainment == pytest.approx(2 / 5)
    assert summary.goodput == pytest.approx(0.2)
    assert summary.preemption_loss == pytest.approx(3 / 4)
    assert summary.preempted_share == pytest.approx(1 / 4)
    assert summary.recompute_share == pytest.approx(15 / (4 * 15 - 4 + 15))
    assert summary.cached_share == pytest.approx(4 / 40)


def test_summary_separates_moved_requests_from_the_others() -> None:
    metrics = Metrics(Slo())
    metrics.ended(record(num_moves=1, tpot_s=0.03, num_preemptions=1, preemption_loss_s=2.0))
    metrics.ended(record(num_moves=3, tpot_s=0.05, num_preemptions=2, num_preemptions_after_move=1))
    metrics.ended(record(num_moves=1, tpot_s=None))
    metrics.ended(record(num_restarts=1, tpot_s=0.08, num_preemptions=1, preemption_loss_s=6.0))
    metrics.ended(record("lost", num_moves=1, num_preemptions_after_move=1))
    summary = metrics.summary(last_arrival_s=10.0, instance_s=40.0, virtual_s=20.0)
    assert (summary.moved_requests, summary.num_finished) == (3, 4)
    assert summary.moved_tpot_mean_s == pytest.approx(0.04)
    assert 0.049 < summary.moved_tpot_p99_s < 0.05
    assert summary.moved_preemption_loss == pytest.approx(2 / 3)
    assert summary.moved_preempted_share == pytest.approx(1 / 3)
    assert summary.stayed_tpot_mean_s == summary.stayed_tpot_p99_s == pytest.approx(0.08)
    assert summary.stayed_preemption_loss == pytest.approx(6.0)
    assert summary.preemption_loss == pytest.approx(2.0)


def test_summary_without_moves_has_zeros() -> None:
    metrics = Metrics(Slo())
    metrics.ended(record())
    summary = metrics.summary(last_arrival_s=10.0, instance_s=40.0, virtual_s=20.0)
    told = {name: value for name, value in summary.to_dict().items() if name.startswith("moved_")}
    assert len(told) == 5
    assert set(told.values()) == {0}
