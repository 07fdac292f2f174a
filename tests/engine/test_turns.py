# SPDX-License-Identifier: Apache-2.0
"""A request that comes from another engine keeps its turn, in vLLM's own queues."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.engine.rig import Rig
from vllm_llumnix.engine.queue.turns import queue_in_turn


@pytest.fixture
def rig(model_dir: Path) -> Rig:
    return Rig(model_dir)


def arrived(rig: Rig, name: str, at: float, num_output: int = 0) -> Request:
    """Not in the queue yet."""
    request = rig.request(name)
    request.arrival_time = at
    request.append_output_token_ids([7] * num_output)
    return request


def names(rig: Rig) -> str:
    return "".join(request.request_id for request in rig.scheduler.waiting)


@pytest.mark.parametrize(("at", "order"), [(0.5, "xabc"), (1.5, "axbc"), (2.0, "abxc"), (3.5, "abcx")])
def test_waiting_request_keeps_its_place_after_a_move(rig: Rig, at: float, order: str) -> None:
    for name, earlier in zip("abc", (1.0, 2.0, 3.0), strict=True):
        rig.scheduler.add_request(arrived(rig, name, earlier))
    coming = arrived(rig, "x", at)
    rig.port.reservations.make(coming, use_prefix_cache=True, queued=True)
    rig.port.reservations.admit(coming, 0)
    assert names(rig) == order


def test_a_stream_goes_on_before_others_begin(rig: Rig) -> None:
    """One that is computed again elsewhere, whatever its age."""
    for name, at in (("a", 1.0), ("b", 2.0)):
        rig.scheduler.add_request(arrived(rig, name, at))
    queue_in_turn(rig.scheduler, arrived(rig, "x", 9.0, num_output=3))
    queue_in_turn(rig.scheduler, arrived(rig, "y", 8.0, num_output=3))
    assert names(rig) == "yxab"


def test_request_preempted_elsewhere_goes_last(rig: Rig) -> None:
    """It is long, and found no room: first here, and without room again, it would hold up who has some."""
    for name, at in (("a", 1.0), ("b", 2.0)):
        rig.scheduler.add_request(arrived(rig, name, at))
    coming = arrived(rig, "x", 0.5, num_output=3)
    rig.port.reservations.make(coming, use_prefix_cache=True, queued=True)
    rig.port.reservations.admit(coming, 0)
    assert names(rig) == "abx"


def test_preempted_request_precedes_new_ones(rig: Rig) -> None:
    """vLLM puts it at the head, whatever its age."""
    preempted = rig.add("p")
    rig.turns(3)
    preempted.arrival_time = 5.0
    rig.scheduler.running.remove(preempted)
    rig.scheduler._preempt_request(preempted, 0.0)
    queue_in_turn(rig.scheduler, arrived(rig, "x", 1.0))
    assert names(rig) == "px"


def test_a_frozen_one_that_was_preempted_has_the_head_again(rig: Rig) -> None:
    """Where vLLM puts who is preempted."""
    queue_in_turn(rig.scheduler, arrived(rig, "x", 1.0, num_output=2))
    preempted = arrived(rig, "p", 5.0, num_output=1)
    preempted.status = RequestStatus.PREEMPTED
    queue_in_turn(rig.scheduler, preempted)
    assert names(rig) == "px"


def test_where_priorities_count_they_decide(model_dir: Path) -> None:
    rig = Rig(model_dir, scheduling_policy="priority")
    for name, priority, at in (("a", 1, 1.0), ("b", 0, 2.0), ("x", 0, 1.5), ("y", 2, 0.5)):
        request = arrived(rig, name, at, num_output=int(name == "y"))
        request.priority = priority
        put = partial(queue_in_turn, rig.scheduler) if name in "xy" else rig.scheduler.add_request
        put(request)
    assert names(rig) == "xbay"


def test_any_number_comes_in_order(rig: Rig) -> None:
    draw = random.Random(5)
    requests = [arrived(rig, f"{index:02d}", float(index), num_output=index % 3) for index in range(40)]
    for request in draw.sample(requests, len(requests)):
        queue_in_turn(rig.scheduler, request)
    begun = [request for request in requests if request.num_output_tokens]
    fresh = [request for request in requests if not request.num_output_tokens]
    assert list(rig.scheduler.waiting) == begun + fresh
