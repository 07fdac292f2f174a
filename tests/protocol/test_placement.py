# SPDX-License-Identifier: Apache-2.0
"""How the requests of a lost engine are spread."""

from __future__ import annotations

from collections import Counter

import pytest

from llumlet.protocol.origin.placement import IN_FLIGHT, SENT_SECONDS, SHUN_SECONDS, Placement

ENGINES = [f"10.0.0.{number}:7000" for number in range(8)]
TOKENS = 1000
NOW = 100.0


def spread(placement: Placement, num_requests: int, room: dict[str, int], prefix: str = "r") -> Counter[str]:
    """Who gets how many of requests that all come at once; each takes a while."""
    took: Counter[str] = Counter()
    for number in range(num_requests):
        request_id = f"{prefix}-{number}"
        address = placement.choose(request_id, TOKENS, ENGINES, room, NOW)
        placement.enter(request_id, address, TOKENS, NOW)
    while going := placement.come():
        for request_id in going:
            took[placement.address_of(request_id)] += 1
            placement.leave(request_id, taken=True, now=NOW)
    assert took.total() == num_requests
    return took


def test_nothing_is_known() -> None:
    took = spread(Placement(), 300, {})
    assert max(took.values()) <= 1.2 * 300 / 8
    assert len(took) == 8


def test_each_gets_what_it_has_room_for() -> None:
    room = dict(zip(ENGINES, (1, 1, 1, 1, 2, 2, 4, 4), strict=True))
    took = spread(Placement(), 320, {address: 100_000 * parts for address, parts in room.items()})
    for address, parts in room.items():
        assert took[address] == pytest.approx(20 * parts, abs=4)


def test_of_whom_nothing_is_known_has_the_usual_room() -> None:
    took = spread(Placement(), 320, dict.fromkeys(ENGINES[:4], 100_000))
    assert all(count == pytest.approx(40, abs=4) for count in took.values())


def test_api_servers_that_have_one_stream_each() -> None:
    """None knows of the others. They do not all ask the engine with the most room, and the fuller one less often."""
    room = dict.fromkeys(ENGINES, 100_000) | {ENGINES[0]: 110_000, ENGINES[7]: 10_000}
    took: Counter[str] = Counter()
    for number in range(400):
        took += spread(Placement(), 1, room, prefix=f"server-{number}")
    assert max(took.values()) < 2 * 400 / 8
    assert took[ENGINES[7]] < 20


def test_sent_requests_count_for_a_while() -> None:
    placement = Placement()

    def chosen(now: float) -> str:
        return placement.choose("r", TOKENS, ENGINES, {}, now)

    first = chosen(NOW)
    placement.enter("large", first, 100 * TOKENS, NOW)
    placement.leave("large", taken=True, now=NOW)
    assert chosen(NOW) != first
    later = NOW + SENT_SECONDS + 1
    assert chosen(later) == first
    placement.enter("large", first, 100 * TOKENS, later)
    assert chosen(later) != first
    placement.leave("large", taken=False, now=later)
    assert chosen(later) == first, "it has not taken that one"


def test_a_few_at_a_time_and_who_waits_chooses_again_when_they_fail() -> None:
    placement = Placement()
    names = [f"r-{number}" for number in range(3 * IN_FLIGHT)]
    for name in names:
        placement.enter(name, ENGINES[0], TOKENS, NOW)
    going = placement.come()
    assert going == names[:IN_FLIGHT]
    assert not any(placement.is_stale(name) for name in going)
    placement.shun(ENGINES[0], NOW + 1)
    for name in going:
        placement.leave(name, taken=False, now=NOW + 1)
    later = placement.come()
    assert later == names[IN_FLIGHT : 2 * IN_FLIGHT], "the first comers first"
    assert all(placement.is_stale(name) for name in later)
    for name in names[IN_FLIGHT:]:
        placement.leave(name, taken=False, now=NOW + 1)

    def chosen(now: float) -> set[str]:
        return {placement.choose(f"s-{number}", TOKENS, ENGINES[:2], {}, now) for number in range(50)}

    assert chosen(NOW + 1) == {ENGINES[1]}
    assert chosen(NOW + 1 + SHUN_SECONDS) == set(ENGINES[:2])


def test_request_that_left_the_queue_is_not_admitted() -> None:
    placement = Placement()
    names = [f"r-{number}" for number in range(IN_FLIGHT + 2)]
    for name in names:
        placement.enter(name, ENGINES[0], TOKENS, NOW)
    assert len(placement.come()) == IN_FLIGHT
    placement.leave(names[IN_FLIGHT], taken=False, now=NOW)
    assert placement.come() == []
    placement.leave(names[0], taken=True, now=NOW)
    assert placement.come() == [names[-1]]


def test_cached_prefix_is_preferred_while_it_outweighs_the_sent_surplus() -> None:
    placement = Placement()
    cached = {ENGINES[3]: 700, ENGINES[5]: 300}
    sent: Counter[str] = Counter()
    for number in range(16):
        address = placement.choose(f"r-{number}", TOKENS, ENGINES, {}, NOW, cached)
        if number == 0:
            assert address == ENGINES[3], "whatever the hash says"
        placement.enter(f"r-{number}", address, TOKENS, NOW)
        sent[address] += 1
    assert 2 <= sent[ENGINES[3]] <= 4, f"what all begin with is computed elsewhere rather than waited for: {sent}"
    assert len(sent) >= 6


def test_a_cache_is_no_reason_to_go_where_there_is_no_room_or_nobody_is_taken() -> None:
    placement = Placement()
    cached = {ENGINES[3]: 900}

    def chosen(room: dict[str, int], now: float = NOW) -> set[str]:
        return {placement.choose(f"r-{number}", TOKENS, ENGINES, room, now, cached) for number in range(50)}

    assert chosen({}) == chosen(dict.fromkeys(ENGINES, TOKENS)) == {ENGINES[3]}
    assert len(chosen(dict.fromkeys(ENGINES, 100 * TOKENS) | {ENGINES[3]: TOKENS - 1})) > 4
    placement.shun(ENGINES[3], NOW)
    assert ENGINES[3] not in chosen({})
    assert chosen({}, NOW + SHUN_SECONDS) == {ENGINES[3]}


def test_the_first_by_rank_is_who_is_chosen() -> None:
    placement = Placement()
    for number in range(20):
        asked = f"r-{number}", TOKENS, ENGINES, {ENGINES[0]: 5 * TOKENS}, NOW
        ranked = placement.ranked(*asked)
        assert sorted(ranked) == sorted(ENGINES)
        assert placement.choose(*asked) == placement.choose(*asked, {ranked[5]: 0}) == ranked[0]
