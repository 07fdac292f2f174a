# SPDX-License-Identifier: Apache-2.0
"""KV caches of one model in engines of different numbers of workers, or with pages of another order: every worker has
its heads, wherever they were."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llumlet.protocol.errors import Reason, Refused
from tests.kv.fakes import Memory, SourceProcess, describe, source_process
from vllm_llumnix.engine.blocks.movers import Movers, SourceMemory, routes
from vllm_llumnix.engine.compatibility.identity import EngineFacts
from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.block_memory import HostMemory
from vllm_llumnix.kv.memory.layout import BlockLayout, Cut, Strip, pair_pieces
from vllm_llumnix.kv.mover.endpoint import PrivateDirectory
from vllm_llumnix.kv.mover.messages import BlockCopy, MoverInfo
from vllm_llumnix.kv.mover.mover_thread import Mover
from vllm_llumnix.kv.mover.process import NoncePage
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.transport.local import LocalTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport

CAPABILITY = bytes(CAPABILITY_BYTES)
NUM_HEADS, TOKENS, CONTENT = 4, 3, 8
LAYERS, BLOCKS = 2, 5
FACTS = EngineFacts({}, {})

Cache = npt.NDArray[np.uint8]
"""[layers, blocks, heads, tokens, content] of a whole model."""


def workers(number: int, layout: str, seed: int = 0) -> list[Memory]:
    page = NUM_HEADS // number * TOKENS * CONTENT
    # As kernels of GPUs have it: what is kept of a head and a token lies in one place.
    each = CONTENT if "HN" in layout else NUM_HEADS // number * CONTENT
    shape = {"layout": layout, "shapes": [(LAYERS, page)], "num_blocks": BLOCKS, "tokens": TOKENS}
    shape["strips"] = ((1, each),)
    return [Memory(**shape, seed=10 * seed + rank, heads=NUM_HEADS // number) for rank in range(number)]


def cache_of(memories: Sequence[Memory]) -> Cache:
    """Read worker by worker, page by page."""
    parts = []
    for memory in memories:
        interior = (memory.heads, TOKENS, CONTENT) if "HN" in memory.layout else (TOKENS, memory.heads, CONTENT)
        pages = [[memory.block(block)[layer] for block in range(BLOCKS)] for layer in range(LAYERS)]
        found = np.array([[np.frombuffer(page, np.uint8).reshape(interior) for page in row] for row in pages])
        parts.append(found if "HN" in memory.layout else found.swapaxes(2, 3))
    return np.concatenate(parts, axis=2)


def copy(source: Memory, there: list[int], destination: Memory, here: list[int], cuts: tuple[Cut | None, ...]) -> None:
    pieces = pair_pieces(source.blocks.cut(cuts[0]), there, destination.blocks.cut(cuts[1]), here)
    for from_address, to_address, length in zip(*(array.tolist() for array in pieces), strict=True):
        at, to = from_address - source.blocks.base, to_address - destination.blocks.base
        destination.bytes[to : to + length] = source.bytes[at : at + length]


@settings(deadline=None)
@given(
    st.sampled_from(list(itertools.product(("LBHNC", "LBNHC", "BLHNC", "BLNHC"), repeat=2))),
    st.sampled_from([(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (2, 2), (1, 1)]),
    st.permutations(range(BLOCKS)),
)
def test_heads_find_their_worker(layouts: tuple[str, str], numbers: tuple[int, int], order: list[int]) -> None:
    sources, destinations = (workers(numbers[side], layouts[side], seed=side) for side in range(2))
    there, here = order[:3], list(range(3))
    expected, untouched = cache_of(sources)[:, there], cache_of(destinations)[:, 3:]
    peers = [describe(memory, NoncePage()) for memory in sources]
    by_layout = {id(peer): memory for peer, memory in zip(peers, sources, strict=True)}
    for destination, its in zip(destinations, routes([memory.blocks for memory in destinations], peers), strict=True):
        for route in its:
            copy(by_layout[id(route.memory)], there, destination, here, route.cuts)
    assert (cache_of(destinations)[:, :3] == expected).all()
    assert (cache_of(destinations)[:, 3:] == untouched).all()


def test_some_pages_cannot_be_cut() -> None:
    (whole,) = workers(1, "LBHNC")
    for index, count in [(2, 2), (-1, 2), (0, 0), (0, 3), (0, 8)]:
        with pytest.raises(ValueError, match="of pages with 4 heads"):
            whole.blocks.cut(Cut(index, count))
    unknown = msgspec.structs.replace(whole.blocks, heads=0, tokens=0, strips=())
    assert unknown.cut(None) is unknown
    with pytest.raises(ValueError, match="with unknown heads"):
        unknown.cut(Cut(0, 2))
    with pytest.raises(ValueError, match="for 5 heads"):
        msgspec.structs.replace(whole.blocks, heads=5)


@pytest.mark.parametrize(
    ("heads", "number"),
    [
        ([2, 2], 0),  # nobody
        ([2, 2], 1),  # half of the heads
        ([2, 2], 3),  # not so many for each
        ([0, 0], 4),  # unknown
        ([1, 3], 4),  # not as many at each of ours
    ],
)
def test_whose_heads_are_not_cut_alike(heads: list[int], number: int) -> None:
    def layout(heads: int) -> BlockLayout:
        return msgspec.structs.replace(Memory(shapes=[(1, 36 * 4)]).blocks, heads=heads, tokens=min(heads, 1))

    nonce = NoncePage()
    peers = [msgspec.structs.replace(describe(Memory(), nonce), layout=layout(2)) for _ in range(number)]
    with pytest.raises(Refused, match=f"{number} workers at the source, 2 here, and their heads") as refused:
        routes([layout(each) for each in heads], peers)
    assert refused.value.reason is Reason.INCOMPATIBLE_ENGINE


@contextlib.contextmanager
def engine(memories: Sequence[Memory], directory: Path) -> Iterator[Movers]:
    with contextlib.ExitStack() as stack:
        infos = []
        for rank, memory in enumerate(memories):
            transports = [LocalTransport(memory.blocks), TcpTransport(HostMemory(memory.blocks))]
            mover = Mover(rank, memory.blocks, transports, PrivateDirectory(str(directory)))
            mover.start()
            stack.callback(mover.close)
            infos.append(MoverInfo(rank, mover.endpoint, mover.thread, describe(memory, NoncePage()), "", "cpu", ""))
        movers = Movers(infos, ("local", "tcp"))
        stack.callback(movers.close)
        yield movers


def test_pages_of_so_many_tokens_are_not_cut() -> None:
    """A peer may say what it likes: a piece for each of a million tokens would keep our mover busy."""
    (whole,) = workers(1, "LBNHC")
    pages = Memory("LBNHC", [(1, 1 << 22)], num_blocks=1, heads=NUM_HEADS // 2, tokens=1 << 20).blocks
    peers = [msgspec.structs.replace(describe(Memory(), NoncePage()), layout=pages) for _ in range(2)]
    with pytest.raises(Refused, match="2 workers at the source, 1 here"):
        routes([whole.blocks], peers)


@pytest.mark.parametrize(
    "changes",
    [{"strips": ()}, {"strips": (Strip(CONTENT, 1),)}, {"heads": 2, "strips": (Strip(1, 2 * CONTENT),)}],
    ids=["unknown", "transposed", "other heads"],
)
def test_pages_of_another_order_whose_vectors_are_not_known(changes: dict[str, Any]) -> None:
    (ours,), (theirs,) = workers(1, "LBHNC"), workers(1, "LBNHC")
    peer = describe(theirs, NoncePage())
    strange = msgspec.structs.replace(peer, layout=msgspec.structs.replace(peer.layout, **changes))
    assert len(routes([ours.blocks], [peer])) == 1
    with pytest.raises(Refused, match="1 workers at the source, 1 here") as refused:
        routes([ours.blocks], [strange])
    assert refused.value.reason is Reason.INCOMPATIBLE_ENGINE


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"], ids=["alike", "another order"])
@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (1, 1)])
async def test_between_processes(numbers: tuple[int, int], order: str, transport: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        shapes = workers(numbers[0], order)
        sources: list[SourceProcess] = [
            stack.enter_context(
                source_process(
                    CAPABILITY,
                    layout=order,
                    shapes=memory.shapes,
                    num_blocks=BLOCKS,
                    seed=memory.seed,
                    heads=memory.heads,
                    tokens=TOKENS,
                    strips=memory.strips,
                )
            )
            for memory in shapes
        ]
        destinations = workers(numbers[1], "LBHNC", seed=1)
        movers = stack.enter_context(engine(destinations, tmp_path))
        source = SourceMemory(FACTS, [one.peer for one in sources], CAPABILITY)
        assert await movers.probe(source) == "local"
        copied = BlockCopy(job=1, src_blocks=[4, 0], dst_blocks=[1, 3], transport=transport, deadline_s=10.0)
        expected = cache_of([one.memory for one in sources])
        num_bytes = await movers.pull([copied], source)
        found = cache_of(destinations)
        assert num_bytes == expected[:, [4, 0]].nbytes
        assert (found[:, [1, 3]] == expected[:, [4, 0]]).all()


@pytest.mark.asyncio
async def test_nothing_begins_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of a copy the mover runs nothing, and says so; the second part must not begin then."""
    with contextlib.ExitStack() as stack:
        shapes = [(LAYERS, NUM_HEADS // 2 * TOKENS * CONTENT)]
        sources = [
            stack.enter_context(source_process(CAPABILITY, shapes=shapes, num_blocks=BLOCKS, heads=2, tokens=TOKENS))
            for _ in range(2)
        ]
        destinations = workers(1, "LBHNC", seed=1)
        movers = stack.enter_context(engine(destinations, tmp_path))
        (client,) = movers._clients
        pull, begun = client.pull, []

        async def stopped_behind_the_first(part):
            begun.append(part)
            report = await pull(part)
            await movers.stop(part.job)
            return report

        monkeypatch.setattr(client, "pull", stopped_behind_the_first)
        copied = BlockCopy(job=1, src_blocks=[0], dst_blocks=[1], deadline_s=10.0)
        with pytest.raises(TransferFailed, match="stopped"):
            await movers.pull([copied], SourceMemory(FACTS, [one.peer for one in sources], CAPABILITY))
        assert len(begun) == 1
