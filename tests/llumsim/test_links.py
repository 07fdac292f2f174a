# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio

import pytest

from llumsim import PS
from llumsim.clock import VirtualLoop
from llumsim.moves.links import Network

SPEED = 1e9


def arrivals(*transfers: tuple[float, str, str, float], cancel_s: float | None = None) -> list[float]:
    """When each is there, in seconds; 0 if never. Of each: when it begins, from, to, gigabytes. `cancel_s`: when the
    first one is cancelled."""
    loop = VirtualLoop()
    network = Network(loop)
    done = [0.0] * len(transfers)

    async def main() -> None:
        begun = []

        def begin(number: int, source: str, destination: str, size: float) -> None:
            def arrived(now_ps: int) -> None:
                done[number] = now_ps / PS

            begun.append(network.transfer(source, destination, int(size * 1e9), SPEED, arrived))

        for number, (at_s, *rest) in enumerate(transfers):
            loop.at(round(at_s * PS), lambda _, number=number, rest=rest: begin(number, *rest))
        if cancel_s is not None:
            loop.at(round(cancel_s * PS), lambda _: network.cancel(begun[0]))
        await asyncio.sleep(1000)

    loop.run_until_complete(main())
    loop.close()
    return done


def test_lone_transfer_has_the_whole_link() -> None:
    assert arrivals((1, "a", "b", 3)) == pytest.approx([4])


def test_transfers_share_the_speed_of_a_common_end() -> None:
    assert arrivals((0, "a", "b", 1), (0, "a", "c", 2)) == pytest.approx([2, 3])
    assert arrivals((0, "a", "c", 1), (0, "b", "c", 2)) == pytest.approx([2, 3])


def test_later_copy_slows_earlier_ones() -> None:
    assert arrivals((0, "a", "b", 2), (1, "a", "c", 1)) == pytest.approx([3, 3])


def test_directions_and_other_nodes_do_not_share() -> None:
    assert arrivals((0, "a", "b", 1), (0, "b", "a", 1), (0, "c", "d", 1)) == pytest.approx([1, 1, 1])


def test_transfer_within_a_node_does_not_use_the_network() -> None:
    assert arrivals((0, "a", "a", 1), (0, "a", "b", 1)) == pytest.approx([1, 1])
    assert arrivals((0, "a", "a", 1), (0, "a", "a", 1)) == pytest.approx([2, 2])


def test_cancelled_transfer_never_arrives_and_frees_its_share() -> None:
    assert arrivals((0, "a", "b", 5), (0, "a", "c", 2), cancel_s=1) == pytest.approx([0, 2.5])
    assert arrivals((0, "a", "b", 1), cancel_s=2) == pytest.approx([1])
