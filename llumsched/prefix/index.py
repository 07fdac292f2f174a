# SPDX-License-Identifier: Apache-2.0
"""The holders of all blocks, in arrays of a fixed size.

A name (`contract.block_hashes`) determines two buckets of eight places, and lies in one of them. A bucket is one CPU
cache line; nothing is probed further, moved or rebuilt. A place is 12 bytes:

    name    8 bytes; 0: free
    holder  4 bytes: the number of the only holder, or, if negative, a row of bits with one for each number

Most blocks have one holder; a common system prompt is few blocks with many. If both buckets are full, or all rows are
used, a further holder is left out and counted (`num_left_out`): a hit is missed, but none is invented.

All operations work on whole numpy arrays of names, at a fraction of a microsecond per name.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

Names = NDArray[np.uint64]
Depths = NDArray[np.intp]
"""By number: the leading blocks of a prompt that an instance holds without a gap."""

USUAL_BLOCKS: Final = 4_000_000
"""Default number of blocks: 64 MB."""
_WAYS: Final = 8
PLACE_BYTES: Final = 12
_LOAD: Final = 0.75
"""Filled share of the places up to which almost nothing is left out."""
_FREE: Final = np.uint64(0)
_FEWEST_BUCKETS: Final = 64
_FIRST_ROWS: Final = 64
_FIRST_NUMBERS: Final = 64
_SWEPT_AT_ONCE: Final = 1 << 12
_MOST_DEAD: Final = 64
"""Numbers of gone instances that are kept before one pass removes them all."""


class PrefixIndex:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: capacity for all instances together; a shared block counts once."""
        buckets = max(int(num_blocks / _LOAD) // _WAYS + 1, _FEWEST_BUCKETS)
        self._names = np.zeros((buckets, _WAYS), np.uint64)
        self._holders = np.zeros((buckets, _WAYS), np.int32)
        self._bits = np.zeros((_FIRST_ROWS, _FIRST_NUMBERS // 8), np.uint8)
        self._free_rows = list(range(1, _FIRST_ROWS))
        """Free rows. Row 0 is never used, as -0 is not negative."""
        self._most_row_bytes = self._names.nbytes
        self._numbers = 0
        """Numbers that were ever assigned."""
        self._free_numbers: list[int] = []
        self._num_held: Counter[int] = Counter()
        """Blocks by the number of their holder."""
        self._dead: list[int] = []
        self.num_left_out = 0
        """Number of holders of blocks that found no room."""

    def __len__(self) -> int:
        """Number of names."""
        return int(np.count_nonzero(self._names))

    @property
    def num_bytes(self) -> int:
        return self._names.nbytes + self._holders.nbytes + self._bits.nbytes

    # Instances

    def join(self) -> int:
        """A number for a new instance."""
        if len(self._dead) > _MOST_DEAD:
            self._sweep()
        if self._free_numbers:
            number = self._free_numbers.pop()
            del self._num_held[number]
            return number
        self._numbers += 1
        if self._numbers > self._bits.shape[1] * 8:
            self._bits = np.pad(self._bits, ((0, 0), (0, self._bits.shape[1])))
        return self._numbers - 1

    def forget(self, number: int) -> None:
        """Releases a number; it is reused after its blocks have been removed."""
        self._dead.append(number)

    def _sweep(self) -> None:
        is_dead = np.zeros(self._bits.shape[1] * 8, np.bool_)
        is_dead[self._dead] = True
        self._bits &= ~np.packbits(is_dead, bitorder="little")
        is_nobodys = ~self._bits.any(axis=1)
        for start in range(0, len(self._names), _SWEPT_AT_ONCE):  # what fits a CPU's cache
            names, holders = (of[start : start + _SWEPT_AT_ONCE] for of in (self._names, self._holders))
            gone = is_dead.take(holders, mode="clip") & (holders >= 0)
            emptied = is_nobodys.take(-holders, mode="clip") & (holders < 0) & (names != _FREE)
            self._free_rows += (-holders[emptied]).tolist()
            names[gone | emptied] = _FREE
        self._free_numbers += self._dead
        self._dead = []

    # Blocks

    def store(self, number: int, names: Names) -> int:
        """Adds blocks of an instance. Returns how many are new."""
        names, left_out = np.unique(names), self.num_left_out
        buckets, ways, found = self._find(names)
        num_new = self._add_holder(number, buckets[found], ways[found]) + self._put(number, names[~found])
        self._num_held[number] += num_new
        if self.num_left_out > left_out and self._dead:
            self._sweep()
            self.num_left_out = left_out
            return num_new + self.store(number, names)
        return num_new

    def remove(self, number: int, names: Names) -> None:
        """Removes blocks of an instance."""
        names = np.unique(names)
        buckets, ways, found = self._find(names)
        buckets, ways = buckets[found], ways[found]
        holders = self._holders[buckets, ways]
        alone = holders == number
        self._names[buckets[alone], ways[alone]] = _FREE
        shared = holders < 0
        rows = -holders[shared]
        bit = np.uint8(1 << (number & 7))
        num_shared = np.count_nonzero(self._bits[rows, number >> 3] & bit)
        self._num_held[number] -= int(np.count_nonzero(alone) + num_shared)
        self._bits[rows, number >> 3] &= ~bit
        empty = ~self._bits[rows].any(axis=1)
        self._names[buckets[shared][empty], ways[shared][empty]] = _FREE
        self._free_rows += rows[empty].tolist()

    def depths(self, names: Names) -> Depths:
        """The depth to which each instance holds this chain of blocks, by number."""
        buckets, ways, found = self._find(names)
        end = len(names) if found.all() else int(np.argmin(found))
        depths = np.zeros(self._bits.shape[1] * 8, np.intp)
        if not end:
            return depths
        held = self._holder_bits(self._holders[buckets[:end], ways[:end]])
        np.bitwise_and.accumulate(held, axis=0, out=held)
        # Few of them differ from the one before: where an instance's blocks end.
        starts = np.flatnonzero(np.concatenate(([True], (held[1:] != held[:-1]).any(axis=1))))
        lengths = np.diff(np.append(starts, end))
        reached: Depths = lengths @ np.unpackbits(held[starts], axis=1, bitorder="little").astype(np.intp)
        return reached

    def shares(self, number: int) -> NDArray[np.float64]:
        """Shares of an instance's blocks that each other one holds too, by number."""
        rows = (self._bits[:, number >> 3] & np.uint8(1 << (number & 7))) != 0
        together = np.unpackbits(self._bits[rows], axis=1, bitorder="little").sum(axis=0, dtype=np.float64)
        shares: NDArray[np.float64] = together / max(self._num_held[number], 1)
        return shares

    def _holder_bits(self, holders: NDArray[np.int32]) -> NDArray[np.uint8]:
        """A row of bits for each place."""
        bits: NDArray[np.uint8] = self._bits[np.maximum(-holders, 0)]  # a copy
        alone = np.flatnonzero(holders >= 0)
        numbers = holders[alone]
        bits[alone] = 0
        bits[alone, numbers >> 3] = (1 << (numbers & 7)).astype(np.uint8)
        return bits

    # Places

    def _buckets(self, names: Names) -> NDArray[np.intp]:
        """The two buckets of each name."""
        size = np.uint64(len(self._names))
        return np.stack([names % size, (names >> np.uint64(32)) % size], axis=1).astype(np.intp)

    def _find(self, names: Names) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Buckets and ways of names, and which of the names are present."""
        both = self._buckets(names)
        same = (self._names[both] == names[:, None, None]).reshape(len(names), 2 * _WAYS)
        at = same.argmax(axis=1)
        every = np.arange(len(names))
        return both[every, at // _WAYS], at % _WAYS, same[every, at] & (names != _FREE)

    def _add_holder(self, number: int, buckets: NDArray[np.intp], ways: NDArray[np.intp]) -> int:
        """Returns the number of places that gained this holder."""
        holders = self._holders[buckets, ways]
        second = np.flatnonzero((holders >= 0) & (holders != number))
        rows = self._new_rows(len(second))
        self.num_left_out += len(second) - len(rows)
        second = second[: len(rows)]
        first = holders[second]
        self._bits[rows, first >> 3] = (1 << (first & 7)).astype(np.uint8)
        self._holders[buckets[second], ways[second]] = -rows
        holders[second] = -rows
        shared = -holders[holders < 0]
        bit = np.uint8(1 << (number & 7))
        is_new = (self._bits[shared, number >> 3] & bit) == 0
        self._bits[shared, number >> 3] |= bit
        return int(np.count_nonzero(is_new))

    def _new_rows(self, wanted: int) -> NDArray[np.int32]:
        """At most `wanted` empty rows."""
        while len(self._free_rows) < wanted and 2 * self._bits.nbytes <= self._most_row_bytes:
            before = len(self._bits)
            self._bits = np.pad(self._bits, ((0, before), (0, 0)))
            self._free_rows += range(before, 2 * before)
        taken = self._free_rows[len(self._free_rows) - min(wanted, len(self._free_rows)) :]
        del self._free_rows[len(self._free_rows) - len(taken) :]
        return np.array(taken, np.int32)

    def _put(self, number: int, names: Names) -> int:
        """Puts new names into the emptier of their buckets; returns how many found room. Of names that compete for a
        place, one gets it per turn."""
        names = names[names != _FREE]
        num_names, left_out = len(names), self.num_left_out
        while len(names):
            every, both = np.arange(len(names)), self._buckets(names)
            free = self._names[both] == _FREE
            num_free = free.sum(axis=2)
            side = num_free.argmax(axis=1)
            fits = num_free[every, side] > 0
            self.num_left_out += int(np.count_nonzero(~fits))
            names, every, side = names[fits], every[fits], side[fits]
            buckets, ways = both[every, side], free[every, side].argmax(axis=1)
            self._names[buckets, ways] = names
            self._holders[buckets, ways] = number
            names = names[self._names[buckets, ways] != names]
        return num_names - (self.num_left_out - left_out)
