# SPDX-License-Identifier: Apache-2.0
"""Several reschedulers without a common store: those whose orders llumlets refuse stand by."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from llumsched.cms.embedded import EmbeddedStore
from llumsched.rescheduling import standalone as process
from llumsched.rescheduling import turns
from llumsched.rescheduling.executing.records import Records
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.rescheduling.turns import STAND_BY_S, Turns
from llumsim.live import SimulatedCluster, SimulatedRequest, engine_model
from tests.llumlet.fake_agent import until


def test_refused_one_stands_by_and_returns_with_a_higher_term() -> None:
    now_s = 0.0
    first, second = (Turns(lambda: now_s, lambda began=began: 100.0 + began + now_s) for began in (0.0, 5.0))
    assert 0 < first.term < second.term
    assert first.term == first.term, "as long as it is not refused"
    refused = first.term
    now_s = STAND_BY_S
    first.refused(refused)
    assert first.term == 0
    assert "stands by for 60 s" in first.reason
    second.refused(refused)
    assert second.term, "the term of another one"
    now_s += STAND_BY_S
    assert first.term > second.term
    first.refused(refused)
    assert first.term, "an order of earlier"


def test_term_of_a_clock_that_was_ahead_is_outbid_in_minutes() -> None:
    now_s, seen = 0.0, int(10_000 * 1e6)  # two hours and a half ahead
    only = Turns(lambda: now_s, lambda: 1000.0 + now_s)
    while only.term < seen:
        only.refused(only.term)
        assert only.term == 0
        now_s += STAND_BY_S
    assert now_s <= 9 * STAND_BY_S


@pytest.mark.asyncio
async def test_of_two_schedulers_with_stores_of_their_own_one_moves_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "STAND_BY_S", 3600.0)  # longer than the test
    config = ReschedulingConfig(policies=("neutral_load",), interval_ms=100)
    async with AsyncExitStack() as stack:
        stores = [EmbeddedStore(), EmbeddedStore()]
        for store in stores:
            await store.start()
            stack.push_async_callback(store.close)
        addresses = [str(store.address) for store in stores]
        cluster = await stack.enter_async_context(
            SimulatedCluster(2, ",".join(addresses), model=engine_model(speed=0.05))
        )
        running = [await process.serve(address, config) for address in addresses]
        for one in running:
            stack.push_async_callback(one.close)

        instances = itertools.cycle([cluster[0], cluster[1]])

        async def load_is_uneven_until(condition: Callable[[], object]) -> None:
            """The requests of one instance end before the other one gets some: however slow the machine is, neither
            is ever too full to take a move."""
            requests: list[SimulatedRequest] = []
            async with asyncio.timeout(300):
                while not condition():
                    instance = next(instances)
                    for length in range(12):
                        requests.append(instance.submit(200 + length, 200))
                    await until(lambda: condition() or all(one.finished for one in requests), 300)

        both = [one.rescheduler.records for one in running]

        def waiting() -> list[Records]:
            """The reschedulers that stand by: the one whose term began first, which need not be the first here."""
            return [one for one in both if any("stands by" in past.skipped for past in one.passes)]

        await load_is_uneven_until(waiting)
        (earlier,) = waiting()
        (later,) = (one for one in both if one is not earlier)
        assert any("not_leader" in move.error for move in earlier.moves)
        num_moves = len(earlier.moves)
        before = len(later.moves)
        await load_is_uneven_until(lambda: len(later.moves) > before)
        assert len(earlier.moves) == num_moves
        assert not any("not_leader" in move.error for move in later.moves)
