# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.support import budgets


def test_each_exceeded_budget_is_told() -> None:
    found = {"lines": {"llumlet": 11, "llumsched": 10}, "files": {"llumlet": 16}, "long": {"llumlet/a.py": 451}}
    assert budgets.faults(found, {"lines": {"llumlet": 10, "llumsched": 10}}) == [
        "llumlet has 11 lines, 10 are allowed",
        "llumlet has 16 files, 15 are allowed",
        "llumlet/a.py has 451 lines, 450 are allowed",
    ]


def test_slow_machine_has_more_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "read", lambda: {"minutes": {"kv": 2}})
    assert budgets.minutes({"kv": 300.0}, 1.0)[1] == ["tests/kv took 5.0 min, 2 are allowed (tests/budgets.toml)"]
    assert budgets.minutes({"kv": 300.0}, 1.5)[1] == []
