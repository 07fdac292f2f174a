# SPDX-License-Identifier: Apache-2.0
"""The overhead benchmark's figures, from loads that never ran."""

from __future__ import annotations

import dataclasses
import random

import pytest
from rich.console import Console

from benchmarks.overhead import Block, Load, Run, result, specs, table_of
from tests.support.model import PRESETS


def blocks(factor: float, seed: int) -> list[Block]:
    rng = random.Random(seed)

    def run(cost: float) -> Run:
        noise = rng.gauss(1.0, 0.002)
        return Run(cpu_s_per_token=0.010 * cost * noise, s_per_token=0.005 * cost * noise)

    return [(run(1), run(factor), run(factor), run(1)) for _ in range(8)]


def test_an_idle_llumlet_that_costs_nothing() -> None:
    answer = result(blocks(1.0, 1), blocks(1.0, 2), Load(4, 128, 200))
    assert answer["verdict"] in ("within", "not distinguishable")
    assert answer["cpu_s_per_token_ratio"] == pytest.approx(1.0, abs=0.005)
    assert {"bench", "cpu_s_per_token_ratio", "aa_ratio", "throughput_ratio"} <= answer.keys()
    low, high = answer["cpu_s_per_token_bounds"]
    assert low <= answer["cpu_s_per_token_ratio"] <= high
    Console(quiet=True).print(table_of(answer))


def test_five_percent_are_found_and_slow_down_the_throughput() -> None:
    answer = result(blocks(1.05, 1), blocks(1.0, 2), Load(4, 128, 200))
    assert answer["verdict"] == "outside"
    assert answer["throughput_ratio"] == pytest.approx(1 / 1.05, abs=0.005)
    low, high = answer["throughput_bounds"]
    assert low <= answer["throughput_ratio"] <= high < 1
    assert answer["cpu_ms_per_token_stock"] == pytest.approx(10.0, rel=0.01)


def test_the_three_servers_differ_in_the_llumlet_only() -> None:
    load = Load(4, 128, 200)
    stock, again, ours = specs("tiny", load)
    assert [server.llumlet for server in (stock, again, ours)] == [False, False, True]
    assert stock.core is not None, "on cores of their own they are compared on different cores"
    assert dataclasses.replace(again, name="stock") == stock
    assert dataclasses.replace(ours, name="stock", llumlet=False) == stock
    assert load.prompt_tokens + load.output_tokens <= stock.max_model_len <= PRESETS["tiny"].max_position
    assert load.streams <= stock.max_num_seqs
