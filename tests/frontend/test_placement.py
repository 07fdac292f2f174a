# SPDX-License-Identifier: Apache-2.0
"""How the requests of a lost engine are spread."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from vllm_llumnix.frontend.placement import IN_FLIGHT, SENT_SECONDS, SHUN_SECONDS, Placement

ENGINES = [f"10.0.0.{number}:7000" for number in range(8)]
TOKENS = 1000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def spread(placement: Placement, num_requests: int, room: dict[str, int], prefix: str = "r") -> Counter[str]:
    """Who gets how many of requests that all come at once; each takes a while."""
    took: Counter[str] = Counter()

    async def place(request_id: str) -> None:
        address = placement.choose(request_id, TOKENS, ENGINES, room)
        async with placement.turn(address, TOKENS) as turn:
            await asyncio.sleep(0)
            took[address] += 1
            turn.taken = True

    await asyncio.gather(*(place(f"{prefix}-{number}") for number in range(num_requests)))
    return took


@pytest.mark.asyncio
async def test_nothing_is_known() -> None:
    took = await spread(Placement(), 300, {})
    assert max(took.values()) <= 1.2 * 300 / 8
    assert len(took) == 8


@pytest.mark.asyncio
async def test_each_gets_what_it_has_room_for() -> None:
    room = dict(zip(ENGINES, (1, 1, 1, 1, 2, 2, 4, 4), strict=True))
    took = await spread(Placement(), 320, {address: 100_000 * parts for address, parts in room.items()})
    for address, parts in room.items():
        assert took[address] == pytest.approx(20 * parts, abs=4)


@pytest.mark.asyncio
async def test_of_whom_nothing_is_known_has_the_usual_room() -> None:
    took = await spread(Placement(), 320, dict.fromkeys(ENGINES[:4], 100_000))
    assert all(count == pytest.approx(40, abs=4) for count in took.values())


@pytest.mark.asyncio
async def test_api_servers_that_have_one_stream_each() -> None:
    """None knows of the others. They do not all ask the engine with the most room, and the fuller one less often."""
    room = dict.fromkeys(ENGINES, 100_000) | {ENGINES[0]: 110_000, ENGINES[7]: 10_000}
    took: Counter[str] = Counter()
    for number in range(400):
        took += await spread(Placement(), 1, room, prefix=f"server-{number}")
    assert max(took.values()) < 2 * 400 / 8
    assert took[ENGINES[7]] < 20


@pytest.mark.asyncio
async def test_what_was_sent_counts_for_a_while() -> None:
    clock = Clock()
    placement = Placement(clock)
    first = placement.choose("r", TOKENS, ENGINES, {})
    async with placement.turn(first, 100 * TOKENS) as turn:
        turn.taken = True
    assert placement.choose("r", TOKENS, ENGINES, {}) != first
    clock.now += SENT_SECONDS + 1
    assert placement.choose("r", TOKENS, ENGINES, {}) == first
    async with placement.turn(first, 100 * TOKENS):
        assert placement.choose("r", TOKENS, ENGINES, {}) != first
    assert placement.choose("r", TOKENS, ENGINES, {}) == first, "it has not taken that one"


@pytest.mark.asyncio
async def test_a_few_at_a_time_and_who_waits_chooses_again_when_they_fail() -> None:
    clock = Clock()
    placement = Placement(clock)
    going = asyncio.Event()
    num_going = num_stale = 0

    async def go() -> None:
        nonlocal num_going, num_stale
        async with placement.turn(ENGINES[0], TOKENS) as turn:
            if turn.is_stale:
                num_stale += 1
                return
            num_going += 1
            await going.wait()
            turn.shun()

    tasks = [asyncio.create_task(go()) for _ in range(3 * IN_FLIGHT)]
    await asyncio.sleep(0.01)
    assert num_going == IN_FLIGHT
    clock.now += 1
    going.set()
    await asyncio.gather(*tasks)
    assert (num_going, num_stale) == (IN_FLIGHT, 2 * IN_FLIGHT)
    chosen = lambda: {placement.choose(f"r-{number}", TOKENS, ENGINES[:2], {}) for number in range(50)}  # noqa: E731
    assert chosen() == {ENGINES[1]}
    clock.now += SHUN_SECONDS
    assert chosen() == set(ENGINES[:2])
