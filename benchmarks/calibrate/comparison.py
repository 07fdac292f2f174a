# SPDX-License-Identifier: Apache-2.0
"""How far apart two worlds are: request by request, in what a setting comes to, and in the order of the settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

from benchmarks.calibrate.load import Played, Times
from tests.support.stats import median, quantile


@dataclass(frozen=True)
class Outcome:
    """One setting under one load: the same requests, several times in each world."""

    num_instances: int
    load: str
    setting: str
    real: Sequence[Played]
    simulated: Sequence[Played]


Of = Callable[[Times], float]


def ttft(times: Times) -> float:
    return times.ttft_s


def tpot(times: Times) -> float:
    return times.tpot_s


def errors(outcomes: Iterable[Outcome], of: Of) -> list[float]:
    """The error for each request: what the simulator says, relative to what was real, in every run of either. Above 0
    it is too slow."""
    return [
        error
        for one in outcomes
        for real, simulated in itertools.product(one.real, one.simulated)
        for error in _relative(simulated, real, of)
    ]


def run_spread(outcomes: Iterable[Outcome], of: Of) -> list[float]:
    """The spread for each request: one real run relative to another. No simulator can be nearer to the next run than
    that."""
    return [
        error
        for one in outcomes
        for real, again in itertools.permutations(one.real, 2)
        for error in _relative(again, real, of)
    ]


def _relative(played: Played, real: Played, of: Of) -> list[float]:
    pairs = zip(played.requests, real.requests, strict=True)
    return [of(one) / of(other) - 1 for one, other in pairs]


def median_size(values: Iterable[float]) -> float:
    """The median of absolute values."""
    return median(map(abs, values))


def quantile_error(outcome: Outcome, of: Of, share: float) -> float:
    """The error of a quantile of the distribution over all requests and runs."""
    real, simulated = (
        quantile((of(times) for played in world for times in played.requests), share)
        for world in (outcome.real, outcome.simulated)
    )
    return simulated / real - 1


def quantile_spread(outcome: Outcome, of: Of, share: float) -> float:
    """A quantile's largest difference between two real runs, relative to the smaller one."""
    found = [quantile(map(of, played.requests), share) for played in outcome.real]
    return max(found) / min(found) - 1


MEASURES: Final[Mapping[str, Callable[[Played], float]]] = {
    "e2e mean": lambda played: fmean(times.e2e_s for times in played.requests),
    "TTFT p99": lambda played: quantile(map(ttft, played.requests), 0.99),
    "TPOT p99": lambda played: quantile(map(tpot, played.requests), 0.99),
}
"""Measures by which settings are ranked; less is better."""


class Ranking(NamedTuple):
    """Settings from the best to the worst, under one load by one measure, with their values."""

    num_instances: int
    load: str
    measure: str
    real: list[tuple[str, float]]
    simulated: list[tuple[str, float]]
    real_spread: float
    """The largest difference between real runs of one setting, relative to the smaller value."""
    num_told_apart: int
    """Pairs of settings whose real values differ by more than that."""
    wrong: list[tuple[str, str]]
    """Pairs among them, better one first, that the simulator has the other way round."""


def rankings(outcomes: Sequence[Outcome]) -> list[Ranking]:
    """Rankings of all settings that were played with the same requests. A pair that real runs do not tell apart is a
    tie, which no order contradicts. In either world a setting's value is the mean of its runs."""
    found = []
    cells = dict.fromkeys((one.num_instances, one.load) for one in outcomes)
    for (num_instances, load), (name, measure) in itertools.product(cells, MEASURES.items()):
        cell = [one for one in outcomes if (one.num_instances, one.load) == (num_instances, load)]
        runs = {one.setting: [measure(played) for played in one.real] for one in cell}
        spread = max(max(values) / min(values) - 1 for values in runs.values())
        real = {setting: fmean(values) for setting, values in runs.items()}
        simulated = {one.setting: fmean(measure(played) for played in one.simulated) for one in cell}
        apart = [pair for pair in itertools.permutations(real, 2) if real[pair[1]] / real[pair[0]] - 1 > spread]
        wrong = [(better, worse) for better, worse in apart if simulated[better] > simulated[worse]]
        ranking = Ranking(num_instances, load, name, _ordered(real), _ordered(simulated), spread, len(apart), wrong)
        found.append(ranking)
    return found


def _ordered(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: item[1])
