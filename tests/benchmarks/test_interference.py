# SPDX-License-Identifier: Apache-2.0
"""The interference benchmark's figures, from windows that never were."""

from __future__ import annotations

import random

import pytest
from rich.console import Console

from benchmarks.interference import Case, Window, result, table_of


def blocks(factor: float, seed: int) -> list[list[Window]]:
    rng = random.Random(seed)

    def window(cost: float) -> Window:
        noise = rng.gauss(1.0, 0.002)
        return Window(p50=0.010 * cost * noise, p99=0.015 * cost * cost * noise)

    return [[window(1), window(factor), window(factor), window(1)] for _ in range(6)]


def test_moves_that_cost_nothing() -> None:
    row = result(Case(2, "25%", 1024), blocks(1.0, 1), blocks(1.0, 2), seconds=4.0)
    assert row["itl_p50_ratio"] == pytest.approx(1.0, abs=0.005)
    assert row["p50_verdict"] in ("within", "not distinguishable")
    assert {"bench", "moves_at_once", "limit", "itl_p50_ratio", "itl_p99_ratio", "aa_p50_ratio"} <= row.keys()
    assert (row["moves_at_once"], row["limit"], row["moves"]) == (2, "25%", 0)
    Console(quiet=True).print(table_of([row]))


def test_five_percent_are_found() -> None:
    row = result(Case(1, "none", 1024), blocks(1.05, 1), blocks(1.0, 2), seconds=4.0)
    assert row["itl_p50_ratio"] == pytest.approx(1.05, abs=0.005)
    assert row["itl_p99_ratio"] == pytest.approx(1.05**2, abs=0.005)
    assert row["aa_p50_ratio"] == pytest.approx(1.0, abs=0.005)
    assert row["p50_verdict"] == "outside"
