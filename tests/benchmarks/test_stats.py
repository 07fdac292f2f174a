# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stats import Bounded, Comparison, Summary, bootstrap, compare, median, quantile

durations = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50)


@given(durations, st.floats(0.0, 1.0))
def test_quantile_is_numpys(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-9)


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_summary_of_known_values() -> None:
    summary = Summary.of(range(101))
    assert summary == Summary(50.0, 99.0, 100)
    assert summary.rounded() == {"p50": 50.0, "p99": 99.0, "max": 100}


def test_bootstrap_covers_the_median_about_as_often_as_it_says() -> None:
    rng = random.Random(4)
    hits = 0
    for _ in range(100):
        bounds = bootstrap([rng.gauss(10, 2) for _ in range(40)], resamples=300)
        hits += bounds.low <= 10 <= bounds.high
    assert hits >= 87


def test_bootstrap_is_repeatable_and_brackets_its_value() -> None:
    values = [3.0, 1.0, 2.0, 5.0, 4.0]
    bounds = bootstrap(values)
    assert bounds == bootstrap(values)
    assert bounds.low <= bounds.value == median(values) <= bounds.high


def test_abba_cancels_a_linear_drift() -> None:
    blocks = [tuple(100.0 * 1.0005 ** (4 * i + k) for k in range(4)) for i in range(8)]
    comparison = compare(blocks, blocks)
    assert comparison.ratio.value == pytest.approx(1.0, abs=1e-9)


def test_compare_finds_a_five_percent_cost() -> None:
    rng = random.Random(2)

    def cost(factor: float) -> float:
        return factor * rng.gauss(1.0, 0.005)

    ours = [(cost(1), cost(1.05), cost(1.05), cost(1)) for _ in range(10)]
    control = [(cost(1), cost(1), cost(1), cost(1)) for _ in range(10)]
    comparison = compare(ours, control)
    assert comparison.ratio.value == pytest.approx(1.05, abs=0.01)
    assert comparison.control.low <= 1.0 <= comparison.control.high
    assert comparison.against(1.01) == "outside"
    assert comparison.against(1.10) == "within"


@pytest.mark.parametrize(
    ("ratio", "control", "verdict"),
    [
        (Bounded(0.99, 0.98, 1.00), Bounded(1, 0.99, 1.01), "within"),
        (Bounded(1.01, 0.98, 1.04), Bounded(1, 0.99, 1.005), "not distinguishable"),
        (Bounded(1.03, 1.02, 1.04), Bounded(1, 0.97, 1.03), "not distinguishable"),
        (Bounded(1.08, 1.06, 1.10), Bounded(1, 0.97, 1.03), "outside"),
        # Noise in ours alone excuses nothing: the control resolves far less than ours costs.
        (Bounded(1.10, 1.009, 1.2), Bounded(1, 0.999, 1.001), "outside"),
        (Bounded(1.10, 0.90, 1.3), Bounded(1, 0.999, 1.001), "outside"),
    ],
)
def test_verdicts(ratio: Bounded, control: Bounded, verdict: str) -> None:
    assert Comparison(ratio, control).against(1.01) == verdict


def test_with_medians_one_block_in_ten_may_be_disturbed() -> None:
    blocks = [(1.0, 1.05, 1.05, 1.0)] * 9 + [(1.0, 9.0, 9.0, 1.0)]
    control = [(1.0, 1.0, 1.0, 1.0)] * 10
    assert compare(blocks, control).ratio.value > 1.2
    assert compare(blocks, control, statistic=median).ratio.value == pytest.approx(1.05)


def test_a_ratio_turned_around() -> None:
    assert Bounded(0.8, 0.5, 1.6).inverse() == Bounded(1.25, 0.625, 2.0)


def test_a_block_that_is_no_abba_is_refused() -> None:
    with pytest.raises(ValueError, match="ABBA"):
        compare([(1.0, 1.0, 1.0)], [(1.0, 1.0, 1.0, 1.0)])
