# SPDX-License-Identifier: Apache-2.0
"""Who waits for an instance, and whose turn it is. On a virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

import pytest

from llumlet.process.addresses import Address
from llumsched.contract import HostPort, LLMInstance, SchedulingRequest
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.config import Config
from llumsched.gateway.errors import NoInstance, Overloaded
from llumsched.gateway.outliers import Limits
from llumsched.gateway.placement import Placed
from llumsched.gateway.scheduled import Scheduled
from llumsched.gateway.scheduler_client import NoEndpoint, NotInTime, SchedulerAnswer
from llumsched.gateway.waiting import Queues, Waiting
from llumsched.request import Request
from llumsim.clock import VirtualLoop

_SCHEDULER = Address("scheduler", 1)
_BACKEND = Backends((), None, Limits(0.5), {}).at(Address("127.0.0.1", 9))  # type: ignore[arg-type]


class Scheduler:
    """Takes as many requests as there is room for; each takes a millisecond to ask for."""

    def __init__(self) -> None:
        self.room = 0
        self.would_be_late = False
        """Whether only who may wait is refused."""
        self.models_without = set[str]()
        self.meets: Callable[[SchedulingRequest], bool] = lambda request: True
        """True if the objectives of a request can be met."""
        self.asked: list[SchedulingRequest] = []
        self.is_asked = asyncio.Event()
        self.released: list[str] = []

    async def schedule(self, request: SchedulingRequest) -> SchedulerAnswer:
        self.asked.append(request)
        self.is_asked.set()
        await asyncio.sleep(0.001)
        if request.may_wait and not self.meets(request):
            raise NotInTime("its objectives would be missed")
        if self.would_be_late and not request.may_wait:
            self.room += 1
        if not self.room or request.model in self.models_without:
            raise (NotInTime if request.may_wait and self.would_be_late else NoEndpoint)("all are busy")
        self.room -= 1
        return SchedulerAnswer(_SCHEDULER, request, [LLMInstance("one", HostPort("127.0.0.1", 9), request.model)])

    def release(self, placed: SchedulerAnswer) -> None:
        self.released.append(placed.request.id)

    async def close(self) -> None:
        return


class World:
    def __init__(self, loop: VirtualLoop, **settings: Any) -> None:
        self.loop, self.scheduler = loop, Scheduler()
        self.config = Config(**settings)
        backends = Backends((), None, Limits(0.5), {})  # type: ignore[arg-type]
        self.placement = Scheduled(self.config, backends, self.scheduler, loop.time)  # type: ignore[arg-type]
        self.placed: list[str] = []
        self.failed: dict[str, Exception] = {}

    async def place(self, request: Request, key: str = "") -> Placed | None:
        try:
            placed = await self.placement.place(request, key=key)
        except (NoInstance, Overloaded) as error:
            self.failed[request.id] = error
            return None
        self.placed.append(request.id)
        return placed

    def begin(self, *requests: Request, key: str = "") -> list[asyncio.Task[Placed | None]]:
        return [asyncio.create_task(self.place(request, key)) for request in requests]


def play(scenario: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    try:
        loop.run_until_complete(scenario)
    finally:
        loop.abandon()
        loop.close()


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


def test_earliest_deadline_goes_first(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        slow, none, fast, urgent = (
            Request("slow", ttft_slo_ms=4000),
            Request("none"),
            Request("fast", ttft_slo_ms=1000),
            Request("urgent", ttft_slo_ms=9000, priority=-1),
        )
        tasks = world.begin(slow, none, fast, urgent)
        await asyncio.sleep(0.35)
        assert not world.placed
        world.scheduler.room = 4
        await asyncio.gather(*tasks)
        assert world.placed == ["urgent", "fast", "slow", "none"]
        await world.placement.close()

    play(scenario(), loop)


def test_earlier_wait_counts(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        tasks = world.begin(Request("fresh", ttft_slo_ms=2000), Request("moved", ttft_slo_ms=3000, waited_ms=2000))
        await asyncio.sleep(0.35)
        world.scheduler.room = 2
        await asyncio.gather(*tasks)
        assert world.placed == ["moved", "fresh"]
        waited = [asked.waited_ms for asked in world.scheduler.asked if asked.id == "moved"]
        assert waited[0] == 2000
        assert waited[-1] == pytest.approx(2400, abs=60)
        await world.placement.close()

    play(scenario(), loop)


def test_late_request_waits_behind_punctual_ones(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        tasks = world.begin(Request("late", ttft_slo_ms=500))
        await asyncio.sleep(1)
        tasks += world.begin(Request("in time", ttft_slo_ms=5000))
        await asyncio.sleep(0.5)
        world.scheduler.room = 1
        await asyncio.sleep(0.2)
        assert world.placed == ["in time"]
        world.scheduler.room = 1
        await asyncio.gather(*tasks)
        assert world.placed == ["in time", "late"]
        await world.placement.close()

    play(scenario(), loop)


def test_a_newcomer_does_not_overtake(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        tasks = world.begin(Request("first"))
        await asyncio.sleep(0.45)
        tasks += world.begin(Request("second"))
        world.scheduler.room = 1  # of which the second would know first, if it asked by itself
        await asyncio.sleep(0.05)
        assert not world.placed
        await asyncio.sleep(0.1)
        assert world.placed == ["first"]
        world.scheduler.room = 1
        await asyncio.gather(*tasks)
        await world.placement.close()

    play(scenario(), loop)


def test_models_do_not_wait_for_each_other(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        world.scheduler.models_without = {"a"}
        world.scheduler.room = 1
        of_a = world.begin(*(Request(f"a{number}", "a") for number in range(20)))
        await asyncio.sleep(0.3)
        await asyncio.gather(*world.begin(Request("b", "b")))
        assert loop.time() < 0.35
        assert world.placed == ["b"]
        for one in of_a:
            one.cancel()
        await world.placement.close()

    play(scenario(), loop)


def test_however_many_wait_only_a_few_are_asked_for_in_a_round(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, max_queue_size=1000)
        tasks = world.begin(*(Request(f"{number}") for number in range(500)))
        await asyncio.sleep(0.5)
        before = len(world.scheduler.asked)
        await asyncio.sleep(1)
        assert 1 < len(world.scheduler.asked) - before <= (4 + 4) * 10, "ten rounds a second"
        assert world.placement.num_waiting == 500
        world.scheduler.room = 500
        await asyncio.gather(*tasks)
        assert len(world.placed) == 500
        assert not world.placement.num_waiting
        await world.placement.close()

    play(scenario(), loop)


def test_without_objectives_it_waits_for_the_usual_time_and_may_not_be_held(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, wait_scheduling_timeout_s=2.0)
        await world.place(Request("one"))
        assert isinstance(world.failed["one"], NoInstance)
        assert loop.time() == pytest.approx(2, abs=0.2)
        assert not any(asked.may_wait for asked in world.scheduler.asked)
        await world.placement.close()

    play(scenario(), loop)


def test_objectives_do_not_prolong_the_wait_for_an_instance_that_is_not_there(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, wait_scheduling_timeout_s=2.0)
        await world.place(Request("one", ttft_slo_ms=30_000))
        assert isinstance(world.failed["one"], NoInstance)
        assert loop.time() == pytest.approx(2, abs=0.2)
        await world.placement.close()

    play(scenario(), loop)


def test_long_late_request_is_placed_late(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, late_wait_s=7.0)
        world.scheduler.would_be_late = True
        await world.place(Request("one", ttft_slo_ms=1000))
        assert world.placed == ["one"]
        assert loop.time() == pytest.approx(7, abs=0.2)
        await world.placement.close()

    play(scenario(), loop)


def test_an_objective_beyond_that_is_waited_for(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, late_wait_s=7.0)
        world.scheduler.would_be_late = True
        await world.place(Request("one", ttft_slo_ms=20_000))
        assert loop.time() == pytest.approx(20, abs=0.2)
        await world.placement.close()

    play(scenario(), loop)


def test_below_the_priority_that_is_shed_it_is_refused_once_it_is_late(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, shed_priority=5)
        world.scheduler.would_be_late = True
        low, high = Request("low", ttft_slo_ms=1500, priority=5), Request("high", ttft_slo_ms=1500, priority=4)
        tasks = world.begin(low, high)
        await tasks[0]
        assert loop.time() == pytest.approx(1.5, abs=0.2)
        error = world.failed["low"]
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == pytest.approx(1.5, abs=0.2)
        await tasks[1]
        assert world.placed == ["high"]
        await world.placement.close()

    play(scenario(), loop)


def test_a_client_that_leaves_is_asked_for_no_more_and_its_place_is_given_back(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        (leaving,) = world.begin(Request("leaves"))
        await asyncio.sleep(0.25)
        world.scheduler.room = 1
        world.scheduler.is_asked.clear()
        await world.scheduler.is_asked.wait()
        leaving.cancel()  # while the scheduler places it
        await asyncio.sleep(0.01)
        assert world.scheduler.released == ["leaves"]
        asked = len(world.scheduler.asked)
        await asyncio.sleep(1)
        assert len(world.scheduler.asked) == asked
        assert not world.placement.num_waiting
        await world.placement.close()

    play(scenario(), loop)


def _impossible(number: int) -> list[Request]:
    """Requests with objectives that nobody meets, none of which needs as much as another."""
    return [
        Request(f"i{each}", prompt_num_tokens=each, ttft_slo_ms=600_000, tpot_slo_ms=1e-3 * (1 + each), priority=-1)
        for each in range(number)
    ]


@pytest.mark.parametrize("number", [4, 100])
@pytest.mark.parametrize("tpot_slo_ms", [0.0, 50.0])
def test_impossible_objectives_hold_up_nobody_else(loop: VirtualLoop, number: int, tpot_slo_ms: float) -> None:
    async def took_s(world: World) -> list[float]:
        took = []
        for each in range(50):
            began_s = loop.time()
            await asyncio.gather(*world.begin(Request(f"{tpot_slo_ms}-{each}", tpot_slo_ms=tpot_slo_ms)))
            took.append(loop.time() - began_s)
            await asyncio.sleep(0.03)
        return took

    async def scenario() -> None:
        world = World(loop)
        world.scheduler.room = 1000
        world.scheduler.meets = lambda request: request.tpot_slo_ms > 1
        before = await took_s(world)
        attack = world.begin(*_impossible(number))
        await asyncio.sleep(0.5)
        assert world.placement.num_waiting == number
        during = await took_s(world)
        assert max(during) <= 1.1 * max(before)
        for one in attack:
            one.cancel()
        await world.placement.close()

    play(scenario(), loop)


def test_request_behind_many_impossible_ones_is_asked_for(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        met_ms = [1e9]
        world.scheduler.meets = lambda request: request.tpot_slo_ms > met_ms[0]
        world.scheduler.room = 1000
        attack = world.begin(*_impossible(100))
        behind = world.begin(*(Request(f"{each}", tpot_slo_ms=50 + each) for each in range(3)))
        await asyncio.sleep(1)
        assert not world.placed
        met_ms[0] = 1
        began_s = loop.time()
        await asyncio.gather(*behind)
        assert loop.time() - began_s < 6, "turns of all that wait"
        for one in attack:
            one.cancel()
        await world.placement.close()

    play(scenario(), loop)


async def _time_of_newcomer(refused: Iterable[Waiting], newcomer: Waiting) -> tuple[bool, float]:
    """Whether it is held up by requests that nothing takes, and the time until it has a place, which is there."""
    clock = asyncio.get_running_loop().time

    async def place(waiting: Waiting) -> Placed:
        if waiting is not newcomer:
            raise NotInTime("late") if waiting.asked.has_objectives else NoEndpoint("all others are busy")
        return Placed(waiting.asked, _BACKEND)

    queues = Queues(place, lambda placed: None, 0.1, clock)
    tasks = [asyncio.create_task(queues.wait(one)) for one in refused]
    await asyncio.sleep(0.15)
    is_held_up, began_s = queues.holds_up(newcomer), clock()
    await queues.wait(newcomer)
    took_s = clock() - began_s
    for task in tasks:
        task.cancel()
    await queues.close()
    return is_held_up, took_s


def _waiting(asked: Request, excluded: Collection[Backend] = (), shunned: Collection[Backend] = ()) -> Waiting:
    now_s = asyncio.get_running_loop().time()
    return Waiting(asked, excluded, shunned, now_s, now_s + 60, in_time_until_s=now_s + 60)


@pytest.mark.parametrize("closed", [{"excluded": {_BACKEND}}, {"shunned": {_BACKEND}}], ids=["excluded", "shunned"])
def test_retried_requests_do_not_hold_up_one_that_may_use_the_instance_they_left(
    loop: VirtualLoop, closed: dict[str, Collection[Backend]]
) -> None:
    async def scenario() -> None:
        refused = [_waiting(Request(f"{each}", "m", 100), **closed) for each in range(4)]
        is_held_up, took_s = await _time_of_newcomer(refused, _waiting(Request("newcomer", "m", 100, priority=1)))
        assert not is_held_up
        assert took_s < 0.2, "two rounds"

    play(scenario(), loop)


def test_late_prompts_do_not_hold_up_one_that_may_be_in_a_cache(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        def asked(name: str, num_tokens: int, first: bytes) -> Waiting:
            blocks = first * 8 + bytes(8 * (num_tokens // 16 - 1))
            return _waiting(Request(name, "m", num_tokens, 0, 3000.0, prompt_blocks=blocks, prompt_block_size=16))

        refused = [asked(f"{each}", 1024, b"%d" % each) for each in range(4)]
        is_held_up, took_s = await _time_of_newcomer(refused, asked("cached", 1200, b"c"))
        assert not is_held_up
        assert took_s < 0.2, "two rounds"

    play(scenario(), loop)


def test_request_that_four_refusals_speak_against_is_asked_for_in_the_same_round(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        refused = [_waiting(Request(f"{each}", "m", 100)) for each in range(4)]
        is_held_up, took_s = await _time_of_newcomer(refused, _waiting(Request("newcomer", "m", 100, priority=1)))
        assert is_held_up
        assert took_s < 0.2, "two rounds"

    play(scenario(), loop)


def test_keys_have_equal_shares_of_a_queue_by_tokens(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, max_queue_size=1000, wait_scheduling_timeout_s=3600.0)
        many = world.begin(*(Request(f"many {each}", prompt_num_tokens=1000) for each in range(100)), key="many")
        many += world.begin(*(Request(f"long {each}", prompt_num_tokens=2064) for each in range(100)), key="long")
        await asyncio.sleep(0.5)
        few = world.begin(*(Request(f"few {each}", prompt_num_tokens=1000) for each in range(20)), key="few")
        await asyncio.sleep(0.5)
        for _ in range(25):
            world.scheduler.room = 2
            await asyncio.sleep(0.2)
        assert Counter(name.split()[0] for name in world.placed) == {"many": 20, "few": 20, "long": 10}
        for one in many + few:
            one.cancel()
        await world.placement.close()

    play(scenario(), loop)


def test_full_queue_makes_room_for_a_key_with_less_in_it(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop, max_queue_size=10, wait_scheduling_timeout_s=3600.0)
        many = world.begin(*(Request(f"many {each}") for each in range(12)), key="many")
        await asyncio.sleep(0.5)
        assert len(world.failed) == 2, "a key with others makes no room for itself"
        others = world.begin(*(Request(f"other {each}") for each in range(7)), key="other")
        await asyncio.sleep(0.5)
        assert all(isinstance(error, Overloaded) for error in world.failed.values())
        assert world.placement.num_waiting == 10
        assert sum(name.startswith("many") for name in world.failed) == 7
        for one in many + others:
            one.cancel()
        await world.placement.close()

    play(scenario(), loop)


def test_low_priority_is_placed_before_its_wait_ends(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        world = World(loop)
        (low,) = world.begin(Request("low", priority=9))
        await asyncio.sleep(0.05)
        high: list[asyncio.Task[Placed | None]] = []
        for each in range(100):
            high += world.begin(*(Request(f"{each}-{number}") for number in range(3)))
            world.scheduler.room = 1
            await asyncio.sleep(0.1)
        assert low.done()
        assert "low" in world.placed
        assert world.placed.index("low") > 20, "priority counts for most of the time"
        for one in high:
            one.cancel()
        await world.placement.close()

    play(scenario(), loop)
