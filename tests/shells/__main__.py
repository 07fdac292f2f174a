# SPDX-License-Identifier: Apache-2.0
"""Play combinations of faults: `python -m tests.shells FIRST [LAST]`; one seed alone is shown before it is played."""

from __future__ import annotations

import asyncio
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.model import PRESETS, build
from tests.shells import combinations
from tests.shells.cluster import hurried
from tests.shells.network import intercepted

SIDE_BY_SIDE = 4


async def main(first: int, last: int) -> int:
    if first == last:
        print(combinations.Combination.of(first))
    model, turn = build(PRESETS["tiny"]), asyncio.Semaphore(SIDE_BY_SIDE)

    async def play(seed: int) -> list[str]:
        async with turn:
            faults = await combinations.play(seed, model)
            for fault in faults:
                print(fault, flush=True)
            return faults

    found = await asyncio.gather(*(play(seed) for seed in range(first, last + 1)))
    print(f"{last + 1 - first} combinations, {sum(map(bool, found))} with faults")
    return int(any(found))


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    with hurried(), intercepted():
        sys.exit(asyncio.run(main(numbers[0], numbers[-1])))
