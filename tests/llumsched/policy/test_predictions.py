# SPDX-License-Identifier: Apache-2.0
"""Predictions beside what the modelled engine then does, in any state, at any moment."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.in_flight import InFlight, counters_of
from llumsched.cluster.table import Table, standard_table
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.metrics import METRICS
from llumsched.request import Request
from llumsim import PS
from llumsim.clock import VirtualLoop
from llumsim.cluster.member import Cadence, Member
from llumsim.engine.requests import EngineRequest, Watcher
from llumsim.engine.step_model import EngineConfig, StepModel, load_hardware
from tests.llumsched import cases
from tests.llumsched.cases import Known
from tests.llumsched.latency.test_fitting import TRUE

CONFIG = EngineConfig(num_blocks=4000, max_num_batched_tokens=512, max_num_seqs=128, prefix_caching=False)


@contextmanager
def engine(config: EngineConfig = CONFIG) -> Iterator[Member]:
    hardware = replace(load_hardware("a10-llama-7b"), engine=config, step=StepModel.of_seconds(*TRUE))
    loop = VirtualLoop()
    yield Member(loop, 0, hardware, Cadence(), Watcher(), lambda status: None, model="", max_moves=4)
    loop.close()


def predicted(
    member: Member, told_ps: int, now_ps: int, prompt: int, sent: tuple[int, ...] = (), known: Known | None = None
) -> tuple[float, float]:
    """Seconds to the first token and between two, as of a status that is so old, with what was sent since."""
    member.engine.advance(told_ps)
    in_flight = InFlight()
    table = standard_table(in_flight, known or Known())
    table.appeared(Instance(member.metadata, member.status_at(told_ps), told_ps / PS))
    for each in sent:
        in_flight.add(member.id, counters_of(InferType.NEUTRAL, each))
    columns = Candidates(table, Context(now_ps / PS, Request(prompt_num_tokens=prompt)))
    values = [METRICS[name].values(columns)[0] / 1e3 for name in ("predicted_ttft", "predicted_tpot")]
    return float(values[0]), float(values[1])


def add(member: Member, name: str, prompt: int, output: int, now_ps: int) -> EngineRequest:
    member.engine.advance(now_ps)
    request = EngineRequest(name, prompt, output, arrived_ps=now_ps)
    member.engine.add(request, now_ps)
    return request


def until_first_token(member: Member, request: EngineRequest, now_ps: int) -> float:
    at_ps = now_ps
    while request.first_token_ps is None:
        end_ps = member.engine.next_end_after(at_ps)
        assert end_ps is not None
        at_ps = max(end_ps, at_ps)
        member.engine.advance(at_ps)
        member.engine.settle(at_ps)
    return (request.first_token_ps - now_ps) / PS


def test_the_first_token_comes_when_it_was_said() -> None:
    """While there is room: in idle engines, in such as decode, with prompts in the queue, by statuses that are old.
    Now and then the last tokens of a prompt need a step more than was thought, or one less."""
    off = []
    for seed in range(200):
        chance = random.Random(seed)
        with engine() as member:
            now_ps = 0
            for number in range(chance.choice((0, 1, 5, 20))):
                now_ps += round(chance.expovariate(1 / chance.choice((0.01, 0.1))) * PS)
                add(member, f"r{number}", chance.randint(2, 900), chance.randint(200, 400), now_ps)
            told_ps = now_ps + round(chance.uniform(0.0, 0.3) * PS)
            now_ps = told_ps + round(chance.choice((0.0, chance.uniform(0.0, 0.2))) * PS)
            prompt = chance.randint(2, 1500)
            said_s, _ = predicted(member, told_ps, now_ps, prompt)
            came_s = until_first_token(member, add(member, "own", prompt, 10, now_ps), now_ps)
        off.append(said_s / came_s - 1)
    sizes = sorted(map(abs, off))
    assert sizes[100] < 0.01
    assert sizes[190] < 0.05
    assert sizes[-1] < 0.25
    assert abs(sum(off) / len(off)) < 0.01


@pytest.mark.parametrize("seed", range(20))
def test_requests_sent_since_go_first(seed: int) -> None:
    chance = random.Random(seed)
    with engine() as member:
        for number in range(5):
            add(member, f"r{number}", chance.randint(2, 300), 300, 0)
        told_ps = now_ps = PS
        sent = tuple(chance.randint(2, 900) for _ in range(3))
        said_s, _ = predicted(member, told_ps, now_ps, 400, sent)
        for number, each in enumerate(sent):
            add(member, f"s{number}", each, 300, now_ps)
        came_s = until_first_token(member, add(member, "own", 400, 10, now_ps), now_ps)
    assert said_s == pytest.approx(came_s, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_come_as_it_was_said(seed: int) -> None:
    chance = random.Random(seed)
    with engine() as member:
        for number in range(chance.choice((0, 3, 40))):
            add(member, f"r{number}", chance.randint(2, 300), 2000, 0)
        now_ps = 5 * PS
        prompt = chance.randint(2, 500)
        _, said_s = predicted(member, now_ps, now_ps, prompt)
        own = add(member, "own", prompt, 50, now_ps)
        until_first_token(member, own, now_ps)
        first_ps = own.first_token_ps
        assert first_ps is not None
        while member.engine.num_tokens(own) < prompt + 10:
            now_ps = member.engine.next_end_after(now_ps) or now_ps
            member.engine.advance(now_ps)
            member.engine.settle(now_ps)
        came_s = (now_ps - first_ps) / PS / 9
    assert said_s == pytest.approx(came_s, rel=0.03)


def full(chance: random.Random, gone_per_s: float) -> tuple[float, float]:
    """Seconds that a request is said to wait, and waits, in a full engine whose requests may end at any time."""
    with engine() as member:
        step_s = TRUE.a + 60 * TRUE.d + 60_000 * TRUE.e
        now_ps = number = 0
        while now_ps < 60 * PS:
            if len(member.engine.waiting) < 3:
                number += 1
                add(member, f"r{number}", 1000, 1 + round(chance.expovariate(gone_per_s * step_s)), now_ps)
            now_ps = member.engine.next_end_after(now_ps) or now_ps
            member.engine.advance(now_ps)
            member.engine.settle(now_ps)
        said_s, _ = predicted(member, now_ps, now_ps, 1500, known=Known(gone_per_s=gone_per_s))
        return said_s, until_first_token(member, add(member, "own", 1500, 10, now_ps), now_ps)


def without_place(chance: random.Random, ended_per_s: float) -> tuple[float, float]:
    """The same in an engine whose batch is full, and whose memory is not."""
    with engine(replace(CONFIG, max_num_seqs=16)) as member:
        step_s = TRUE.a + 16 * TRUE.d + 16 * 400 * TRUE.e
        now_ps = number = 0
        while now_ps < 60 * PS:
            if len(member.engine.waiting) < 3:
                number += 1
                add(member, f"r{number}", 100, 1 + round(chance.expovariate(ended_per_s * step_s)), now_ps)
            now_ps = member.engine.next_end_after(now_ps) or now_ps
            member.engine.advance(now_ps)
            member.engine.settle(now_ps)
        said_s, _ = predicted(member, now_ps, now_ps, 100, known=Known(ended_per_s=ended_per_s))
        blind_s, _ = predicted(member, now_ps, now_ps, 100)
        assert said_s > 2 * blind_s
        return said_s, until_first_token(member, add(member, "own", 100, 10, now_ps), now_ps)


@pytest.mark.parametrize("ended_per_s", [0.05, 0.1])
def test_full_batch_delays_until_others_end(ended_per_s: float) -> None:
    waits = [without_place(random.Random(seed), ended_per_s) for seed in range(20)]
    said_s, came_s = (sum(times) / len(times) for times in zip(*waits, strict=True))
    assert said_s == pytest.approx(came_s, rel=0.35)
    assert came_s > 1.5


@pytest.mark.parametrize("gone_per_s", [0.02, 0.04])
def test_full_cache_delays_until_others_end(gone_per_s: float) -> None:
    """On average: who ends next is not known."""
    waits = [full(random.Random(seed), gone_per_s) for seed in range(20)]
    said_s, came_s = (sum(times) / len(times) for times in zip(*waits, strict=True))
    assert said_s == pytest.approx(came_s, rel=0.35)
    assert came_s > 1.5


def test_prefills_stretch_the_time_between_tokens() -> None:
    def tpot(stretch: float) -> float:
        table = standard_table(InFlight(), Known(stretch=stretch))
        table.appeared(cases.instance("a"))
        return float(METRICS["predicted_tpot"].values(table)[0])

    assert tpot(1.0) == pytest.approx(TRUE.a * 1e3)
    assert tpot(1.5) == pytest.approx(1.5 * tpot(1.0))


def test_no_more_decode_at_a_time_than_there_is_room_for() -> None:
    """Forty requests of a thousand tokens each, where there is room for ten."""
    table = standard_table(InFlight(), Known())
    waiting = {"scheduler_waiting_to_decode_requests_num": 30, "scheduler_waiting_to_decode_tokens_num": 30_000}
    running = {"scheduler_running_to_decode_requests_num": 10, "scheduler_running_to_decode_tokens_num": 10_000}
    table.appeared(cases.instance("a", num_total_gpu_tokens=10_000, **running, **waiting))
    (value,) = METRICS["predicted_tpot"].values(table)
    assert value == pytest.approx(1e3 * (TRUE.a + 10 * TRUE.d + 10_000 * TRUE.e))


def test_where_nothing_is_known_nobody_is_better() -> None:
    table = standard_table(InFlight(), Known(cases.UNKNOWN))
    table.appeared(cases.instance("a"))
    for name in ("predicted_ttft", "predicted_tpot"):
        assert METRICS[name].values(table).tolist() == [math.inf]


def test_far_off_what_was_measured_it_stays_a_number() -> None:
    """A grid has an edge; Llumnix's predictor answers infinity beyond it."""
    table = standard_table(InFlight(), Known())
    table.appeared(
        cases.instance(
            "a",
            num_uncomputed_tokens_all_waiting_prefills=10**7,
            num_uncomputed_pairs=10**13,
            scheduler_running_to_decode_requests_num=5000,
            scheduler_running_to_decode_tokens_num=10**9,
        )
    )
    for name in ("predicted_ttft", "predicted_tpot"):
        (value,) = METRICS[name].values(table)
        assert 0 < value < math.inf


def test_moves_change_it_as_they_change_what_decodes() -> None:
    """The rescheduler asks what it would be with a request more, or less."""
    table: Table = standard_table(InFlight(), Known())
    table.appeared(
        cases.instance("a", scheduler_running_to_decode_requests_num=4, scheduler_running_to_decode_tokens_num=8000)
    )
    tpot = METRICS["predicted_tpot"]
    weight = {"scheduler_running_to_decode_requests_num": 1.0, "scheduler_running_to_decode_tokens_num": 2000.0}
    assert tpot.at(table, 0, weight) - tpot.at(table, 0) == pytest.approx(1e3 * (TRUE.d + 2000 * TRUE.e))
    assert np.isfinite(tpot.at(table, 0))
