# SPDX-License-Identifier: Apache-2.0
"""Fits the five numbers of a step model to measured steps.

    seconds ~ a + b · prefill tokens + c · Σ pairs + d · decodes + e · Σ decode KV

A chunk of p prompt tokens that begins at position s has p · s + p · (p + 1) / 2 pairs of a query and a key. A request
with one computed token is a decode; its decode KV is all its tokens, including that one.

The fit minimises the squared *relative* error, so that a decode of 20 ms counts as much as a prefill of a second, with
no negative numbers. It is exact: the best solution is the plain least squares of its nonzero numbers, and there are
only 16 choices of these (a is always one).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from llumlet.contract.types import StepSample

FEWEST_STEPS: Final = 50
FEWEST_OF_A_KIND: Final = 10
"""Fewest steps with prefills, and with decodes, that determine their numbers."""
_MOST_ALIKE: Final = 1e4
"""Largest condition number of the table of steps, with columns scaled to length 1. Above it two numbers cannot be told
apart."""
_TERMS: Final = {
    "b": "prefill tokens",
    "c": "pairs of query and key",
    "d": "decodes",
    "e": "tokens in the KV cache of decodes",
}

Array = npt.NDArray[np.float64]


class MeasuredStep(NamedTuple):
    """`seconds`: from the step's beginning to the next one's, unless the engine idled between them, so that vLLM's
    scheduler and the engine's loop are included."""

    prefill_tokens: int
    pairs: int
    num_decodes: int
    decode_kv: int
    seconds: float

    @classmethod
    def of(cls, sample: StepSample) -> MeasuredStep:
        """The step that an engine reports."""
        return cls(sample.prefill_tokens, sample.pairs, sample.num_decodes, sample.decode_kv, sample.seconds)


def pairs(start: int, num_tokens: int) -> int:
    """Pairs of queries and keys of a chunk that begins at position `start`."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class Coefficients(NamedTuple):
    """Seconds, and seconds per unit."""

    a: float
    b: float
    c: float
    d: float
    e: float

    def errors(self, steps: Sequence[MeasuredStep]) -> list[float]:
        """The model's relative error for each step; above 0 the model is too slow."""
        counts, seconds = _table(steps)
        return [float(error) for error in counts @ np.asarray(self) / seconds - 1]


def fit(steps: Sequence[MeasuredStep]) -> Coefficients:
    """Raises ValueError that names what is missing if the steps do not determine all five numbers."""
    if len(steps) < FEWEST_STEPS:
        raise ValueError(f"{len(steps)} steps are too few for five numbers: at least {FEWEST_STEPS}")
    counts, seconds = _table(steps)
    if not (seconds > 0).all():
        raise ValueError("a step took no time")
    for term, column in zip(_TERMS, counts.T[1:], strict=True):
        if (number := np.count_nonzero(column)) < FEWEST_OF_A_KIND:
            raise ValueError(f"{term} cannot be told: {number} steps have {_TERMS[term]}, not {FEWEST_OF_A_KIND}")
    relative = counts / seconds[:, None]
    lengths = np.linalg.norm(relative, axis=0)
    scaled = relative / lengths
    condition = np.linalg.cond(scaled)
    if condition > _MOST_ALIKE:
        raise ValueError(f"the steps are too much alike to tell the five numbers apart (condition {condition:.1e})")
    return Coefficients(*(float(value) for value in not_negative(scaled.T @ scaled, scaled.sum(axis=0)) / lengths))


def _table(steps: Sequence[MeasuredStep]) -> tuple[Array, Array]:
    """A row of 1 and four counts for each step; and the measured seconds."""
    rows = np.asarray(steps, dtype=np.float64).reshape(-1, 5)
    return np.hstack([np.ones((len(rows), 1)), rows[:, :4]]), rows[:, 4]


def not_negative(squares: Array, sums: Array) -> Array:
    """The least-squares solution x of `table @ x = wanted` with x[0] above 0 and no negative number. `squares`:
    `table.T @ table`, possibly regularised; `sums`: `table.T @ wanted`. The table's columns have similar lengths."""
    number = len(sums)
    best, least = np.zeros(number), np.inf
    for size in range(number):
        for others in itertools.combinations(range(1, number), size):
            columns = [0, *others]
            try:
                found = np.linalg.solve(squares[np.ix_(columns, columns)], sums[columns])
            except np.linalg.LinAlgError:  # two of them say the same
                continue
            error = -float(found @ sums[columns])  # and wanted @ wanted, for all of them
            if found[0] > 0 and found.min() >= 0 and error < least:
                best, least = np.zeros(number), error
                best[columns] = found
    return best
