# SPDX-License-Identifier: Apache-2.0
"""The five numbers of a step model from steps that were measured.

    seconds ~ a + b · prefill tokens + c · Σ pairs + d · decodes + e · Σ decode KV

A chunk of p prompt tokens that begins at position s has p · s + p · (p + 1) / 2 pairs of a query and a key. A request
of which one token is computed is a decode; its decode KV is all its tokens, that one included.

Least squares of the *relative* error, so that a decode of 20 ms counts as much as a prefill of a second, under the
condition that no number is negative. With five numbers that is exact and short: the best solution is the plain least
squares of those that are not zero, and there are only 16 choices of these (a is always one).
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
"""Steps that compute something of what a number stands for: prefills, decodes."""
_MOST_ALIKE: Final = 1e4
"""Condition number of the table of steps, each column scaled to length 1. Above it two numbers cannot be told apart."""
_TERMS: Final = {
    "b": "prefill tokens",
    "c": "pairs of query and key",
    "d": "decodes",
    "e": "tokens in the KV cache of decodes",
}

Array = npt.NDArray[np.float64]


class MeasuredStep(NamedTuple):
    """`seconds`: from its beginning to that of the next one, where the engine did not idle between them: what vLLM's
    scheduler and the engine's loop need is in it."""

    prefill_tokens: int
    pairs: int
    num_decodes: int
    decode_kv: int
    seconds: float

    @classmethod
    def of(cls, sample: StepSample) -> MeasuredStep:
        """The step that an engine tells of."""
        return cls(sample.prefill_tokens, sample.pairs, sample.num_decodes, sample.decode_kv, sample.seconds)


def pairs(start: int, num_tokens: int) -> int:
    """Pairs of queries and keys of a chunk that begins at position `start`."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class Coefficients(NamedTuple):
    """Seconds, and seconds a unit."""

    a: float
    b: float
    c: float
    d: float
    e: float

    def errors(self, steps: Sequence[MeasuredStep]) -> list[float]:
        """The model's error for each step, relative to what was measured; above 0 the model is too slow."""
        counts, seconds = _table(steps)
        return [float(error) for error in counts @ np.asarray(self) / seconds - 1]


def fit(steps: Sequence[MeasuredStep]) -> Coefficients:
    """Raises ValueError, with what is missing, where the steps do not determine all five numbers."""
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
    """A row for each step: 1 and its four counts; and the seconds that it took."""
    rows = np.asarray(steps, dtype=np.float64).reshape(-1, 5)
    return np.hstack([np.ones((len(rows), 1)), rows[:, :4]]), rows[:, 4]


def not_negative(squares: Array, sums: Array) -> Array:
    """x that brings `table @ x` as near to `wanted` as can be, the first of its numbers above 0, none below.
    `squares`: `table.T @ table`, to which something may have been added to make it regular; `sums`: `table.T @ wanted`.
    Columns of the table are about as long as each other."""
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
