# SPDX-License-Identifier: Apache-2.0
"""The same requests for both worlds, and what became of each of them in either."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from benchmarks.rebalance import TOKEN_IDS, Arrival
from llumsim.cluster.run import ClusterConfig, run
from llumsim.cluster.workload import Arrival as SimulatedArrival
from tests.support.client import Stream

SEEDS: Final = range(5)
"""Seeds of the simulator: what is drawn in dispatch and rescheduling."""


@dataclass(frozen=True)
class Lengths:
    """Least and most tokens of prompts and of outputs, each as probable as any other."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def draw(self, chance: random.Random) -> tuple[int, int]:
        return chance.randint(*self.prompt), chance.randint(*self.output)


LONG: Final = Lengths((350, 550), (50, 90))
SHORT: Final = Lengths((128, 256), (16, 32))
ANY: Final = Lengths((8, 800), (2, 120))
"""Lengths of the probe: beyond what is asked of it later."""


def skewed(rate: float, seconds: float, num_instances: int, seed: int) -> list[Arrival]:
    """Poisson arrivals, `rate` a second for each instance. One in `num_instances` is long, the first of each round, so
    that round robin sends all long ones to the same instance."""
    chance = random.Random(seed)
    found: list[Arrival] = []
    for number, at_s in enumerate(_poisson(rate * num_instances, seconds, chance)):
        prompt, output = (SHORT if number % num_instances else LONG).draw(chance)
        found.append(Arrival(at_s, chance.choices(TOKEN_IDS, k=prompt), output))
    return found


def ramp(rates: Sequence[float], seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of lengths of any kind, at each rate for so long."""
    chance = random.Random(seed)
    found: list[Arrival] = []
    for number, rate in enumerate(rates):
        for at_s in _poisson(rate, seconds, chance):
            prompt, output = ANY.draw(chance)
            found.append(Arrival(number * seconds + at_s, chance.choices(TOKEN_IDS, k=prompt), output))
    return found


def _poisson(rate: float, seconds: float, chance: random.Random) -> Iterator[float]:
    at_s = chance.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += chance.expovariate(rate)


class Times(NamedTuple):
    """Times of one request, in seconds, by its client's clock."""

    ttft_s: float
    tpot_s: float
    """Mean time of a token after the first."""
    e2e_s: float


def times_of(ttft_s: float, stream: Stream) -> Times:
    """Times of a request with several tokens."""
    rest_s = stream.times[-1] - stream.times[0]
    return Times(ttft_s, rest_s / (len(stream.times) - 1), ttft_s + rest_s)


class Counts(NamedTuple):
    """What happened meanwhile, in all instances."""

    preemptions: float
    moves: float
    statuses: float
    """Each second and instance."""


class Played(NamedTuple):
    """One run in one world: the requests in the order of their arrival."""

    requests: list[Times]
    counts: Counts


def simulated(config: ClusterConfig, requests: Sequence[Arrival], seeds: Sequence[int] = SEEDS) -> list[Played]:
    """A run for each seed."""
    arrivals = [SimulatedArrival(one.at_s, len(one.prompt), one.num_output) for one in requests]
    num_instances = sum(number for _, _, number in config.groups)
    found = []
    for seed in seeds:
        lines = io.StringIO()
        summary, _ = run(replace(config, seed=seed), arrivals, lines)
        records = {record["id"]: record for record in map(json.loads, lines.getvalue().splitlines())}
        times = [
            Times(record["ttft_s"], record["tpot_s"], record["e2e_s"])
            for record in (records[f"r{number}"] for number in range(len(requests)))
        ]
        statuses = summary.statuses / summary.virtual_s / num_instances
        found.append(Played(times, Counts(summary.preemptions, summary.moves, statuses)))
    return found
