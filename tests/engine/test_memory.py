# SPDX-License-Identifier: Apache-2.0
"""The movers of several workers, driven together: real ones, and real sources."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.kv.fakes import Memory, SourceProcess, describe, source_process
from vllm_llumnix.engine.memory import Movers, SourceMemory
from vllm_llumnix.errors import Reason, Refused
from vllm_llumnix.kv.endpoint import PrivateDirectory
from vllm_llumnix.kv.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.memory import HostMemory
from vllm_llumnix.kv.messages import MoverInfo
from vllm_llumnix.kv.mover import Mover
from vllm_llumnix.kv.pace import Pace
from vllm_llumnix.kv.process import NoncePage
from vllm_llumnix.kv.settings import Limit
from vllm_llumnix.kv.transport.local import LocalTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport

CAPABILITY = bytes(CAPABILITY_BYTES)
RANKS = 2


@pytest.fixture
def sources() -> Iterator[list[SourceProcess]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(source_process(CAPABILITY, seed=rank)) for rank in range(RANKS)]


@pytest.fixture
def infos(tmp_path: Path) -> Iterator[list[MoverInfo]]:
    infos, movers, nonces = [], [], []
    for rank in range(RANKS):
        memory, nonce = Memory(seed=10 + rank), NoncePage()
        transports = [LocalTransport(memory.blocks), TcpTransport(HostMemory(memory.blocks))]
        mover = Mover(rank, memory.blocks, transports, PrivateDirectory(str(tmp_path)))
        mover.start()
        movers.append(mover)
        nonces.append(nonce)
        infos.append(MoverInfo(rank, mover.endpoint, describe(memory, nonce), "", "cpu", ""))
    yield infos
    for mover in movers:
        mover.close()


@pytest.mark.asyncio
async def test_every_rank_reaches_its_peer_by_the_transport(
    sources: list[SourceProcess], infos: list[MoverInfo]
) -> None:
    movers = Movers(infos, ("local", "tcp"))
    near = [source.peer for source in sources]
    assert await movers.probe(SourceMemory("", near)) == "local"
    # The first rank is a neighbour, the second is not.
    apart = [near[0], msgspec.structs.replace(near[1], boot_id="another")]
    assert await movers.probe(SourceMemory("", apart)) == "tcp"
    nowhere = [msgspec.structs.replace(near[0], tcp=None), apart[1]]
    with pytest.raises(Refused) as refusal:
        await movers.probe(SourceMemory("", nowhere))
    assert refusal.value.reason is Reason.TRANSPORT_UNAVAILABLE
    local, tcp = refusal.value.detail.split("; ")
    assert local.startswith("local, rank 1: there runs on another host")
    assert tcp == "tcp, rank 0: the source does not serve its blocks"
    with pytest.raises(Refused, match="1 workers at the source, 2 here"):
        await movers.probe(SourceMemory("", near[:1]))
    movers.close()


@pytest.mark.asyncio
async def test_equal_limits_of_two_links_are_two_limits(
    sources: list[SourceProcess], infos: list[MoverInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is measured of one would limit the other."""
    half = Limit(share=0.5)
    movers = Movers(infos, ("local", "tcp"), half, half)
    paces = {}
    pace_of = Mover._pace

    def spy(mover: Mover, link: str, limit: Limit) -> Pace:
        paces[mover.rank, link] = pace_of(mover, link, limit)
        return paces[mover.rank, link]

    monkeypatch.setattr(Mover, "_pace", spy)
    near = [source.peer for source in sources]
    apart = [msgspec.structs.replace(peer, boot_id="another") for peer in near]
    for job, (peers, transport) in enumerate([(near, "local"), (apart, "tcp")], 1):
        await movers.pull(
            job,
            SourceMemory("", peers, CAPABILITY),
            [1],
            [2],
            transport=transport,
            deadline_s=5.0,
            final=False,
            tag="",
        )
    assert len(set(map(id, paces.values()))) == 2 * RANKS
    movers.close()
