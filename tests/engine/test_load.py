# SPDX-License-Identifier: Apache-2.0
"""The load counters: after any history, what they say is what the queues hold. On vLLM's real schedulers."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Refused
from tests.engine.rig import BLOCK_SIZE, Rig
from tests.engine.test_sessions import answered, say
from vllm_llumnix.engine.load.load_counters import RECENT_SECONDS, LoadCounters
from vllm_llumnix.engine.load.load_sums import NO_HIT, NOTHING, Load, Place, share_of
from vllm_llumnix.engine.requests.request_state import why_not_now

KINDS = {
    "sync": {"asynchronous": False, "runner_v2": False},
    "async-v1": {"asynchronous": True, "runner_v2": False},
    "async-v2": {"asynchronous": True, "runner_v2": True},
}
HISTORY = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def rig(request: pytest.FixtureRequest, model_dir: Path) -> Rig:
    return Rig(model_dir, **request.param)


def held(rig: Rig) -> Iterator[tuple[Place, Request]]:
    scheduler = rig.scheduler
    for request in scheduler.running:
        yield Place.RUNNING, request
    for request in [*scheduler.waiting, *scheduler.kv_holding_waiting, *rig.port._parked.values()]:
        yield Place.WAITING, request


def recount(load: LoadCounters, requests: list[tuple[Place, Request]], moving: frozenset[str]) -> Load:
    """The slow way to the same sums."""
    sums = NOTHING
    for place, request in requests:
        name = request.request_id
        share = share_of(place, request, load._entries[name].hit, moving=name in moving, urgent=request.priority < 0)
        sums = sums.plus(share)
    return sums


def first_waiting_tokens(rig: Rig, moving: frozenset[str]) -> int:
    """What the head of the queue will allocate."""
    queue = [*rig.scheduler.kv_holding_waiting, *rig.scheduler.waiting]
    if not queue:
        return 0
    return recount(rig.port.load, [(Place.WAITING, queue[0])], moving).waiting_unallocated_tokens


def assert_right(rig: Rig, moving: frozenset[str] = frozenset()) -> Load:
    load = rig.port.load
    snapshot = load.snapshot()
    requests = [*held(rig)]
    assert snapshot.load == recount(load, requests, moving)
    assert sorted(snapshot.waiting) == sorted(
        request.request_id for place, request in requests if place is Place.WAITING
    )
    assert snapshot.num_free_blocks == rig.free_blocks
    assert snapshot.first_waiting_tokens == first_waiting_tokens(rig, moving)
    return snapshot.load


def test_nothing_is_no_load(rig: Rig) -> None:
    assert assert_right(rig) == Load()


def test_life_of_a_request(rig: Rig) -> None:
    rig.add("a", num_prompt=600, max_tokens=3)
    assert assert_right(rig) == Load(
        num_waiting=1,
        waiting_to_decode=1,
        waiting_to_decode_tokens=600,
        waiting_prefill_tokens=600,
        waiting_unallocated_tokens=600,
        prefill_pairs=600 * 601 // 2,
    )
    assert rig.begin().num_scheduled_tokens == {"a": 256}
    # Of the step in flight nothing is computed yet; its blocks are there.
    running = Load(
        num_running=1,
        running_to_decode=1,
        running_to_decode_tokens=600,
        running_prefill_tokens=600,
        running_unallocated_tokens=344,
        prefill_pairs=600 * 601 // 2,
    )
    assert assert_right(rig) == running
    rig.drain_one()
    left = running._replace(running_prefill_tokens=344, prefill_pairs=(600 * 601 - 256 * 257) // 2)
    assert assert_right(rig) == left
    seen = []
    while rig.scheduler.requests:
        rig.turn()
        seen.append(assert_right(rig))
    assert seen[-1] == Load()
    lengths = [load.running_to_decode_tokens for load in seen if not load.running_prefill_tokens and load.num_running]
    assert lengths == sorted(lengths)
    assert set(lengths) == {601, 602}


def test_ended_request_is_counted_with_its_tokens(rig: Rig) -> None:
    """One that only waited had nothing to give back."""
    rig.add("a", num_prompt=60, max_tokens=3)
    for number in range(4):
        rig.add(f"b{number}", num_prompt=60, max_tokens=500)
    while "a" in rig.scheduler.requests:
        rig.turn()
    snapshot = rig.port.load.snapshot()
    assert (snapshot.num_gone, snapshot.gone_tokens) == (1, 63)
    rig.add("waits", num_prompt=60)
    rig.scheduler.finish_requests("waits", RequestStatus.FINISHED_ABORTED)
    assert rig.port.load.snapshot().num_gone == 1


def test_urgent_requests_are_counted_where_they_are_and_the_first_of_the_queue_with_what_it_needs(rig: Rig) -> None:
    rig.add("a", num_prompt=40, max_tokens=4)
    for name, priority in (("b", -1), ("c", -7), ("d", 0)):
        request = rig.request(name, num_prompt=60 + ord(name), max_tokens=9, first=ord(name) % 7)
        request.priority = priority
        rig.scheduler.add_request(request)
    snapshot = rig.port.load.snapshot()
    assert (snapshot.load.num_urgent, snapshot.load.urgent_running_to_decode) == (2, 0)
    assert snapshot.first_waiting_tokens == 40
    rig.turns(6)
    load = assert_right(rig)
    assert (load.num_urgent, load.urgent_running_to_decode, load.running_to_decode) == (2, 2, 3)
    rig.port.load.moving("b", True)
    load = assert_right(rig, frozenset("b"))
    assert (load.num_urgent, load.urgent_running_to_decode) == (2, 1)
    rig.scheduler.finish_requests("c", RequestStatus.FINISHED_ABORTED)
    assert assert_right(rig, frozenset("b")).num_urgent == 1


def test_request_on_its_way_to_an_empty_queue_needs_room(rig: Rig) -> None:
    request = rig.request("a", num_prompt=100)
    rig.port.load.received(request)
    assert rig.port.load.snapshot().first_waiting_tokens == 100
    rig.scheduler.add_request(request)
    assert_right(rig)


def test_a_single_token_is_no_decode_load(rig: Rig) -> None:
    rig.add("a", num_prompt=600, max_tokens=1)
    assert assert_right(rig).waiting_to_decode == 0
    rig.turn()
    load = assert_right(rig)
    assert (load.num_running, load.running_to_decode, load.running_to_decode_tokens) == (1, 0, 0)
    assert load.running_prefill_tokens > 0


@pytest.mark.parametrize("count", [1, 7])
def test_a_shared_prefix_is_work_once(rig: Rig, count: int) -> None:
    prefix = 10 * BLOCK_SIZE
    first = rig.request("first", num_prompt=prefix + 5, max_tokens=2)
    rig.scheduler.add_request(first)
    while rig.scheduler.requests:
        rig.turn()
    pool, manager = rig.port.block_pool, rig.scheduler.kv_cache_manager
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    stats = dataclasses.replace(manager.prefix_cache_stats)
    for index in range(count):
        rig.add(f"r{index}", num_prompt=prefix + 40 + index)
    load = assert_right(rig)
    assert load.waiting_prefill_tokens == sum(40 + index for index in range(count))
    assert load.waiting_to_decode_tokens == sum(prefix + 40 + index for index in range(count))
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == order
    assert manager.prefix_cache_stats == stats
    rig.turns(3)
    assert_right(rig)
    computed = {request.request_id: request.prefill_stats for _, request in held(rig)}
    assert all(stats is None or stats.num_local_cached_tokens in (0, prefix) for stats in computed.values())


def test_a_prefix_in_use_takes_no_room_and_one_that_is_only_cached_does(rig: Rig) -> None:
    prefix = 10 * BLOCK_SIZE
    rig.add("first", num_prompt=prefix + 5, max_tokens=40)
    rig.turns(3)
    rig.add("second", num_prompt=prefix + 40)
    load = assert_right(rig)
    assert (load.waiting_prefill_tokens, load.waiting_unallocated_tokens) == (40, 40)
    while rig.scheduler.requests:
        rig.turn()
    rig.add("third", num_prompt=prefix + 40, max_tokens=2)
    load = assert_right(rig)
    assert load.waiting_prefill_tokens < BLOCK_SIZE + 40
    assert load.waiting_unallocated_tokens == prefix + 40


def test_received_counts_before_the_loop_knows(rig: Rig) -> None:
    load = rig.port.load
    request = rig.request("a", num_prompt=100)
    load.received(request)
    snapshot = load.snapshot()
    assert (snapshot.load.num_waiting, snapshot.load.waiting_prefill_tokens) == (1, 100)
    assert snapshot.waiting == snapshot.recent == ("a",)
    rig.scheduler.add_request(request)
    load.settled("a")
    assert_right(rig)
    turned_away = rig.request("b")
    load.received(turned_away)
    load.settled("b")
    assert_right(rig)
    assert load.snapshot().recent == ("a", "b")


def test_the_loop_does_not_look_up_what_was_looked_up_when_it_came(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    load, looked_up = rig.port.load, []
    look_up = load._look_up
    monkeypatch.setattr(load, "_look_up", lambda request: looked_up.append(request.request_id) or look_up(request))
    request = rig.request("a", num_prompt=100)
    load.received(request)
    rig.scheduler.add_request(request)
    assert looked_up == ["a"]
    assert_right(rig)


def test_preempted_waits_again(model_dir: Path) -> None:
    rig = Rig(model_dir, num_blocks=12)
    for index in range(3):
        rig.add(f"r{index}", num_prompt=90, first=5 + 10 * index)
    while not rig.port.load.snapshot().num_preemptions:
        rig.turn()
        load = assert_right(rig)
    assert load.num_waiting >= 1
    victim = next(request for _, request in held(rig) if request.num_preemptions)
    # Its full blocks are in the prefix cache still, for the time being: those who made it wait take them first.
    assert rig.scheduler.kv_cache_manager.get_computed_blocks(victim)[1] > 0
    waiting = sum(request.num_tokens for place, request in held(rig) if place is Place.WAITING)
    assert load.waiting_prefill_tokens == load.waiting_unallocated_tokens == waiting
    rig.turns(20)
    assert_right(rig)


def test_leaving_request_is_no_decode_load(rig: Rig) -> None:
    for name in "ab":
        rig.add(name, first=ord(name) - 90)
    rig.turns(5)
    both = assert_right(rig)
    assert both.running_to_decode == 2
    rig.port.load.moving("a", True)
    one = assert_right(rig, frozenset("a"))
    assert (one.num_running, one.running_to_decode) == (2, 1)
    rig.turns(3)
    assert_right(rig, frozenset("a"))
    rig.port.load.moving("a", False)
    rig.turns(3)
    assert assert_right(rig).running_to_decode == 2


def test_no_reader_sees_half_a_change(rig: Rig) -> None:
    """Four requests live until all four are aborted: no snapshot shows more or fewer, or tokens of nobody."""
    load, stop, seen = rig.port.load, threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            seen.append(load.snapshot())

    names = [f"r{index}" for index in range(4)]
    for index, name in enumerate(names):
        rig.add(name, num_prompt=40, max_tokens=1500, first=5 + index)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        rig.turns(400)
        rig.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    finally:
        stop.set()
        reader.join()
    assert len(seen) > 100
    tokens = [one.load.running_to_decode_tokens for one in seen if one.load.running_to_decode == 4]
    assert tokens == sorted(tokens)
    before = [one.load for one in seen if one.load.num_waiting + one.load.num_running == 4]
    assert before == [one.load for one in seen][: len(before)]
    assert all(load.running_to_decode_tokens >= 40 * load.running_to_decode for load in before)
    versions = [one.version for one in seen]
    assert versions == sorted(versions)


def test_a_step_that_ends_requests_is_seen_whole(rig: Rig) -> None:
    """Where the counters take off tokens that they have not added yet, nobody looks."""
    for index in range(3):
        rig.add(f"r{index}", num_prompt=40, max_tokens=4, first=5 + index)
    rig.turns(rig.depth + 1)
    load, seen = rig.port.load, list[Load]()
    free_request, blocks = rig.scheduler._free_request, rig.free_blocks
    late = rig.request("late", num_prompt=100, first=50)

    def look(*args: object, **kwargs: object) -> object:
        answer = free_request(*args, **kwargs)
        if not load.snapshot().waiting:
            load.received(late)
        snapshot = load.snapshot()
        assert snapshot.waiting == ("late",)
        assert snapshot.recent[-1] == "late"
        assert (snapshot.load.num_waiting, snapshot.load.waiting_prefill_tokens) == (1, 100)
        assert snapshot.num_free_blocks == blocks
        seen.append(snapshot.load)
        return answer

    rig.scheduler._free_request = look
    load.on_change = lambda: seen.append(load.snapshot().load)
    while rig.scheduler.requests:
        rig.turn()
    assert {each.running_to_decode for each in seen} <= {0, 3}
    assert seen[-1].num_waiting == 1
    load.settled("late")
    assert seen[-1] == Load()
    assert all(each.running_to_decode_tokens >= 40 * each.running_to_decode for each in seen)


def test_change_right_after_a_step_is_reported() -> None:
    class Racing(LoadCounters):
        """The step is over as soon as somebody outside of the lock has seen that it is not."""

        racing, before = False, None

        @property
        def _before(self) -> Load | None:  # type: ignore[override]
            seen = self.before
            if self.racing:
                self.racing = False
                self.computed([], (), exact)
            return seen

        @_before.setter
        def _before(self, value: Load | None) -> None:
            self.before = value  # type: ignore[assignment]

        def _tell(self) -> None:
            self.racing = self.before is not None
            super()._tell()

    now, told = [100.0], list[tuple[str, ...]]()
    load = Racing(lambda _: NO_HIT, lambda: 0, lambda: None, lambda request: request.request_id, clock=lambda: now[0])
    load.touch()
    load.on_change = lambda: told.append(load.snapshot().recent)
    exact = load.computing()
    load.received(_Request("a"))
    assert told == [("a",)]


def test_a_request_that_was_queued_behind_our_back_is_counted(rig: Rig, llumlet_log: pytest.LogCaptureFixture) -> None:
    request = rig.request("a", num_prompt=40, max_tokens=3)
    rig.scheduler.requests["a"] = request
    rig.scheduler.waiting.add_request(request)
    while rig.scheduler.requests:
        rig.turn()
        assert_right(rig)
    assert rig.port.load.snapshot().load == Load()
    assert llumlet_log.text.count("request a runs and was not seen to be queued") == 1


def test_names_are_shown_once(rig: Rig) -> None:
    load = rig.port.load
    for index in range(3):
        request = rig.request(f"{index}_resp_1-abcd1234")
        request.llumlet_residence.name = "gate-7"
        load.received(request)
        rig.scheduler.add_request(request)
    assert load.snapshot().waiting == ("gate-7",)
    rig.turn()
    rig.turns(3)
    snapshot = load.snapshot()
    assert (snapshot.waiting, snapshot.recent) == ((), ("gate-7",))


def test_recent_names_are_forgotten() -> None:
    now = [100.0]
    load = LoadCounters(
        lambda _: NO_HIT, lambda: 0, lambda: None, lambda request: request.request_id, clock=lambda: now[0]
    )
    for name in ("a", "b"):
        load.received(_Request(name))
        now[0] += RECENT_SECONDS - 1
    assert load.snapshot().recent == ("b",)


def test_every_change_is_told_and_tokens_now_and_then(rig: Rig) -> None:
    load = rig.port.load
    told = []
    load.on_change = lambda: told.append(load.snapshot())
    rig.add("a")
    assert told[-1].load.num_waiting == 1
    rig.turn()
    assert told[-1].load.num_running == 1
    rig.turns(3)
    versions = [snapshot.version for snapshot in told]
    assert versions == sorted(set(versions))
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert told[-1].load == Load()
    assert told[-1].num_free_blocks == rig.free_blocks
    before = len(told)
    rig.scheduler.set_pause_state(rig.scheduler.pause_state)
    assert len(told) == before + 1


@pytest.mark.parametrize("error", [KeyError("gone"), AssertionError(), AttributeError("ref_cnt"), IndexError()])
def test_a_look_up_that_fails_costs_no_request(rig: Rig, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop changes the cache while the input thread looks; vLLM answers an exception there with an error."""
    rig.add("first", num_prompt=10 * BLOCK_SIZE, max_tokens=2)
    rig.turns(8)
    (manager,) = rig.port.kv_cache_manager.coordinator.single_type_managers
    request = rig.request("second", num_prompt=10 * BLOCK_SIZE + 5)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "find_longest_cache_hit", Mock(side_effect=error))
        rig.port.load.received(request)
        assert manager.find_longest_cache_hit.called
    assert rig.port.load.snapshot().load.waiting_prefill_tokens == request.num_tokens, "all of it is work"
    rig.scheduler.add_request(request)
    rig.turns(3)
    assert request.num_output_tokens
    assert_right(rig)


def test_between_two_parts_of_its_input_it_waits_for_no_turn(model_dir: Path) -> None:
    rig = Rig(model_dir)
    before = rig.port.load.snapshot().load
    say(rig, 0)
    answered(rig)
    counted = rig.port.load.snapshot()
    assert counted.load == before._replace(num_running=1)
    assert counted.waiting == ()
    say(rig, 1)
    assert rig.port.load.snapshot().load.num_waiting == 1
    answered(rig)
    rig.scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    assert rig.port.load.snapshot().load == before
    assert rig.port.load.snapshot().num_gone == 1


class _Request:
    max_tokens = 4
    num_computed_tokens = num_in_flight_tokens = 0
    resumable = False
    status = RequestStatus.WAITING
    num_tokens = 9
    priority = 0

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


class History:
    """A random life of one engine, its moves included."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.names = 0
        self.moving: set[str] = set()
        self.reserved: list[Request] = []

    def run(self, steps: int) -> None:
        acts = [self.turn] * 6 + [self.add, self.abort, self.move, self.reserve, self.admit, self.cancel, self.reset]
        for _ in range(steps):
            self.random.choice(acts)()
            self.moving &= self.rig.scheduler.requests.keys()
            self.rig.port.load.blocks_changed()
            assert_right(self.rig, frozenset(self.moving))

    def turn(self) -> None:
        self.rig.port.park_preempted()
        self.rig.turn()
        for request in list(self.rig.port._frozen.values()):
            if request.is_finished():
                self.rig.port.forget(request)

    def _draw(self) -> Request:
        self.names += 1
        draw = self.random
        request = self.rig.request(
            f"r{self.names}", draw.choice([1, 33, 90, 300]), draw.choice([1, 2, 5, 40]), first=draw.choice([5, 6])
        )
        request.priority = draw.choice([-1, 0, 2])
        return request

    def add(self) -> None:
        request = self._draw()
        if self.random.random() < 0.7:
            self.rig.port.load.received(request)
        if self.random.random() < 0.9:
            self.rig.scheduler.add_request(request)
        self.rig.port.load.settled(request.request_id)

    def _any(self) -> Request | None:
        requests = list(self.rig.scheduler.requests.values())
        return self.random.choice(requests) if requests else None

    def abort(self) -> None:
        if (request := self._any()) is not None:
            self.rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            self.rig.port.forget(request)

    def move(self) -> None:
        """One step of a move out."""
        request, port = self._any(), self.rig.port
        if request is None:
            return
        name = request.request_id
        if name not in self.moving:
            if why_not_now(request) is not None:
                return
            self.moving.add(name)
            port.load.moving(name, True)
            if self.random.random() < 0.5:
                port.freeze(request)
        elif self.random.random() < 0.5:
            port.unfreeze(request)
            port.load.moving(name, False)
            self.moving.discard(name)
        elif not request.num_in_flight_tokens:
            port.release(request)

    def reserve(self) -> None:
        request = self._draw()
        if self.random.random() < 0.7:
            request.append_output_token_ids([7] * self.random.choice([1, 40]))
            request.max_tokens = request.num_output_tokens + 4
            request.prefill_stats = None
        try:
            self.rig.port.reservations.make(request, use_prefix_cache=True)
        except Refused:
            return
        self.reserved.append(request)

    def admit(self) -> None:
        if self.reserved:
            request = self.reserved.pop()
            computed = self.random.choice([0, request.num_tokens - 1]) if request.num_output_tokens else 0
            self.rig.port.reservations.admit(request, computed)

    def cancel(self) -> None:
        if self.reserved:
            self.rig.port.reservations.cancel(self.reserved.pop())

    def reset(self) -> None:
        if self.random.random() < 0.2 and not self.moving:
            # Refused, when everybody has been preempted, if a reservation holds blocks.
            with contextlib.suppress(RuntimeError):
                self.rig.scheduler.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("kind", KINDS)
@HISTORY
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([24, 64]))
def test_counters_are_the_recount_after_any_history(model_dir: Path, kind: str, seed: int, num_blocks: int) -> None:
    History(Rig(model_dir, num_blocks=num_blocks, **KINDS[kind]), seed).run(60)
