# SPDX-License-Identifier: Apache-2.0
"""A hang is told from a long step by what the step was expected to take."""

from __future__ import annotations

import pytest

from vllm_llumnix.engine.progress import FIRST_SECONDS_PER_TOKEN, PATIENCE_FACTOR, Progress
from vllm_llumnix.migration.wire import Health


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


def turn(progress: Progress, clock: Clock, tokens: int, seconds: float) -> None:
    """One step of the loop that takes `seconds`."""
    progress.step()
    progress.execute(tokens)
    clock.now += seconds


def test_a_decode_step_that_hangs(progress: Progress, clock: Clock) -> None:
    for _ in range(50):
        turn(progress, clock, 4, 0.01)
    seen = []
    for _ in range(10):
        clock.now += 0.5
        seen.append(progress.health)
    assert seen == [Health.OK] * 2 + [Health.SUSPECT] * 6 + [Health.HUNG] * 2
    progress.step()
    assert progress.health is Health.OK


def test_a_long_prefill_is_no_hang(progress: Progress, clock: Clock) -> None:
    for _ in range(30):
        turn(progress, clock, 1000, 0.5)
    progress.step()
    progress.execute(8000)
    clock.now += 4 * PATIENCE_FACTOR * 0.95
    assert progress.health is Health.OK
    clock.now += 4 * PATIENCE_FACTOR * 0.1
    assert progress.health is Health.SUSPECT


@pytest.mark.parametrize("tokens", [8, 512])
def test_one_stall_changes_little(clock: Clock, tokens: int) -> None:
    """A stopped process, a hang that was survived: it says nothing of what the next step takes."""

    def limits_after(*steps: tuple[int, float]) -> list[float]:
        progress = Progress(clock)
        for step in ((1000, 0.05),) * 50 + ((8, 0.02),) * 200 + steps + ((8, 0.02),):
            turn(progress, clock, *step)
        progress.step()
        found = []
        for given in (8, 48, 4000):
            progress.execute(given)
            found.append(progress.limit_seconds)
        return found

    pairs = zip(limits_after(), limits_after((tokens, 60.0)), strict=True)
    assert all(disturbed < 3 * undisturbed for undisturbed, disturbed in pairs)


@pytest.mark.parametrize(("tokens", "usual"), [(8, 0.1), (1000, 0.4)])
def test_a_machine_that_has_become_slower_is_believed_after_some_steps(
    progress: Progress, clock: Clock, tokens: int, usual: float
) -> None:
    for _ in range(50):
        turn(progress, clock, tokens, usual)
    steps = 0
    while progress.limit_seconds < 20 * usual:
        assert steps < 10, progress.limit_seconds
        turn(progress, clock, tokens, 20 * usual)
        steps += 1
    assert steps > 1


def test_before_the_first_prefill_a_slow_machine_is_assumed(progress: Progress) -> None:
    progress.execute(4000)
    assert progress.limit_seconds == pytest.approx(PATIENCE_FACTOR * 4000 * FIRST_SECONDS_PER_TOKEN)


def test_whoever_sleeps_does_not_hang(progress: Progress, clock: Clock) -> None:
    progress.step()
    progress.sleep()
    clock.now += 3600
    assert (progress.health, progress.stalled_seconds) == (Health.OK, 0.0)
    progress.step()
    clock.now += 1
    assert progress.stalled_seconds == pytest.approx(1)
