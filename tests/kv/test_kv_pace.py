# SPDX-License-Identifier: Apache-2.0
"""The rate limit, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_llumnix.kv.mover.pace import (
    CHUNK_BYTES,
    MEASURED_BYTES,
    MEASURED_CHUNKS,
    MEASURED_FOR_SECONDS,
    SMALLEST_CHUNK_BYTES,
    Pace,
)
from vllm_llumnix.kv.settings import Limit

ENOUGH = MEASURED_BYTES * MEASURED_CHUNKS // (MEASURED_CHUNKS - 1)
"""Of a pull whose first chunk does not count."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def transfer(pace: Pace, clock: Clock, num_bytes: int, copy_bytes_per_s: float = 5e9) -> float:
    """Seconds that a transfer takes when copying itself runs at `copy_bytes_per_s`."""
    began = clock.now
    for _ in chunks(pace, clock, num_bytes, [copy_bytes_per_s]):
        pass
    return clock.now - began


def chunks(pace: Pace, clock: Clock, num_bytes: int, copy_bytes_per_s: list[float]) -> Iterator[int]:
    """The sizes of a pull's chunks; how fast they come can be changed in between."""
    pull, left = pace.begin(num_bytes), num_bytes
    while left:
        chunk = min(left, pull.chunk_bytes())
        started = clock.now
        clock.now += chunk / copy_bytes_per_s[0]
        pull.spend(chunk, started)
        clock.now += pace.delay()
        left -= chunk
        yield chunk


@pytest.mark.parametrize("num_bytes", [1, 4096, 1 << 20, 224 << 20])
@pytest.mark.parametrize("rate", [1e6, 0.5e9, 3e9])
def test_a_transfer_takes_its_time_on_the_link(num_bytes: int, rate: float) -> None:
    clock = Clock()
    assert transfer(Pace(Limit(bytes_per_s=rate), clock), clock, num_bytes) == pytest.approx(num_bytes / rate, abs=1e-9)


def test_an_idle_link_saves_nothing_up() -> None:
    clock = Clock()
    pace = Pace(Limit(bytes_per_s=1e9), clock)
    transfer(pace, clock, 10_000_000)
    clock.now += 60
    assert transfer(pace, clock, 10_000_000) == pytest.approx(0.01)


def test_a_slow_copy_is_not_slowed_down() -> None:
    clock = Clock()
    assert transfer(Pace(Limit(bytes_per_s=1e9), clock), clock, 1 << 24, 0.5e9) == pytest.approx((1 << 24) / 0.5e9)


def test_chunks_follow_the_rate() -> None:
    assert Pace().begin(1 << 30).chunk_bytes() == CHUNK_BYTES
    for rate, size in ((1e12, CHUNK_BYTES), (1e9, 2_000_000), (1.0, SMALLEST_CHUNK_BYTES)):
        assert Pace(Limit(bytes_per_s=rate)).begin(1 << 30).chunk_bytes() == size


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_is_one_of_what_the_link_gives(share: float) -> None:
    clock = Clock()
    pace = Pace(Limit(share=share), clock)
    for link in (5e9, 1e9):
        assert transfer(pace, clock, ENOUGH, link) == pytest.approx(ENOUGH / link)
        for _ in range(3):
            assert transfer(pace, clock, 10_000_000, link) == pytest.approx(10_000_000 / (share * link), rel=0.01)
        clock.now += MEASURED_FOR_SECONDS


def test_small_transfers_measure_together() -> None:
    clock = Clock()
    pace = Pace(Limit(share=0.5), clock)
    for _ in range(ENOUGH >> 20):
        assert transfer(pace, clock, 1 << 20, 1e9) == pytest.approx((1 << 20) / 1e9)
    transfer(pace, clock, 1 << 20, 1e9)
    assert pace.bytes_per_s == pytest.approx(0.5e9)


def test_the_way_to_a_peer_is_not_the_link() -> None:
    """What it takes to connect and to be answered, and what has come meanwhile, says nothing of the link."""
    clock = Clock()
    for first in (1e6, 1e12):
        pace, speed = Pace(Limit(share=0.5), clock), [first]
        for _ in chunks(pace, clock, 2 * ENOUGH, speed):
            speed[0] = 1e9
        assert pace.bytes_per_s == pytest.approx(0.5e9)


def test_a_pull_under_a_limit_measures_nothing() -> None:
    """What it has not fetched in time lies in the buffers of its connections, and comes at the speed of memory."""
    clock = Clock()
    pace = Pace(Limit(share=0.5), clock)
    transfer(pace, clock, ENOUGH, 1e9)
    late = chunks(pace, clock, 4 * ENOUGH, [1e12])
    next(late)
    clock.now += MEASURED_FOR_SECONDS
    began = clock.now
    copied = sum(late)
    assert clock.now - began == pytest.approx(copied / 0.5e9, rel=0.01)
    assert pace.bytes_per_s == pytest.approx(0.5e9)
    transfer(pace, clock, ENOUGH, 2e9)
    assert pace.bytes_per_s == pytest.approx(1e9)


@pytest.mark.parametrize("limit", [{"bytes_per_s": 0}, {"bytes_per_s": -1.0}, {"bytes_per_s": float("nan")},
                                   {"share": 0}, {"share": 1.1}, {"share": float("nan")}])  # fmt: skip
def test_impossible_limits(limit: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a limit of"):
        Pace(Limit(**limit))


def test_workers_share_a_rate() -> None:
    assert Limit(bytes_per_s=8.0).of_one_in(4) == Limit(bytes_per_s=2.0)
    assert Limit(share=0.2).of_one_in(4) == Limit(share=0.2)
