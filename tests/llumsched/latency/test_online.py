# SPDX-License-Identifier: Apache-2.0
"""A model that follows what is measured: the mean is right, what is rare counts, what has changed is believed."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from llumsched.latency.fitting import Coefficients, MeasuredStep
from llumsched.latency.online import FEWEST_STEPS, KEPT_OF_A_KIND, LearntModel, OnlineFit
from tests.llumsched.latency.test_fitting import TRUE, steps


def learnt(*measured: MeasuredStep, prior: Coefficients | None = None) -> OnlineFit:
    fit = OnlineFit(prior)
    for step in measured:
        fit.add(step)
    fit.refit()
    return fit


def model(fit: OnlineFit) -> LearntModel:
    assert fit.model is not None
    return fit.model


def coefficients(fit: OnlineFit) -> Coefficients:
    return model(fit).coefficients


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_the_mean_of_steps_is_right(noise: float) -> None:
    """Least squares of errors relative to what was measured would be short by the square of the noise."""
    measured = steps(TRUE, 4000, noise=noise)
    mean = math.exp(noise**2 / 2)
    off = coefficients(learnt(*measured)).errors(steps(Coefficients(*(mean * each for each in TRUE)), 500, seed=1))
    assert statistics.mean(off) == pytest.approx(0.0, abs=0.002 + 0.06 * noise)
    assert max(map(abs, off)) < 0.005 + 0.4 * noise


def test_a_thousand_decodes_do_not_displace_the_few_prefills() -> None:
    chance = random.Random(0)
    prefills = [step for step in steps(TRUE, 80, noise=0.02) if step.prefill_tokens]
    decodes = []
    for kv in range(8000, 9000):
        seconds = (TRUE.a + 8 * TRUE.d + kv * TRUE.e) * chance.lognormvariate(0, 0.02)
        decodes.append(MeasuredStep(0, 0, 8, kv, seconds))
    found = coefficients(learnt(*prefills, *decodes))
    assert found.b == pytest.approx(TRUE.b, rel=0.05)
    assert found.a + 8 * found.d + 8500 * found.e == pytest.approx(TRUE.a + 8 * TRUE.d + 8500 * TRUE.e, rel=0.02)


def test_a_step_in_which_the_engine_was_stopped_changes_little() -> None:
    measured = steps(TRUE, 400, noise=0.02)
    stopped = [step._replace(seconds=60.0) if number % 50 == 7 else step for number, step in enumerate(measured)]
    off = coefficients(learnt(*stopped)).errors(steps(TRUE, 200, seed=1))
    assert statistics.median(map(abs, off)) < 0.05


@pytest.mark.parametrize("factor", [0.6, 1.6, 5.0])
def test_an_engine_that_is_not_what_it_was_is_believed_soon(factor: float) -> None:
    fit = learnt(*steps(TRUE, 2000, noise=0.05))
    other = Coefficients(*(factor * each for each in TRUE))
    for number, step in enumerate(steps(other, 96, noise=0.05, seed=1)):
        fit.add(step)
        if number % 16 == 15:
            fit.refit()
    assert fit.num_changes >= 1
    off = coefficients(fit).errors(steps(other, 200, seed=2))
    assert statistics.median(map(abs, off)) < 0.1


def test_steps_of_a_kind_that_is_new_do_not_displace_what_is_known() -> None:
    """A load of prompts ten times as long: the model may be wrong there, and is not wrong elsewhere."""
    fit = learnt(*steps(TRUE, 1000, noise=0.02))
    bent = [step._replace(seconds=1.5 * step.seconds) for step in steps(TRUE, 200, seed=1) if step.prefill_tokens]
    for step in bent[:40]:
        fit.add(step._replace(prefill_tokens=10 * step.prefill_tokens, seconds=15 * step.seconds))
    fit.refit()
    assert fit.num_changes == 0
    decodes = [step for step in steps(TRUE, 200, seed=2) if not step.prefill_tokens]
    assert statistics.median(map(abs, coefficients(fit).errors(decodes))) < 0.1


def test_it_says_how_sure_it_is() -> None:
    few, many = (model(learnt(*steps(TRUE, number, noise=0.1))) for number in (20, 2000))
    near, far = (200, 200 * 300, 8, 8000), (20_000, 20_000 * 10_000, 500, 500_000)
    assert many.deviation(*near) < few.deviation(*near) < few.deviation(*far) < math.inf
    assert many.deviation(*near) < 0.02
    # What it says is what it is: over many draws, as far off as it says.
    off, said = [], []
    for seed in range(40):
        found = model(learnt(*steps(TRUE, 100, noise=0.1, seed=seed)))
        off.append(found.seconds(*near) / sum(n * each for n, each in zip((1, *near), TRUE, strict=True)) - 1)
        said.append(found.deviation(*near))
    assert statistics.pstdev(off) == pytest.approx(statistics.mean(said), rel=0.5)


def test_of_what_was_never_seen_it_is_not_sure_at_all() -> None:
    found = model(learnt(*[step for step in steps(TRUE, 400) if not step.prefill_tokens]))
    assert found.deviation(0, 0, 4, 4000) < 0.05
    assert found.deviation(100, 5050, 4, 4000) == math.inf
    assert math.isfinite(found.seconds(100, 5050, 4, 4000))


def test_before_there_are_enough_steps_there_is_no_model() -> None:
    fit = learnt(*steps(TRUE, FEWEST_STEPS - 1))
    assert fit.model is None
    fit.add(steps(TRUE, 1, seed=1)[0])
    assert fit.refit()
    assert fit.model is not None


def test_profile_counts_until_steps_are_known() -> None:
    """It is off by a fifth, as one of the same card in another rack may be."""
    near, prior = steps(TRUE, 500, seed=1), Coefficients(*(1.2 * each for each in TRUE))
    assert coefficients(learnt(prior=prior)) == pytest.approx(prior, rel=1e-3)
    few = learnt(*steps(TRUE, 20), prior=prior)
    many = learnt(*steps(TRUE, 4000), prior=prior)
    assert 0.03 < statistics.median(coefficients(few).errors(near)) < 0.18
    assert abs(statistics.median(coefficients(many).errors(near))) < 0.03
    assert few.prior_off is many.prior_off is None


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_profile_of_another_machine_is_given_up(factor: float) -> None:
    fit = learnt(*steps(TRUE, 200, noise=0.05), prior=Coefficients(*(factor * each for each in TRUE)))
    assert fit.prior_off == pytest.approx(factor - 1, rel=0.1)
    assert statistics.median(map(abs, coefficients(fit).errors(steps(TRUE, 200, seed=1)))) < 0.03


def test_nothing_is_learnt_from_what_is_no_step() -> None:
    fit = learnt(*steps(TRUE, 50))
    before = coefficients(fit)
    for nonsense in (
        MeasuredStep(0, 0, 0, 0, 0.1),
        MeasuredStep(1, 1, 1, 1, 0.0),
        MeasuredStep(1, 1, 1, 1, -1.0),
        MeasuredStep(1, 1, 1, 1, math.nan),
        MeasuredStep(1, 1, 1, 1, math.inf),
        MeasuredStep(1, 1, 1, 1, 1e-300),
        MeasuredStep(1, 1, 1, 1, 1e9),
        MeasuredStep(-1, 1, 2, 1, 0.1),
        MeasuredStep(1, -5, 1, 1, 0.1),
        MeasuredStep(1, 1, 1, 1 << 62, 0.1),
    ):
        fit.add(nonsense)
    assert fit.num_unseen == 0
    assert not fit.refit()
    assert coefficients(fit) == before


def test_it_stays_of_one_size_whatever_comes() -> None:
    fit, chance = OnlineFit(), random.Random(0)
    for _ in range(20_000):
        tokens, number = 1 << chance.randrange(20), 1 << chance.randrange(12)
        fit.add(MeasuredStep(tokens, tokens * tokens, number, number << chance.randrange(14), chance.uniform(0.01, 9)))
    assert len(fit._rows) * KEPT_OF_A_KIND <= fit._steps[:, :, 0].size
    assert fit.refit()
