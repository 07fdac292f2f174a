# SPDX-License-Identifier: Apache-2.0
"""Every form of the block copy against the formula of `BlockLayout.page_address`, byte by byte.

The memory around the pages is filled with noise, which must be there unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_llumnix.errors import ConfigError
from vllm_llumnix.kv.kernels import gather, scatter
from vllm_llumnix.kv.layout import BlockLayout, TensorRegion

Bytes = npt.NDArray[np.uint8]
Shapes = list[tuple[int, int]]
"""(layers, bytes of a page) of each region."""


class Case(NamedTuple):
    """A copy and the memory it works on. The buffer starts `lead` bytes into an allocation."""

    to_buffer: bool
    layout: BlockLayout
    ids: list[int]
    storage: Bytes
    allocation: Bytes
    lead: int


Form = Callable[[Case], tuple[Bytes, Bytes]]
"""Carries a case out; returns what then is in the storage and in the buffer's allocation."""


def on_device(backend: str, device: str = "cpu", **options: Any) -> Form:
    def run(case: Case) -> tuple[Bytes, Bytes]:
        storage, allocation = (torch.tensor(data, device=device) for data in (case.storage, case.allocation))
        copy = gather if case.to_buffer else scatter
        buffer = allocation[case.lead :]
        num_bytes = copy(storage, case.layout, case.ids, buffer, backend=backend, **options)
        assert num_bytes == len(case.ids) * case.layout.bytes_per_block
        return storage.cpu().numpy(), allocation.cpu().numpy()

    return run


FORMS: dict[str, Form] = {"auto": on_device("auto"), "torch": on_device("torch")}
if torch.cuda.is_available():
    FORMS |= {f"{name} on a GPU": on_device(name, "cuda") for name in ("auto", "torch")}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[Form]:
    return FORMS[request.param]


def layout_of(order: str, shapes: Shapes, num_blocks: int, gap: int = 0) -> BlockLayout:
    """Pages in vLLM's order, with `gap` bytes before each of them and at the end."""
    regions, offset = [], gap
    per_block = sum(layers * (page + gap) for layers, page in shapes)
    for layers, page in shapes:
        step = page + gap
        if order.startswith("L"):
            regions.append(TensorRegion(offset, layers, step * num_blocks, step, page))
            offset += layers * step * num_blocks
        else:
            regions.append(TensorRegion(offset, layers, step, per_block, page))
            offset += layers * step
    return BlockLayout(1 << 20, per_block * num_blocks + gap, num_blocks, tuple(regions), order)


def case_of(layout: BlockLayout, ids: list[int], *, to_buffer: bool, lead: int = 0, tail: int = 24) -> Case:
    noise = np.random.default_rng(len(ids) + lead)
    allocation = noise.integers(0, 256, lead + len(ids) * layout.bytes_per_block + tail, np.uint8)
    return Case(to_buffer, layout, ids, noise.integers(0, 256, layout.storage_bytes, np.uint8), allocation, lead)


def expected(case: Case) -> tuple[Bytes, Bytes]:
    storage, allocation, at = case.storage.copy(), case.allocation.copy(), case.lead
    for block in case.ids:
        for layer in range(case.layout.num_layers):
            address, length = case.layout.page_address(block, layer)
            page = slice(address - case.layout.base, address - case.layout.base + length)
            if case.to_buffer:
                allocation[at : at + length] = storage[page]
            else:
                storage[page] = allocation[at : at + length]
            at += length
    return storage, allocation


def check(form: Form, case: Case) -> None:
    for found, wanted in zip(form(case), expected(case), strict=True):
        np.testing.assert_array_equal(found, wanted)


SHAPES = {
    "bf16, 16 tokens of 2 heads of 64": [(3, 16 * 2 * 2 * 64 * 2)],
    "fp8 with a scale for each token and head": [(3, 16 * 2 * 2 * (64 + 4))],
    "fp8 MLA, 656 bytes a token": [(2, 16 * 656)],
    "4-byte words": [(2, 1028)],
    "odd": [(3, 1025)],
    "tiny": [(5, 1)],
    "below a vector": [(2, 15)],
    "mixed": [(3, 2048), (1, 1040), (2, 33)],
}
PATTERNS = {
    "none": [],
    "single": [4],
    "all": list(range(9)),
    "contiguous": [2, 3, 4, 5],
    "random": [7, 0, 8, 3, 5],
    "backwards": [8, 7, 6],
}


@pytest.mark.parametrize("to_buffer", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize("gap", [0, 16, 7], ids=lambda gap: f"gap {gap}")
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_exactly_the_named_blocks_are_copied(form: Form, order: str, shapes: Shapes, gap: int, to_buffer: bool) -> None:
    layout = layout_of(order, shapes, 9, gap)
    for ids in PATTERNS.values():
        check(form, case_of(layout, ids, to_buffer=to_buffer))


@pytest.mark.parametrize("lead", [1, 4, 8, 16])
@pytest.mark.parametrize("to_buffer", [True, False], ids=["gather", "scatter"])
def test_the_buffer_may_start_anywhere(form: Form, lead: int, to_buffer: bool) -> None:
    for page in (2048, 2052, 2049):
        layout = layout_of("LBHNC", [(2, page)], 5)
        check(form, case_of(layout, [3, 1], to_buffer=to_buffer, lead=lead))


def test_a_block_may_be_gathered_twice(form: Form) -> None:
    check(form, case_of(layout_of("LBHNC", [(2, 100)], 4), [1, 1, 3, 1], to_buffer=True))


def test_large_pages(form: Form) -> None:
    for to_buffer in (True, False):
        layout = layout_of("LBHNC", [(2, 128 * 1024), (1, 70_001)], 4)
        check(form, case_of(layout, [3, 0, 1], to_buffer=to_buffer, lead=2))


def test_part_of_the_blocks_is_a_range_of_the_buffer(form: Form) -> None:
    layout = layout_of("BLHNC", [(2, 64), (1, 33)], 8)
    whole = case_of(layout, [6, 1, 5, 2], to_buffer=True, tail=0)
    _, buffer = form(whole)
    for first in range(4):
        _, part = form(whole._replace(ids=whole.ids[first : first + 2]))
        cut = slice(first * layout.bytes_per_block, (first + 2) * layout.bytes_per_block)
        stop = len(buffer[cut])
        np.testing.assert_array_equal(part[:stop], buffer[cut])


@settings(deadline=None, max_examples=40)
@given(
    orders=st.tuples(st.sampled_from(["LBHNC", "BLHNC"]), st.sampled_from(["LBHNC", "BLHNC"])),
    gaps=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 300)), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_form_scatters_what_any_form_gathered(orders: Any, gaps: Any, shapes: Shapes, data: Any) -> None:
    """Into a layout with the same pages, with other ids, other gaps and another outermost dimension."""
    source, destination = (layout_of(order, shapes, 6, gap) for order, gap in zip(orders, gaps, strict=True))
    from_ids = data.draw(st.lists(st.integers(0, 5), max_size=6))
    to_ids = data.draw(st.permutations(range(6)))[: len(from_ids)]
    gathering, scattering = (data.draw(st.sampled_from(sorted(FORMS))) for _ in range(2))
    sent = case_of(source, from_ids, to_buffer=True)
    _, buffer = FORMS[gathering](sent)
    received = case_of(destination, to_ids, to_buffer=False)._replace(allocation=buffer)
    storage, _ = FORMS[scattering](received)

    wanted = received.storage.copy()
    for from_id, to_id in zip(from_ids, to_ids, strict=True):
        for layer in range(source.num_layers):
            (source_at, length), (at, _) = source.page_address(from_id, layer), destination.page_address(to_id, layer)
            page = sent.storage[source_at - source.base :][:length]
            wanted[at - destination.base :][:length] = page
    np.testing.assert_array_equal(storage, wanted)


LAYOUT = layout_of("LBHNC", [(2, 64)], 4)
"""512 bytes, 128 a block."""


def row(num_bytes: int, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, **kwargs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "id too high": ({"block_ids": [0, 4]}, "block ids 0 to 4 are not all within 0 to 3"),
    "id negative": ({"block_ids": [-1, 2]}, "block ids -1 to 2"),
    "id beyond 64 bits": ({"block_ids": [2**63]}, "block ids 9223372036854775808"),
    "ids of floats": ({"block_ids": [1.0]}, "a list of integers, not float64"),
    "ids of two dimensions": ({"block_ids": [[1, 2]]}, "of shape"),
    "storage of halves": ({"storage": torch.zeros(512, dtype=torch.float16)}, "storage is not a row of bytes"),
    "storage of two dimensions": ({"storage": row(512).view(4, 128)}, "storage is not a row of bytes"),
    "storage with gaps": ({"storage": row(1024)[::2]}, "storage is not a row of bytes"),
    "storage too small": ({"storage": row(511)}, "a storage of 511 bytes; the layout is that of 512"),
    "storage of something else": ({"storage": row(513)}, "a storage of 513 bytes"),
    "buffer of signed bytes": ({"buffer": torch.zeros(256, dtype=torch.int8)}, "buffer is not a row of bytes"),
    "buffer of two dimensions": ({"buffer": row(256).view(2, 128)}, "buffer is not a row of bytes"),
    "buffer with gaps": ({"buffer": row(512)[::2]}, "buffer is not a row of bytes"),
    "buffer too small": ({"buffer": row(255)}, "a buffer of 255 bytes for 256"),
    "buffer elsewhere": ({"buffer": row(256, device="meta")}, "the storage is on cpu, the buffer on meta"),
    "no memory": ({"storage": row(512, device="meta"), "buffer": row(256, device="meta")}, "storage has no memory"),
    "sparse buffer": ({"buffer": row(256).to_sparse()}, "the buffer has no memory"),
}


@pytest.mark.parametrize("copy", [gather, scatter])
@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_copied(copy: Callable[..., int], why: str) -> None:
    change, complaint = REFUSED[why]
    sound = {"storage": torch.ones(512, dtype=torch.uint8), "layout": LAYOUT, "block_ids": [2, 0], "buffer": row(256)}
    with pytest.raises(ValueError, match=complaint):
        copy(**(sound | change))
    assert sound["storage"].eq(1).all()
    assert sound["buffer"].eq(0).all()
    assert copy(**sound) == 256


def test_the_buffer_is_not_part_of_the_storage() -> None:
    memory = row(512 + 128)
    for start in (384, 511):
        with pytest.raises(ValueError, match="part of the storage"):
            gather(memory[:512], LAYOUT, [0], memory[start:])
    assert gather(memory[:512], LAYOUT, [0], memory[512:]) == 128


def test_a_block_is_written_once() -> None:
    with pytest.raises(ValueError, match="named twice"):
        scatter(row(512), LAYOUT, [1, 2, 1], row(384))


@pytest.mark.parametrize(
    "regions",
    [
        (TensorRegion(0, 2, 255, 64, 64),),
        (TensorRegion(0, 2, 256, 63, 64),),
        (TensorRegion(0, 2, 0, 64, 64),),
        (TensorRegion(0, 2, 100, 100, 64),),
        (TensorRegion(0, 2, 64, 128, 64), TensorRegion(63, 1, 64, 128, 1)),
        (TensorRegion(0, 1, 0, 64, 64), TensorRegion(255, 1, 0, 64, 64)),
        (TensorRegion(0, 1, 0, 100, 64), TensorRegion(64, 1, 0, 100, 64)),
    ],
)
def test_pages_that_overlap_are_read_but_not_written(regions: tuple[TensorRegion, ...]) -> None:
    layout = BlockLayout(0, 512, 4, regions, "LBHNC")
    buffer = row(2 * layout.bytes_per_block)
    assert gather(row(512), layout, [0, 3], buffer) > 0
    with pytest.raises(ValueError, match="overlap"):
        scatter(row(512), layout, [0, 3], buffer)


def test_pages_beyond_the_storage_are_no_layout() -> None:
    with pytest.raises(ValueError, match="beyond the storage"):
        BlockLayout(0, 511, 4, LAYOUT.regions, "LBHNC")


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ConfigError, match="none of the block copy backends"):
        gather(row(512), LAYOUT, [0], row(128), backend="fortran")
