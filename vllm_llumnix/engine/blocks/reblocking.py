# SPDX-License-Identifier: Apache-2.0
"""Moves between engines whose blocks are of different sizes.

Such a move counts in rows that are a whole number of blocks on either side. What is copied at once are the tokens that
lie within one block on both sides: of blocks for 32 tokens and for 48 parts of 16, three rows of which follow:

    source         |  0   |  0   |  1   |  1   |  2   |  2   |     blocks for 32 tokens, in two parts each
    destination    |  0   |  0   |  0   |  1   |  1   |  1   |     blocks for 48 tokens, in three
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.blocks.block_rows import BlockRows, to_copy
from vllm_llumnix.kv.memory.layout import WHOLE, Cut, Cuts

_MOST_TOKENS: Final = 4096
"""Most tokens of a row. The final part of a row that is not full is copied while the request is frozen."""

Pairs = list[tuple[int, int]]


def rows_between(ours: BlockRows, row_tokens: int) -> BlockRows | None:
    """Rows of a move to this engine, from an engine whose rows have so many tokens (0: it does not say). None if
    nothing can be copied between the two.

    A window ends within a block of another size: there a part would be missing, and here a partly filled block would be
    cached as a whole.
    """
    if row_tokens in (0, ours.size):
        return ours
    size = math.lcm(ours.size, row_tokens)
    if ours.num_states or ours.has_windows or ours.holds_several or size > _MOST_TOKENS:
        return None
    return ours.of_size(size)


def rows_of_move(ours: BlockRows, row_tokens: int) -> BlockRows:
    """Rows of a move from this engine, as its destination has said (0: it has not). Raises Refused(invalid_request)."""
    if row_tokens in (0, ours.size):
        return ours
    if row_tokens % ours.size or row_tokens > _MOST_TOKENS:
        raise Refused(Reason.INVALID_REQUEST, f"rows of {row_tokens} tokens, where {ours.size} are a block's")
    return ours.of_size(row_tokens)


class Pairing:
    """Pairs of blocks, at a source and here, row by row. `rows`: of `rows_between`; `ours`: this engine's."""

    def __init__(self, ours: BlockRows, rows: BlockRows, row_tokens: int) -> None:
        self.our_width = self.their_width = rows.width
        self.cuts = WHOLE
        """Cut of the blocks; the first of the parts."""
        self._units: list[tuple[int, int, Cuts]] = [(column, column, WHOLE) for column in range(rows.width)]
        """Units of a row: the place among its blocks there and here, and the parts of these."""
        theirs = row_tokens or ours.size
        if theirs == ours.size:
            return
        unit = math.gcd(ours.size, theirs)
        here, there = rows.size // ours.size, rows.size // theirs
        self.their_width = there * ours.width
        self._units = [
            (
                group * there + at // theirs,
                group * here + at // ours.size,
                Cuts(_part(at, theirs, unit), _part(at, ours.size, unit)),
            )
            for group, at in itertools.product(range(ours.width), range(0, rows.size, unit))
        ]
        self.cuts = self._units[0][2]

    def pairs(self, at_source: Sequence[Sequence[int]], here: Sequence[int]) -> Mapping[Cuts, Pairs]:
        """The copies by how their blocks are cut, without what a window has left behind on either side. `at_source`:
        block ids of each row; `here`: those of all these rows, one after the other."""
        found: defaultdict[Cuts, Pairs] = defaultdict(list)
        for there, place, cuts in self._units:
            found[cuts] += to_copy((row[there] for row in at_source), here[place :: self.our_width])
        return found


def _part(at: int, block_size: int, unit: int) -> Cut:
    return Cut(at % block_size // unit, block_size // unit, "tokens")
