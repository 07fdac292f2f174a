# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the intake of statuses, with few instances."""

from __future__ import annotations

import pytest

from benchmarks.status_intake import measure, measure_embedded
from llumlet.contract.cms.redis_reports import LEAST_INTERVAL_S, MOST_WRITES_PER_S
from llumsched.cms.embedded import MOST_STATUSES_PER_S


@pytest.mark.parametrize(("instances", "interval_s"), [(100, LEAST_INTERVAL_S), (400, 400 / MOST_WRITES_PER_S)])
def test_intake_costs_less_than_reading_everything_each_time(instances: int, interval_s: float) -> None:
    found = measure(instances, 15)
    assert found.ours_interval_s == interval_s
    assert found.ratio < 1
    assert found.ours_cores < found.baseline_cores


def test_busy_instances_of_an_embedded_cms_keep_its_pace() -> None:
    found = measure_embedded(100, 2.0)
    assert found.interval_s == 100 / MOST_STATUSES_PER_S
    assert 0 < found.statuses_per_s <= 1.1 * MOST_STATUSES_PER_S
