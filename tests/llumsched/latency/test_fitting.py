# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from llumsched.latency.fitting import FEWEST_STEPS, Coefficients, MeasuredStep, fit, pairs
from llumsim.engine.step_model import StepModel

TRUE = Coefficients(a=0.03, b=2e-4, c=8e-9, d=1.5e-4, e=2e-6)


def steps(
    true: Coefficients, number: int = 600, noise: float = 0.0, seed: int = 0, most_prefilled: int = 512
) -> list[MeasuredStep]:
    """As an engine makes them: decodes, and a prefill in every fourth."""
    chance = random.Random(seed)
    found = []
    for index in range(number):
        num_decodes = chance.randint(0, 16)
        decode_kv = num_decodes * chance.randint(50, 2000)
        prefilled = chance.randint(2, most_prefilled) if index % 4 == 0 or not num_decodes else 0
        counts = (prefilled, pairs(chance.randint(0, 4000), prefilled), num_decodes, decode_kv)
        seconds = sum(number * each for number, each in zip((1, *counts), true, strict=True))
        found.append(MeasuredStep(*counts, seconds * chance.lognormvariate(0.0, noise)))
    return found


def test_the_numbers_come_out_as_they_went_in() -> None:
    assert fit(steps(TRUE)) == pytest.approx(TRUE, rel=1e-6)
    assert StepModel.of_seconds(*fit(steps(TRUE))).duration(100, 5050, 3, 600) == pytest.approx(
        51_690_400_000, rel=1e-6
    )


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_out(seed: int) -> None:
    found = fit(steps(TRUE, 2000, noise=0.05, seed=seed))
    assert found[:2] == pytest.approx(TRUE[:2], rel=0.02)
    assert found.e == pytest.approx(TRUE.e, rel=0.1)
    errors = found.errors(steps(TRUE, 2000, noise=0.05, seed=seed + 100))
    assert abs(statistics.median(errors)) < 0.01
    # The median of the size of a normal deviation of 5 %.
    assert statistics.median(map(abs, errors)) == pytest.approx(0.05 * 0.674, rel=0.15)


def test_an_error_is_above_zero_where_the_model_is_too_slow() -> None:
    assert TRUE.errors([MeasuredStep(0, 0, 0, 0, 0.02)]) == pytest.approx([0.5])


@pytest.mark.parametrize("missing", range(1, 5))
@pytest.mark.parametrize("seed", range(5))
def test_no_number_is_ever_below_zero(missing: int, seed: int) -> None:
    """Where one has no influence, noise would have it on either side of zero."""
    true = Coefficients(*(0.0 if index == missing else value for index, value in enumerate(TRUE)))
    found = fit(steps(true, 300, noise=0.1, seed=seed))
    assert min(found) >= 0
    assert found.a > 0
    assert found.a == pytest.approx(TRUE.a, rel=0.15)


def test_it_is_the_best_that_is_not_negative() -> None:
    """Steps that become faster with more decodes: d is zero, and no other choice comes nearer."""
    measured = steps(TRUE._replace(d=-5e-4), 400, noise=0.02)
    found = fit(measured)
    assert found.d == 0

    def squares(coefficients: Coefficients) -> float:
        return sum(error**2 for error in coefficients.errors(measured))

    least = squares(found)
    for index in range(5):
        for factor in (0.98, 1.02):
            other = Coefficients(*(v * factor if n == index else v for n, v in enumerate(found)))
            assert squares(other) >= least
    assert squares(found._replace(d=1e-6)) > least


WITHOUT_PREFILLS = [step for step in steps(TRUE) if not step.prefill_tokens]
WITHOUT_DECODES = [step for step in steps(TRUE, 3000) if not step.num_decodes]
ALWAYS_THE_SAME = [MeasuredStep(10, 55, 2, 300, 0.05)] * 200
DECODES_OF_ONE_LENGTH = [
    step._replace(decode_kv=step.num_decodes * 100, seconds=0.03 + 0.001 * step.num_decodes) for step in steps(TRUE)
]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], f"0 steps are too few for five numbers: at least {FEWEST_STEPS}"),
        (steps(TRUE, FEWEST_STEPS - 1), "too few"),
        (WITHOUT_PREFILLS, "b cannot be told: 0 steps have prefill tokens"),
        (WITHOUT_DECODES, "d cannot be told: 0 steps have decodes"),
        (ALWAYS_THE_SAME, "too much alike"),
        (DECODES_OF_ONE_LENGTH, "too much alike"),
        ([step._replace(seconds=0.0) for step in steps(TRUE)], "took no time"),
    ],
)
def test_insufficient_steps_are_refused(given: Sequence[MeasuredStep], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(given)
