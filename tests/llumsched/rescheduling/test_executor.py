# SPDX-License-Identifier: Apache-2.0
"""Moves that are really asked for: simulated llumlets over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from llumlet.contract.types import Reason
from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.view import View
from llumsched.rescheduling.executing.executor import Executor
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.executing.records import MoveRecord, Outcome, Records, RescheduleCounters
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsim.live import SimulatedCluster, SimulatedRequest, engine_model
from tests.llumlet.fake_agent import until

pytestmark = pytest.mark.asyncio

MODEL = engine_model(num_blocks=2048)
"""Requests outlive the test."""


@dataclass
class World:
    cluster: SimulatedCluster
    config: ReschedulingConfig = field(default_factory=lambda: ReschedulingConfig(grpc_timeout_s=2.0))

    def __post_init__(self) -> None:
        self.view = View()
        self.refresh()
        self.history, self.records, self.registry = History(self.config), Records(), CollectorRegistry()
        self.executor = Executor(self.view, self.config, self.history, self.records, RescheduleCounters(self.registry))

    def refresh(self) -> None:
        for instance in self.cluster.instances.values():
            self.view.put_metadata(instance.metadata)
            self.view.put_status(instance.status)

    async def run(self, *moves: Move, seconds: float = 10.0) -> list[MoveRecord]:
        before = len(self.records.moves)
        self.executor.start(moves)
        await until(lambda: self.executor.num_open == 0, seconds)
        return list(self.records.moves)[before:]

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"scheduler_rescheduling_{name}", labels) or 0.0

    @property
    def now_s(self) -> float:
        return self.executor.clock()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    async with SimulatedCluster(3, model=MODEL) as cluster:
        world = World(cluster)
        yield world
        await world.executor.close()


def move(
    source: str = "sim-0", destination: str = "sim-1", rule: str = "NUM_REQ", value: float = 2, **more: object
) -> Move:
    selection = Selection(Unit(rule), Order.SR, value)
    return replace(Move("neutral_load", Purpose.BALANCE, source, destination, selection, 100.0), **more)


async def decoding(world: World, *lengths: int, external_id: str = "") -> list[SimulatedRequest]:
    """Requests of these lengths on sim-0, all past their prefill."""
    requests = [world.cluster[0].submit(length, 5000, external_id=external_id) for length in lengths]
    await until(lambda: all(request.output for request in requests))
    world.refresh()
    return requests


async def test_requests_move_and_are_remembered(world: World) -> None:
    short, longer, longest = await decoding(world, 30, 60, 900)
    heard: list[str] = []
    world.records.observe_moves(lambda record: heard.append(str(record.outcome)))
    [record] = await world.run(move())
    assert record.outcome is Outcome.MOVED, record
    assert (record.num_selected, record.num_moved) == (2, 2)
    assert [one.owner for one in (short, longer, longest)] == ["sim-1", "sim-1", "sim-0"]
    assert record.moved_tokens >= 90
    assert heard[0] == "open"
    assert heard[-1] == "moved"
    cooling = world.history.cooling_requests("sim-1", world.now_s)
    assert cooling == {short.request_id, longer.request_id}
    labels = {"rescheduling_req_select_rule": "NUM_REQ", "rescheduling_req_select_order": "SR"}
    assert world.count("total", **labels) == 1
    assert world.count("failed_total") == 0
    assert world.count("requests_total", policy="neutral_load") == 2
    assert world.count("open_moves") == 0


async def test_requests_that_came_lately_stay(world: World) -> None:
    first, second = await decoding(world, 30, 60)
    await world.run(move(value=1))
    assert first.owner == "sim-1"
    mine = world.cluster[1].submit(200, 500)
    await until(lambda: mine.output)
    world.refresh()
    [record] = await world.run(move("sim-1", "sim-2", value=5))
    assert record.num_moved == 1
    assert (first.owner, mine.owner, second.owner) == ("sim-1", "sim-2", "sim-0")


async def test_choices_of_one_request_move_on_their_own(world: World) -> None:
    """vLLM gives all of them the client's id."""
    parts = await decoding(world, 30, 60, external_id="client")
    [record] = await world.run(move())
    assert record.num_moved == 2
    assert record.moved_tokens >= 90
    assert record.requests == {"client": "moved", parts[1].request_id: "moved"}
    assert world.history.cooling_requests("sim-1", world.now_s) == {part.request_id for part in parts}


async def test_no_connection_is_kept_to_a_source_that_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llumsched.rescheduling.executing.executor._SWEEP_S", 0.0)
    await decoding(world, 30, 60)
    await world.run(move())
    world.view.remove("sim-0")
    await world.run(move("sim-1", "sim-2", value=1))
    assert list(world.executor._sources) == [world.view["sim-1"].llumlet]


async def test_limit_leaves_out_what_would_make_it_worse(world: World) -> None:
    await decoding(world, 900)
    [record] = await world.run(move(rule="TOKEN", value=300, limit_tokens=600.0))
    assert record.outcome is Outcome.NOTHING
    assert "migrate" not in world.cluster[0].agent.calls
    [record] = await world.run(move(rule="TOKEN", value=300, limit_tokens=1500.0))
    assert record.outcome is Outcome.MOVED


async def test_calls_at_the_same_time_name_different_requests(world: World) -> None:
    requests = await decoding(world, 30, 40, 50, 60)
    world.cluster[0].agent.delays["migrate"] = 0.1
    pair = {"rule": "TOKEN", "value": 400, "limit_tokens": 1000.0, "expected_requests": 2.0}
    records = await world.run(move(destination="sim-1", **pair), move(destination="sim-2", **pair))
    assert [record.num_moved for record in records] == [2, 2]
    assert [dict(record.refusals) for record in records] == [{}, {}]
    assert sorted(request.owner for request in requests) == ["sim-1", "sim-1", "sim-2", "sim-2"]


async def test_source_whose_requests_cannot_move_is_asked_ever_more_seldom(world: World) -> None:
    await decoding(world, 30)
    world.cluster[1].agent.refusals["reserve"] = Reason.NOT_PORTABLE
    now_s = 1000.0
    world.executor.clock = lambda: now_s
    for rest_s in (0.5, 1.0, 2.0):
        [record] = await world.run(move(value=1))
        assert record.outcome is Outcome.STAYED
        assert world.history.source_avoided("sim-0", now_s + rest_s - 0.01)
        assert not world.history.source_avoided("sim-0", now_s + rest_s + 0.01)
    assert world.history.obstacle("sim-2", "sim-1", world.now_s) == "", "the destination is not to blame"


async def test_a_request_too_long_for_a_destination_is_offered_to_others(world: World) -> None:
    """And the destination is offered others, at once."""
    misfit, other = await decoding(world, 30, 60)
    agent = world.cluster[1].agent
    agent.refusals["reserve"] = Reason.REQUEST_TOO_LONG
    [record] = await world.run(move(value=1))
    assert record.refusals == {"request_too_long": 1}
    assert world.history.obstacle("sim-2", "sim-1", world.now_s) == "", "the destination is not to blame"
    assert not world.history.source_avoided("sim-0", world.now_s), "nor is the source"
    agent.refusals.clear()
    await world.run(move(value=1))
    assert (misfit.owner, other.owner) == ("sim-0", "sim-1")
    [record] = await world.run(move(value=1))
    assert record.outcome is Outcome.NOTHING
    [record] = await world.run(move(destination="sim-2", value=1))
    assert misfit.owner == "sim-2"


async def test_a_misfit_takes_nothing_from_a_move_that_succeeds(world: World) -> None:
    await decoding(world, 30, 60)
    world.cluster[1].agent.refusals["reserve"] = Reason.REQUEST_TOO_LONG
    await world.run(move(value=1))
    world.history.destination_failed("sim-1", world.now_s)
    world.cluster[1].agent.refusals.clear()
    [record] = await world.run(move())
    assert record.num_moved == 1
    assert world.history.obstacle("sim-2", "sim-1", world.now_s) == ""


async def test_misfits_are_forgotten_with_instance_and_time(world: World) -> None:
    history, pair = world.history, move()
    history.does_not_fit("sim-1", "r", 0.0)
    assert history.left_out(pair, 599.0) == {"r"}
    assert history.left_out(pair, 601.0) == set()
    history.forget_expired(601.0)
    assert not history._misfits
    history.does_not_fit("sim-1", "r", 0.0)
    history.instance_left("sim-1")
    assert history.left_out(pair, 1.0) == set()


async def test_destination_that_refuses_is_avoided(world: World) -> None:
    await decoding(world, 30)
    world.cluster[1].agent.refusals["reserve"] = Reason.DESTINATION_FULL
    [record] = await world.run(move(value=1))
    assert record.outcome is Outcome.STAYED
    assert record.refusals == {"destination_full": 1}
    assert world.history.obstacle("sim-2", "sim-1", world.now_s) == "destination_avoided"
    assert world.history.obstacle("sim-0", "sim-2", world.now_s) == ""
    assert world.count("failed_total") == 1
    assert world.count("timeouts_total") == 0
    [record] = await world.run(move(destination="sim-2", value=1))
    assert record.outcome is Outcome.MOVED


async def test_destination_that_is_gone_is_avoided_by_who_could_not_reach_it(world: World) -> None:
    await decoding(world, 30)
    await world.cluster[1].kill()
    [record] = await world.run(move(value=1))
    assert record.outcome is Outcome.STAYED
    assert record.refusals == {"peer_unreachable": 1}
    assert world.history.obstacle("sim-0", "sim-1", world.now_s) == "destination_avoided"


async def test_silent_source_is_a_timeout_and_holds_up_nobody(world: World) -> None:
    await decoding(world, 30, 60)
    world.cluster[2].agent.delays["migrate"] = 60.0
    world.executor.start([move("sim-2", "sim-1", value=1), move(destination="sim-1", value=1)])
    silent, record = world.records.moves
    await until(lambda: record.outcome is not Outcome.OPEN)
    assert record.outcome is Outcome.MOVED
    assert silent.outcome is Outcome.OPEN
    await until(lambda: world.executor.num_open == 0)
    assert silent.outcome is Outcome.TIMEOUT
    assert world.count("timeouts_total") == 1
    assert world.count("failed_total") == 1
    assert world.history.source_avoided("sim-2", world.now_s)
    assert not world.history.source_avoided("sim-0", world.now_s)


async def test_source_that_is_gone_or_refuses_fails_and_is_avoided(world: World) -> None:
    await decoding(world, 30)
    world.cluster[1].agent.refusals["migrate"] = Reason.SHUTTING_DOWN
    await world.cluster[2].kill()
    refused, gone = await world.run(move("sim-1", "sim-0"), move("sim-2", "sim-0"))
    assert (refused.outcome, gone.outcome) == (Outcome.FAILED, Outcome.FAILED)
    assert "shutting_down" in refused.error
    assert world.count("failed_total") == 2
    assert world.count("timeouts_total") == 0
    assert world.history.source_avoided("sim-1", world.now_s)
    assert world.history.source_avoided("sim-2", world.now_s)
    assert world.history.obstacle("sim-1", "sim-0", world.now_s) == "pair_cooling", "the destination did nothing"


async def test_calls_to_one_source_are_limited(world: World) -> None:
    world.executor.config = replace(world.config, connection_pool_size=2)
    agent = world.cluster[0].agent
    agent.delays["migrate"] = 5.0
    await decoding(world, 30)
    world.executor.start([move(value=1) for _ in range(5)])
    await until(lambda: agent.calls.count("migrate") == 2)
    await asyncio.sleep(0.1)
    assert agent.calls.count("migrate") == 2
    agent.delays["migrate"] = 0.0
    await until(lambda: world.executor.num_open == 0)
    assert agent.calls.count("migrate") == 5


async def test_close_leaves_calls_and_connections(world: World) -> None:
    world.cluster[0].agent.delays["migrate"] = 5.0
    world.executor.start([move(value=1)])
    await until(lambda: world.cluster[0].agent.calls)
    await world.executor.close()
    [record] = world.records.moves
    assert record.outcome is Outcome.FAILED
    assert record.error == "the rescheduler ended"
    assert record.to_dict()["outcome"] == "failed"


async def test_instances_that_left_are_not_asked(world: World) -> None:
    world.view.remove("sim-1")
    assert await world.run(move()) == []
