# SPDX-License-Identifier: Apache-2.0
"""What the llumlet lists, and what a rule takes of it: the rescheduler chooses from the list by the same rules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llumlet.contract.types import MigrateRequest, MigrationReqPolicy, MigrationType
from llumlet.protocol.move.selection import Order, Unit
from llumsched.rescheduling.executing.orders import choose
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from tests.engine.loop import new_loop
from vllm_llumnix.engine.compatibility.identity import EngineFacts, EngineIdentity
from vllm_llumnix.engine.service.listing import Listing


@pytest.mark.parametrize(("order", "first"), [(Order.FCR, "early"), (Order.LCR, "late")])
def test_moved_request_is_listed_by_its_arrival(model_dir: Path, order: Order, first: str) -> None:
    loop = new_loop(model_dir)
    for name in ("early", "late"):
        loop.rig.add(name)
    loop.turns(4)
    loop.rig.scheduler.running.reverse()  # as when the later one has come from another engine
    identity = EngineIdentity("a", "life", EngineFacts({}, {}), None, None, "cpu", False, False)
    context: Any = SimpleNamespace(identity=identity, engine=loop, loop=loop.kvconn)
    departures: Any = SimpleNamespace(moves={})
    listing = Listing(context, departures)
    rule = MigrateRequest(
        migration_type=MigrationType.NUM_REQ, migration_req_policy=MigrationReqPolicy.Value(order), num_reqs=1
    )
    assert listing.select(rule) == [first]
    move = Move("policy", Purpose.BALANCE, "a", "b", Selection(Unit.NUM_REQ, order, 1), 1.0)
    assert [one.request_id for one in choose(listing.requests([]).requests, move, 1000, ())] == [first]


def test_urgent_requests_are_listed_as_such_and_taken_last(model_dir: Path) -> None:
    """By the llumlet and by the rescheduler alike, whatever number vLLM takes for a priority."""
    loop = new_loop(model_dir)
    for name, priority in (("urgent", -(1 << 40)), ("other", 1 << 40)):
        request = loop.rig.request(name)
        request.priority = priority
        loop.rig.scheduler.add_request(request)
    loop.turns(4)
    identity = EngineIdentity("a", "life", EngineFacts({}, {}), None, None, "cpu", False, False)
    context: Any = SimpleNamespace(identity=identity, engine=loop, loop=loop.kvconn)
    departures: Any = SimpleNamespace(moves={})
    listing = Listing(context, departures)
    rule = MigrateRequest(migration_type=MigrationType.NUM_REQ, migration_req_policy=MigrationReqPolicy.FCR, num_reqs=1)
    assert listing.select(rule) == ["other"]
    listed = listing.requests([]).requests
    assert {one.request_id: one.priority for one in listed} == {"urgent": -(1 << 40), "other": 1 << 40}
    move = Move("policy", Purpose.BALANCE, "a", "b", Selection(Unit.NUM_REQ, Order.FCR, 1), 1.0)
    assert [one.request_id for one in choose(listed, move, 1000, ())] == ["other"]


def test_the_lowest_priority_is_taken_first_and_of_equals_the_longest(model_dir: Path) -> None:
    """By the llumlet and by the rescheduler alike; who is urgent is not among them."""
    loop = new_loop(model_dir)
    for name, priority, num_prompt in (("urgent", -5, 90), ("short", 0, 40), ("long", 0, 80), ("batch", 10, 20)):
        request = loop.rig.request(name, num_prompt)
        request.priority = priority
        loop.rig.scheduler.add_request(request)
    loop.turns(6)
    identity = EngineIdentity("a", "life", EngineFacts({}, {}), None, None, "cpu", False, False)
    context: Any = SimpleNamespace(identity=identity, engine=loop, loop=loop.kvconn)
    departures: Any = SimpleNamespace(moves={})
    listing = Listing(context, departures)
    rule = MigrateRequest(migration_type=MigrationType.NUM_REQ, migration_req_policy=MigrationReqPolicy.LP, num_reqs=4)
    assert listing.select(rule) == ["batch", "long", "short"]
    move = Move("policy", Purpose.BALANCE, "a", "b", Selection(Unit.NUM_REQ, Order.LP, 4), 1.0)
    listed = listing.requests([]).requests
    assert [one.request_id for one in choose(listed, move, 1000, ())] == ["batch", "long", "short"]
