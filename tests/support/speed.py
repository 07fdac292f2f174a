# SPDX-License-Identifier: Apache-2.0
"""How fast this machine is: a fixed piece of work, for times of different machines to be compared by."""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

TIMES = 5
INTERPRETED_S = 0.065
"""Time of `interpret` on the machine whose minutes stand in `tests/budgets.toml`."""
TEXT = random.Random(0).randbytes(1 << 20).hex().encode()


def interpret() -> int:
    """Python's interpreter at work; some 0.07 s."""
    table: dict[int, int] = {}
    for number in range(600_000):
        table[number & 1023] = table.get(number & 1023, 0) + number * number % 7
    return sum(table.values())


def squeeze() -> None:
    """Compiled code and memory at work, without the interpreter's lock: the same on each core; some 0.1 s."""
    zlib.compress(TEXT, 6)


def slowness() -> float:
    """The time that this machine takes for what takes one on the machine of the budgets; not less than 1."""
    return max(1.0, _best(interpret) / INTERPRETED_S)


def measured() -> str:
    """In words; takes some two seconds of all cores."""
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as threads:
        alone = _best(lambda: threads.submit(squeeze).result())
        together = _best(lambda: list(threads.map(lambda _: squeeze(), range(cores))))
    return (
        f"this machine: interpreter {_best(interpret):.3f} s, a core {alone:.3f} s, each of {cores} cores at once "
        f"{together:.3f} s for their fixed pieces of work"
    )


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
