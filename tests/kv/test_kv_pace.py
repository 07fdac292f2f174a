# SPDX-License-Identifier: Apache-2.0
"""The rate limit, on a clock of its own."""

from __future__ import annotations

import pytest

from vllm_llumnix.kv.pace import CHUNK_BYTES, SMALLEST_CHUNK_BYTES, Pace


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
    assert transfer(Pace(rate, clock), clock, num_bytes) == pytest.approx(num_bytes / rate, abs=1e-9)


def test_an_idle_link_saves_nothing_up() -> None:
    clock = Clock()
    pace = Pace(1e9, clock)
    transfer(pace, clock, 10_000_000)
    clock.now += 60
    assert transfer(pace, clock, 10_000_000) == pytest.approx(0.01)


def test_a_slow_copy_is_not_slowed_down() -> None:
    clock = Clock()
    assert transfer(Pace(1e9, clock), clock, 1 << 24, 0.5e9) == pytest.approx((1 << 24) / 0.5e9)


def test_the_rate_may_change_while_the_link_is_busy() -> None:
    clock = Clock()
    pace = Pace(1e6, clock)
    pace.spend(1_000_000, clock.now)
    pace.bytes_per_s = None
    assert pace.delay() == pytest.approx(1.0)
    clock.now += 1
    assert pace.delay() == 0
    assert transfer(pace, clock, 1 << 24) == pytest.approx((1 << 24) / 5e9)


def test_chunks_follow_the_rate() -> None:
    assert Pace(None).chunk_bytes() == CHUNK_BYTES
    assert Pace(1e12).chunk_bytes() == CHUNK_BYTES
    assert Pace(1e9).chunk_bytes() == 2_000_000
    assert Pace(1.0).chunk_bytes() == SMALLEST_CHUNK_BYTES


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(ValueError, match="a rate of"):
        Pace(rate)
