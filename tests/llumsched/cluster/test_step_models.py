# SPDX-License-Identifier: Apache-2.0
"""Columns of step models: learnt from statuses, shared by instances of one kind, and never written for nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from llumlet.contract.types import StepSample
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.providers.step_models import HALF_LIFE_S, REFIT_S, StepModels
from llumsched.cluster.table import Table, standard_table
from llumsched.cluster.view import View
from llumsched.latency.fitting import Coefficients, MeasuredStep
from llumsched.latency.profile import Profile
from tests.llumsched import cases
from tests.llumsched.latency.test_fitting import TRUE, steps

MEASURED = steps(TRUE, 2000, noise=0.02)


class World:
    """A view with a table; statuses come by hand."""

    def __init__(self, *profiles: Profile) -> None:
        self.now_s = 100.0
        self.view = View(lambda: self.now_s, wall_clock=lambda: self.now_s)
        self.models = StepModels(lambda: self.now_s, profiles)
        self.table: Table = standard_table(InFlight(), self.models)
        self.view.observe(self.models, self.table)
        self._updates = 0

    def appear(self, instance_id: str, **fields: Any) -> None:
        self.view.put_metadata(cases.metadata(instance_id, **fields))

    def tell(self, instance_id: str, *measured: tuple[int, MeasuredStep], **fields: Any) -> None:
        """A status with these steps, by number."""
        self._updates += 1
        samples = [StepSample(number=number, **step._asdict()) for number, step in measured]
        fields = {"incarnation": self.view[instance_id].metadata.incarnation} | fields
        status = cases.status(instance_id, self._updates, timestamp_ms=int(self.now_s * 1e3), steps=samples, **fields)
        assert self.view.put_status(status)

    def column(self, name: str, instance_id: str) -> float:
        return float(self.table[name][self.table.index[instance_id]])

    def learn(self, instance_id: str, measured: list[MeasuredStep], first: int = 1) -> None:
        for number in range(0, len(measured), 4):
            self.now_s += 0.2
            chunk = measured[number : number + 4]
            self.tell(instance_id, *((first + number + index, step) for index, step in enumerate(chunk)))


@pytest.fixture
def world() -> World:
    return World()


def test_a_profile_is_for_engines_of_its_model_until_they_show_something_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twice = Coefficients(*(2 * each for each in TRUE))
    world = World(Profile("m1", twice, 100, 0.01, "one.json"), Profile("", TRUE, 100, 0.01, "any.json"))
    for name, model in (("a", "m1"), ("b", "m2")):
        world.appear(name, model=model)
        world.tell(name)
    assert world.column("step_s", "a") == pytest.approx(twice.a, rel=1e-3)
    assert world.column("step_s", "b") == pytest.approx(TRUE.a, rel=1e-3)
    for name in "ab":
        world.learn(name, MEASURED[:400])
        assert world.column("step_s", name) == pytest.approx(TRUE.a, rel=0.1)
    given_up = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(given_up) == 1
    assert given_up[0].startswith("Profile one.json is used no more: what it expects of most steps is off by +")


def test_before_anything_is_known_nothing_is_said(world: World) -> None:
    world.appear("a")
    world.tell("a")
    assert math.isnan(world.column("step_s", "a"))
    assert world.column("step_stretch", "a") == 1.0


def test_steps_of_an_instance_teach_its_kind(world: World) -> None:
    world.appear("a", model="m1")
    world.appear("b", model="m1")
    world.appear("c", model="m2")
    for name in "abc":
        world.tell(name)
    world.learn("a", MEASURED[:200])
    for name in "ab":
        assert world.column("step_s", name) == pytest.approx(TRUE.a, rel=0.1)
        assert world.column("step_prefill_token_s", name) == pytest.approx(TRUE.b, rel=0.1)
    assert math.isnan(world.column("step_s", "c"))
    world.appear("d", model="m1")
    world.tell("d")
    assert world.column("step_s", "d") == pytest.approx(TRUE.a, rel=0.1)


def test_each_step_counts_once_though_several_statuses_tell_of_it(world: World) -> None:
    world.appear("a")
    for number in range(40):
        world.now_s += 0.01
        world.tell("a", *((index, MEASURED[index]) for index in range(max(number - 3, 0), number + 1) if index))
    fit = next(iter(world.models._fits.values()))
    assert fit.online._num_added == 39


def test_a_new_life_begins_to_count_anew(world: World) -> None:
    world.appear("a")
    world.learn("a", MEASURED[:40], first=1000)
    world.appear("a", incarnation="second")
    world.tell("a", *enumerate(MEASURED[40:44], 1))
    fit = next(iter(world.models._fits.values()))
    assert fit.online._num_added == 44
    assert fit.members == {"a"}


def test_an_instance_that_changes_its_kind(world: World) -> None:
    world.appear("a", model="m1")
    world.learn("a", MEASURED[:40])
    world.appear("a", model="m2")
    world.now_s += 1
    world.tell("a")
    assert math.isnan(world.column("step_s", "a"))


def test_fits_are_made_now_and_then_and_rows_written_when_something_changes(world: World) -> None:
    world.appear("a")
    world.appear("b")
    world.tell("b")
    told: list[str] = []
    world.models.on_change(told.append)
    refits, refit = [], None
    world.learn("a", MEASURED[:8])
    fit = next(iter(world.models._fits.values())).online
    refit = fit.refit
    fit.refit = lambda: refits.append(world.now_s) or refit()  # type: ignore[method-assign, func-returns-value]
    assert sorted(set(told)) == ["a", "b"]
    world.learn("a", MEASURED[8:1200], first=9)
    assert min(after - before for before, after in itertools.pairwise(refits)) >= REFIT_S - 1e-6
    assert len(refits) == pytest.approx(1192 / 4 * 0.2 / REFIT_S, rel=0.2)
    told.clear()
    world.learn("a", MEASURED[1200:], first=1201)
    assert len(told) <= 2 * 3, "a model that stays as it is, within 2 %, is not told"


@pytest.mark.parametrize("stretch", [1.0, 1.5])
def test_stretch_is_what_steps_took_over_what_their_decodes_would_have(world: World, stretch: float) -> None:
    world.appear("a")
    world.learn("a", MEASURED[:400])
    number = requests = kv = 0
    seconds = 0.0
    for _ in range(40):
        world.now_s += 0.5
        number, requests, kv = number + 10, requests + 80, kv + 80_000
        seconds += 10 * stretch * (TRUE.a + 8 * TRUE.d + 8000 * TRUE.e)
        sums = {"num_decode_steps": number, "decode_steps_requests": requests, "decode_steps_kv": kv}
        world.tell("a", decode_steps_s=seconds, **sums)
    assert world.column("step_stretch", "a") == pytest.approx(stretch, rel=0.03)
    # Then nothing is in the way any more.
    for _ in range(int(5 * HALF_LIFE_S)):
        world.now_s += 1.0
        number, requests, kv = number + 20, requests + 160, kv + 160_000
        seconds += 20 * (TRUE.a + 8 * TRUE.d + 8000 * TRUE.e)
        sums = {"num_decode_steps": number, "decode_steps_requests": requests, "decode_steps_kv": kv}
        world.tell("a", decode_steps_s=seconds, **sums)
    assert world.column("step_stretch", "a") == pytest.approx(1.0, rel=0.04)


def test_how_soon_requests_end_is_learnt_of_all_of_a_kind(world: World) -> None:
    """One in two hundred decodes is the last of its request, of 1,000 tokens; of 8 in each step of 50 ms."""
    for name in "ab":
        world.appear(name)
    number = 0
    for _ in range(400):
        world.now_s += 0.5
        number += 10
        for name in "ab":
            sums = {"num_decode_steps": number, "decode_steps_requests": 8 * number, "decode_steps_kv": 8000 * number}
            gone = 8 * number // 200 if name == "a" else 0
            world.tell(name, decode_steps_s=0.05 * number, num_gone=gone, gone_tokens=1000 * gone, **sums)
    for name in "ab":
        # Of 8,000 tokens at each of two instances, 1,000 · 8 · 20 / 200 go each second at one of them.
        assert world.column("gone_per_s", name) == pytest.approx(800 / 16_000, rel=0.1)
        assert world.column("ended_per_s", name) == pytest.approx(0.8 / 16, rel=0.1)


def test_an_instance_that_talks_nonsense_is_not_believed(world: World) -> None:
    """Its own kind would pay for it; what it says is a number all the same."""
    world.appear("a")
    world.appear("b")
    world.tell("b")
    world.learn("a", MEASURED[:200])
    before = world.column("step_s", "b")
    nonsense = MeasuredStep(-(1 << 62), 1 << 62, -1, 0, 1e-300)
    world.tell("a", *((1 << 40, nonsense) for _ in range(1000)), num_decode_steps=5, decode_steps_s=1.0)
    for number in (10, 3, 20):
        world.now_s += REFIT_S
        sums = {"decode_steps_requests": 100 - number, "decode_steps_kv": 50, "gone_tokens": 7 * (number % 4)}
        world.tell("a", num_decode_steps=number, decode_steps_s=1.0, **sums)
    for name in "ab":
        assert world.column("step_s", name) == pytest.approx(before, rel=0.1)
        assert 0 < world.column("step_stretch", name) < math.inf
        assert not world.column("gone_per_s", name) < 0


def test_sums_that_fall_are_no_steps(world: World) -> None:
    world.appear("a")
    world.learn("a", MEASURED[:400])
    told = {"num_decode_steps": 0, "decode_steps_requests": 0, "decode_steps_kv": 0, "decode_steps_s": 0.0}
    for number in (100, 200):
        told = {"num_decode_steps": number, "decode_steps_requests": 8 * number, "decode_steps_kv": 8000 * number}
        told["decode_steps_s"] = 2 * number * (TRUE.a + 8 * TRUE.d + 8000 * TRUE.e)
        world.now_s += 0.1
        world.tell("a", gone_tokens=1000, **told)
    before = [world.column(name, "a") for name in ("step_stretch", "gone_per_s")]
    assert before[0] == pytest.approx(2.0, rel=0.05)
    world.tell("a", gone_tokens=0, **(told | {"num_decode_steps": 300, "decode_steps_s": 1e9}))
    assert [world.column(name, "a") for name in ("step_stretch", "gone_per_s")] == before


def test_no_more_is_learnt_from_than_the_next_fit_needs(world: World) -> None:
    world.appear("a")
    world.tell("a", *enumerate(MEASURED[:1000], 1))
    online = next(iter(world.models._fits.values())).online
    assert online._num_added == 16, "of one status"
    for number in range(100):
        world.tell("a", *enumerate(MEASURED[:16], 2000 + 16 * number))
    assert online._num_added < 16 + 128 + 16, "until the next fit"


def test_left_instance_is_forgotten(world: World) -> None:
    world.appear("a")
    world.learn("a", MEASURED[:40])
    world.view.remove("a")
    assert not world.models._recent
    assert all(not fit.members for fit in world.models._fits.values())
