# SPDX-License-Identifier: Apache-2.0
"""The index says what a set of names for each instance would say, or less where it says that it left something out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llumsched.prefix.index import Names, PrefixIndex


def names_of(*numbers: int) -> Names:
    """As hashes are: any bits."""
    return np.array([random.Random(number).randrange(1, 1 << 64) for number in numbers], np.uint64)


class Sets:
    """The same with Python's sets."""

    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {}

    def depth(self, number: int, chain: list[int]) -> int:
        depth = 0
        while depth < len(chain) and chain[depth] in self.held[number]:
            depth += 1
        return depth


@pytest.mark.parametrize("seed", range(8))
def test_any_history_of_any_instances(seed: int) -> None:
    draw = random.Random(seed)
    index, sets = PrefixIndex(4096), Sets()
    for _ in range(300):
        kind = draw.random()
        if not sets.held or kind < 0.15:
            number = index.join()
            assert number not in sets.held
            sets.held[number] = set()
        elif kind < 0.2:
            number = draw.choice(list(sets.held))
            index.forget(number)
            del sets.held[number]
        else:
            number = draw.choice(list(sets.held))
            first = draw.randrange(0, 60)
            block = list(range(first, first + draw.randrange(1, 40)))
            if kind < 0.7:
                index.store(number, names_of(*block))
                sets.held[number] |= set(block)
            else:
                index.remove(number, names_of(*block))
                sets.held[number] -= set(block)
        first = draw.randrange(0, 50)
        chain = list(range(first, first + draw.randrange(1, 50)))
        depths = index.depths(names_of(*chain))
        assert {number: depths[number] for number in sets.held} == {
            number: sets.depth(number, chain) for number in sets.held
        }
    assert not index.num_left_out
    for number in list(sets.held):
        index.remove(number, names_of(*range(100)))
    index._sweep()
    assert len(index) == 0
    assert len(index._free_rows) == len(index._bits) - 1, "every row is free again"


def test_shares_are_of_all_that_one_holds() -> None:
    index = PrefixIndex(1000)
    one, other, third = index.join(), index.join(), index.join()
    index.store(one, names_of(*range(8)))
    index.store(other, names_of(*range(4, 20)))
    index.store(third, names_of(4))
    index.store(one, names_of(*range(8)))
    assert [index.shares(one)[number] for number in (other, third)] == [0.5, 0.125]
    assert [index.shares(other)[number] for number in (one, third)] == [0.25, 0.0625]
    index.remove(one, names_of(0, 1, 4, 50))
    assert [index.shares(one)[number] for number in (other, third)] == [0.6, 0.0]
    index.forget(one)
    index._sweep()
    again = index.join()
    assert not index.shares(again).any()
    index.store(again, names_of(5, 100))
    assert index.shares(again)[other] == 0.5


def test_numbers_are_given_again_only_when_nothing_is_left_of_them() -> None:
    index = PrefixIndex(1000)
    for _ in range(500):
        number = index.join()
        assert not index.depths(names_of(1, 2))[number]
        index.store(number, names_of(1, 2))
        assert index.depths(names_of(1, 2))[number] == 2
        index.forget(number)
    assert index._numbers < 100
    assert len(index) <= 2


def test_a_full_index_leaves_out_and_says_so_and_makes_nothing_up() -> None:
    index = PrefixIndex(1000)
    number = index.join()
    draw = np.random.default_rng(1)
    names = draw.integers(1, 1 << 64, 1000, np.uint64)
    index.store(number, names)
    assert len(index) + index.num_left_out == 1000
    assert index.num_left_out < 5, "nearly as many as it has room for"
    more = draw.integers(1, 1 << 64, 4000, np.uint64)
    before = index.num_bytes
    index.store(number, more)
    assert index.num_bytes == before
    assert len(index) + index.num_left_out == 5000
    names = names[index._find(names)[2]]
    other = index.join()
    assert not index.depths(names[:10])[other]
    index.remove(number, np.concatenate([names, more]))
    assert len(index) == 0
    index.store(number, names)
    assert index.depths(names[:10])[number] == 10


def test_blocks_of_gone_instances_make_room() -> None:
    index = PrefixIndex(1000)
    draw = np.random.default_rng(4)
    for _ in range(20):
        number, names = index.join(), draw.integers(1, 1 << 64, 700, np.uint64)
        assert index.store(number, names) == 700
        assert index.depths(names)[number] == 700
        index.forget(number)
    assert not index.num_left_out


def test_rows_of_bits_are_bounded_too() -> None:
    index = PrefixIndex(1000)
    one, other, third = index.join(), index.join(), index.join()
    for _ in range(200):
        index.join()
    names = np.random.default_rng(2).integers(1, 1 << 64, 1000, np.uint64)
    for number in (one, other, third):
        index.store(number, names)
    assert index._bits.nbytes <= index._most_row_bytes
    depths = index.depths(names)
    assert depths[one] == 1000
    assert index.num_left_out
    assert sum(index._holders[index._names != 0] < 0) == len(index._bits) - 1
    assert max(depths[other], depths[third]) < 1000


def test_nothing_is_held_of_nothing() -> None:
    index = PrefixIndex(10)
    number = index.join()
    index.store(number, names_of())
    index.remove(number, names_of())
    index.store(number, np.zeros(3, np.uint64))
    assert not index.depths(names_of()).any()
    assert not index.depths(np.zeros(3, np.uint64)).any()
