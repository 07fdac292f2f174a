# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json

from benchmarks import scheduler


def test_the_targets_are_reached_with_a_thousand_instances() -> None:
    """By CPU time, as a multiple of the reference's in the same run: neither the machine nor its load counts."""
    result = scheduler.measure_all(instances=1000, decisions=2000, updates=2.0, seconds=0, dead=10, quiet=True)
    assert not result.missed, dataclasses.asdict(result)


def test_it_measures_decisions_updates_and_passes() -> None:
    result = scheduler.measure_all(instances=20, decisions=300, updates=1.0, seconds=0, dead=2, quiet=True)
    figures = dataclasses.asdict(result)
    assert json.loads(json.dumps(figures))["instances"] == 20
    assert figures.pop("status_to_view_p99_ms") is None
    assert all(value > 0 for value in figures.values())
