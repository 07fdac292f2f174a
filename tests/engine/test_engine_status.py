# SPDX-License-Identifier: Apache-2.0
"""A status is made whatever the loop is doing; what changes without an event is noticed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.v1.core.sched.interface import PauseState

from llumlet.contract.coming_steps import NUM_STEPS
from llumlet.contract.types import Health, InstanceReport
from llumlet.protocol import wire
from llumlet.protocol.errors import Reason
from llumlet.protocol.ids import MigrationId
from llumlet.protocol.move.limits import Limits, Slots
from llumsched.cms.validation import MAX_LIST, MAX_REPORT_BYTES
from tests.engine.rig import BLOCK_SIZE, Rig
from tests.engine.test_step_times import batch
from vllm_llumnix.engine.load.load_counters import MAX_NAMES
from vllm_llumnix.engine.load.step_times import StepTimes
from vllm_llumnix.engine.service.metadata import node_id, unit_id
from vllm_llumnix.engine.service.status import StatusSource


@pytest.fixture
def rig(model_dir: Path) -> Rig:
    return Rig(model_dir)


@pytest.fixture
def source(rig: Rig) -> StatusSource:
    return source_of(rig)


def source_of(rig: Rig) -> StatusSource:
    """Of an engine of which all but the scheduler is made up."""
    capacity = rig.port.capacity_tokens
    progress = SimpleNamespace(health=wire.Health.OK, stalled_seconds=0.0, busy_with="")
    loop = SimpleNamespace(
        port=rig.port, progress=progress, steps=7, takes_requests=True, step_times=StepTimes(lambda: 0.0)
    )
    identity = SimpleNamespace(instance="a", incarnation="1", kv_unsupported=None)
    context: Any = SimpleNamespace(identity=identity, loop=loop)
    departures: Any = SimpleNamespace(moves={}, slots=Slots(Limits(max_requests=4), capacity, Reason.SOURCE_BUSY))
    arrivals: Any = SimpleNamespace(
        pending=list,
        draining_blocks=lambda: 0,
        slots=Slots(Limits(max_requests=3, max_tokens=100), capacity, Reason.DESTINATION_BUSY),
    )
    adoptions: Any = SimpleNamespace(num_adopted=2, num_rescued=1)
    return StatusSource(context, departures, arrivals, adoptions)


def test_the_longest_names_fit_a_report(rig: Rig, source: StatusSource) -> None:
    for number in range(MAX_NAMES + 5):
        # Four bytes each.
        rig.port.load.received(rig.request(f"{number:04d}" + "\U0001f999" * 200))
    status = source.now()
    assert len(status.waiting_requests) == len(status.recent_waiting_requests) == MAX_NAMES <= MAX_LIST
    assert MAX_NAMES * 2 * 4 * 100 < InstanceReport(status=status).ByteSize() < MAX_REPORT_BYTES


def test_without_limits_there_is_room(rig: Rig, source: StatusSource) -> None:
    source._departures.slots = Slots(Limits(), rig.port.capacity_tokens, Reason.SOURCE_BUSY)
    status = source.now()
    assert status.num_available_migrate_out_slots == 2**31 - 1
    assert status.num_available_migrate_out_tokens == rig.port.capacity_tokens


def test_an_idle_engine(rig: Rig, source: StatusSource) -> None:
    status = source.now()
    assert (status.instance_id, status.incarnation, status.step_id, status.profiling_id) == ("a", "1", 7, -1)
    assert status.schedulable
    assert status.health == Health.OK
    assert abs(status.timestamp_ms - 1e3 * time.time()) < 5e3
    assert status.num_total_gpu_tokens == rig.port.capacity_tokens == status.num_total_blocks * BLOCK_SIZE
    assert status.num_used_gpu_tokens == 0
    assert (status.num_available_migrate_in_slots, status.num_available_migrate_in_tokens) == (3, 100)
    assert (status.num_available_migrate_out_slots, status.num_available_migrate_out_tokens) == (
        4,
        rig.port.capacity_tokens,
    )
    assert status.available_kv_cache_usage_ratio_migrate_in == pytest.approx(100 / rig.port.capacity_tokens)
    assert status.available_kv_cache_usage_ratio_migrate_out == 1.0
    assert (status.num_adopted, status.num_rescued, status.num_preemptions) == (2, 1, 0)


def test_a_loaded_engine(rig: Rig, source: StatusSource) -> None:
    before = source.now()
    for index in range(5):
        rig.add(f"r{index}", num_prompt=70, first=5 + index)
    rig.turns(3)
    status = source.now()
    assert status.update_id > before.update_id
    assert (status.num_running_requests, status.num_waiting_requests) == (4, 1)
    assert list(status.waiting_requests) == ["r4"]
    assert status.num_uncomputed_tokens_all_waiting_prefills == 70
    assert status.num_unallocated_tokens_all_waiting_requests == 70
    assert status.num_uncomputed_pairs == 70 * 71 // 2
    assert status.scheduler_running_to_decode_tokens_num == 4 * 70 + sum(
        request.num_output_tokens for request in rig.scheduler.running
    )
    assert status.num_used_gpu_tokens == 4 * 3 * BLOCK_SIZE
    assert status.num_free_blocks == rig.free_blocks


def test_steps_are_part_of_it(rig: Rig, source: StatusSource) -> None:
    times = source._loop.step_times
    for seconds in (0.04, None, 0.03):
        times.took(batch(a=(0, 16), b=(50, 1)), seconds, 1, 51)
    status = source.now()
    assert [sample.number for sample in status.steps] == [1], "the other came within a tenth of a second"
    assert (status.profiling_id, status.step_duration, status.num_scheduled_prefill_tokens) == (1, 40.0, 16)
    assert (status.num_decode_steps, status.decode_steps_requests, status.decode_steps_kv) == (2, 2, 102)
    assert status.decode_steps_s == pytest.approx(0.07)


def test_shortages_and_what_is_computed_again_are_part_of_it(rig: Rig, source: StatusSource) -> None:
    rig.add("a", num_prompt=70)
    rig.turns(3)
    rig.port.tokens.recomputed = 5
    shortage = rig.port.shortage
    shortage._shortages.num_averted, shortage.num_blocks = 2, 1
    status = source.now()
    assert (status.num_computed_tokens, status.num_recomputed_tokens) == (72, 5)
    assert (status.num_averted_preemptions, status.num_lacking_blocks) == (2, 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_status_tells_the_coming_steps(model_dir: Path, asynchronous: bool) -> None:
    """Blocks that are taken and given back, and ends, step by step, as vLLM's scheduler then makes them."""
    rig = Rig(model_dir, asynchronous=asynchronous)
    status_source = source_of(rig)
    for number, (num_prompt, max_tokens) in enumerate([(70, 30), (17, 9), (33, 500)]):
        rig.add(f"r{number}", num_prompt=num_prompt, max_tokens=max_tokens, first=5 + number)
    rig.turns(4)
    told = status_source.now()
    assert len(told.coming_blocks) == NUM_STEPS
    assert sum(told.coming_ends) == 2
    free, blocks, ends, running = rig.free_blocks, 0, 0, 3
    for step in range(40):
        rig.turn()
        blocks += told.coming_blocks[step]
        ends += told.coming_ends[step] if step < len(told.coming_ends) else 0
        assert rig.free_blocks == free - blocks, step
        assert len(rig.scheduler.running) == running - ends, step


def test_of_prefills_and_of_drafts_nothing_is_foretold(rig: Rig, source: StatusSource) -> None:
    assert not source.now().coming_blocks
    rig.add("a", num_prompt=70)
    assert not source.now().coming_blocks, "it waits"
    rig.turns(2)
    assert source.now().coming_blocks
    rig.scheduler.num_spec_tokens = 2
    assert not source.now().coming_blocks


def test_moves_are_part_of_it(rig: Rig, source: StatusSource) -> None:
    request = rig.add("a")
    source._departures.moves["a"] = SimpleNamespace(request=request, leaving=SimpleNamespace(num_pinned_blocks=2))
    source._departures.slots.take(MigrationId("m"), request.num_tokens)
    coming = SimpleNamespace(request=rig.request("b", num_prompt=40), blocks=SimpleNamespace(count=3))
    settling = SimpleNamespace(request=None, blocks=SimpleNamespace(count=0))
    source._arrivals.pending = lambda: [coming, settling]
    status = source.now()
    assert (status.num_migrate_out_reqs, status.num_migrate_out_tokens, status.num_pinned_blocks) == (1, 70, 2)
    assert status.num_available_migrate_out_slots == 3
    assert (status.num_migrate_in_reqs, status.num_migrate_in_tokens, status.num_reserved_blocks) == (2, 40, 3)
    assert status.kv_cache_usage_ratio_migrate_in == pytest.approx(40 / rig.port.capacity_tokens)


@pytest.mark.parametrize("why", ["hung", "paused", "leaving"])
def test_closed_engine_reports_itself_unschedulable(rig: Rig, source: StatusSource, why: str) -> None:
    if why == "hung":
        source._loop.progress.health = wire.Health.HUNG
    elif why == "paused":
        rig.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    else:
        source._loop.takes_requests = False
    assert not source.now().schedulable
    assert (source.now().health == Health.HUNG) is (why == "hung")


@pytest.mark.asyncio
async def test_status_tells_changes_without_events(rig: Rig, source: StatusSource) -> None:
    told: asyncio.Queue[int] = asyncio.Queue()
    rig.port.load.on_change = lambda: told.put_nowait(source.now().health)
    with mock.patch("vllm_llumnix.engine.service.status.WATCH_SECONDS", 0.001):
        source.open()
        try:
            for health, shown in (
                (wire.Health.SUSPECT, Health.SUSPECT),
                (wire.Health.HUNG, Health.HUNG),
                (wire.Health.OK, Health.OK),
            ):
                source._loop.progress.health = health
                assert await asyncio.wait_for(told.get(), 5) == shown
            source._identity.kv_unsupported = "its mover is lost"
            assert await asyncio.wait_for(told.get(), 5) == Health.OK
        finally:
            source.close()
    assert told.empty()


def test_nodes_and_units() -> None:
    assert node_id() == node_id() != ""
    assert unit_id("a") == unit_id("a") != unit_id("b")
    missing = Path("/nonexistent")
    with (
        mock.patch("vllm_llumnix.engine.service.metadata._BOOT_ID", missing),
        mock.patch("vllm_llumnix.engine.service.metadata._MACHINE_ID", missing),
        mock.patch("socket.gethostname", return_value="host"),
    ):
        assert node_id() == "host"
