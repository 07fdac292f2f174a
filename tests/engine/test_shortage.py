# SPDX-License-Identifier: Apache-2.0
"""Who waits for blocks that a move gives back, and for how long: over vLLM's real schedulers, with a made-up clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.move.shortage import ASK_SECONDS, HOLD_SECONDS, UNHEARD_SECONDS
from tests.engine.loop import Loop, new_loop
from tests.engine.rig import BLOCK_SIZE, Rig, full, window
from tests.engine.test_scheduler_port import KINDS
from vllm_llumnix.engine.load.load_counters import LoadCounters
from vllm_llumnix.engine.queue.shortage import Shortage

NUM_BLOCKS = 13
"""Twelve are for requests: three of four blocks each fill it."""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("groups", [[full(), window(64), window(64)], [full(64), window(64, 16)]])
def test_of_several_groups_no_preemption_comes_unforeseen(
    model_dir: Path, groups: Sequence[KVCacheSpec], asynchronous: bool
) -> None:
    rig = Rig(model_dir, num_blocks=40, groups=groups, asynchronous=asynchronous)
    for name, num_prompt in (("a", 120), ("b", 116), ("c", 112)):
        rig.add(name, num_prompt=num_prompt, max_tokens=600)
    foreseen, quiet, before = 0, 0, 0
    for _ in range(1500):
        short = bool(rig.port.shortage.lacking())
        rig.turn()
        preempted, before = rig.port.load.num_preemptions() - before, rig.port.load.num_preemptions()
        assert short or not preempted
        foreseen += bool(preempted)
        quiet += not short
    assert foreseen
    assert quiet > 100


class Pressed:
    """Three requests that decode, each in a cache that is nearly full. `now_s` is the clock of its shortages."""

    def __init__(self, model: Path, **kind: bool) -> None:
        self.now_s = 100.0
        self.changes = 0
        self.rig = rig = Rig(model, num_blocks=NUM_BLOCKS, **kind)
        rig.port.shortage = self.shortage = Shortage(
            rig.scheduler, rig.port.load.num_preemptions, holds=True, clock=lambda: self.now_s
        )
        self.shortage.on_change = self._changed
        # Each needs its fifth block some steps after the one before it.
        self.requests = [
            rig.add(name, num_prompt=num_prompt, first=5 + 20 * number)
            for number, (name, num_prompt) in enumerate((("a", 120), ("b", 116), ("c", 112)))
        ]

    def _changed(self) -> None:
        self.changes += 1

    def turn(self, *, moving: bool = False) -> None:
        self.shortage.before_step(moving=moving)
        self.rig.turn()

    def until_short(self) -> None:
        """All turns until the coming step lacks a block."""
        for _ in range(NUM_BLOCKS * BLOCK_SIZE):
            if self.shortage.lacking():
                return
            self.turn(moving=True)
        raise AssertionError("there are blocks for everybody")

    @property
    def num_preemptions(self) -> int:
        return self.rig.port.load.num_preemptions()

    def leaves(self, request: Request) -> None:
        self.rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def pressed(request: pytest.FixtureRequest, model_dir: Path) -> Pressed:
    return Pressed(model_dir, **request.param)


def test_request_without_a_block_waits_for_a_move(pressed: Pressed) -> None:
    pressed.until_short()
    first, second, victim = pressed.requests
    for _ in range(3):
        pressed.turn(moving=True)
    lengths = [request.num_tokens for request in pressed.requests]
    pressed.turn(moving=True)
    pressed.turn(moving=True)
    assert first.num_tokens == lengths[0], "it has no block for another token"
    assert second.num_tokens > lengths[1]
    assert victim.num_tokens > lengths[2]
    pressed.leaves(victim)
    for _ in range(4):
        pressed.turn()
    assert first.num_tokens > lengths[0]
    assert pressed.num_preemptions == 0
    assert pressed.shortage.num_averted == 1
    assert pressed.changes == 2, "its beginning and its end are told at once"


def test_shortage_waits_no_longer_than_a_preemption_costs(pressed: Pressed) -> None:
    pressed.until_short()
    pressed.turn(moving=True)
    pressed.now_s += HOLD_SECONDS - 0.01
    pressed.turn(moving=True)
    assert pressed.num_preemptions == 0
    pressed.now_s += 0.02
    pressed.turn(moving=True)
    assert pressed.num_preemptions == 1
    assert pressed.shortage.num_averted == 0


def test_a_move_that_fails_is_not_waited_for(pressed: Pressed) -> None:
    pressed.shortage.asks = True
    pressed.until_short()
    pressed.turn(moving=True)
    pressed.turn(moving=False)
    assert pressed.num_preemptions == 1
    pressed.turn()
    assert pressed.shortage.num_averted == 0


def test_shortage_waits_a_while_for_an_answer(pressed: Pressed) -> None:
    pressed.until_short()
    pressed.shortage.asks = True
    for _ in range(3):
        pressed.turn()
    assert pressed.num_preemptions == 0
    pressed.now_s += ASK_SECONDS + 0.01
    pressed.turn()
    assert pressed.num_preemptions == 1


def test_unanswered_shortage_does_not_wait_next_time(pressed: Pressed) -> None:
    shortage = pressed.shortage
    shortage.asks = True
    pressed.until_short()
    pressed.turn()
    pressed.now_s += ASK_SECONDS + 0.01
    pressed.turn()
    assert pressed.num_preemptions == 1
    pressed.until_short()
    pressed.turn()
    assert pressed.num_preemptions == 2
    pressed.now_s += UNHEARD_SECONDS
    pressed.until_short()
    pressed.turn()
    assert pressed.num_preemptions == 2


def test_without_moves_and_readers_vllm_preempts_at_once(pressed: Pressed) -> None:
    pressed.until_short()
    pressed.turn()
    assert pressed.num_preemptions == 1


def test_caches_of_several_kinds_are_left_to_vllm(pressed: Pressed) -> None:
    pressed.shortage._holds = False
    pressed.until_short()
    pressed.turn(moving=True)
    assert pressed.num_preemptions == 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("seed", range(6))
def test_a_shortage_is_what_vllm_preempts_for(kind: dict[str, bool], seed: int, model_dir: Path) -> None:
    """No more and no less, step by step, with prompts in chunks and requests that come and end."""
    chance = random.Random(seed)
    rig = Rig(model_dir, num_blocks=20, max_num_batched_tokens=64, max_num_seqs=8, **kind)
    shortage, number, shortages = rig.port.shortage, 0, 0
    for _ in range(500):
        if len(rig.scheduler.requests) < 8 and chance.random() < 0.3:
            number += 1
            first, tokens = chance.randrange(90), chance.randrange(2, 150)
            rig.add(f"r{number}", num_prompt=chance.randrange(10, 300), max_tokens=tokens, first=first)
        before = rig.port.load.num_preemptions()
        shortage.before_step(moving=False)
        rig.turn()
        preempted = rig.port.load.num_preemptions() > before
        assert bool(shortage.num_blocks) == preempted
        shortages += preempted
    assert shortages > 2


@pytest.mark.parametrize("depth", [2, 4])
def test_the_loop_waits_for_whom_it_sees_leave(depth: int, model_dir: Path) -> None:
    """A request on its way out with its KV cache; not one that waits, which has none."""
    loop: Loop = new_loop(model_dir, depth, num_blocks=NUM_BLOCKS)
    port, engine_loop = loop.rig.port, loop.kvconn
    assert engine_loop is not None
    leaving = Watched(loop.rig.add("c", num_prompt=112))
    loop.turns(depth)
    loop.rig.add("a", num_prompt=120, first=40)
    loop.rig.add("b", num_prompt=116, first=60)
    engine_loop.watch(leaving)
    for _ in range(3 * BLOCK_SIZE):
        loop.turn()
        if port.shortage.num_blocks:
            break
    loop.turns(5)
    assert not port.load.num_preemptions()
    engine_loop.unwatch("c")
    loop.turns(2)
    assert port.load.num_preemptions() == 1


class Watched:
    """A request on its way out that never gets there."""

    def __init__(self, request: Request) -> None:
        self.request, self.num_preemptions, self.freezing, self.frozen = request, 0, False, False


def test_counters_count_preemptions(pressed: Pressed) -> None:
    load: LoadCounters = pressed.rig.port.load
    pressed.until_short()
    pressed.turn()
    assert load.num_preemptions() == load.snapshot().num_preemptions == 1
