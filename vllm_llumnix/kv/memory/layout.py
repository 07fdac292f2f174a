# SPDX-License-Identifier: Apache-2.0
"""The places of the bytes of a KV block.

vLLM keeps the caches of all layers of a worker in one allocation. The page of layer `l` of a region
for block `b` is

    address = base + offset + l * layer_stride + b * block_stride        length = page_bytes

for every layout whose two outermost dimensions are layers (L) and blocks (B), in either order.
Tensor views are of no use here: attention backends reshape them.

A layout is also what a worker tells its peers about its memory, so it is checked when it is built
or decoded: every page of every block lies within the allocation. Nothing below reads memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Ids: TypeAlias = npt.NDArray[np.int64]
OfStates: TypeAlias = Literal["recurrent", "inputs"]
OfHeads: TypeAlias = Literal["heads", "vectors"]
OfPages: TypeAlias = OfHeads | Literal["tokens"]

ADDRESS_SPACE = 2**63
_OF_PAGES: Final[tuple[OfPages, ...]] = ("heads", "vectors", "tokens")
_OF_STATES: Final[tuple[OfStates, ...]] = ("recurrent", "inputs")
_MOST_DRAFTS: Final = 16
"""The inputs behind so many have places of every alignment."""
_MOST_PIECES: Final = 1 << 14
"""Most pieces of a page that is cut: 128 heads of 128 dimensions each have one on a CPU."""


class TensorRegion(msgspec.Struct, frozen=True):
    """Layers of equal shape, at equal distances. All fields but `num_layers` are in bytes.

    `element_bytes` is the size of one cache element, the smallest where layers have different ones.
    """

    offset: int
    num_layers: int
    layer_stride: int
    block_stride: int
    page_bytes: int
    element_bytes: int = 2


class Strip(msgspec.Struct, frozen=True):
    """`count` pieces of a page, one behind the other, in each of which are `token_bytes` of every token, in turn."""

    count: int
    token_bytes: int


class StatePart(msgspec.Struct, frozen=True):
    """Part of a state's page that its next step reads: `num_bytes` bytes from `offset` on.

    Speculative decoding keeps a state for each draft that may be accepted. Recurrent states have a block each;
    convolution inputs begin `step_bytes` further on in the same block for each.
    """

    offset: int
    num_bytes: int
    step_bytes: int = 0

    @property
    def is_of(self) -> OfStates:
        """As in `Cut`."""
        return "inputs" if self.step_bytes else "recurrent"


class Cut(msgspec.Struct, frozen=True):
    """Slice of each page to copy: slice `index` of `count`, along KV heads or along tokens.

    Workers of one engine share the heads, so those of an engine with more workers have parts of these. If the order of
    heads and tokens differs, the heads' `vectors` are taken one by one, in the same order. Pages of more tokens hold
    several of fewer. For states: all recurrent parts (0 of 1), or the convolution inputs behind `index` accepted
    drafts.
    """

    index: int
    count: int
    of: OfPages | OfStates = "heads"


class Cuts(NamedTuple):
    """Part of a source's pages, and the part of the destination's to which it goes, as large; None: whole pages."""

    source: Cut | None = None
    destination: Cut | None = None


WHOLE: Final = Cuts()


def cuts_behind(num_accepted: int, kind: OfStates) -> Cuts:
    """The copy of one kind of parts of the state behind so many accepted drafts, to where it is without drafts."""
    if kind == "recurrent":
        return Cuts(Cut(0, 1, kind), Cut(0, 1, kind))
    count = num_accepted + 1
    return Cuts(Cut(num_accepted, count, kind), Cut(0, count, kind))


class BlockLayout(msgspec.Struct, frozen=True):
    """The KV memory of one worker: `num_blocks` blocks, `storage_bytes` bytes from `base` on.

    `layout` is vLLM's name of the dimension order, such as LBHNC. `heads`, `tokens`: how many a page has; both 0 where
    its heads cannot be told apart. `strips`: what a page repeats until it is full; empty where its tokens cannot be
    told apart. `states`: what is in a page that has a state, if drafts are computed beside it. Raises ValueError
    (`msgspec.ValidationError` when decoded) if a page would lie outside the storage.
    """

    base: int
    storage_bytes: int
    num_blocks: int
    regions: tuple[TensorRegion, ...]
    layout: str
    heads: int = 0
    tokens: int = 0
    strips: tuple[Strip, ...] = ()
    states: tuple[StatePart, ...] = ()

    def __post_init__(self) -> None:
        if self.base < 0 or self.storage_bytes < 0 or self.num_blocks < 0:
            raise ValueError("negative base, size or number of blocks")
        if self.base + self.storage_bytes > ADDRESS_SPACE:
            raise ValueError("the storage does not fit the address space")
        if min(self.heads, self.tokens) < 0 or bool(self.heads) is not bool(self.tokens):
            raise ValueError(f"pages of {self.heads} heads and {self.tokens} tokens")
        for region in self.regions:
            if min(region.num_layers, region.page_bytes, region.element_bytes, self.num_blocks) < 1:
                raise ValueError("a region without layers, blocks or bytes")
            if min(region.offset, region.layer_stride, region.block_stride) < 0:
                raise ValueError("a region with a negative offset or stride")
            last = (region.num_layers - 1) * region.layer_stride + (self.num_blocks - 1) * region.block_stride
            if region.offset + last + region.page_bytes > self.storage_bytes:
                raise ValueError("a region reaches beyond the storage")
            if self.heads and region.page_bytes % (self.heads * self._rows):
                raise ValueError(f"pages of {region.page_bytes} bytes for {self.heads} heads of {self.tokens} tokens")
            if self.strips and not self._is_full_of_strips(region):
                raise ValueError(f"pages of {region.page_bytes} bytes and {self.tokens} tokens, in {self.strips}")
            for part in self.states:
                if min(part.offset, part.num_bytes - 1, part.step_bytes) < 0:
                    raise ValueError("a part of a state with a negative place or step, or of no bytes")
                if part.offset + part.num_bytes > region.page_bytes:
                    raise ValueError("a part of a state reaches beyond its page")

    def _is_full_of_strips(self, region: TensorRegion) -> bool:
        if self.tokens < 1 or any(min(strip.count, strip.token_bytes) < 1 for strip in self.strips):
            return False
        return region.page_bytes % self._repeated == 0

    @property
    def _repeated(self) -> int:
        """Bytes of what a page repeats."""
        return self.tokens * sum(strip.count * strip.token_bytes for strip in self.strips)

    @property
    def _rows(self) -> int:
        """Pieces of a page in which all heads follow each other: one for each token where a token's heads do."""
        return self.tokens if self.interior.startswith("N") else 1

    def cut(self, cut: Cut | None) -> BlockLayout:
        """The same memory, pages of which are parts of these; whole ones without a cut. Cuts of two layouts have the
        same pages if they are of as many heads, or of as many tokens; those of vectors whatever the order of a page's
        dimensions. Raises ValueError."""
        if cut is None:
            return self
        regions = []
        for region in self.regions:
            for offset, length in self._parts_of(region, cut):
                regions.append(msgspec.structs.replace(region, offset=region.offset + offset, page_bytes=length))
        order = self.layout.replace("NH", "HN") if cut.of == "vectors" else self.layout
        return msgspec.structs.replace(
            self, regions=tuple(regions), layout=order, heads=0, tokens=0, strips=(), states=()
        )

    def _parts_of(self, region: TensorRegion, cut: Cut) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what a cut leaves of a page."""
        if cut.of in ("recurrent", "inputs"):
            yield from self._parts_of_states(region, cut)
            return
        there_are = self._parts[cut.of]
        if not (0 <= cut.index < cut.count and there_are and there_are % cut.count == 0):
            raise ValueError(f"part {cut.index} of {cut.count} of pages with {there_are or 'unknown'} {cut.of}")
        if cut.of == "vectors":
            yield from self._vectors_of(region, cut)
            return
        for offset, length in self._pieces_of(region) if cut.of == "tokens" else self._rows_of(region):
            part = length // cut.count
            yield offset + cut.index * part, part

    @property
    def _parts(self) -> dict[str, int]:
        """Number of parts into which a page may be cut, by kind of part."""
        return {
            "heads": self.heads,
            "vectors": self.heads * self.has_vectors,
            "tokens": self.tokens * bool(self.strips),
        }

    @property
    def has_vectors(self) -> bool:
        """True if the values of one head and one token lie in one place, with others like them around."""
        return bool(self.heads) and [strip.count for strip in self.strips] == [1]

    def _vectors_of(self, region: TensorRegion, cut: Cut) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what a page has of each token of some heads, head by head. Raises ValueError."""
        if self.heads * self.tokens > _MOST_PIECES:
            raise ValueError(f"pages in more than {_MOST_PIECES} vectors")
        length = region.page_bytes // (self.heads * self.tokens)
        of_head, of_token = (1, self.heads) if self.interior.startswith("N") else (self.tokens, 1)
        each = self.heads // cut.count
        for head in range(cut.index * each, (cut.index + 1) * each):
            for token in range(self.tokens):
                yield (head * of_head + token * of_token) * length, length

    def _parts_of_states(self, region: TensorRegion, cut: Cut) -> Iterator[tuple[int, int]]:
        parts = [part for part in self.states if part.is_of == cut.of]
        if not (0 <= cut.index < cut.count and parts):
            raise ValueError(f"part {cut.index} of {cut.count} of pages with {len(parts)} parts that are {cut.of}")
        for part in parts:
            offset = part.offset + cut.index * part.step_bytes
            if offset + part.num_bytes > region.page_bytes:
                raise ValueError(f"inputs behind {cut.index} drafts lie beyond their page")
            yield offset, part.num_bytes

    def _rows_of(self, region: TensorRegion) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the pieces of a page in which all heads follow each other."""
        row = region.page_bytes // self._rows
        for at in range(0, region.page_bytes, row):
            yield at, row

    def _pieces_of(self, region: TensorRegion) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the pieces of a page in which all tokens follow each other. Raises ValueError."""
        num_repeated = region.page_bytes // self._repeated
        if num_repeated * sum(strip.count for strip in self.strips) > _MOST_PIECES:
            raise ValueError(f"pages in more than {_MOST_PIECES} pieces of all tokens")
        at = 0
        for strip in num_repeated * self.strips:
            for _ in range(strip.count):
                yield at, self.tokens * strip.token_bytes
                at += self.tokens * strip.token_bytes

    def cuts(self) -> Iterator[Cut]:
        """All kinds of cuts that a move may ask of these pages: into as many parts as there may be, of each the last;
        of states, those behind the first drafts."""
        of_pages = (Cut(count - 1, count, of) for of in _OF_PAGES for count in range(1, self._parts[of] + 1))
        of_states = (cut.source for kind in _OF_STATES for k in range(_MOST_DRAFTS) if (cut := cuts_behind(k, kind)))
        return filter(self._is_possible, [*of_pages, *filter(None, of_states)])

    def _is_possible(self, cut: Cut) -> bool:
        try:
            self.cut(cut)
        except ValueError:
            return False
        return True

    def split(self, max_bytes: int) -> tuple[BlockLayout, ...]:
        """The same memory, a block of which is copied in turns: layouts of neighbouring pages, of `max_bytes` at the
        most, or of one page. Two layouts with the same pages are split alike."""
        if self.bytes_per_block <= max_bytes:
            return (self,)
        return _split(self, max_bytes)

    @property
    def num_layers(self) -> int:
        return sum(region.num_layers for region in self.regions)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return sum(region.num_layers * region.page_bytes for region in self.regions)

    @property
    def largest_page(self) -> int:
        """Bytes of it."""
        return max((region.page_bytes for region in self.regions), default=0)

    @property
    def interior(self) -> str:
        """The order of dimensions within a page, which layouts must share for bytes to fit."""
        return self.layout.replace("L", "").replace("B", "")

    def page(self, block: int, layer: int) -> tuple[int, TensorRegion]:
        """The address of one page, and what it is a page of; `layer` counts through the regions.
        Raises ValueError out of range.
        """
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not one of {self.num_blocks}")
        index = layer
        for region in self.regions:
            if 0 <= index < region.num_layers:
                within = region.offset + index * region.layer_stride + block * region.block_stride
                return self.base + within, region
            index -= region.num_layers
        raise ValueError(f"layer {layer} is not one of {self.num_layers}")

    def page_address(self, block: int, layer: int) -> tuple[int, int]:
        """(address, bytes) of one page, as `page`."""
        address, region = self.page(block, layer)
        return address, region.page_bytes

    @property
    def layers_outermost(self) -> bool:
        """True if neighbours in memory are blocks of one layer, rather than layers of one block."""
        return all(region.layer_stride >= region.block_stride for region in self.regions)

    def pieces(self, block_ids: Sequence[int], layers_outermost: bool | None = None) -> tuple[Words, Words]:
        """(addresses, lengths) of all layers of `block_ids`, adjacent ones merged.

        layers_outermost: in which order; by default that of memory. Two layouts with the same pages
        have the same bytes in the same order. Raises ValueError out of range.
        """
        if layers_outermost is None:
            layers_outermost = self.layers_outermost
        ids = _checked(self, block_ids)
        addresses = _addresses(self, ids, layers_outermost)
        (addresses,), lengths = _merged((addresses,), _lengths(self, len(ids)))
        return addresses, lengths


@functools.lru_cache(maxsize=16)
def _split(layout: BlockLayout, max_bytes: int) -> tuple[BlockLayout, ...]:
    parts: list[list[TensorRegion]] = [[]]
    room = max_bytes
    for region in layout.regions:
        first = 0
        while first < region.num_layers:
            fit = min(region.num_layers - first, room // region.page_bytes)
            if fit <= 0 and parts[-1]:
                parts.append([])
                room = max_bytes
                continue
            num_layers = max(1, fit)
            offset = region.offset + first * region.layer_stride
            parts[-1].append(msgspec.structs.replace(region, offset=offset, num_layers=num_layers))
            first += num_layers
            room -= num_layers * region.page_bytes
    whole = {"heads": 0, "tokens": 0, "strips": (), "states": ()}
    return tuple(msgspec.structs.replace(layout, regions=tuple(regions), **whole) for regions in parts)


class Pieces(NamedTuple):
    """A copy in parallel arrays: `length[i]` bytes from `source[i]` to `destination[i]`."""

    source: Words
    destination: Words
    length: Words


def pair_pieces(
    source: BlockLayout,
    source_ids: Sequence[int],
    destination: BlockLayout,
    destination_ids: Sequence[int],
) -> Pieces:
    """The copy of block `source_ids[i]` to block `destination_ids[i]`, for all i and all layers.

    Pieces are merged where both sides are adjacent. Raises ValueError if the layouts do not hold
    the same pages, an id is out of range, the lists differ in length, or a destination block is
    named twice.
    """
    require_same_pages(source, destination)
    from_ids, to_ids = _checked(source, source_ids), _checked(destination, destination_ids)
    require_pairs(source_ids, destination_ids)
    layers_outermost = destination.layers_outermost
    sides = (
        _addresses(source, from_ids, layers_outermost),
        _addresses(destination, to_ids, layers_outermost),
    )
    (from_addresses, to_addresses), lengths = _merged(sides, _lengths(source, len(from_ids)))
    return Pieces(from_addresses, to_addresses, lengths)


def require_pairs(source_ids: Sequence[int], destination_ids: Sequence[int]) -> None:
    """Raise ValueError unless there is one source block for each destination block, and none of these is named
    twice."""
    if len(source_ids) != len(destination_ids):
        raise ValueError(f"{len(source_ids)} source blocks for {len(destination_ids)} destination blocks")
    if len(set(destination_ids)) != len(destination_ids):
        raise ValueError("a destination block is named twice")


def require_same_pages(ours: BlockLayout, theirs: BlockLayout) -> None:
    """Raise ValueError unless page `i` of a block means the same bytes on both sides."""
    if ours.interior != theirs.interior:
        raise ValueError(f"KV cache layouts differ: {ours.layout} and {theirs.layout}")
    ours_shape, theirs_shape = (
        [(region.num_layers, region.page_bytes, region.element_bytes) for region in layout.regions]
        for layout in (ours, theirs)
    )
    if ours_shape != theirs_shape:
        raise ValueError(f"KV cache pages differ: (layers, bytes, of an element) {ours_shape} and {theirs_shape}")


def _checked(layout: BlockLayout, block_ids: Sequence[int]) -> Ids:
    if block_ids and (min(block_ids) < 0 or max(block_ids) >= layout.num_blocks):
        raise ValueError(
            f"block ids {min(block_ids)} to {max(block_ids)} are not all within 0 to {layout.num_blocks - 1}"
        )
    return np.array(block_ids, np.int64)


def _addresses(layout: BlockLayout, ids: Ids, layers_outermost: bool) -> Words:
    """Addresses of all pages, in the order in which neighbours in memory follow each other."""
    parts = []
    for region, of_layers in zip(layout.regions, _layer_addresses(layout), strict=True):
        of_blocks = ids * region.block_stride
        grid = of_layers[:, None] + of_blocks if layers_outermost else of_blocks[:, None] + of_layers
        parts.append(grid.ravel())
    if not parts:
        return np.empty(0, np.uint64)
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(np.uint64)


@functools.lru_cache(maxsize=64)
def _layer_addresses(layout: BlockLayout) -> tuple[Ids, ...]:
    """The places where the pages of block 0 lie, for each region."""
    return tuple(
        np.arange(region.num_layers, dtype=np.int64) * region.layer_stride + (layout.base + region.offset)
        for region in layout.regions
    )


def _lengths(layout: BlockLayout, num_blocks: int) -> Words:
    """The lengths that belong to `_addresses`."""
    parts = [np.full(region.num_layers * num_blocks, region.page_bytes, np.uint64) for region in layout.regions]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint64), *parts])


def _merged(sides: tuple[Words, ...], lengths: Words) -> tuple[tuple[Words, ...], Words]:
    """Join neighbours in the arrays that are neighbours in memory on every side."""
    apart = np.zeros(max(0, len(lengths) - 1), np.bool_)
    for addresses in sides:
        apart |= addresses[:-1] + lengths[:-1] != addresses[1:]
    if apart.all():
        return sides, lengths
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return tuple(addresses[first] for addresses in sides), np.add.reduceat(lengths, first)
