# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks and how it counts; that it runs on real engines is shown by running it."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Self, cast

import pytest

from benchmarks import rebalance
from benchmarks.rebalance import CASES, LONG, SHORT, Case, Outcome, arrivals, rate_for, table_of
from tests.support.harness import Server


def test_every_second_request_is_long_and_all_cases_get_the_same() -> None:
    requests = arrivals(rate=5, seconds=60, seed=3)
    assert requests == arrivals(rate=5, seconds=60, seed=3)
    assert requests != arrivals(rate=5, seconds=60, seed=4)
    assert [(len(one.prompt), one.num_output) for one in requests[:4]] == [LONG, SHORT, LONG, SHORT]
    assert all(before.at_s < after.at_s <= 60 for before, after in itertools.pairwise(requests))
    assert len(requests) == pytest.approx(300, rel=0.2)


class FakeClient:
    """Every request runs alone and gives a token in `GAP_S`. As that of the benchmark, as far as it is used."""

    GAP_S = 0.001
    most = running = 0

    def __init__(self, url: str) -> None:
        del url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def complete(self, prompt: list[int], num_output: int, *, ignore_eos: bool) -> SimpleNamespace:
        del prompt, ignore_eos
        times: list[float] = []

        async def result(timeout_s: float) -> None:
            del timeout_s
            FakeClient.running += 1
            FakeClient.most = max(FakeClient.most, FakeClient.running)
            began = asyncio.get_running_loop().time()
            try:
                for number in range(1, num_output + 1):
                    due = began + number * self.GAP_S
                    await asyncio.sleep(due - asyncio.get_running_loop().time())
                    times.append(due)  # however late this machine is
            finally:
                FakeClient.running -= 1

        return SimpleNamespace(times=times, result=result)


@pytest.mark.asyncio
async def test_as_many_requests_come_as_fill_the_kv_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the engines are: by Little's law as many run as ran when their speed was measured."""
    monkeypatch.setattr(rebalance, "Client", FakeClient)
    monkeypatch.setattr(rebalance, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(rebalance, "WARM_SECONDS", 0.2)
    engine = cast(Server, SimpleNamespace(base_url="", spec=SimpleNamespace(block_size=32)))
    rate = await rate_for(1.2, [engine, engine], blocks=200)
    running = 2 * round(0.6 * 200 * 32 / (LONG[0] + LONG[1] / 2))
    assert FakeClient.most == running
    assert FakeClient.running == 0
    seconds_of_a_long_one = LONG[1] * FakeClient.GAP_S
    assert rate / 2 * seconds_of_a_long_one == pytest.approx(running, rel=0.25)


def test_a_row() -> None:
    outcome = Outcome([1.0, 2.0, 103.0], [5.0] * 200, preemptions=3, moves=4)
    row = outcome.row(Case("round-robin", True))
    assert (row["bench"], row["dispatch"], row["rescheduling"]) == ("rebalance", "round-robin", True)
    assert row["ttft_p99_ms"] == pytest.approx(101, abs=0.1)
    assert (row["itl_p99_ms"], row["preemptions"], row["moves"], row["requests"]) == (5.0, 3, 4, 3)
    assert table_of([row]).row_count == 1


def test_the_cases() -> None:
    assert len(set(CASES)) == 4
    assert ["--enable-rescheduling" in case.scheduler_arguments for case in CASES] == [False, True, False, True]
