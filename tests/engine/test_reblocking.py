# SPDX-License-Identifier: Apache-2.0
"""Requests that move between engines of different block sizes: which bytes go where, and in what rows both count."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llumlet.protocol.errors import Reason, Refused
from tests.engine.test_cuts import copy as copy_pieces
from tests.kv.fakes import Memory
from vllm_llumnix.engine.blocks.block_rows import BlockRows
from vllm_llumnix.engine.blocks.reblocking import Pairing, rows_between, rows_of_move
from vllm_llumnix.kv.memory.layout import WHOLE, Cut, Strip

HEADS, SIZE, LAYERS, NUM_BLOCKS = 2, 3, 2, 60
"""Heads, and bytes of a key, and of a value."""

Vectors = npt.NDArray[np.uint8]
"""[layers, heads, tokens, 2 (key, value), size]"""


def by_token(page: npt.NDArray[np.uint8], tokens: int) -> Vectors:
    return page.reshape(tokens, HEADS, 2, SIZE).swapaxes(0, 1)


def by_head(page: npt.NDArray[np.uint8], tokens: int) -> Vectors:
    return page.reshape(HEADS, tokens, 2, SIZE)


def with_keys_transposed(page: npt.NDArray[np.uint8], tokens: int) -> Vectors:
    keys = page.reshape(HEADS, 2, -1)[:, 0].reshape(HEADS, SIZE, tokens).swapaxes(1, 2)
    values = page.reshape(HEADS, 2, -1)[:, 1].reshape(HEADS, tokens, SIZE)
    return np.stack([keys, values], axis=2)


Arrangement = tuple[str, tuple[Strip, ...], Callable[[npt.NDArray[np.uint8], int], Vectors]]
ARRANGEMENTS: dict[str, Arrangement] = {
    "NHC": ("LBNHC", (Strip(1, HEADS * 2 * SIZE),), by_token),
    "HNC": ("BLHNC", (Strip(1, 2 * SIZE),), by_head),
    "a CPU's": ("LBHNC", (Strip(SIZE, 1), Strip(1, SIZE)), with_keys_transposed),
}


def rows(size: int, groups: int = 1, num_states: int = 0) -> BlockRows:
    made = BlockRows.__new__(BlockRows)
    made.size, made.width = size, groups
    made._sizes, made._states = dict.fromkeys(range(groups), size), dict.fromkeys(range(num_states))  # type: ignore[arg-type]
    made._seen = {}
    return made


def with_window(of: BlockRows) -> BlockRows:
    of._seen = {1: 64}
    return of


def memory(arrangement: Arrangement, tokens: int, seed: int) -> Memory:
    layout, strips, _ = arrangement
    made = Memory(
        layout, [(LAYERS, HEADS * tokens * 2 * SIZE)], num_blocks=NUM_BLOCKS, seed=seed, heads=HEADS, tokens=tokens
    )
    made.blocks = msgspec.structs.replace(made.blocks, strips=strips)
    return made


def content(of: Memory, block_ids: Sequence[int], read: Callable[..., Vectors]) -> Vectors:
    pages = [[np.frombuffer(page, np.uint8) for page in of.block(block)] for block in block_ids]
    return np.concatenate([np.stack([read(page, of.tokens) for page in layers]) for layers in pages], axis=2)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(ARRANGEMENTS)),
    st.sampled_from([(2, 4), (4, 2), (4, 6), (6, 4), (3, 2), (8, 1), (4, 4)]),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_every_token_arrives_in_its_place(name: str, sizes: tuple[int, int], num_tokens: int, random: Any) -> None:
    arrangement = ARRANGEMENTS[name]
    source, destination = (memory(arrangement, size, seed) for seed, size in enumerate(sizes))
    theirs, ours = sizes
    between = rows_between(rows(ours), theirs)
    assert between is not None
    pairing = Pairing(rows(ours), between, theirs)
    num_rows = between.rows_of(num_tokens)
    there, here = (random.sample(range(1, NUM_BLOCKS), -(-num_tokens // size)) for size in sizes)
    padded = there + [0] * (num_rows * pairing.their_width - len(there))
    at_source = [padded[at : at + pairing.their_width] for at in range(0, len(padded), pairing.their_width)]
    held = here + [0] * (num_rows * pairing.our_width - len(here))
    expected = content(source, there, arrangement[2])[:, :, :num_tokens]
    untouched = [block for block in range(NUM_BLOCKS) if block not in here]
    before = content(destination, untouched, arrangement[2])
    for cuts, pairs in pairing.pairs(at_source, held).items():
        copy_pieces(source, [pair[0] for pair in pairs], destination, [pair[1] for pair in pairs], cuts)
    assert (content(destination, here, arrangement[2])[:, :, :num_tokens] == expected).all()
    assert (content(destination, untouched, arrangement[2]) == before).all()


def test_a_row_is_a_whole_number_of_blocks_on_either_side() -> None:
    between = rows_between(rows(48, groups=2), 32)
    assert between is not None
    assert (between.size, between.width) == (96, 4)
    pairing = Pairing(rows(48, groups=2), between, 32)
    assert (pairing.our_width, pairing.their_width) == (4, 6)
    found = pairing.pairs([[1, 2, 3, 11, 12, 13]], [5, 6, 15, 16])
    assert found == {
        _cuts(0, 0): [(1, 5), (11, 15)],
        _cuts(1, 1): [(1, 5), (11, 15)],
        _cuts(0, 2): [(2, 5), (12, 15)],
        _cuts(1, 0): [(2, 6), (12, 16)],
        _cuts(0, 1): [(3, 6), (13, 16)],
        _cuts(1, 2): [(3, 6), (13, 16)],
    }


def _cuts(of_two: int, of_three: int) -> tuple[Cut, Cut]:
    return Cut(of_two, 2, "tokens"), Cut(of_three, 3, "tokens")


def test_of_equal_blocks_nothing_is_cut() -> None:
    ours = rows(16, groups=2)
    for told in (16, 0):
        assert rows_between(ours, told) is ours
        pairing = Pairing(ours, ours, told)
        assert pairing.pairs([[1, 0], [3, 4]], [5, 6, 7, 0]) == {WHOLE: [(1, 5), (3, 7)]}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rows(16, num_states=1), 32),
        (with_window(rows(16, groups=2)), 32),
        (rows(16).of_size(64), 32),  # its groups have blocks of several sizes
        (rows(16), 1 << 20),
        (rows(4096), 4095),
    ],
    ids=["states", "windows", "several sizes", "long rows", "hardly a common row"],
)
def test_where_nothing_can_be_copied(ours: BlockRows, theirs: int) -> None:
    assert rows_between(copy.copy(ours), theirs) is None


def test_destination_s_rows_are_validated() -> None:
    ours = rows(16)
    assert rows_of_move(ours, 0) is rows_of_move(ours, 16) is ours
    assert rows_of_move(ours, 48).size == 48
    for impossible in (8, 24, 1 << 20):
        with pytest.raises(Refused, match=f"rows of {impossible} tokens") as refusal:
            rows_of_move(ours, impossible)
        assert refusal.value.reason is Reason.INVALID_REQUEST


def test_pages_whose_tokens_cannot_be_cut() -> None:
    layout, strips, _ = ARRANGEMENTS["a CPU's"]
    blocks = memory(ARRANGEMENTS["a CPU's"], 4, 0).blocks
    with pytest.raises(ValueError, match="part 0 of 3 of pages with 4 tokens"):
        blocks.cut(Cut(0, 3, "tokens"))
    with pytest.raises(ValueError, match="pages with unknown tokens"):
        msgspec.structs.replace(blocks, strips=()).cut(Cut(0, 2, "tokens"))
    for impossible in ((Strip(SIZE + 2, 1),), (Strip(0, 1), *strips), (Strip(1, -1), *strips)):
        with pytest.raises(ValueError, match="pages of 48 bytes"):
            msgspec.structs.replace(blocks, strips=impossible)
    fine = Memory(layout, [(1, 1 << 20)], num_blocks=1, heads=1, tokens=4).blocks
    fine = msgspec.structs.replace(fine, strips=(Strip(1, 1),))
    with pytest.raises(ValueError, match="more than 16384 pieces"):
        fine.cut(Cut(0, 2, "tokens"))
