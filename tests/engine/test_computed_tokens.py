# SPDX-License-Identifier: Apache-2.0
"""What is computed again: counted over vLLM's real schedulers, against what their steps hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.loop import new_loop
from tests.engine.rig import Rig
from tests.engine.test_scheduler_port import KINDS


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_positions_that_were_computed_before(kind: dict[str, bool], caching: bool, seed: int, model_dir: Path) -> None:
    """Position by position: what a step computes a second time of a request is computed again."""
    chance = random.Random(seed)
    rig = Rig(
        model_dir, num_blocks=20, max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=caching, **kind
    )
    tokens, computed, again, number = rig.port.tokens, 0, 0, 0
    seen: dict[str, set[int]] = {}
    for _ in range(500):
        if len(rig.scheduler.requests) < 8 and chance.random() < 0.3:
            number += 1
            num_prompt, max_tokens = chance.randrange(10, 300), chance.randrange(2, 150)
            rig.add(f"r{number}", num_prompt=num_prompt, max_tokens=max_tokens, first=number)
        step = rig.begin()
        for name, count in step.num_scheduled_tokens.items():
            had, end = seen.setdefault(name, set()), rig.scheduler.requests[name].num_computed_tokens
            positions = set(range(end - count, end))
            again += len(had & positions)
            had |= positions
            computed += count
        if len(rig._in_flight) >= rig.depth:
            rig.drain_one()
        assert (tokens.computed, tokens.recomputed) == (computed, again)
    assert again > 100


def test_request_moved_as_tokens_in_mid_stream_counts_as_recomputed(model_dir: Path) -> None:
    """All its tokens but the newest were computed elsewhere."""
    loop = new_loop(model_dir)
    assert loop.kvconn is not None
    request = loop.rig.request("a", num_prompt=100)
    request.append_output_token_ids(list(range(7)))
    loop.rig.port.reservations.make(request, use_prefix_cache=False, queued=True)
    loop.kvconn.admit(request, 0)
    loop.turns(5)
    assert loop.rig.port.tokens.recomputed == 106
    assert loop.rig.port.tokens.computed > 107


def test_request_moved_before_its_first_token_counts_nothing_again(model_dir: Path) -> None:
    loop = new_loop(model_dir)
    assert loop.kvconn is not None
    request = loop.rig.request("a", num_prompt=100)
    loop.rig.port.reservations.make(request, use_prefix_cache=False, queued=True)
    loop.kvconn.admit(request, 0)
    loop.turns(5)
    assert loop.rig.port.tokens.recomputed == 0


def test_nothing_is_remembered_of_who_is_gone(model_dir: Path) -> None:
    rig = Rig(model_dir, num_blocks=12)
    for index in range(3):
        rig.add(f"r{index}", num_prompt=90, first=5 + 10 * index)
    while not rig.port.load.num_preemptions():
        rig.turn()
    assert rig.port.tokens._lost
    rig.scheduler.finish_requests(list(rig.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    assert not rig.port.tokens._lost
