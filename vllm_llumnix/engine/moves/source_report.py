# SPDX-License-Identifier: Apache-2.0
"""Progress of a move out of this engine: reports to those who asked for it, and records of the latest moves until the
API server has counted them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from llumlet.contract.bridge import MODES, PHASES, reason_number
from llumlet.contract.types import Mode, MovePhase, MoveProgress, reason_word, word
from llumlet.protocol.move.source import Outcome, State
from vllm_llumnix.engine.compatibility.way import Way
from vllm_llumnix.engine.engine_port import FrozenRequest
from vllm_llumnix.engine.moves.source_request import SourceRequest

REPORT_SECONDS = 0.1
"""Between two reports of a move that goes on. Each is a message that takes time of the engine's process and of the
asker's: one for each phase was more than all that the move itself asks of the llumlet."""

Report = Callable[[MoveProgress], None]


class SourceReport:
    """The report of one move: `progress` is what is known now, in milliseconds for each phase."""

    def __init__(self, migration_id: str, leaving: SourceRequest, way: Way, report: Report) -> None:
        self._report = report
        self._began = time.perf_counter()
        self._next: asyncio.TimerHandle | None = None
        self.progress = MoveProgress(
            migration_id=migration_id,
            request_id=leaving.request.request_id,
            external_request_id=leaving.residence.external_request_id,
            phase=MovePhase.SELECTED,
            mode=MODES[way.method],
            tokens_alone=way.tokens_alone,
            context_tokens=leaving.request.num_tokens,
        )

    def enter(self, phase: State) -> None:
        """The phase before has ended. Told a little later: most moves are over by then, and tell of that alone."""
        self._enter(phase)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._tell)

    def end(self, outcome: Outcome) -> None:
        self.progress.reason = reason_number(outcome.reason)
        self.progress.detail = outcome.detail
        self._enter(outcome.state)
        self._tell()

    def leaves_kv(self, why: str) -> None:
        """Notes that it goes with its tokens alone; `why` says why."""
        self.progress.mode, self.progress.tokens_alone = Mode.RECOMPUTE, why

    def freezes(self, frozen: FrozenRequest) -> None:
        """Notes its stop. It may have no KV cache to leave, after all."""
        self.progress.context_tokens = frozen.num_tokens
        if not frozen.computed_tokens:
            self.progress.mode = Mode.RECOMPUTE if frozen.request.num_output_tokens else Mode.WAITING
            self.progress.tokens_alone = ""

    def _enter(self, phase: State) -> None:
        now = time.perf_counter()
        before = MovePhase.Name(self.progress.phase).lower()
        self.progress.phase_ms[before] += (now - self._began) * 1e3
        self._began = now
        self.progress.phase = PHASES[phase]

    def _tell(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        snapshot = MoveProgress()
        snapshot.CopyFrom(self.progress)
        self._report(snapshot)


NUM_KEPT = 4096
"""More than settle between two looks of an API server, which takes one every second."""
STALL_PHASES = ("freezing", "committing", "withdrawing", "fencing")
"""Phases in which nobody computes tokens for the request."""
_MAX_POLICIES = 64
_MAX_CHARACTERS = 128
"""Names of policies that are told apart, and the length of one: each is a time series, and whoever asks for a move
chooses the name."""
OTHER_POLICY = "other"


class SourceRecords:
    """Written by the llumlet's thread, read by the loop thread."""

    def __init__(self) -> None:
        self._policies: set[str] = set()
        self._records: deque[tuple[int, dict[str, Any]]] = deque(maxlen=NUM_KEPT)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, settled: MoveProgress) -> None:
        record = {
            "outcome": word(MovePhase, settled.phase),
            "reason": reason_word(settled.reason),
            "mode": word(Mode, settled.mode),
            "transport": settled.transport,
            "trigger_policy": self._policy(settled.trigger_policy),
            "seconds": sum(settled.phase_ms.get(phase, 0.0) for phase in _PHASES) / 1e3,
            "stall_seconds": sum(settled.phase_ms.get(phase, 0.0) for phase in STALL_PHASES) / 1e3,
            "rounds": settled.rounds,
            "copied_bytes": settled.copied_bytes,
        }
        with self._lock:
            self._records.append((next(self._numbers), record))

    def _policy(self, name: str) -> str:
        if len(self._policies) < _MAX_POLICIES and len(name) <= _MAX_CHARACTERS:
            self._policies.add(name)
        return name if name in self._policies else OTHER_POLICY

    def since(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        """Records after number `number`, and the number of the last; 0 is before the first."""
        with self._lock:
            last = self._records[-1][0] if self._records else 0
            return last, [record for at, record in self._records if at > number]


_PHASES = tuple(word(MovePhase, phase) for phase in MovePhase.values())
