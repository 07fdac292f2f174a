# SPDX-License-Identifier: Apache-2.0
"""The arrivals at a cluster: recorded traces, scaled, and drawn arrivals.

Everything is drawn from the `random.Random` that is handed in: the same seed makes the same load. Lengths are
distributions with a known mean and some percentiles. Between two percentiles the logarithm of the length is linear;
below the median it bends such that the mean is met, or is as near as any bend brings it.
"""

from __future__ import annotations

import csv
import json
import math
import random
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np

_SHARES: Final = (0.0, 0.5, 0.8, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Lengths:
    """Tokens. `knots`: the shortest, P50, P80, P95, P99, and the longest."""

    mean: float
    knots: tuple[int, int, int, int, int, int]
    _bend: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bend", self._bend_for_mean())

    def draw(self, random_: random.Random) -> int:
        return max(round(self.at(random_.random())), 1)

    def at(self, share: float) -> float:
        """The length that this share of all does not exceed."""
        number = min(bisect_right(_SHARES, share) - 1, len(_SHARES) - 2)
        within = (share - _SHARES[number]) / (_SHARES[number + 1] - _SHARES[number])
        if not number:
            within **= self._bend
        low, high = self.knots[number], self.knots[number + 1]
        return low * math.exp(within * math.log(high / low))

    def _bend_for_mean(self) -> float:
        """Larger bends make the shortest ones more."""
        low, high = 0.02, 50.0
        for _ in range(60):
            bend = math.sqrt(low * high)
            if self._mean_with(bend) > self.mean:
                low = bend
            else:
                high = bend
        return math.sqrt(low * high)

    def _mean_with(self, bend: float) -> float:
        total = 0.0
        for number in range(len(_SHARES) - 1):
            low, high = self.knots[number], self.knots[number + 1]
            steps, power = 200, 1.0 if number else bend
            values = (low * math.exp(((step + 0.5) / steps) ** power * math.log(high / low)) for step in range(steps))
            total += (_SHARES[number + 1] - _SHARES[number]) * sum(values) / steps
        return total


LONGEST: Final = 6144
"""The longest prompt, and the longest output, in Llumnix's evaluation: 6k."""

LENGTHS: Final[dict[str, Lengths]] = {
    "sharegpt-in": Lengths(306, (4, 74, 348, 1484, 3388, LONGEST)),
    "sharegpt-out": Lengths(500, (4, 487, 781, 988, 1234, LONGEST)),
    "burstgpt-in": Lengths(830, (4, 582, 1427, 2345, 3549, LONGEST)),
    "burstgpt-out": Lengths(271, (4, 243, 434, 669, 964, LONGEST)),
    "short": Lengths(128, (8, 38, 113, 413, 1464, LONGEST)),
    "medium": Lengths(256, (8, 32, 173, 1288, 4208, LONGEST)),
    "long": Lengths(512, (8, 55, 582, 3113, 5166, LONGEST)),
}
"""Table 1 of Llumnix (OSDI'24): stand-ins for its data sets, rebuilt from the percentiles that it prints."""

PAIRS: Final[dict[str, tuple[str, str]]] = {
    "sharegpt": ("sharegpt-in", "sharegpt-out"),
    "burstgpt": ("burstgpt-in", "burstgpt-out"),
    "s-s": ("short", "short"),
    "m-m": ("medium", "medium"),
    "l-l": ("long", "long"),
    "s-l": ("short", "long"),
    "l-s": ("long", "short"),
}
"""Prompts and outputs."""

_MOONCAKE_BLOCK: Final = 512
_LEAST_S: Final = 1e-6
_HALVINGS: Final = 60


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_prompt: int
    num_output: int
    model: str = ""
    """Empty: any."""
    priority: int = 0
    """Smaller goes first, in engines that heed it."""
    prefix: tuple[Hashable, ...] = ()
    """Names of the prompt's parts of `_MOONCAKE_BLOCK` tokens; the last part may be shorter. A name stands for
    everything before it as well. Empty: no other prompt shares anything."""

    def content(self, block_size: int) -> Sequence[Hashable] | None:
        """Name the content of each full block of the prompt; None if no other prompt shares it."""
        if not self.prefix:
            return None
        per_part = _MOONCAKE_BLOCK // block_size
        return [
            (self.prefix[index // per_part], index % per_part)
            for index in range(min(self.num_prompt // block_size, per_part * len(self.prefix)))
        ]


def read_trace(path: Path) -> list[Arrival]:
    """Requests of a trace in the order of time, beginning at 0. Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens)
    or Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids). Raises ValueError, OSError."""
    with path.open(newline="") as file:
        try:
            found = list(_mooncake(file) if path.suffix == ".jsonl" else _azure(file))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: no trace of a known form: {error!r}") from error
    if not found:
        raise ValueError(f"{path}: an empty trace")
    found.sort(key=lambda arrival: arrival.at_s)
    began_s = found[0].at_s
    return [replace(arrival, at_s=arrival.at_s - began_s) for arrival in found]


def _azure(lines: Iterator[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        # Seven digits of a second, of which Python reads six.
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Arrival(at_s, max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1))


def _mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        prefix = tuple(row["hash_ids"])
        at_s = row["timestamp"] / 1e3
        yield Arrival(at_s, max(row["input_length"], 1), max(row["output_length"], 1), prefix=prefix)


def scaled(trace: Sequence[Arrival], factor: float, draw: random.Random, *, spread_s: float = 1.0) -> list[Arrival]:
    """`factor` times as many requests in the same time, the rate's course kept: each is left out, or comes several
    times within `spread_s` to either side. A repetition has the lengths of a request drawn from the whole trace; if
    prompts share prefixes, its own lengths, and a prefix that only the repetitions of the same number share."""
    found = []
    last_s = trace[-1].at_s
    for arrival in trace:
        number = int(factor) + (draw.random() < factor - int(factor))
        for copy in range(number):
            if not copy:
                found.append(arrival)
                continue
            at_s = min(max(arrival.at_s + draw.uniform(-spread_s, spread_s), 0.0), last_s)
            if arrival.prefix:
                found.append(replace(arrival, at_s=at_s, prefix=tuple((copy, part) for part in arrival.prefix)))
            else:
                other = draw.choice(trace)
                found.append(replace(other, at_s=at_s))
    found.sort(key=lambda arrival: arrival.at_s)
    return found


def made_up(
    rate: float, num_requests: int, lengths: tuple[Lengths, Lengths], draw: random.Random, *, cv: float = 1.0
) -> list[Arrival]:
    """`rate` a second. `cv`: coefficient of variation of the time between two, Gamma distributed; 1 is Poisson."""
    shape = 1 / cv**2
    now_s, found = 0.0, []
    prompts, outputs = lengths
    for _ in range(num_requests):
        now_s += max(draw.gammavariate(shape, 1 / (rate * shape)), _LEAST_S)
        found.append(Arrival(now_s, prompts.draw(draw), outputs.draw(draw)))
    return found


def waved(arrivals: Sequence[Arrival], valley: float, period_s: float) -> list[Arrival]:
    """The same requests, later: where they came at a constant rate, it is a wave now, once in `period_s` between that
    rate and its share `valley`, from 0 to 1, with which it begins. Raises ValueError."""
    if not 0 <= valley <= 1 or period_s <= 0:
        raise ValueError(f"no wave: down to {valley} of the rate in {period_s} s")
    mean, swing = (1 + valley) / 2, (1 - valley) / 2
    due_s = np.array([arrival.at_s for arrival in arrivals])
    # At t, mean * t - reach * sin(turn * t) of the constant rate's time has passed. That grows with t: it is halved.
    turn = 2 * math.pi / period_s
    reach = swing / turn
    low, high = due_s, (due_s + reach) / mean
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_early = mean * middle - reach * np.sin(turn * middle) < due_s
        low, high = np.where(is_early, middle, low), np.where(is_early, high, middle)
    return [replace(arrival, at_s=at_s) for arrival, at_s in zip(arrivals, high.tolist(), strict=True)]


def clipped(arrivals: Sequence[Arrival], most_tokens: int) -> list[Arrival]:
    """Requests that fit an engine, with shorter outputs where prompt and output together do not; others are left
    out."""
    return [
        replace(arrival, num_output=min(arrival.num_output, most_tokens - arrival.num_prompt))
        for arrival in arrivals
        if arrival.num_prompt < most_tokens
    ]


def prioritized(arrivals: Sequence[Arrival], share: float, draw: random.Random) -> list[Arrival]:
    """Requests of which a share goes first: its priority is smaller by one."""
    return [replace(one, priority=one.priority - (draw.random() < share)) for one in arrivals]


def assigned(arrivals: Sequence[Arrival], models: dict[str, float], draw: random.Random) -> list[Arrival]:
    """Requests that are given to models by their weights."""
    names, weights = list(models), list(models.values())
    return [replace(arrival, model=draw.choices(names, weights)[0]) for arrival in arrivals]
