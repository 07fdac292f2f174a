# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks of a mixture of experts: no forward pass ends unless every rank takes part.

vLLM's own engine class over the rig's scheduler, without a model: what it would do alone is counted, not done.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from llumlet.protocol.errors import Reason, Refused
from tests.engine.loop import new_engine_loop
from tests.engine.rig import Rig
from vllm_llumnix.engine.recovery.adoptions import Adoptions


class Rank(DPEngineCoreProc):
    """One engine of a group that has a coordinator, asleep in its seventh wave."""

    def __init__(self, rig: Rig, index: int = 0) -> None:
        self.scheduler = rig.scheduler
        self.port = rig.port
        self.engine_index = index
        self.has_coordinator = True
        self.engines_running = self.ignore_start_dp_wave = False
        self.current_wave = 7
        self.batch_queue = deque()
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.dummies = 0
        self.kvconn = new_engine_loop(self, rig)
        context: Any = SimpleNamespace(engine=self, loop=self.kvconn, relay=None)
        self.adoptions = Adoptions(context, *[SimpleNamespace()] * 3)

    def is_running(self) -> bool:
        return True

    def execute_dummy_batch(self) -> None:
        self.dummies += 1

    def told_coordinator(self) -> list[int]:
        """The waves that this rank has said it starts."""
        told = [self.output_queue.get_nowait() for _ in range(self.output_queue.qsize())] + [*self.kvconn.step()]
        assert all(client == -1 for client, _ in told)
        return [outputs.start_wave for _, outputs in told]


@pytest.fixture
def rank(model_dir: Path) -> Rank:
    return Rank(Rig(model_dir))


@pytest.fixture
def rig(model_dir: Path) -> Rig:
    return Rig(model_dir)


@pytest.mark.asyncio
async def test_a_sleeping_rank_is_not_warmed_up(rank: Rank) -> None:
    task = asyncio.create_task(rank.kvconn.warm_up())
    while not task.done():
        await asyncio.sleep(0)
        rank.kvconn.step()
    assert rank.dummies == 0


@pytest.mark.parametrize("computed", [70, 0])
def test_an_admission_wakes_the_group(rig: Rig, computed: int) -> None:
    rank = Rank(rig)
    request = rig.request("a")
    rig.port.reservations.make(request, use_prefix_cache=False)
    rank.kvconn.admit(request, min(computed, request.num_tokens - 1))
    assert rank.engines_running
    assert rank.told_coordinator() == [7]
    # The coordinator tells the others. A second request finds the wave begun.
    other = Rank(rig, index=1)
    other._handle_client_request(EngineCoreRequestType.START_DP_WAVE, (7, 0))
    assert other.engines_running
    rank.kvconn.wake_group()
    assert rank.told_coordinator() == []


def test_as_vllm_does_for_its_own_requests(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Rank(rig), Rank(rig)
    monkeypatch.setattr(EngineCoreProc, "add_request", lambda *_: None)
    theirs.add_request(rig.request("a"), request_wave=6)
    ours.kvconn.wake_group()
    assert ours.told_coordinator() == theirs.told_coordinator() == [7]
    assert ours.engines_running is theirs.engines_running is True


def test_an_adoption_wakes_the_group(rig: Rig) -> None:
    rank = Rank(rig)
    rank.adoptions.add_on_loop(rig.request("a"), None)
    assert rank.engines_running
    assert rank.told_coordinator() == [7]


def test_an_adopted_stream_does_not_queue_behind_new_requests(rig: Rig) -> None:
    """Its client has waited for the loss to be noticed already."""
    rank = Rank(rig)
    streams = [rig.request(name) for name in "ab"]
    new = rig.add("new")
    for request in reversed(streams):
        request.append_output_token_ids([7])
        rank.adoptions.add_on_loop(request, None)
    assert list(rig.scheduler.waiting) == [*streams, new]


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_group_sleeps_on(rig: Rig, state: PauseState) -> None:
    """What would run at once is refused; what only queues waits for the group to go on."""
    rank = Rank(rig)
    request = rig.request("a")
    rig.port.reservations.make(request, use_prefix_cache=False)
    rig.scheduler.set_pause_state(state)
    with pytest.raises(Refused) as refused:
        rank.kvconn.admit(request, request.num_tokens - 1)
    assert refused.value.reason is Reason.DESTINATION_PAUSED
    rig.port.reservations.cancel(request)
    rank.adoptions.add_on_loop(rig.request("b"), None)
    assert not rank.engines_running
    assert rank.told_coordinator() == []


def test_an_engine_of_its_own_tells_nobody(rig: Rig) -> None:
    engine = SimpleNamespace(engines_running=False, has_coordinator=True, output_queue=queue.Queue())
    new_engine_loop(engine, rig).wake_group()
    assert not engine.engines_running
    assert engine.output_queue.empty()
