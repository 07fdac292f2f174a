# SPDX-License-Identifier: Apache-2.0
"""Whole runs: production control plane, modelled engines and links."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llumlet.contract.types import MigrateEvent, MigrateRequest, MovePhase, Reason
from llumlet.protocol.move.limits import Limits
from llumsched.rescheduling.rescheduling_config import LoadTarget, ReschedulingConfig
from llumsim.clock import VirtualLoop
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.member import Cadence, Member
from llumsim.cluster.metrics import Metrics, Summary
from llumsim.cluster.run import ClusterConfig, Happening, What, _Run, run
from llumsim.cluster.workload import LENGTHS, Arrival, assigned, clipped, made_up
from llumsim.engine.requests import EngineRequest, Watcher
from llumsim.engine.step_model import Hardware, load_hardware
from llumsim.moves.incoming import Arrivals
from llumsim.moves.links import Network
from llumsim.moves.outgoing import Departures

A10 = load_hardware("a10-llama-7b")
MEDIUM = LENGTHS["medium"], LENGTHS["medium"]
CAPACITY = 13_616


def load(rate: float, number: int, seed: int = 1) -> list[Arrival]:
    return clipped(made_up(rate, number, MEDIUM, random.Random(seed)), CAPACITY)


def cluster(num_instances: int, **more: Any) -> ClusterConfig:
    return ClusterConfig(groups=[("", A10, num_instances)], **more)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[_Run]:
    """Every run, to look at what it left."""
    runs: list[_Run] = []
    made = _Run.__init__

    def init(self: _Run, *args: Any) -> None:
        made(self, *args)
        runs.append(self)

    monkeypatch.setattr(_Run, "__init__", init)
    return runs


def played(config: ClusterConfig, arrivals: Sequence[Arrival]) -> tuple[Summary, Metrics, list[dict[str, Any]]]:
    lines = io.StringIO()
    summary, metrics = run(config, arrivals, lines)
    return summary, metrics, [json.loads(line) for line in lines.getvalue().splitlines()]


def conserve(runs: Sequence[_Run]) -> None:
    """No block, slot or move is left behind."""
    for one in runs:
        assert not one._clients
        for llumlet in one._llumlets.values():
            if llumlet.member.number in one._members or not llumlet.member.is_alive:
                continue
            engine = llumlet.member.engine
            assert engine.blocks.num_free == engine.config.num_blocks
            assert engine.num_reserved_slots == 0


def test_moves_lose_nothing_and_pay(ended: list[_Run]) -> None:
    arrivals = clipped(made_up(4, 300, (LENGTHS["long"], LENGTHS["long"]), random.Random(0)), 8192)
    without, _, _ = played(cluster(8, control=ControlConfig(rescheduling=None)), arrivals)
    summary, metrics, records = played(cluster(8), arrivals)
    assert summary.num_finished == len(records) == 300
    asked = {f"r{number}": (one.num_prompt, one.num_output) for number, one in enumerate(arrivals)}
    assert {one["id"]: (one["prompt_tokens"], one["output_tokens"]) for one in records} == asked
    assert summary.moves == sum(one["num_moves"] for one in records) > 50
    rescheduler = ended[-1]._control.first.rescheduler
    assert rescheduler is not None
    refusals = sum((one.refusals for one in rescheduler.records.moves), Counter())
    known = {"source_busy", "destination_full", "destination_busy", "request_finished", "request_preempted"}
    assert set(refusals) <= known
    assert all(len(one["instances"]) == one["num_moves"] + 1 for one in records)
    assert summary.moved_requests == sum(one["num_moves"] > 0 for one in records)
    assert summary.preemption_loss < without.preemption_loss / 2
    assert summary.e2e_mean_s < without.e2e_mean_s
    assert 0.02 < summary.move_stall_p50_s < 0.2
    tokens = sum(one.num_output for one in arrivals)
    assert metrics.gaps.number == tokens - len(arrivals)
    conserve(ended)


def test_preemption_after_a_move_is_told_from_a_move_after_preemption() -> None:
    arrivals = clipped(made_up(2, 120, (LENGTHS["long"], LENGTHS["long"]), random.Random(1)), CAPACITY)
    summary, _, records = played(cluster(2), arrivals)
    moved = [one for one in records if one["num_moves"]]
    after = {one["id"] for one in moved if one["num_preemptions_after_move"]}
    before = {one["id"] for one in moved if one["num_preemptions"] > one["num_preemptions_after_move"]}
    assert before - after
    assert after - before
    assert before & after
    assert not any(one["num_preemptions_after_move"] for one in records if not one["num_moves"])
    assert summary.moved_preempted_share == pytest.approx(len(after) / len(moved))


def test_source_moves_as_many_requests_at_a_time_as_it_has_slots(ended: list[_Run]) -> None:
    events: list[MigrateEvent] = []

    def ask(at_s: float, num_ended: int) -> None:
        if at_s < 20 or events:
            return
        source, destination = list(ended[-1]._by_id.values())
        names = [one.request_id for one in source.list_requests().requests if one.movable]
        assert len(names) >= 3
        source.migrate(MigrateRequest(request_ids=names[:3]), destination.arrivals, events.append)

    config = cluster(2, max_moves=1, control=ControlConfig(rescheduling=None))
    summary, _ = run(config, load(1.2, 100), progress=ask)
    stayed = [event.progress.reason for event in events if event.progress.phase == MovePhase.STAYED]
    assert stayed == [Reason.SOURCE_BUSY] * 2
    assert (events[-1].summary.selected, events[-1].summary.moved, events[-1].summary.stayed) == (3, 1, 2)
    assert summary.moves == 1
    conserve(ended)


def test_same_seed_gives_same_run() -> None:
    arrivals = load(6, 120)
    first = played(cluster(6), arrivals)
    again = played(cluster(6), arrivals)
    assert first[0] == again[0]
    assert first[2] == again[2]


def test_round_robin_is_the_policys() -> None:
    control = ControlConfig(policy="round-robin", rescheduling=None)
    _, _, records = played(cluster(4, control=control), load(2, 40))
    dealt = [one["instances"][0] for one in sorted(records, key=lambda one: one["arrived_s"])]
    assert dealt == [f"i{number % 4:04}" for number in range(40)]


def test_idle_engine_takes_the_time_of_its_model_and_of_the_hops() -> None:
    [(_, _, [record])] = [played(cluster(2, control=ControlConfig(rescheduling=None)), [Arrival(5.0, 1000, 2)])]
    step, hop_s = A10.step, Cadence().hop_s
    prefill = step.duration(1000, 1000 * 1001 // 2, 0, 0) / 1e12
    assert record["ttft_s"] == pytest.approx(prefill + 4 * hop_s)
    assert record["tpot_s"] == pytest.approx(step.duration(0, 0, 1, 1001) / 1e12)


def test_api_server_adds_its_time_before_and_after() -> None:
    slow = replace(A10, request_s=0.02, answer_s=0.003)
    [before, after] = [
        played(ClusterConfig(groups=[("", hardware, 1)]), [Arrival(5.0, 1000, 20)])[2][0] for hardware in (A10, slow)
    ]
    assert after["ttft_s"] - before["ttft_s"] == pytest.approx(0.023)
    assert after["e2e_s"] - before["e2e_s"] == pytest.approx(0.023)
    assert after["tpot_s"] == pytest.approx(before["tpot_s"])


def test_statuses_are_counted() -> None:
    idle, _, _ = played(cluster(3), [Arrival(30.0, 100, 1)])
    assert idle.statuses == pytest.approx(3 * 30, abs=6)
    busy, _, _ = played(cluster(1), [Arrival(0.0, 100, 500)])
    assert busy.statuses == pytest.approx(busy.virtual_s / Cadence().tokens_s, rel=0.1)


def test_the_destination_is_asked_between_two_steps_of_the_source() -> None:
    """It is told what the request is like then."""
    loop, hop_ps = VirtualLoop(), 1_000_000
    source, destination = (
        Member(
            loop, number, A10, Cadence(), Watcher(), lambda status: None,
            model="", max_moves=1,
        )
        for number in range(2)
    )  # fmt: skip
    departures = Departures(source, hop_ps, lambda name: None, Limits())
    arrivals = Arrivals(destination, Network(loop), hop_ps, lambda request, member: None, Limits())
    request = EngineRequest("r", 100, 100)
    source.add(request, 0)
    loop.run_until_complete(asyncio.sleep(0.5))
    departures.begin(request, arrivals, lambda move: None)
    end_ps = source.engine.next_end_after(loop.now_ps)
    assert end_ps is not None
    assert end_ps > loop.now_ps + 10 * hop_ps
    loop.run_until_complete(asyncio.sleep((end_ps - loop.now_ps) / 1e12 - 1e-9))
    assert not destination.coming
    loop.run_until_complete(asyncio.sleep(3e-6))
    assert list(destination.coming.values()) == [source.engine.num_tokens(request)]
    source.end()
    destination.end()
    loop.close()


def test_moves_keep_to_their_share_of_the_kv_cache(ended: list[_Run]) -> None:
    """As production's llumlets do by default: a quarter. What is refused stays where it is."""
    arrivals = clipped(made_up(4, 200, (LENGTHS["long"], LENGTHS["long"]), random.Random(0)), 8192)
    refusals = []
    for share in (0.25, 1.0):
        summary, _, _ = played(cluster(8, max_moves_share=share), arrivals)
        assert summary.num_finished == 200
        assert summary.moves > 20
        rescheduler = ended[-1]._control.first.rescheduler
        assert rescheduler is not None
        counted = sum((one.refusals for one in rescheduler.records.moves), Counter())
        refusals.append(counted["source_busy"] + counted["destination_busy"])
    assert refusals[0] > refusals[1]
    conserve(ended)


def test_requests_of_a_dead_instance_go_on_elsewhere(ended: list[_Run]) -> None:
    arrivals = load(5, 200)
    summary, _, records = played(cluster(4, happenings=[Happening(20.0, What.FAIL, 1)]), arrivals)
    assert summary.num_finished == 200
    restarted = [one for one in records if one["num_restarts"]]
    assert any("i0001" in one["instances"] for one in restarted)
    assert all(one["instances"][-1] != "i0001" for one in restarted)
    assert all(one["output_tokens"] == arrivals[int(one["id"][1:])].num_output for one in records)
    late = [one for one in records if one["arrived_s"] > 22]
    assert not any("i0001" in one["instances"] for one in late)
    conserve(ended)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.rest) for seed in range(1, 4))])
def test_deaths_in_the_middle_of_moves_leave_nothing_behind(seed: int, ended: list[_Run]) -> None:
    draw = random.Random(seed)
    quick = replace(A10, cold_start_s=3.0)
    happenings = []
    for number in range(6):
        at_s = draw.uniform(5, 15)
        while at_s < 60:
            happenings += [Happening(at_s, draw.choice([What.FAIL, What.STOP]), number)]
            happenings += [Happening(at_s + draw.uniform(1, 4), What.START, number)]
            at_s += draw.uniform(8, 30)
    lengths = LENGTHS["long"], LENGTHS["medium"]
    arrivals = clipped(made_up(6, 300, lengths, draw), 8192)
    rescheduling = ReschedulingConfig(pair_cooldown_s=0.5, request_cooldown_s=0.5, horizon_s=20.0)
    config = ClusterConfig(
        groups=[("", quick, 6)], happenings=happenings, control=ControlConfig(rescheduling=rescheduling), seed=seed
    )
    summary, _, records = played(config, arrivals)
    assert len(records) == len(arrivals)
    assert summary.num_finished > len(arrivals) * 0.8
    for one in records:
        if one["outcome"] == "finished":
            assert one["output_tokens"] == arrivals[int(one["id"][1:])].num_output
    assert summary.moves > 50
    conserve(ended)


def test_everything_is_lost_with_the_last_instance() -> None:
    summary, _, records = played(cluster(1, happenings=[Happening(5.0, What.FAIL, 0)]), load(2, 30))
    outcomes = Counter(one["outcome"] for one in records)
    assert set(outcomes) <= {"finished", "lost", "refused"}
    assert summary.num_lost + summary.num_refused == outcomes["lost"] + outcomes["refused"] > 0


def test_stopping_instance_is_empty_in_seconds_and_gone(ended: list[_Run]) -> None:
    """Its requests move away, however long they still are; its API server, no engine, passes their tokens on."""
    arrivals = [Arrival(number * 0.05, 64, 3000) for number in range(20)]
    summary, metrics, records = played(cluster(4, happenings=[Happening(10.0, What.STOP, 2)]), arrivals)
    assert summary.num_finished == 20
    assert not any(one["instances"][-1] == "i0002" for one in records)
    assert any(one["instances"][0] == "i0002" and one["num_moves"] for one in records)
    [member] = [one.member for one in ended[0]._llumlets.values() if one.member.id == "i0002"]
    assert not member.is_alive
    streamed = max(one["arrived_s"] + one["e2e_s"] for one in records if one["instances"][0] == "i0002")
    gone = next(sample.at_s for sample in metrics.samples if sample.num_instances == 3)
    assert gone < 15 < 60 < streamed
    conserve(ended)


def test_started_instance_gets_load_after_its_cold_start() -> None:
    happenings = [Happening(0.5, What.FAIL, 1), Happening(2.0, What.START, 1)]
    quick = replace(A10, cold_start_s=10.0)
    config = ClusterConfig(groups=[("", quick, 2)], happenings=happenings)
    _, _, records = played(config, load(3, 120))
    had = [one["arrived_s"] for one in records if one["instances"][0] == "i0001"]
    assert not [at_s for at_s in had if 2.0 < at_s < 11.5]
    assert [at_s for at_s in had if at_s > 12.0]


def test_models_have_their_own_instances() -> None:
    arrivals = assigned(load(6, 120), {"big": 1.0, "small": 2.0}, random.Random(1))
    arrivals.append(Arrival(arrivals[-1].at_s + 1, 10, 10, model="unknown"))
    config = ClusterConfig(groups=[("big", A10, 2), ("small", A10, 3)])
    summary, _, records = played(config, arrivals)
    assert summary.num_refused == 1
    homes = {"big": {"i0000", "i0001"}, "small": {"i0002", "i0003", "i0004"}}
    for one in records:
        assert set(one["instances"]) <= homes.get(one["model"], set())


def test_urgent_request_waits_less() -> None:
    first: Hardware = replace(A10, engine=replace(A10.engine, by_priority=True))
    arrivals = [replace(one, priority=-(number % 5 == 0)) for number, one in enumerate(load(12, 300))]
    config = ClusterConfig(groups=[("", first, 2)], control=ControlConfig(rescheduling=None))
    _, _, records = played(config, arrivals)
    means = {}
    for priority in (-1, 0):
        waits = [one["ttft_s"] for one in records if one["priority"] == priority]
        means[priority] = sum(waits) / len(waits)
    assert means[-1] < means[0] / 2


def test_other_requests_make_room_for_an_urgent_one() -> None:
    """By dispatch and by moves, where it has come to them. It stays."""
    arrivals = [Arrival(number / 2, 200, 2000) for number in range(60)]
    arrivals.insert(41, Arrival(20.1, 200, 600, priority=-1))
    by_memory = ControlConfig(rescheduling=ReschedulingConfig())
    by_usage = ControlConfig(
        policy="virtual-usage", rescheduling=ReschedulingConfig(neutral=LoadTarget("virtual_usage"))
    )
    without = replace(by_usage, priority_headroom=0.0)
    tpot_s, num_moves = [], []
    for control in (by_usage, by_memory, without):
        _, _, records = played(ClusterConfig(groups=[("", A10, 4)], control=control), arrivals)
        [urgent] = [one for one in records if one["priority"] < 0]
        tpot_s.append(urgent["tpot_s"])
        num_moves.append(urgent["num_moves"])
    assert tpot_s[0] < 0.95 * min(tpot_s[1:])
    assert num_moves[0] == 0


def packed(policy: str, tpot_slo: float, arrivals: Sequence[Arrival]) -> tuple[list[dict[str, Any]], ...]:
    """Requests of three instances, without moves and with those of a policy that packs."""
    both = (None, ReschedulingConfig(policies=(policy,), tpot_slo=tpot_slo))
    controls = [ControlConfig(policy="round-robin", rescheduling=one) for one in both]
    return tuple(played(cluster(3, control=control), arrivals)[2] for control in controls)


def test_few_decodes_are_packed_in_time(ended: list[_Run]) -> None:
    without, records = packed("binpacking_consolidation", 120.0, [Arrival(one / 10, 100, 1500) for one in range(12)])
    assert Counter(one["instances"][-1] for one in without).most_common() == [(f"i000{at}", 4) for at in range(3)]
    assert len({one["instances"][-1] for one in records}) == 1
    assert max(one["tpot_s"] for one in records) < 0.12
    assert 8 <= sum(one["num_moves"] for one in records) <= 12, "hardly one moves twice"
    conserve(ended)


def test_late_instance_is_relieved(ended: list[_Run]) -> None:
    arrivals = [Arrival(one / 10, 100 if one % 3 else 1800, 1200) for one in range(18)]
    without, records = packed("binpacking_mitigation", 65.0, arrivals)
    assert max(one["tpot_s"] for one in without) > 0.08
    assert max(one["tpot_s"] for one in records) < 0.065
    conserve(ended)


@pytest.mark.parametrize(("ageing_s", "least_s", "most_s"), [(20.0, 20.0, 60.0), (0.0, 200.0, math.inf)])
def test_overload_of_urgent_requests_starves_none(ageing_s: float, least_s: float, most_s: float) -> None:
    """One that may wait comes early; without ageing it is among the last that begin."""
    ageing: Hardware = replace(A10, engine=replace(A10.engine, by_priority=True, ageing_s=ageing_s, max_num_seqs=8))
    arrivals = [replace(one, priority=5 * (number == 60) - 1) for number, one in enumerate(load(6, 600))]
    config = ClusterConfig(groups=[("", ageing, 2)], control=ControlConfig(rescheduling=None))
    _, _, records = played(config, arrivals)
    [patient] = [one for one in records if one["priority"] == 4]
    assert least_s < patient["ttft_s"] < most_s


def test_shared_prefix_is_hit_on_its_instance() -> None:
    arrivals = [Arrival(number * 3.0, 2048, 4, prefix=(1, 2, 3, 10 + number)) for number in range(6)]
    _, _, records = played(cluster(1), arrivals)
    assert [one["cached_tokens"] for one in records] == [0, 1536, 1536, 1536, 1536, 1536]


def test_reporting_tokens_seldom_hardly_changes_results() -> None:
    """The cadence for large clusters: less is sent, and the results are nearly the same."""
    arrivals = load(6, 300)
    often, _, _ = played(cluster(6), arrivals)
    seldom, _, _ = played(cluster(6, cadence=Cadence(tokens_s=1.0)), arrivals)
    assert seldom.e2e_mean_s == pytest.approx(often.e2e_mean_s, rel=0.05)
    assert seldom.gap_p99_s == pytest.approx(often.gap_p99_s, rel=0.1)


def test_account_spreads_requests_while_statuses_are_late() -> None:
    arrivals = [Arrival(1 + number * 0.2, 500, 100) for number in range(12)]

    def most_at_one(late_s: float, *, account: bool) -> int:
        control = ControlConfig(rescheduling=None, account=account)
        _, _, records = played(cluster(4, control=control, cadence=Cadence(late_s=late_s)), arrivals)
        return max(Counter(one["instances"][0] for one in records).values())

    assert most_at_one(0.0, account=False) == most_at_one(0.0, account=True) == most_at_one(5.0, account=True) == 3
    assert most_at_one(5.0, account=False) == 12


def test_old_statuses_do_not_repeat_moves() -> None:
    arrivals = load(6, 300)
    now, _, _ = played(cluster(6), arrivals)
    late, _, records = played(cluster(6, cadence=Cadence(late_s=3.0)), arrivals)
    assert 20 < late.moves < 1.5 * now.moves
    assert late.moves_failed < late.moves / 10
    assert max(one["num_moves"] for one in records) <= 5


def test_no_move_begins_below_the_threshold() -> None:
    control = ControlConfig(rescheduling=ReschedulingConfig(balance_threshold=2.0))
    summary, _, _ = played(cluster(4, control=control), load(4, 60))
    assert summary.moves == 0


@pytest.mark.rest
def test_fifty_instances_are_faster_than_real_time() -> None:
    """By a factor; how large is in docs/operate/simulator.md."""
    arrivals = load(20, 800)
    began_s = time.process_time()
    summary, _, _ = played(cluster(50), arrivals)
    assert time.process_time() - began_s < summary.virtual_s / 2


def test_run_without_arrivals_is_empty() -> None:
    summary, _, records = played(cluster(2), [])
    assert records == []
    assert summary.num_requests == 0
