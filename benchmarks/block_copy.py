# SPDX-License-Identifier: Apache-2.0
"""How fast are KV blocks gathered and scattered on this CPU, and do stores past the caches pay?

    python -m benchmarks.block_copy --mib 64 --rounds 15

Random blocks of a 1 GiB cache (32 layers, LBHNC) to one buffer and back. Beside every form: numpy copying as many
bytes in one piece. `victim` is the time to read 1 MiB that was in the cache before the copy, the model's working set
as it were, against the same without a copy. All variants take turns in every round; medians over rounds. A table for
people, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from tests.support.progress import saying
from tests.support.stats import median
from vllm_llumnix.kv.kernels import gather, native, scatter
from vllm_llumnix.kv.memory.layout import BlockLayout, TensorRegion

NUM_LAYERS = 32
CACHE_BYTES = 1 << 30
NEVER = 1 << 62
PAGES = (4 << 10, 16 << 10, 128 << 10)


def layout_of(page: int) -> BlockLayout:
    num_blocks = CACHE_BYTES // NUM_LAYERS // page
    region = TensorRegion(0, NUM_LAYERS, page * num_blocks, page, page)
    return BlockLayout(0, CACHE_BYTES, num_blocks, (region,), "LBHNC")


def variants(storage: torch.Tensor, page: int, num_bytes: int) -> dict[str, Callable[[], object]]:
    layout = layout_of(page)
    ids = np.random.default_rng(0).permutation(layout.num_blocks)[: num_bytes // layout.bytes_per_block]
    buffer = torch.ones(num_bytes, dtype=torch.uint8)
    source, target = buffer.numpy(), np.ones(num_bytes, np.uint8)

    def run(copy: Callable[..., int], backend: str, threads: int, streaming_from: int) -> Callable[[], object]:
        def once() -> None:
            thresholds = dict.fromkeys(("SCATTER_STREAMING_FROM", "GATHER_STREAMING_FROM"), streaming_from)
            with mock.patch.multiple(native, **thresholds):
                copy(storage, layout, ids, buffer, backend=backend, num_threads=threads)

        return once

    found: dict[str, Callable[[], object]] = {"numpy, one piece": lambda: np.copyto(target, source)}
    for copy in (gather, scatter):
        found[f"{copy.__name__} torch"] = run(copy, "torch", 1, NEVER)
        for threads in (1, 2):
            for name, streaming_from in (("cached", NEVER), ("streaming", 0)):
                found[f"{copy.__name__} cpp {threads} thread(s) {name}"] = run(copy, "cpp", threads, streaming_from)
    return found


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of one copy (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default %(default)s)")
    options = parser.parse_args()
    if obstacle := native.cpu() if isinstance(native.cpu(), str) else None:
        parser.error(str(obstacle))
    torch.set_num_threads(1)
    num_bytes = options.mib << 20
    storage = torch.ones(CACHE_BYTES, dtype=torch.uint8)
    victim = np.ones(1 << 17, np.int64)
    victim.sum()
    quiet = median(seconds(victim.sum) for _ in range(200))
    rows = []
    with saying("measuring") as say:
        for page in PAGES:
            actions = variants(storage, page, num_bytes)
            copies: dict[str, list[float]] = {name: [] for name in actions}
            reads: dict[str, list[float]] = {name: [] for name in actions}
            for turn in range(options.rounds + 1):
                say(f"pages of {page >> 10} KiB, round {turn} of {options.rounds}")
                for name, action in actions.items():
                    victim.sum()
                    took, read = seconds(action), seconds(victim.sum)
                    if turn:  # the first one faults pages in
                        copies[name].append(took)
                        reads[name].append(read)
            for name in actions:
                speed = num_bytes / median(copies[name]) / 1e9
                rows.append({"page": page, "variant": name, "gb_per_s": speed, "victim": median(reads[name]) / quiet})
    print(f"{'page KiB':>8}  {'variant':34}  {'GB/s':>6}  {'victim':>6}")
    for line in rows:
        print(f"{line['page'] >> 10:8}  {line['variant']:34}  {line['gb_per_s']:6.2f}  {line['victim']:6.2f}")
    print(json.dumps({"mib": options.mib, "rounds": options.rounds, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
