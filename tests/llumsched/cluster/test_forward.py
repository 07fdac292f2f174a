# SPDX-License-Identifier: Apache-2.0
"""Statuses that are moved on, beside what the modelled engine then reports, and within bounds whatever was told."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llumlet.contract.types import InstanceStatus
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers.account import Account
from llumsched.cluster.providers.in_flight import Counters, InFlight
from llumsched.cluster.snapshot import Snapshot
from llumsched.cluster.table import standard_table
from llumsched.cluster.view import View
from llumsched.dispatch.explain import explain
from llumsched.foresight.moved_on import MOVED, Forward, move_on, moved_on
from llumsched.foresight.outlook import Outlook
from llumsched.policy import pipeline
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.document import Mode, load_policy
from llumsched.policy.metrics import METRICS
from llumsched.policy.selectors import Draw
from llumsched.request import Request
from llumsched.rescheduling.planning.planner import Plan
from llumsched.rescheduling.rescheduler import Rescheduler
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsim import PS
from llumsim.clock import VirtualLoop
from llumsim.cluster.member import Cadence, Member
from llumsim.engine.requests import EngineRequest, Watcher
from llumsim.engine.step_model import EngineConfig, StepModel, load_hardware
from tests.llumsched import cases
from tests.llumsched.latency.test_fitting import TRUE
from tests.llumsched.policy.test_predictions import Known

CONFIG = EngineConfig(num_blocks=2000, max_num_batched_tokens=512, max_num_seqs=128, prefix_caching=False)
USED = "num_used_gpu_tokens"
DECODES = "scheduler_running_to_decode_requests_num"


class World:
    """One modelled engine that tells a table of itself."""

    def __init__(self, loop: VirtualLoop, config: EngineConfig, foretold: float | None) -> None:
        hardware = replace(load_hardware("a10-llama-7b"), engine=config, step=StepModel.of_seconds(*TRUE))
        self.now_ps = 0
        self.member = Member(
            loop, 0, hardware, Cadence(foretold=foretold), Watcher(), lambda status: None,
            model="", max_moves=4,
        )  # fmt: skip
        self.view = View(lambda: self.now_s, wall_clock=lambda: self.now_s)
        self.account = Account(lambda: self.now_s, 10.0)
        outlook = Outlook(lambda: self.now_s)
        self.table = standard_table(self.account.in_flight, Known(), outlook)
        self.view.observe(self.account, outlook, self.table)
        self.view.put_metadata(self.member.metadata)

    @property
    def now_s(self) -> float:
        return self.now_ps / PS

    def wait(self, seconds: float) -> None:
        self.now_ps += round(seconds * PS)
        self.member.engine.advance(self.now_ps)

    def add(self, name: str, prompt: int, output: int) -> None:
        self.member.add(EngineRequest(name, prompt, output, arrived_ps=self.now_ps), self.now_ps)

    def until_step_ends(self) -> float:
        end_ps = self.member.engine.next_end_after(self.now_ps)
        assert end_ps is not None
        return (end_ps - self.now_ps) / PS

    def status(self) -> InstanceStatus:
        return self.member.status_at(self.now_ps)

    def tell(self) -> None:
        self.view.put_status(self.status())

    def moved(self, name: str) -> float:
        return float(moved_on(self.table, self.now_s)[name][0])


@contextmanager
def world(config: EngineConfig = CONFIG, foretold: float | None = 1.0) -> Iterator[World]:
    loop = VirtualLoop()
    try:
        yield World(loop, config, foretold)
    finally:
        loop.close()


def busy(here: World, chance: random.Random, least_output: int = 1) -> None:
    """A state that has come about: some requests decode, some have ended, some were added a moment ago."""
    for number in range(chance.randrange(2, 25)):
        here.add(f"r{number}", chance.randrange(2, 700), chance.randrange(least_output, 600))
        here.wait(chance.expovariate(20))
        if chance.random() < 0.5:
            here.tell()
    here.wait(chance.random() * 0.3)


@pytest.mark.parametrize("seed", range(60))
def test_status_is_moved_on_to_the_later_truth(seed: int) -> None:
    """Prefills in chunks, prompts that wait, growing caches, ends that are foretold: block by block. Of several that
    wait it is known how long they are together, and so about when each of them is admitted."""
    chance = random.Random(seed)
    with world() as here:
        busy(here, chance, least_output=100)
        here.tell()
        told, waiting = here.status(), here.table["num_waiting_requests"][0]
        for _ in range(4):
            here.wait(chance.random() * 0.12)
            true = here.status()
            off = min(max(waiting - 1, 0), 2)
            assert here.moved(DECODES) == pytest.approx(true.scheduler_running_to_decode_requests_num, abs=off)
            assert here.moved("num_waiting_requests") == pytest.approx(true.num_waiting_requests, abs=off)
            assert here.moved(USED) == pytest.approx(true.num_used_gpu_tokens, abs=16 * (1 + waiting))
            prefill = here.moved("num_uncomputed_tokens_scheduler_running_prefills")
            true_prefill = true.num_uncomputed_tokens_scheduler_running_prefills
            assert prefill == pytest.approx(true_prefill, abs=700 * min(off, 1) + 1e-6)
            if not off and true.num_gone == told.num_gone:
                tokens = here.moved("scheduler_running_to_decode_tokens_num")
                assert tokens == pytest.approx(true.scheduler_running_to_decode_tokens_num)


def test_a_stale_status_is_wrong_where_the_moved_one_is_right() -> None:
    """The tests above would hold for statuses as they came if nothing happened in them."""
    errors = {"stale": 0.0, "moved": 0.0}
    for seed in range(40):
        chance = random.Random(seed)
        with world() as here:
            busy(here, chance)
            here.tell()
            here.wait(0.2)
            true = here.status().num_used_gpu_tokens
            errors["stale"] += abs(here.table[USED][0] - true)
            errors["moved"] += abs(here.moved(USED) - true)
    assert errors["moved"] * 10 < errors["stale"]


@pytest.mark.parametrize("seed", range(30))
def test_sent_requests_are_moved_on(seed: int) -> None:
    chance = random.Random(seed)
    with world() as here:
        busy(here, chance, least_output=300)
        here.wait(2.0)  # nobody waits any more
        here.tell()
        here.wait(chance.random() * 0.1)
        here.account.dispatched("new", here.member.id, InferType.NEUTRAL, 200)
        here.add("new", 200, 400)
        for _ in range(4):
            here.wait(chance.random() * 0.1)
            true = here.status()
            running = true.scheduler_running_to_decode_requests_num
            assert here.moved(DECODES) == running
            assert here.moved("sent_requests") == true.num_waiting_requests
            assert here.moved(USED) == pytest.approx(true.num_used_gpu_tokens, abs=32)
            assert here.moved("sent_uncomputed_prefill_tokens") == 200 * true.num_waiting_requests
            prefill = here.moved("num_uncomputed_tokens_scheduler_running_prefills")
            assert prefill == true.num_uncomputed_tokens_scheduler_running_prefills


def test_blocked_request_stays_waiting() -> None:
    config = replace(CONFIG, num_blocks=200)
    with world(config) as here:
        for number in range(3):
            here.add(f"r{number}", 900, 400)
        here.wait(0.5)
        here.add("late", 1000, 10)
        here.tell()
        here.wait(0.1)
        here.tell()
        here.wait(0.1)
        true = here.status()
        assert true.num_waiting_requests == 1
        assert here.moved("num_waiting_requests") == 1
        assert here.moved(DECODES) == true.scheduler_running_to_decode_requests_num


def test_blocked_request_is_admitted_after_an_end() -> None:
    config = replace(CONFIG, num_blocks=200)
    with world(config) as here:
        here.add("short", 1500, 12)
        here.add("long", 1400, 400)
        here.wait(0.8)
        here.add("late", 1200, 400)
        for _ in range(2):
            here.tell()
            here.wait(0.08)
        assert here.table["queue_is_stuck"][0] == 1
        while here.status().num_gone == 0:
            here.wait(0.03)
        here.wait(0.1)
        true = here.status()
        assert true.num_waiting_requests == here.moved("num_waiting_requests") == 0
        assert here.moved(DECODES) == true.scheduler_running_to_decode_requests_num == 2
        assert here.moved(USED) < here.table[USED][0]
        assert here.table["num_waiting_requests"][0] == 1


def test_a_place_in_the_batch_is_waited_for_as_room_is() -> None:
    config = replace(CONFIG, max_num_seqs=2)
    with world(config) as here:
        for number in range(3):
            here.add(f"r{number}", 100, 400)
        here.wait(0.5)
        here.tell()
        assert here.moved("num_waiting_requests") == 1
        here.wait(0.1)
        assert here.moved("num_waiting_requests") == 0, "one status alone does not tell it from one that has just come"
        here.tell()
        here.wait(0.1)
        assert here.moved("num_waiting_requests") == here.status().num_waiting_requests == 1


def test_ends_that_nobody_foretells_are_expected_as_they_came_lately() -> None:
    with world(foretold=0.0) as here:
        chance = random.Random(1)
        for number in range(400):
            here.add(f"r{number}", 20, 1 + round(chance.expovariate(1 / 40)))
            here.wait(0.05)
            here.tell()
        status = here.status()
        number = status.scheduler_running_to_decode_requests_num
        share = here.table["ends_per_token"][0]
        assert share == pytest.approx(1 / 40, rel=0.25)
        for num_steps in range(1, 5):
            here.wait(here.until_step_ends() + 0.01)
            median = math.floor(share * number * num_steps + 0.31)
            assert median == statistics.median(np.random.default_rng(0).poisson(share * number * num_steps, 10_001))
            assert here.moved(DECODES) == number - median
        assert here.table["ended_tokens"][0] == pytest.approx(61, rel=0.25)


def test_foretold_ends_are_not_expected_twice() -> None:
    with world(foretold=1.0) as here:
        for number in range(100):
            here.add(f"r{number}", 20, 40)
            here.wait(0.05)
            here.tell()
        assert here.status().num_gone > 50
        assert here.table["ends_per_token"][0] == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_next_report_takes_the_place_of_all_that_was_expected(seed: int) -> None:
    """Whatever was moved on before, a status of now is what is seen, and what was sent is counted in it once."""
    chance = random.Random(seed)
    with world() as here:
        busy(here, chance)
        here.tell()
        here.account.dispatched("new", here.member.id, InferType.NEUTRAL, 300)
        here.wait(0.001)
        here.add("new", 300, 50)
        here.wait(0.3)
        told_before = {name: float(here.table[name][0]) for name in MOVED}
        moved_on(here.table, here.now_s)
        assert {name: float(here.table[name][0]) for name in MOVED} == told_before, "the table is as it was"
        here.tell()
        true, moved = here.status(), moved_on(here.table, here.now_s)
        assert moved["sent_requests"][0] == 0
        for name in set(MOVED) & set(here.table.columns) - {one for one in MOVED if one.startswith("sent_")}:
            assert moved[name][0] == getattr(true, name), name


# Where it is seen


def test_decisions_see_it_and_predictions_do_not_count_the_time_twice() -> None:
    with world() as here:
        for number in range(6):
            here.add(f"r{number}", 600, 300)
        here.wait(0.05)
        here.tell()
        here.wait(0.3)
        context = Context(here.now_s, Request(prompt_num_tokens=100))
        forward = Forward(here.table, here.now_s)
        as_told, moved = Candidates(here.table, context), Candidates(forward, context, reported=here.table)
        assert moved[USED][0] == here.moved(USED) > as_told[USED][0]
        usage = METRICS["kv_cache_usage_ratio_projected"]
        assert moved.values(usage)[0] != as_told.values(usage)[0]
        assert moved["age_s"][0] == pytest.approx(0.3), "how old the report is does not change"
        for name in ("predicted_ttft", "predicted_tpot"):
            assert moved[name][0] == as_told[name][0] == moved.values(METRICS[name])[0]


def test_a_decision_is_explained_with_what_was_moved_on() -> None:
    stage = load_policy("load-balance", Mode.FULL).stages[InferType.NEUTRAL]
    with world() as here:
        here.add("a", 600, 300)
        here.wait(0.05)
        here.tell()
        here.wait(0.4)
        told: list[dict[str, Any]] = []
        for cluster in (here.table, Forward(here.table, here.now_s)):
            candidates = Candidates(cluster, Context(here.now_s), reported=here.table)
            told += explain(pipeline.run(stage, candidates, Draw(random.Random(0), None)))["instances"]
        assert told[0]["moved_on"] is None
        assert told[1]["moved_on"][USED] == [here.table[USED][0], here.moved(USED)]
        assert "max_model_len" not in told[1]["moved_on"]


def test_others_are_taken_to_have_sent_what_this_scheduler_has() -> None:
    with world() as here:
        here.add("a", 100, 300)
        here.wait(0.5)
        here.tell()
        here.account.dispatched("b", here.member.id, InferType.NEUTRAL, 160)
        here.wait(0.4)
        alone, of_three = (moved_on(here.table, here.now_s, senders) for senders in (1.0, 3.0))
        assert alone[DECODES][0] == 2
        assert of_three[DECODES][0] == 4
        assert of_three[USED][0] - here.table[USED][0] > 2.5 * (alone[USED][0] - here.table[USED][0])


def test_a_snapshot_is_moved_on_as_the_table_is() -> None:
    with world() as here:
        busy(here, random.Random(3))
        here.tell()
        here.wait(0.2)
        snapshot, forward = here.table.snapshot(), Forward(here.table, here.now_s)
        move_on(snapshot, here.now_s)
        for name in here.table.columns:
            np.testing.assert_equal(snapshot[name], forward[name], name)
        assert snapshot[USED][0] != here.table[USED][0]


@pytest.mark.parametrize("is_forward", [False, True])
def test_a_rescheduling_pass_plans_with_it_if_it_is_told_to(is_forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Snapshot] = []

    def planned(snapshot: Snapshot, *_: object, **__: object) -> Plan:
        seen.append(snapshot)
        return Plan((), ())

    monkeypatch.setattr("llumsched.rescheduling.rescheduler.plan", planned)
    with world() as here:
        busy(here, random.Random(3))
        here.tell()
        here.wait(0.2)
        config = ReschedulingConfig(forward_status=is_forward)
        Rescheduler(here.view, config, table=here.table, clock=lambda: here.now_s).run_pass()
        assert seen[0][USED][0] == (here.moved(USED) if is_forward else here.table[USED][0])
        assert here.moved(USED) != here.table[USED][0]


def test_a_thousand_instances_take_a_fifth_of_a_millisecond() -> None:
    """Four times that here: machines of tests are shared."""
    chance = random.Random(0)
    outlook = Outlook(lambda: 0.0)
    in_flight = InFlight()
    table = standard_table(in_flight, Known(), outlook)
    for number in range(1000):
        in_flight.add(f"i{number}", Counters(1, 1, 1, 200, 20_000, 200, 200, 100))
        decodes = chance.randrange(1, 200)
        instance = cases.instance(
            f"i{number}", num_total_gpu_tokens=400_000, num_total_blocks=25_000, num_used_gpu_tokens=160_000,
            num_running_requests=decodes, scheduler_running_to_decode_requests_num=decodes,
            scheduler_running_to_decode_tokens_num=500 * decodes, coming_blocks=[1] * 64, coming_ends=[1] * 20,
        )  # fmt: skip
        outlook.appeared(instance)
        table.appeared(instance)
    lasted = []
    for _ in range(100):
        began = time.perf_counter()
        moved_on(table, 0.3)
        lasted.append(time.perf_counter() - began)
    assert min(lasted) < 0.8e-3
