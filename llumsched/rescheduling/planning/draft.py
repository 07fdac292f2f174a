# SPDX-License-Identifier: Apache-2.0
"""A pass in progress: the moves chosen so far, and the cluster as it will be with them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from llumsched.cluster.columns import Mask, Values
from llumsched.cluster.providers.status import Cargo
from llumsched.cluster.snapshot import Snapshot
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.planning.moves import Move
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig

Shares = Callable[[str], Mapping[str, float] | None]
"""Shares of an instance's KV cache in the prefix caches of others, by id, without zeros: these need no copy. None if
unknown."""


def caches_unknown(instance_id: str) -> None:
    """The shares if prefix caches are unknown."""


@dataclass
class Draft:
    snapshot: Snapshot
    """The cluster as reported."""
    history: History
    config: ReschedulingConfig
    now_s: float
    shares: Shares = caches_unknown
    projected: Snapshot = field(init=False)
    """The cluster with the running moves and those of this pass."""
    out_slots: Values = field(init=False)
    in_slots: Values = field(init=False)
    free_tokens: Values = field(init=False)
    """Free tokens of the KV cache, less the coming ones; infinite for instances that do not tell."""
    leaving: Values = field(init=False)
    """Requests that were asked for and that the status may still count."""
    moves: list[Move] = field(default_factory=list)
    pairs: set[tuple[int, int]] = field(default_factory=set)
    """Rows of sources and destinations of running moves and of this pass."""
    sources: set[int] = field(default_factory=set)
    """Rows of sources, which may not be destinations."""
    destinations: set[int] = field(default_factory=set)
    """Rows of destinations, which may not be sources."""
    chosen: set[int] = field(default_factory=set)
    """Ends of this pass's moves."""
    taking: set[int] = field(default_factory=set)
    """Destinations of this pass's moves."""
    refused: Counter[str] = field(default_factory=Counter)
    """Pairs and sources that the present policy did not choose, by reason."""

    def __post_init__(self) -> None:
        snapshot, index = self.snapshot, self.snapshot.index
        self.projected = snapshot.copy()
        total = snapshot["num_total_gpu_tokens"]
        self.free_tokens = np.where(total > 0, total - snapshot["num_used_gpu_tokens"], np.inf)
        for move in self.history.pending_moves():
            if move.source in index:
                self.sources.add(index[move.source])
            if move.destination in index:
                self.destinations.add(index[move.destination])
            if move.source in index and move.destination in index:
                self.pairs.add((index[move.source], index[move.destination]))
        for instance_id, cargo in self.history.pending().items():
            row = index.get(instance_id)
            if row is not None:
                self.projected.add(row, cargo.weight)
                self.free_tokens[row] -= max(cargo.tokens, 0.0)  # what leaves is there until it has left
        self._count_slots()

    def _count_slots(self) -> None:
        """Counts free slots. A begun move may be missing in the status, so the greater number counts."""
        open_moves, snapshot = self.history.open_moves(), self.snapshot
        leaving = self._requests((move.source, move.expected_requests) for move in open_moves)
        coming = self._requests((move.destination, move.expected_requests) for move in open_moves)
        self.out_slots = snapshot["max_migrations_out"] - np.maximum(leaving, snapshot["num_migrate_out_reqs"])
        self.in_slots = snapshot["max_migrations_in"] - np.maximum(coming, snapshot["num_migrate_in_reqs"])
        pending = self.history.pending_moves()
        self.leaving = self._requests((move.source, move.expected_requests) for move in pending)

    def _requests(self, ends: Iterable[tuple[str, float]]) -> Values:
        numbers = np.zeros(len(self.snapshot))
        for instance_id, number in ends:
            row = self.snapshot.index.get(instance_id)
            if row is not None:
                numbers[row] += number
        return numbers

    # What is there to move, by row

    @functools.cached_property
    def running(self) -> Values:
        """Requests that could move with a KV cache, without moving ones; urgent ones only if there are no others."""
        number = self.snapshot["scheduler_running_to_decode_requests_num"]
        urgent = self.snapshot["scheduler_running_to_decode_urgent_requests_num"]
        return np.where(self.only_urgent, number, number - urgent)

    @functools.cached_property
    def only_urgent(self) -> Mask:
        """True if all running requests are urgent, without moving ones."""
        number = self.snapshot["scheduler_running_to_decode_requests_num"]
        only: Mask = number <= self.snapshot["scheduler_running_to_decode_urgent_requests_num"]
        return only

    @functools.cached_property
    def running_tokens(self) -> Values:
        """Tokens of those, assuming equal lengths."""
        number = self.snapshot["scheduler_running_to_decode_requests_num"]
        tokens: Values = self.snapshot["scheduler_running_to_decode_tokens_num"] * self.running / np.maximum(number, 1)
        return tokens

    @property
    def waiting(self) -> Values:
        return self.snapshot["num_waiting_requests"]

    @property
    def waiting_tokens(self) -> Values:
        return np.maximum(
            self.snapshot["num_uncomputed_tokens_all_waiting_prefills"],
            self.snapshot["num_unallocated_tokens_all_waiting_requests"],
        )

    @functools.cached_property
    def waiting_cached_tokens(self) -> Values:
        """Tokens of waiting requests in their instance's prefix cache; possibly one too few per request, as a full hit
        counts one less."""
        tokens = np.maximum(self.snapshot["scheduler_waiting_to_decode_tokens_num"], self.waiting_tokens)
        uncomputed = self.snapshot["num_uncomputed_tokens_all_waiting_prefills"] + self.waiting
        cached: Values = np.maximum(tokens - uncomputed, 0.0)
        return cached

    def mask(self, rows: Collection[int]) -> Mask:
        """A mask of these rows."""
        found = np.zeros(len(self.snapshot), np.bool_)
        found[list(rows)] = True
        return found

    # Choosing

    @property
    def room(self) -> int:
        return self.config.max_moves_per_pass - len(self.moves)

    def obstacle(self, source: int, destination: int) -> str:
        """The reason to avoid the pair for a while; "" if there is none."""
        if (source, destination) in self.pairs:
            return "move_open"
        ids = self.snapshot.ids
        return self.history.obstacle(ids[source], ids[destination], self.now_s)

    def choose(self, source: int, destination: int, move: Move, cargo: Cargo) -> None:
        """Adds a move and projects it. Raises ValueError for one that no pass may have. Selectors themselves decide
        about gains and avoided pairs."""
        if fault := self._fault(source, destination):
            ids = self.snapshot.ids
            raise ValueError(f"a move from {ids[source]} to {ids[destination]}: {fault}")
        self.projected.add(source, cargo.negative.weight)
        self.projected.add(destination, cargo.weight)
        self.free_tokens[destination] -= move.expected_tokens
        self.out_slots[source] -= move.expected_requests
        self.in_slots[destination] -= move.expected_requests
        self.moves.append(move)
        self.pairs.add((source, destination))
        self.sources.add(source)
        self.destinations.add(destination)
        self.chosen |= {source, destination}
        self.taking.add(destination)

    def _fault(self, source: int, destination: int) -> str:
        groups = self.snapshot["exchange_group"]
        if self.room <= 0:
            return "the pass has all the moves that it may have"
        if source == destination:
            return "they are the same"
        if groups[source] != groups[destination]:
            return "they cannot exchange requests"
        if destination in self.sources:
            return "the destination gives requests itself"
        if source in self.taking:
            return "the source takes requests in this pass"
        if self.out_slots[source] < 1 or self.in_slots[destination] < 1:
            return "one of them has as many moves as it may have"
        return ""
