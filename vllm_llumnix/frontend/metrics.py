# SPDX-License-Identifier: Apache-2.0
"""Migration metrics on vLLM's own `/metrics`: what became of the moves out of the engines of this API server, what they
computed and what of it again, and how many requests it started again elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.engine.exceptions import EngineDeadError

logger = logging.getLogger("vllm.llumnix")

PERIOD_SECONDS = 1.0
CALL_SECONDS = 5.0
MOVE_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STALL_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROUNDS = (0, 1, 2, 3, 4, 6, 8)

Report = Callable[[bytes, int], Awaitable[tuple[int, list[dict[str, Any]], dict[str, int]]]]
"""An engine's answer to: which moves have settled since this number? And what it has counted since its start, by the
names of `_Families`."""


class _Families(NamedTuple):
    moves: Counter
    copied_bytes: Counter
    seconds: Histogram
    stall_seconds: Histogram
    rounds: Histogram
    computed_tokens: Counter
    recomputed_tokens: Counter
    recomputed_share: Gauge
    averted_preemptions: Counter
    replays: Counter


@functools.cache
def families() -> _Families:
    """Once in a process: a registry takes a name once."""
    where = ("model_name", "engine")
    return _Families(
        Counter(
            "llumlet_migrations",
            "Moves out of this engine that have settled.",
            (*where, "outcome", "reason", "mode", "transport", "trigger_policy"),
        ),
        Counter(
            "llumlet_migration_copied_bytes", "Bytes of KV cache that moves have copied.", (*where, "mode", "transport")
        ),
        Histogram(
            "llumlet_migration_seconds",
            "From the choice of a request until its move has settled.",
            (*where, "outcome"),
            buckets=MOVE_SECONDS,
        ),
        Histogram(
            "llumlet_migration_stall_seconds",
            "From the order to freeze a request that has moved until its destination has it.",
            (*where, "mode", "transport"),
            buckets=STALL_SECONDS,
        ),
        Histogram(
            "llumlet_migration_rounds",
            "Rounds in which the KV cache of a request that has moved was copied.",
            (*where, "mode"),
            buckets=ROUNDS,
        ),
        Counter("llumlet_computed_tokens", "Tokens that steps have computed, of prompts and of outputs.", where),
        Counter("llumlet_recomputed_tokens", "Tokens among them that had been computed before.", where),
        Gauge(
            "llumlet_recomputed_share",
            "Of all tokens that were computed since the engine's start, the share that had been computed before.",
            where,
            multiprocess_mode="mostrecent",
        ),
        Counter(
            "llumlet_averted_preemptions", "Shortages of blocks that a move ended before anybody was preempted.", where
        ),
        Counter("llumlet_replays", "Requests that went on at another engine after theirs was lost.", ("model_name",)),
    )


class MoveMetrics:
    """Asks engines for the moves that have settled, and counts them."""

    def __init__(self, model_name: str, report: Report) -> None:
        self._model_name = model_name
        self._report = report
        self._counted: dict[bytes, int] = {}
        self._counts: dict[tuple[bytes, str], int] = {}
        """Counts that engines reported last."""
        self._num_replayed = 0
        self._not_before = 0.0
        self._asking: asyncio.Task[None] | None = None
        families()

    def look(self, engines: Iterable[bytes]) -> None:
        """Ask, if it is time and every engine has answered the last time. Returns at once."""
        loop = asyncio.get_running_loop()
        if self._asking is not None or loop.time() < self._not_before:
            return
        self._not_before = loop.time() + PERIOD_SECONDS
        self._asking = loop.create_task(self._ask(list(engines)), name="llumnix-metrics")
        self._asking.add_done_callback(self._asked)

    def count_replays(self, num_replayed: int) -> None:
        """`num_replayed`: since this process began."""
        families().replays.labels(self._model_name).inc(num_replayed - self._num_replayed)
        self._num_replayed = num_replayed

    def cancel(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("llumlet: moves were not counted: %s: %s", type(error).__name__, error)

    async def _ask(self, engines: list[bytes]) -> None:
        for engine in engines:
            # One that hangs or is dead has said what it had to say; its numbers go on where they stopped.
            with contextlib.suppress(TimeoutError, EngineDeadError):
                report = self._report(engine, self._counted.get(engine, 0))
                last, records, counts = await asyncio.wait_for(report, CALL_SECONDS)
                self._counted[engine] = last
                for record in records:
                    self._count(int.from_bytes(engine, "little"), record)
                self._take_over(engine, counts)

    def _count(self, engine: int, record: dict[str, Any]) -> None:
        here = {"model_name": self._model_name, "engine": str(engine)}
        how = {"mode": record["mode"], "transport": record["transport"]}
        known, moved = families(), record["outcome"] == "moved"
        why = {"outcome": record["outcome"], "reason": record["reason"], "trigger_policy": record["trigger_policy"]}
        known.moves.labels(**here, **how, **why).inc()
        known.copied_bytes.labels(**here, **how).inc(record["copied_bytes"])
        known.seconds.labels(**here, outcome=record["outcome"]).observe(record["seconds"])
        if moved:
            known.stall_seconds.labels(**here, **how).observe(record["stall_seconds"])
            known.rounds.labels(**here, mode=record["mode"]).observe(record["rounds"])

    def _take_over(self, engine: bytes, counts: Mapping[str, int]) -> None:
        """Brings counters to what the engine has counted itself."""
        known, labels = families(), (self._model_name, str(int.from_bytes(engine, "little")))
        for name, count in counts.items():
            getattr(known, name).labels(*labels).inc(count - self._counts.get((engine, name), 0))
            self._counts[engine, name] = count
        if computed := counts.get("computed_tokens"):
            known.recomputed_share.labels(*labels).set(counts["recomputed_tokens"] / computed)
