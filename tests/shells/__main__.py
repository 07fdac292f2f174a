# SPDX-License-Identifier: Apache-2.0
"""Play combinations of faults: `python -m tests.shells FIRST [LAST]`; one seed alone is shown before it is played."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from functools import partial

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.shells import combinations
from tests.shells.cluster import hurried, side_by_side
from tests.shells.network import intercepted
from tests.support.model import PRESETS, build


async def main(first: int, last: int) -> int:
    if first == last:
        print(combinations.Combination.of(first))
    reached: Counter[str] = Counter()
    model = build(PRESETS["tiny"])

    async def play(seed: int) -> list[str]:
        faults = await combinations.play(seed, model, reached)
        for fault in faults:
            print(fault, flush=True)
        return [f"{seed}"] if faults else []

    found = await side_by_side(partial(play, seed) for seed in range(first, last + 1))
    print(", ".join(f"{count} {what}" for what, count in reached.most_common()))
    print(f"{last + 1 - first} combinations, {len(found)} with faults")
    return int(bool(found))


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    with hurried(), intercepted():
        sys.exit(asyncio.run(main(numbers[0], numbers[-1])))
