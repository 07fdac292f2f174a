# SPDX-License-Identifier: Apache-2.0
"""Run random schedules of the protocol on every core: `python -m tests.simulation --schedules 1000000`.

Prints its progress, and `N schedules, 0 violations`. A violation is printed with its seed; `--seed N --trace` plays
that schedule again and prints all of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from .schedule import play

CHUNK = 250
"""Schedules that a process plays before it reports."""
MAX_REPORTED = 20

Report = tuple[int, Counter[str], list[tuple[int, str]]]
"""Schedules, what they reached, and the seeds that violate something with the first violation of each."""


def run_chunk(seeds: range) -> Report:
    reached: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        played = play(seed)
        reached.update(played.reached)
        if played.faults:
            violations.append((seed, played.faults[0]))
    return len(seeds), reached, violations


def run(first: int, count: int, num_processes: int) -> Iterator[Report]:
    """Reports of chunks as they come."""
    chunks = [range(seed, min(seed + CHUNK, first + count)) for seed in range(first, first + count, CHUNK)]
    # Forked: vLLM is imported once, and nothing runs in it.
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


def trace(seed: int) -> int:
    """Play one schedule and print it. The number of violations."""
    played = play(seed, traced=True)
    print("\n".join([f"seed {seed}", *played.cluster.log, played.cluster.summary()]))
    print("\n".join(f"VIOLATION: {fault}" for fault in played.faults))
    return len(played.faults)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schedule")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    arguments = parser.parse_args()
    if arguments.seed is not None and arguments.trace:
        return 1 if trace(arguments.seed) else 0
    if arguments.seed is not None:
        arguments.first, arguments.schedules, arguments.processes = arguments.seed, 1, 1
    num_done, num_violations, reached, start = 0, 0, Counter[str](), time.monotonic()
    for num_played, chunk_reached, violations in run(arguments.first, arguments.schedules, arguments.processes):
        num_done += num_played
        reached.update(chunk_reached)
        for seed, fault in violations:
            num_violations += 1
            if num_violations <= MAX_REPORTED:
                print(f"\rseed {seed}: {fault}")
        _progress(num_done, num_played, arguments.schedules, time.monotonic() - start)
    print("\r" + ", ".join(f"{count} {what}" for what, count in sorted(reached.items())), end=" ")
    print(f"in {time.monotonic() - start:.0f} s")
    print(f"{num_done} schedules, {num_violations} violations")
    return 1 if num_violations else 0


def _progress(done: int, last: int, total: int, seconds: float) -> None:
    """A bar on a terminal; elsewhere a line for every tenth."""
    rate = f"{done}/{total}, {done / seconds:.0f}/s"
    if sys.stdout.isatty():
        bar = "#" * (40 * done // total)
        print(f"\r[{bar:40}] {rate}", end="", flush=True)
    elif 10 * done // total > 10 * (done - last) // total:
        print(rate, flush=True)


if __name__ == "__main__":
    sys.exit(main())
