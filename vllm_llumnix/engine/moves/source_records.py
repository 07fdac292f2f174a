# SPDX-License-Identifier: Apache-2.0
"""The latest moves out of this engine, kept until the API server has counted them."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Any

from llumlet.contract.types import Mode, MovePhase, MoveProgress, reason_word, word

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
        """What came after record `number`, and the number of the last; 0 is before the first."""
        with self._lock:
            last = self._records[-1][0] if self._records else 0
            return last, [record for at, record in self._records if at > number]


_PHASES = tuple(word(MovePhase, phase) for phase in MovePhase.values())
