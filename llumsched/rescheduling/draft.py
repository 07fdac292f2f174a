# SPDX-License-Identifier: Apache-2.0
"""One pass in the making: what its policies have chosen so far, and the load that comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from llumsched.rescheduling.config import Config
from llumsched.rescheduling.history import History
from llumsched.rescheduling.moves import Move
from llumsched.rescheduling.snapshot import Column, Snapshot

RATIO: Final = "kv_cache_usage_ratio_projected"
"""The metric whose value says how much of an instance is in use; others are compared with the greatest there is."""


@dataclass(slots=True)
class Draft:
    snapshot: Snapshot
    history: History
    config: Config
    now_s: float
    load: Column = field(init=False)
    """Projected: with the moves that are under way, and those of this pass."""
    out_slots: Column = field(init=False)
    in_slots: Column = field(init=False)
    free_tokens: Column = field(init=False)
    """Of the KV cache, less what is on its way there; infinite for an instance that does not say how much it has."""
    leaving: Column = field(init=False)
    """Requests that have been asked for and that the status may still count."""
    moves: list[Move] = field(default_factory=list)
    pairs: set[tuple[int, int]] = field(default_factory=set)
    """Of moves under way and of this pass."""
    sources: set[int] = field(default_factory=set)
    """Of the same: none of them takes anything."""
    destinations: set[int] = field(default_factory=set)
    """None of them gives anything."""
    chosen: set[int] = field(default_factory=set)
    """Ends of this pass's moves."""
    refused: Counter[str] = field(default_factory=Counter)
    """Of the policy at work: pairs and sources by the reason why they were not chosen."""

    def __post_init__(self) -> None:
        snapshot, index = self.snapshot, self.snapshot.index
        self.load = snapshot.load.copy()
        self.free_tokens = np.where(snapshot.total_tokens > 0, snapshot.free_tokens, np.inf)
        for move in self.history.pending_moves():
            if move.source in index:
                self.sources.add(index[move.source])
            if move.destination in index:
                self.destinations.add(index[move.destination])
            if move.source in index and move.destination in index:
                self.pairs.add((index[move.source], index[move.destination]))
        for instance_id, tokens in self.history.pending_tokens().items():
            row = index.get(instance_id)
            if row is not None:
                self.load[row] = max(self.load[row] + self.shift(row, tokens), 0.0)
                self.free_tokens[row] -= max(tokens, 0.0)  # what leaves is there until it has left
        self._count_slots()

    def _count_slots(self) -> None:
        """A move that has begun may not be in the status yet, so the greater number counts."""
        open_moves = self.history.open_moves()
        leaving = self._requests((move.source, move.expected_requests) for move in open_moves)
        coming = self._requests((move.destination, move.expected_requests) for move in open_moves)
        self.out_slots = self.snapshot.max_out - np.maximum(leaving, self.snapshot.moving_out)
        self.in_slots = self.snapshot.max_in - np.maximum(coming, self.snapshot.moving_in)
        pending = self.history.pending_moves()
        self.leaving = self._requests((move.source, move.expected_requests) for move in pending)

    def _requests(self, ends: Iterable[tuple[str, float]]) -> Column:
        numbers = np.zeros(len(self.snapshot))
        for instance_id, number in ends:
            row = self.snapshot.index.get(instance_id)
            if row is not None:
                numbers[row] += number
        return numbers

    @property
    def room(self) -> int:
        return self.config.max_moves_per_pass - len(self.moves)

    def choose(self, source: int, destination: int, move: Move) -> None:
        given, taken = self.shifts(source, destination, move.expected_tokens)
        self.load[source] -= given
        self.load[destination] += taken
        self.free_tokens[destination] -= move.expected_tokens
        self.out_slots[source] -= move.expected_requests
        self.in_slots[destination] -= move.expected_requests
        self.moves.append(move)
        self.pairs.add((source, destination))
        self.sources.add(source)
        self.destinations.add(destination)
        self.chosen |= {source, destination}

    def shifts(self, source: int, destination: int, tokens: float) -> tuple[float, float]:
        """The load that leaves the source and that comes to the destination with so many tokens."""
        given = self.shift(source, tokens)
        return given, self.shift(destination, tokens) if self.metric(source) == RATIO else given

    def shift(self, row: int, tokens: float) -> float:
        """The share of the KV cache for the metric that is one; else the tokens' share of the instance's load."""
        snapshot = self.snapshot
        if self.metric(row) == RATIO:
            return tokens / max(float(snapshot.total_tokens[row]), 1.0)
        held = float(snapshot.running_tokens[row] + snapshot.waiting_tokens[row])
        return min(tokens / held, 1.0) * float(snapshot.load[row]) if held else 0.0

    def metric(self, row: int) -> str:
        return self.config.target(str(self.snapshot.infer_types[row])).metric
