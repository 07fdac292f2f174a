# SPDX-License-Identifier: Apache-2.0
"""Blocks that were given back while a step in flight still writes them: not before that step is over do movers write.

vLLM's own asynchronous step function and scheduler, with a memory that shows who wrote last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Reason, Refused
from tests.engine.loop import Loop, new_loop
from tests.engine.rig import BLOCK_SIZE

pytestmark = pytest.mark.asyncio

NUM_BLOCKS = 12
RUNNERS = [False, True]


def everything(loop: Loop) -> Request:
    """A request that takes every free block, and one position less."""
    return loop.rig.request("guest", num_prompt=loop.rig.free_blocks * BLOCK_SIZE - 1, first=50)


def reserve(loop: Loop, request: Request) -> list[int]:
    return loop.rig.port.reservations.make(request, use_prefix_cache=False).block_ids


def grow(loop: Loop, request: Request) -> list[int]:
    held = loop.rig.port.reservations.grow(request, request.num_tokens + loop.rig.free_blocks * BLOCK_SIZE)
    assert not loop.rig.free_blocks
    return held.block_ids


def aborted(loop: Loop) -> None:
    loop.rig.add("a", num_prompt=100)
    loop.turns(4)
    loop.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)


def finished(loop: Loop) -> None:
    """By a stop token, which nobody foresees: the next step of the request is on its way."""
    request = loop.rig.add("a", num_prompt=100)
    loop.turns(4)
    request.sampling_params.stop_token_ids.append(loop.rig.runner.token + 1)
    loop.turn()
    assert request.is_finished()


def preempted(loop: Loop) -> None:
    """In the middle of its prefill, for want of one block for a decode. It is next in the queue until it is aborted.

    With two batches, its step would have ended in the same turn; and the block of a decode is the next to be taken.
    """
    loop.rig.port.shortage._holds = False  # else it waits for a reservation that might be given back
    decode = loop.rig.add("decode", num_prompt=125)
    loop.turns(4)
    while decode.num_computed_tokens % BLOCK_SIZE != BLOCK_SIZE - 1:
        loop.turn()
    request = loop.rig.add("a", num_prompt=loop.rig.free_blocks * BLOCK_SIZE, first=30)
    loop.turn()
    assert not loop.rig.free_blocks
    loop.turn()
    assert request.num_preemptions
    assert request.num_in_flight_tokens
    assert loop.rig.free_blocks
    loop.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)


WAYS = {aborted: 2, finished: 2, preempted: 3}
"""With how many batches."""


@pytest.fixture(params=RUNNERS, ids=["v1", "v2"])
def loop(request: pytest.FixtureRequest, model_dir: Path) -> Loop:
    depth = WAYS[request.getfixturevalue("lose")] if "lose" in request.fixturenames else 2
    return new_loop(model_dir, depth, num_blocks=NUM_BLOCKS, runner_v2=request.param)


def mark(loop: Loop, blocks: list[int]) -> Callable[[], set[str]]:
    """A mover copies; returns who has written over it when asked."""
    slots = [(block, slot) for block in blocks for slot in range(BLOCK_SIZE)]
    for block, slot in slots:
        loop.worker.memory.setdefault(block, {})[slot] = "mover"
    return lambda: {loop.worker.memory[block][slot] for block, slot in slots} - {"mover"}


@pytest.mark.parametrize("lose", WAYS)
async def test_early_write_of_a_mover_is_overwritten(lose: Callable[[Loop], None], loop: Loop) -> None:
    """The danger is real: this is what the fence is for."""
    lose(loop)
    written_over = mark(loop, reserve(loop, everything(loop)))
    loop.turns(3)
    assert written_over() == {"a"}


@pytest.mark.parametrize("growing", [False, True], ids=["reserve", "grow"])
@pytest.mark.parametrize("lose", WAYS)
async def test_blocks_are_handed_out_behind_the_steps_in_flight(
    lose: Callable[[Loop], None], growing: bool, loop: Loop
) -> None:
    guest = loop.rig.request("guest", num_prompt=8, first=50)
    if growing:
        reserve(loop, guest)
    lose(loop)
    take = (grow, guest) if growing else (reserve, everything(loop))
    blocks, turns = await loop.until_answered(loop.kvconn.call_for_blocks(take[0], loop, take[1]))
    assert turns > 1
    written_over = mark(loop, blocks)
    loop.turns(4)
    assert not written_over()


@pytest.mark.parametrize("depth", [2, 3, 5])
async def test_all_batches_of_a_pipeline_are_waited_for(depth: int, model_dir: Path) -> None:
    loop = new_loop(model_dir, depth, num_blocks=NUM_BLOCKS, runner_v2=True)
    # One batch for each stage: whoever is in one is in no other.
    loop.scheduler.pp_size = loop.scheduler.decode_stagger = depth - 1
    for index in range(3):
        loop.rig.add(f"{index}", num_prompt=40, first=index)
    loop.turns(12)
    in_flight = [output for _, output, _ in loop.batch_queue]
    assert len(in_flight) == depth - 1
    loop.scheduler.finish_requests(list(loop.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    blocks, _ = await loop.until_answered(loop.kvconn.call_for_blocks(reserve, loop, everything(loop)))
    assert not any(output is one for _, one, _ in loop.batch_queue for output in in_flight)
    written_over = mark(loop, blocks)
    loop.turns(depth + 1)
    assert not written_over()


async def test_an_idle_engine_answers_at_once(loop: Loop) -> None:
    loop.rig.add("a", max_tokens=3)
    loop.turns(8)
    assert not loop.batch_queue
    _, turns = await loop.until_answered(loop.kvconn.call_for_blocks(reserve, loop, everything(loop)))
    assert turns == 1


async def test_the_loop_turns_until_it_has_answered(loop: Loop) -> None:
    """vLLM's has no more work when the last batch in flight was dropped."""
    loop.rig.add("a")
    loop.turns(4)
    loop.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    asked = loop.kvconn.call_for_blocks(reserve, loop, everything(loop), behind_outputs=True)
    turns = 0
    while loop.kvconn.has_work(loop.scheduler.has_requests() or bool(loop.batch_queue)):
        loop.turn()
        turns += 1
        assert turns < 10
    assert await asyncio.wait_for(asked, 10)


async def test_a_refusal(loop: Loop) -> None:
    loop.rig.add("a")
    loop.turns(4)
    with pytest.raises(Refused) as refusal:
        await loop.until_answered(loop.kvconn.call_for_blocks(reserve, loop, loop.rig.request("a")))
    assert refusal.value.reason is Reason.ALREADY_MIGRATING


@pytest.mark.parametrize("runner_v2", RUNNERS, ids=["v1", "v2"])
@pytest.mark.parametrize("depth", [2, 4])
async def test_without_moves_the_engine_schedules_as_vllm_does(depth: int, runner_v2: bool, model_dir: Path) -> None:
    """Memory is short and requests are preempted: with the blocks of each in the pool at once."""

    def schedules(llumlet: bool) -> tuple[list[Any], int]:
        loop = new_loop(model_dir, depth, llumlet=llumlet, num_blocks=NUM_BLOCKS, runner_v2=runner_v2, max_num_seqs=8)
        if llumlet:
            # As `attach` leaves it.
            assert loop.scheduler.defer_block_free is False
        seen, schedule = [], loop.scheduler.schedule

        def watched(*args: Any) -> Any:
            output = schedule(*args)
            seen.append((dict(output.num_scheduled_tokens), sorted(output.scheduled_cached_reqs.resumed_req_ids)))
            return output

        loop.scheduler.schedule = watched
        requests = [loop.rig.add(f"{i}", num_prompt=60 + 7 * i, max_tokens=120, first=9 * i) for i in range(6)]
        while loop.scheduler.has_requests() or loop.batch_queue:
            loop.turn()
            assert len(seen) < 5000
        return seen, sum(request.num_preemptions for request in requests)

    stock, num_preemptions = schedules(llumlet=False)
    assert num_preemptions > 3
    assert schedules(llumlet=True) == (stock, num_preemptions)
