# SPDX-License-Identifier: Apache-2.0
"""A hang is told from a long step by what the step was expected to take."""

from __future__ import annotations

import pytest

from llumlet.protocol.wire import Health
from vllm_llumnix.engine.load.progress import FIRST_SECONDS_PER_TOKEN, PATIENCE_FACTOR, Progress


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
    batch = object()
    progress.step()
    progress.execute(batch, tokens)
    clock.now += seconds
    progress.returned(batch)


def limit(progress: Progress, tokens: int) -> float:
    """For a batch of so many tokens. It says nothing of what one takes."""
    with progress.busy("nothing"):
        progress.execute("asked", tokens)
    found = progress.limit_seconds
    progress.returned("asked")
    return found


def test_a_decode_step_that_hangs(progress: Progress, clock: Clock) -> None:
    for _ in range(50):
        turn(progress, clock, 4, 0.01)
    progress.step()
    progress.execute("hangs", 4)
    clock.now += 0.01
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
    progress.execute("long", 8000)
    clock.now += 4 * PATIENCE_FACTOR * 0.95
    assert progress.health is Health.OK
    clock.now += 4 * PATIENCE_FACTOR * 0.1
    assert progress.health is Health.SUSPECT


@pytest.mark.parametrize("tokens", [8, 512])
def test_single_stall_changes_the_limit_little(clock: Clock, tokens: int) -> None:
    """A stopped process, a hang that was survived: it says nothing of what the next step takes."""

    def limits_after(*steps: tuple[int, float]) -> list[float]:
        progress = Progress(clock)
        for step in ((1000, 0.05),) * 50 + ((8, 0.02),) * 200 + steps + ((8, 0.02),):
            turn(progress, clock, *step)
        return [limit(progress, given) for given in (8, 48, 4000)]

    pairs = zip(limits_after(), limits_after((tokens, 60.0)), strict=True)
    assert all(disturbed < 3 * undisturbed for undisturbed, disturbed in pairs)


@pytest.mark.parametrize(("tokens", "usual"), [(8, 0.1), (1000, 0.4)])
def test_a_machine_that_has_become_slower_is_believed_after_some_steps(
    progress: Progress, clock: Clock, tokens: int, usual: float
) -> None:
    for _ in range(50):
        turn(progress, clock, tokens, usual)
    steps = 0
    while limit(progress, tokens) < 20 * usual:
        assert steps < 10
        turn(progress, clock, tokens, 20 * usual)
        steps += 1
    assert steps > 1


def test_before_the_first_prefill_a_slow_machine_is_assumed(progress: Progress) -> None:
    assert limit(progress, 4000) == pytest.approx(PATIENCE_FACTOR * 4000 * FIRST_SECONDS_PER_TOKEN)


def test_whoever_sleeps_does_not_hang(progress: Progress, clock: Clock) -> None:
    progress.step()
    progress.sleep()
    clock.now += 3600
    assert (progress.health, progress.stalled_seconds) == (Health.OK, 0.0)
    progress.step()
    clock.now += 1
    assert progress.stalled_seconds == pytest.approx(1)


def test_busy_is_not_hung(clock: Clock) -> None:
    """Streams stay for as long as the call may take, and no longer; nothing new comes."""
    progress = Progress(clock, utility_seconds=60)
    progress.sleep()
    clock.now += 100
    seen = []
    with progress.busy("add_lora"):
        for _ in range(8):
            seen.append((progress.health, progress.busy_with))
            clock.now += 10
    assert seen == [(Health.OK, "add_lora")] + [(Health.SUSPECT, "add_lora")] * 6 + [(Health.HUNG, "add_lora")]
    assert (progress.health, progress.busy_with) == (Health.OK, "")
    progress.step()
    clock.now += 4.6
    assert progress.health is Health.HUNG, "a step has its own limit again"


def test_a_call_that_fails(progress: Progress) -> None:
    with pytest.raises(ValueError, match="no such adapter"), progress.busy("add_lora"):
        raise ValueError("no such adapter")
    assert progress.busy_with == ""


def test_step_beside_a_utility_call_is_not_measured(progress: Progress, clock: Clock) -> None:
    for _ in range(50):
        turn(progress, clock, 1000, 0.5)
    progress.execute("beside", 1000)
    with progress.busy("reset_prefix_cache"):
        clock.now += 20
    progress.returned("beside")
    assert limit(progress, 8000) == pytest.approx(PATIENCE_FACTOR * 4, rel=0.01)


def test_a_step_lasts_from_the_end_of_the_one_before_if_the_loop_went_straight_on(
    progress: Progress, clock: Clock
) -> None:
    """What scheduling takes is part of it; being idle is not."""

    def step(before: float, tokens: int = 8) -> float | None:
        progress.step()
        clock.now += before
        progress.execute("batch", tokens)
        clock.now += 0.04
        return progress.returned("batch")

    assert step(0.002) == pytest.approx(0.04), "the first: since when the loop was at it is not known"
    assert step(0.002) == pytest.approx(0.042)
    progress.sleep()
    assert step(5.0) == pytest.approx(0.04)
    progress.step()  # a turn in which nothing could be scheduled
    clock.now += 5.0
    assert step(0.002) == pytest.approx(0.04)
    assert step(0.002, tokens=0) is None
    assert step(0.002) == pytest.approx(0.04)
    with progress.busy("add_lora"):
        clock.now += 5.0
    assert step(0.002) == pytest.approx(0.04)
    progress.execute("beside", 8)
    with progress.busy("add_lora"):
        clock.now += 5.0
    assert progress.returned("beside") is None
    assert progress.returned("never given") is None
    assert step(0.002) == pytest.approx(0.042)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_however_many_are_in_flight_steps_take_all_of_the_time(depth: int, progress: Progress, clock: Clock) -> None:
    pipeline = Pipeline(progress, clock, depth)
    for number in range(50):
        pipeline.turn(DECODE if number % 5 else PREFILL)
    began = clock.now
    pipeline.lasted.clear()
    for number in range(100):
        pipeline.turn(DECODE if number % 5 else PREFILL)
    lasted = [seconds for seconds in pipeline.lasted if seconds is not None]
    assert len(lasted) == 100
    assert sum(lasted) == pytest.approx(clock.now - began)
    assert min(lasted) == pytest.approx(SECONDS[DECODE], abs=0.002)
    assert max(lasted) == pytest.approx(SECONDS[PREFILL], abs=0.01)


PREFILL, DECODE = 2000, 8
SECONDS = {PREFILL: 4.0, DECODE: 0.05}
"""What the model takes for a batch."""


class Pipeline:
    """A model of `stages`, each at one batch at a time; the loop keeps `depth` batches in flight."""

    def __init__(self, progress: Progress, clock: Clock, depth: int, stages: int = 1) -> None:
        self.progress = progress
        self.clock = clock
        self.depth = depth
        self.free_at = [0.0] * stages
        self.in_flight: list[tuple[object, float]] = []
        self.waits: list[tuple[float, float]] = []
        """How long the loop waited, and how long it might have before it were suspect."""
        self.lasted: list[float | None] = []

    def turn(self, tokens: int) -> None:
        self.progress.step()
        batch, at = object(), self.clock.now
        self.progress.execute(batch, tokens)
        for stage, free_at in enumerate(self.free_at):
            at = self.free_at[stage] = max(at, free_at) + SECONDS[tokens] / len(self.free_at)
        self.in_flight.append((batch, at))
        if len(self.in_flight) == self.depth:
            batch, done_at = self.in_flight.pop(0)
            self.waits.append((done_at - self.clock.now, self.progress.limit_seconds))
            self.clock.now = max(self.clock.now, done_at) + 0.001
            self.lasted.append(self.progress.returned(batch))


@pytest.mark.parametrize(("depth", "stages"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 4)])
@pytest.mark.parametrize("every", [2, 3, 7])
def test_each_kind_of_batch_is_learnt_from_its_own(
    depth: int, stages: int, every: int, progress: Progress, clock: Clock
) -> None:
    """Prefills behind decodes and decodes behind prefills, with several batches in flight."""
    pipeline = Pipeline(progress, clock, depth, stages)
    for number in range(300):
        pipeline.turn(DECODE if number % every else PREFILL)
    # One that starts in an empty pipeline takes all stages; in a full one they come at the pace of one stage.
    assert SECONDS[PREFILL] / stages * 0.7 < PREFILL * progress._seconds_per_token < SECONDS[PREFILL] * 1.3
    assert progress._step_seconds < 3 * SECONDS[DECODE]


@pytest.mark.parametrize(("depth", "stages"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 4)])
def test_a_long_prefill_behind_decodes_is_no_hang(
    depth: int, stages: int, progress: Progress, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(progress, clock, depth, stages)
    for number in range(200):
        pipeline.turn(DECODE if number % 5 else PREFILL)
    # 16,000 tokens at once, which the model has never seen: 32 s.
    monkeypatch.setitem(SECONDS, 8 * PREFILL, 8 * SECONDS[PREFILL])
    pipeline.waits.clear()
    for tokens in (DECODE, DECODE, DECODE, 8 * PREFILL, *[DECODE] * 8):
        pipeline.turn(tokens)
    longest = max(waited for waited, _ in pipeline.waits)
    assert longest > 8 * SECONDS[PREFILL] / stages * 0.9
    assert all(waited < limit for waited, limit in pipeline.waits), "suspect"
    assert progress.limit_seconds < PATIENCE_FACTOR * SECONDS[PREFILL], "decodes again"
