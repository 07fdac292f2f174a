# SPDX-License-Identifier: Apache-2.0
"""How much does it take to know which of a thousand instances hold which of a million blocks?

The index of `llumsched.prefix` beside sets of Python, one for each block. Every instance holds a system prompt of 60
blocks and blocks of its own; a prompt of 100 blocks, of which one instance has all, is looked up.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import Final

import numpy as np

from benchmarks.objectives.outcome import Outcome
from llumsched.prefix.index import Names, PrefixIndex
from tests.support.stats import median

NUM_INSTANCES: Final = 1000
NUM_BLOCKS: Final = 1_000_000
MOST_BYTES: Final = 32.0
"""State of a block, to be reached."""
MOST_MS: Final = 1.0
"""A look-up, to be reached: all of a decision takes no longer."""
_NUM_SHARED: Final = 60
_NUM_ASKED: Final = 100
_ROUNDS: Final = 50


def measure(seed: int = 1) -> list[Outcome]:
    chance = np.random.default_rng(seed)
    shared, *own = (
        _names(chance, _NUM_SHARED),
        *(_names(chance, NUM_BLOCKS // NUM_INSTANCES) for _ in range(NUM_INSTANCES)),
    )
    asked = np.concatenate([shared, own[7][: _NUM_ASKED - _NUM_SHARED]])

    index = PrefixIndex(NUM_BLOCKS + _NUM_SHARED)
    numbers = [index.join() for _ in own]
    began_s = time.perf_counter()
    for number, names in zip(numbers, own, strict=True):
        index.store(number, np.concatenate([shared, names]))
    store_us = (time.perf_counter() - began_s) * 1e6 / (NUM_INSTANCES * (_NUM_SHARED + len(own[0])))
    lookup_ms = _took_ms(lambda: index.depths(asked))
    depths = index.depths(asked)
    assert depths[numbers[7]] == _NUM_ASKED
    assert depths[numbers[8]] == _NUM_SHARED
    change = own[7][:20]

    def step() -> None:
        index.remove(numbers[7], change)
        index.store(numbers[7], change)

    tracemalloc.start()
    sets = _Sets()
    for number, names in enumerate(own):
        sets.store(number, np.concatenate([shared, names]))
    set_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    set_ms = _took_ms(lambda: sets.depths(asked))
    assert sets.depths(asked)[7] == _NUM_ASKED
    more = {"left_out": index.num_left_out, "store_us": store_us, "change_of_20_ms": _took_ms(step)}
    return [
        Outcome(
            "prefix-index", "bytes a block", set_bytes / NUM_BLOCKS, index.num_bytes / NUM_BLOCKS, MOST_BYTES, more
        ),
        Outcome("prefix-index", f"look-up of {_NUM_ASKED} blocks, ms", set_ms, lookup_ms, MOST_MS),
    ]


class _Sets:
    """The same by Python's own means."""

    def __init__(self) -> None:
        self._holders: defaultdict[int, set[int]] = defaultdict(set)

    def store(self, number: int, names: Names) -> None:
        for name in names.tolist():
            self._holders[name].add(number)

    def depths(self, names: Names) -> dict[int, int]:
        depths: dict[int, int] = {}
        left = set(range(NUM_INSTANCES))
        for depth, name in enumerate(names.tolist()):
            gone = left - self._holders.get(name, set())
            depths.update(dict.fromkeys(gone, depth))
            left -= gone
        return depths | dict.fromkeys(left, len(names))


def _names(chance: np.random.Generator, number: int) -> Names:
    return chance.integers(1, 1 << 64, number, np.uint64)


def _took_ms(call: Callable[[], object]) -> float:
    took = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        call()
        took.append((time.perf_counter() - began_s) * 1e3)
    return median(took)
