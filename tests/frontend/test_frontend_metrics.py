# SPDX-License-Identifier: Apache-2.0
"""Moves that engines report are counted once, under what they were."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError

from llumlet.contract.types import Mode, MovePhase, MoveProgress, Reason
from vllm_llumnix.engine.moves import source_report as records
from vllm_llumnix.engine.moves.source_report import SourceRecords
from vllm_llumnix.frontend import metrics
from vllm_llumnix.frontend.metrics import MoveMetrics

pytestmark = pytest.mark.asyncio

ENGINE, OTHER = (index.to_bytes(2, "little") for index in (0, 1))
names = (f"model-{number}" for number in itertools.count())
MOVED = MoveProgress(
    phase=MovePhase.MOVED,
    mode=Mode.LIVE,
    transport="tcp",
    rounds=2,
    copied_bytes=1000,
    trigger_policy="neutral_load",
    phase_ms={"reserving": 5.0, "copying": 100.0, "freezing": 10.0, "committing": 30.0, "admit": 3.0},
)
STAYED = MoveProgress(
    phase=MovePhase.STAYED,
    mode=Mode.BLOCKING,
    reason=Reason.DESTINATION_FULL,
    trigger_policy="manual",
    phase_ms={"reserving": 5.0},
)


WHY_MOVED = {"outcome": "moved", "reason": "", "trigger_policy": "neutral_load"}


class Engines:
    """What engines would report; `asked` is which of them were asked since when."""

    def __init__(self) -> None:
        self.records = {ENGINE: SourceRecords(), OTHER: SourceRecords()}
        self.counts: dict[str, int] = {}
        self.asked: list[tuple[bytes, int]] = []
        self.obstacle: Exception | None = None

    async def report(self, engine: bytes, since: int) -> tuple[int, list[dict[str, Any]], dict[str, int]]:
        self.asked.append((engine, since))
        if engine == OTHER and self.obstacle is not None:
            raise self.obstacle
        return *self.records[engine].since(since), self.counts if engine == ENGINE else {}


class Counting:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics, "PERIOD_SECONDS", 0.0)
        self.engines = Engines()
        self.model = next(names)
        self.metrics = MoveMetrics(self.model, self.engines.report)

    async def look(self) -> None:
        self.metrics.look([ENGINE, OTHER])
        assert self.metrics._asking is not None
        await asyncio.wait([self.metrics._asking])
        await asyncio.sleep(0)

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"llumlet_{name}", {"model_name": self.model, "engine": str(engine)} | labels)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


async def test_by_outcome_and_way(counting: Counting) -> None:
    for record in (MOVED, MOVED, STAYED):
        counting.engines.records[ENGINE].add(record)
    counting.engines.records[OTHER].add(MOVED)
    for _ in range(3):
        await counting.look()
    how = {"mode": "live", "transport": "tcp"}
    assert counting.value("migrations_total", **WHY_MOVED, **how) == 2
    assert counting.value("migrations_total", engine=1, **WHY_MOVED, **how) == 1
    why_stayed = {"outcome": "stayed", "reason": "destination_full", "trigger_policy": "manual"}
    assert counting.value("migrations_total", **why_stayed, mode="blocking", transport="") == 1
    assert counting.value("migration_copied_bytes_total", **how) == 2000
    assert counting.value("migration_seconds_sum", outcome="moved") == pytest.approx(2 * 0.145)
    assert counting.value("migration_stall_seconds_sum", **how) == pytest.approx(2 * 0.04)
    assert counting.value("migration_stall_seconds_count", mode="blocking", transport="") is None
    assert counting.value("migration_rounds_sum", mode="live") == 4


async def test_later_counts_are_added(counting: Counting) -> None:
    labels = {**WHY_MOVED, "mode": "live", "transport": "tcp"}
    for expected in (1, 2, 3):
        counting.engines.records[ENGINE].add(MOVED)
        await counting.look()
        assert counting.value("migrations_total", **labels) == expected
    assert [since for engine, since in counting.engines.asked if engine == ENGINE] == [0, 1, 2]


@pytest.mark.parametrize("obstacle", [EngineDeadError(), TimeoutError()])
async def test_an_engine_that_does_not_answer(counting: Counting, obstacle: Exception) -> None:
    labels = {"engine": 1, **WHY_MOVED, "mode": "live", "transport": "tcp"}
    counting.engines.records[OTHER].add(MOVED)
    counting.engines.obstacle = obstacle
    await counting.look()
    assert counting.value("migrations_total", **labels) is None  # type: ignore[arg-type]
    counting.engines.obstacle = None
    await counting.look()
    assert counting.value("migrations_total", **labels) == 1  # type: ignore[arg-type]


async def test_engine_counts_are_taken_over(counting: Counting) -> None:
    """Its counts since its start, and the share of them, however often it is asked."""
    counting.engines.counts = {"computed_tokens": 0, "recomputed_tokens": 0, "averted_preemptions": 0}
    await counting.look()
    assert counting.value("recomputed_share") is None
    for computed, recomputed, averted in ((1000, 10, 0), (1000, 10, 0), (4000, 100, 3)):
        counting.engines.counts = {
            "computed_tokens": computed,
            "recomputed_tokens": recomputed,
            "averted_preemptions": averted,
        }
        await counting.look()
        assert counting.value("computed_tokens_total") == computed
        assert counting.value("recomputed_tokens_total") == recomputed
        assert counting.value("averted_preemptions_total") == averted
        assert counting.value("recomputed_share") == recomputed / computed
    assert counting.value("computed_tokens_total", engine=1) is None


async def test_replays_are_of_the_process(counting: Counting) -> None:
    """An origin says how many there have been; a second one in the process begins with none."""
    for origin, num_replayed in ((counting.metrics, 2), (counting.metrics, 2), (counting.metrics, 5)):
        origin.count_replays(num_replayed)
    MoveMetrics(counting.model, counting.engines.report).count_replays(1)
    assert REGISTRY.get_sample_value("llumlet_replays_total", {"model_name": counting.model}) == 6


async def test_engines_get_a_single_question_at_a_time(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asyncio.Event()

    async def slow(engine: bytes, since: int) -> tuple[int, list[dict[str, Any]], dict[str, int]]:
        counting.engines.asked.append((engine, since))
        await answer.wait()
        return since, [], {}

    counting.metrics._report = slow
    for _ in range(5):
        counting.metrics.look([ENGINE])
        await asyncio.sleep(0)
    assert counting.engines.asked == [(ENGINE, 0)]
    counting.metrics.cancel()
    await asyncio.sleep(0.01)
    assert counting.metrics._asking is None


async def test_old_records_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "NUM_KEPT", 3)
    kept = SourceRecords()
    for _ in range(5):
        kept.add(MOVED)
    last, found = kept.since(0)
    assert (last, len(found)) == (5, 3)
    assert kept.since(4)[1] == found[-1:]
    assert kept.since(5) == (5, [])
    assert SourceRecords().since(0) == (0, [])


async def test_names_of_policies_are_no_unbounded_number_of_series() -> None:
    kept = SourceRecords()
    kept.add(MoveProgress(trigger_policy="p" * 129))
    for number in range(100):
        kept.add(MoveProgress(trigger_policy=f"policy-{number}"))
    kept.add(MoveProgress(trigger_policy="policy-0"))
    told = [record["trigger_policy"] for _, records in [kept.since(0)] for record in records]
    assert told == ["other", *(f"policy-{number}" for number in range(64)), *["other"] * 36, "policy-0"]
