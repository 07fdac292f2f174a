# SPDX-License-Identifier: Apache-2.0
"""A step model that follows what is measured: of all engines of one kind, and always of late.

Steps are kept by what their batch was like (`_kind_of`), the newest of each kind: a thousand decodes do not displace
the few prefills that say what a prompt costs, and a load that changes is known by its first steps. The fit is that of
`fitting`, with three differences that steps of a live engine need:

- Errors are relative to what the model expects, not to what was measured: the mean of many steps is to be right, and
  those that took longer than others would weigh less.
- A step counts as at most `_SLOWER` times what was expected. An engine that was stopped for a second says nothing.
- What the steps do not tell apart is shared out evenly, by a ridge of a ten-thousandth of what they weigh.

When nearly all of the newest steps are out in one direction, and most by `_CHANGED`, though steps like them were known,
the engine is not what it was (other weights, clocks, graphs, neighbours), and only these are kept. A prior that is out
by that much is given up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llumsched.latency.fitting import Array, Coefficients, MeasuredStep, not_negative

FEWEST_STEPS: Final = 8
KEPT_OF_A_KIND: Final = 32
_MOST_KINDS: Final = 64
_NEWEST: Final = 32
_CHANGED: Final = 0.25
_MOST: Final = 0.9
_SLOWER: Final = 2.0
_NOTICED: Final = 0.02
_RIDGE: Final = 1e-4
_LEAST_S: Final = 1e-6
_MOST_S: Final = 1e4
_MOST_COUNTED: Final = 1 << 50
"""Bounds of believable counts, since instances report them."""
_ROUNDS: Final = 3
"""Rounds of the fit: the first expects the measured times; each further one expects the previous model's."""
_Kind = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LearntModel:
    """A learnt step model."""

    coefficients: Coefficients
    num_steps: int
    """Number of steps that it was learnt from; 0: it is only the prior."""
    error: float
    """Median of the absolute relative error over those steps."""
    covariance: Array
    """Covariance of the coefficients, (5, 5): their uncertainty for want of steps."""
    is_known: npt.NDArray[np.bool_]
    """True for each coefficient that was ever measured; the others are 0."""

    def seconds(self, prefill_tokens: float, pairs: float, num_decodes: float, decode_kv: float) -> float:
        return float(np.asarray(self.coefficients) @ (1.0, prefill_tokens, pairs, num_decodes, decode_kv))

    def deviation(self, prefill_tokens: float, pairs: float, num_decodes: float, decode_kv: float) -> float:
        """Relative standard deviation of `seconds` for such a step: small near known steps, growing with the distance
        from them, infinite for a kind that was never seen."""
        counts = np.array((1.0, prefill_tokens, pairs, num_decodes, decode_kv))
        if counts[~self.is_known].any():
            return math.inf
        variance = max(float(counts @ self.covariance @ counts), 0.0)
        return math.sqrt(variance) / self.seconds(prefill_tokens, pairs, num_decodes, decode_kv)


def learn(steps: Sequence[MeasuredStep]) -> LearntModel:
    """Learns a model of all these steps. Raises ValueError if they are too few."""
    if len(steps) < FEWEST_STEPS:
        raise ValueError(f"{len(steps)} steps are too few, {FEWEST_STEPS} at least")
    return _fitted(np.asarray(steps, dtype=np.float64), None, 0.0)


class OnlineFit:
    """Steps of engines of one kind, and their model. Adding a step costs microseconds, `refit` half a millisecond at
    most."""

    def __init__(self, prior: Coefficients | None = None, prior_steps: float = 20.0) -> None:
        """`prior`: a profile, which weighs as much as `prior_steps` steps in each number."""
        self.model: LearntModel | None = None
        """None until there are enough steps, or a prior."""
        self.num_unseen = 0
        """Steps that the model does not include yet."""
        self.num_changes = 0
        """Number of times that older steps were dropped because the engine had changed."""
        self.prior_off: float | None = None
        """Relative error of the prior, if it was dropped for that; above 0 it was too slow."""
        self._prior, self._prior_steps = prior, prior_steps
        self._rows: dict[_Kind, int] = {}
        self._steps = np.zeros((_MOST_KINDS, KEPT_OF_A_KIND, 5))
        """Counts and seconds by kind; seconds are 0 where there is no step."""
        self._numbers = np.zeros((_MOST_KINDS, KEPT_OF_A_KIND), np.int64)
        """Sequence number of each step."""
        self._added = [0] * _MOST_KINDS
        """Steps that were ever added, by kind."""
        self._num_added = 0
        if prior is not None:
            self.refit()

    def add(self, step: MeasuredStep) -> None:
        """Adds a step. Impossible ones (no work, negative counts, absurd times) are skipped."""
        if not _LEAST_S <= step.seconds <= _MOST_S or min(step) < 0 or max(step[:4]) > _MOST_COUNTED:
            return
        if not step.prefill_tokens + step.num_decodes:
            return
        row = self._row_of(_kind_of(step))
        place = self._added[row] % KEPT_OF_A_KIND
        self._steps[row, place] = step
        self._numbers[row, place] = self._num_added
        self._added[row] += 1
        self._num_added += 1
        self.num_unseen += 1

    def refit(self) -> bool:
        """Learns from the added steps. True if the new model changes the prediction for a known step by more than
        `_NOTICED`."""
        self.num_unseen = 0
        before = self.model
        if self._prior is not None and self._is_doubtful(self._prior):
            self._prior = None
        elif before is not None and before.num_steps and self._has_changed(before.coefficients):
            self._steps[self._numbers < self._num_added - _NEWEST] = 0.0
            self.num_changes += 1
        steps = self._kept()
        if len(steps) < FEWEST_STEPS and self._prior is None:
            return False
        self.model = _fitted(steps, self._prior, self._prior_steps)
        return before is None or _differ(steps, before.coefficients, self.model.coefficients)

    def _kept(self) -> Array:
        return self._steps[self._steps[:, :, 4] > 0]

    def _is_doubtful(self, prior: Coefficients) -> bool:
        """True if the prior contradicts most steps, so that it belongs to another model or machine."""
        steps = self._kept()
        if len(steps) < _NEWEST:
            return False
        off = float(np.median(_expected(steps, np.asarray(prior)) / steps[:, 4] - 1))
        self.prior_off = off if abs(off) > _CHANGED else None
        return self.prior_off is not None

    def _row_of(self, kind: _Kind) -> int:
        row = self._rows.get(kind)
        if row is None:
            row = len(self._rows)
            if row == _MOST_KINDS:  # the one of which nothing was seen for the longest time gives way
                newest = {known: self._numbers[at].max() for known, at in self._rows.items()}
                row = self._rows.pop(min(newest, key=newest.__getitem__))
                self._steps[row] = 0.0
                self._added[row] = 0
            self._rows[kind] = row
        return row

    def _has_changed(self, coefficients: Coefficients) -> bool:
        """True if the newest steps, of kinds that were known, contradict the model."""
        is_new = (self._numbers >= self._num_added - _NEWEST) & (self._steps[:, :, 4] > 0)
        is_new[np.asarray(self._added) <= is_new.sum(axis=1)] = False
        steps = self._steps[is_new]
        if len(steps) < _NEWEST // 2:
            return False
        errors = _expected(steps, np.asarray(coefficients)) / steps[:, 4] - 1
        middle = float(np.median(errors))
        return abs(middle) > _CHANGED and float(np.mean(errors * middle > 0)) > _MOST


def _kind_of(step: MeasuredStep) -> _Kind:
    """Kinds group batches that agree within a factor of two in computed tokens and in read tokens."""
    read = step.pairs // max(step.prefill_tokens, 1) + step.decode_kv
    return step.prefill_tokens.bit_length(), step.num_decodes.bit_length(), read.bit_length() // 2


def _table(steps: Array) -> Array:
    return np.hstack([np.ones((len(steps), 1)), steps[:, :4]])


def _expected(steps: Array, coefficients: Array) -> Array:
    return _table(steps) @ coefficients


def _fitted(steps: Array, prior: Coefficients | None, prior_steps: float) -> LearntModel:
    counts, seconds = _table(steps), steps[:, 4]
    expected, found = seconds, np.zeros(5)
    covariance, is_known = np.zeros((5, 5)), np.ones(5, np.bool_)
    for _ in range(_ROUNDS):
        weighted = counts / expected[:, None]
        lengths = np.linalg.norm(weighted, axis=0)
        if prior is not None:
            lengths = np.hypot(lengths, _lengths_of(prior, prior_steps))
        is_known = lengths > 0
        lengths[~is_known] = np.inf
        scaled = weighted / lengths
        measured = np.minimum(seconds / expected, _SLOWER)
        squares = scaled.T @ scaled + _RIDGE * np.eye(5)
        sums = scaled.T @ measured
        if prior is not None:
            pull = (_lengths_of(prior, prior_steps) / lengths) ** 2
            squares += np.diag(pull)
            sums += pull * np.asarray(prior) * np.where(np.isinf(lengths), 0.0, lengths)
        found = not_negative(squares, sums) / lengths
        expected = np.maximum(counts @ found, 1e-9)
        covariance = np.linalg.inv(squares) / np.outer(lengths, lengths)
    errors = counts @ found / seconds - 1
    variance = float(np.mean(np.minimum(np.abs(errors), 1.0) ** 2)) if len(steps) else _CHANGED**2
    error = float(np.median(np.abs(errors))) if len(steps) else _CHANGED
    return LearntModel(Coefficients(*map(float, found)), len(steps), error, covariance * variance, is_known)


def _lengths_of(prior: Coefficients, prior_steps: float) -> Array:
    """Column lengths of `prior_steps` imaginary steps that each number contributes to fully."""
    return math.sqrt(prior_steps) / np.where(np.asarray(prior) > 0, np.asarray(prior), np.inf)


def _differ(steps: Array, one: Coefficients, other: Coefficients) -> bool:
    before, now = _expected(steps, np.asarray(one)), _expected(steps, np.asarray(other))
    return bool((np.abs(now - before) > _NOTICED * before).any())
