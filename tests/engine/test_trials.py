# SPDX-License-Identifier: Apache-2.0
"""What an engine's loop writes down of its steps, and the one request that is on trial there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llumlet.protocol.errors import Refused
from llumlet.protocol.recovery.trials import Trials
from tests.engine.loop import new_loop
from vllm_llumnix.engine.compatibility.identity import EngineFacts, EngineIdentity
from vllm_llumnix.engine.service.listing import Listing
from vllm_llumnix.steps import step_record
from vllm_llumnix.steps.step_record import LastSteps, StepRecord, name_of, read

INCARNATION = "c" * 32


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRecord]:
    monkeypatch.setattr(step_record, "DIRECTORY", tmp_path)
    record = StepRecord(INCARNATION, capacity=64, depth=3)
    yield record
    record.close()


def last_steps() -> LastSteps:
    steps = read(INCARNATION)
    assert steps is not None
    return steps


def names(*request_ids: str) -> frozenset[bytes]:
    return frozenset(map(name_of, request_ids))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_are_under_way(depth: int, model_dir: Path, record: StepRecord) -> None:
    """While a step is computed, everybody in it is written down, and in all that were given to the model behind it."""
    loop = new_loop(model_dir, depth, record=record)
    seen: list[tuple[set[str], LastSteps]] = []

    def look(output: Any) -> None:
        in_flight = [scheduled for _, scheduled, _ in loop.batch_queue or ()]
        named = {name for scheduled in (output, *in_flight) for name in scheduled.num_scheduled_tokens}
        seen.append((named, last_steps()))

    loop.worker.before = look
    loop.rig.add("a", max_tokens=8)
    for number in range(30):
        if number == 4:
            loop.rig.add("b", max_tokens=5)
        loop.turn()
    assert {frozenset(named) for named, _ in seen} >= {frozenset("a"), frozenset("ab")}
    for named, steps in seen:
        assert not steps.anybody
        assert steps.under_way == names(*named)
    assert last_steps().under_way == names()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_leaves_what_it_happened_in(
    depth: int, model_dir: Path, record: StepRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = new_loop(model_dir, depth, record=record)
    loop.rig.add("a")
    loop.turns(4)

    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(loop.worker, "before", fails)
        with pytest.raises(ZeroDivisionError):
            loop.turns(3)
    assert last_steps().under_way == names("a")
    monkeypatch.setattr(loop.scheduler, "schedule", fails)
    with pytest.raises(ZeroDivisionError):
        loop.turns(3)
    assert last_steps().had("whoever"), "it was choosing"


def test_an_engine_that_leaves_says_so(model_dir: Path, record: StepRecord) -> None:
    loop = new_loop(model_dir, record=record)
    loop.rig.add("a")
    loop.turns(4)
    assert not last_steps().leaving
    loop.kvconn.draining = True
    loop.turn()
    assert last_steps().leaving


def test_trial_lasts_until_it_is_survived(model_dir: Path, record: StepRecord) -> None:
    loop = new_loop(model_dir, record=record)
    trials: Trials = loop.kvconn.trials
    tried, other = loop.rig.add("tried"), loop.rig.request("other")
    trials.open(tried, 3)
    with pytest.raises(Refused, match="on trial"):
        trials.open(other, 3)
    trials.close(other)
    assert trials.has(tried)
    while tried.num_output_tokens < 3:
        assert last_steps().on_trial == name_of("tried")
        loop.turn()
    assert not trials.has(tried)
    loop.turn()
    assert last_steps().on_trial == bytes(8)
    trials.open(other, 3)
    trials.close(other)
    assert last_steps().on_trial == bytes(8)


def test_it_stays_where_it_is_tried(model_dir: Path, record: StepRecord) -> None:
    loop = new_loop(model_dir, record=record)
    tried = loop.rig.add("tried")
    identity = EngineIdentity("a", INCARNATION, EngineFacts({}, {}), None, None, "cpu", True, False)
    context: Any = SimpleNamespace(identity=identity, engine=loop, loop=loop.kvconn)
    listing = Listing(context, SimpleNamespace())
    loop.turns(6)
    assert listing.why_not(tried) is None
    loop.kvconn.trials.open(tried, 3)
    assert "on trial" in str(listing.why_not(tried))
    loop.turns(6)
    assert listing.why_not(tried) is None


def test_a_trial_ends_with_its_request(model_dir: Path, record: StepRecord) -> None:
    """An engine that has nothing else to do makes no more steps."""
    loop = new_loop(model_dir, record=record)
    trials: Trials = loop.kvconn.trials
    tried = loop.rig.add("tried", max_tokens=2)
    trials.open(tried, 1000)
    while not tried.is_finished():
        loop.turn()
    trials.open(loop.rig.request("other"), 3)
    assert last_steps().on_trial == name_of("other")
