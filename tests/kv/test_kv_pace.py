# SPDX-License-Identifier: Apache-2.0
"""The rate limit, on a clock of its own."""

from __future__ import annotations

import pytest

from vllm_llumnix.kv.pace import CHUNK_BYTES, MEASURED_BYTES, MEASURED_FOR_SECONDS, SMALLEST_CHUNK_BYTES, Pace
from vllm_llumnix.kv.settings import Limit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def transfer(pace: Pace, clock: Clock, num_bytes: int, copy_bytes_per_s: float = 5e9) -> float:
    """Seconds that a transfer takes when copying itself runs at `copy_bytes_per_s`."""
    began, left = clock.now, num_bytes
    while left:
        chunk = min(left, pace.chunk_bytes())
        started = clock.now
        clock.now += chunk / copy_bytes_per_s
        pace.spend(chunk, started)
        clock.now += pace.delay()
        left -= chunk
    return clock.now - began


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
    assert Pace().chunk_bytes() == CHUNK_BYTES
    for rate, size in ((1e12, CHUNK_BYTES), (1e9, 2_000_000), (1.0, SMALLEST_CHUNK_BYTES)):
        assert Pace(Limit(bytes_per_s=rate)).chunk_bytes() == size


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_is_one_of_what_the_link_gives(share: float) -> None:
    clock = Clock()
    pace = Pace(Limit(share=share), clock)
    for link in (5e9, 1e9):
        assert transfer(pace, clock, MEASURED_BYTES, link) == pytest.approx(MEASURED_BYTES / link)
        for _ in range(3):
            assert transfer(pace, clock, 10_000_000, link) == pytest.approx(10_000_000 / (share * link), rel=0.01)
        clock.now += MEASURED_FOR_SECONDS


def test_small_transfers_measure_together() -> None:
    clock = Clock()
    pace = Pace(Limit(share=0.5), clock)
    for _ in range(MEASURED_BYTES >> 20):
        assert transfer(pace, clock, 1 << 20, 1e9) == pytest.approx((1 << 20) / 1e9)
    assert pace.bytes_per_s == pytest.approx(0.5e9)


@pytest.mark.parametrize("limit", [{"bytes_per_s": 0}, {"bytes_per_s": -1.0}, {"bytes_per_s": float("nan")},
                                   {"share": 0}, {"share": 1.1}, {"share": float("nan")}])  # fmt: skip
def test_impossible_limits(limit: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a limit of"):
        Pace(Limit(**limit))


def test_workers_share_a_rate() -> None:
    assert Limit(bytes_per_s=8.0).of_one_in(4) == Limit(bytes_per_s=2.0)
    assert Limit(share=0.2).of_one_in(4) == Limit(share=0.2)
