# SPDX-License-Identifier: Apache-2.0
"""The movers of several workers, driven together: real ones, and real sources."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llumlet.protocol.errors import Reason, Refused
from tests.kv.fakes import Memory, SourceProcess, describe, source_process
from vllm_llumnix.engine.blocks import movers as engine_memory
from vllm_llumnix.engine.blocks.movers import Movers, SourceMemory
from vllm_llumnix.engine.compatibility.identity import EngineFacts
from vllm_llumnix.kv.memory.block_memory import HostMemory
from vllm_llumnix.kv.mover.endpoint import PrivateDirectory
from vllm_llumnix.kv.mover.messages import BlockCopy, MoverInfo
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.mover.mover_thread import Mover
from vllm_llumnix.kv.mover.pace import Pace
from vllm_llumnix.kv.mover.process import NoncePage
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.settings import Limit
from vllm_llumnix.kv.transport.local import LocalTransport
from vllm_llumnix.kv.transport.tcp import TcpTransport

CAPABILITY = bytes(CAPABILITY_BYTES)
RANKS = 2
FACTS = EngineFacts({}, {})


@pytest.fixture
def sources() -> Iterator[list[SourceProcess]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(source_process(CAPABILITY, seed=rank)) for rank in range(RANKS)]


@pytest.fixture
def running() -> list[Mover]:
    """The movers of `infos`."""
    return []


@pytest.fixture
def infos(tmp_path: Path, running: list[Mover]) -> Iterator[list[MoverInfo]]:
    infos, kept = [], []
    for rank in range(RANKS):
        memory, nonce = Memory(seed=10 + rank), NoncePage()
        transports = [LocalTransport(memory.blocks), TcpTransport(HostMemory(memory.blocks))]
        mover = Mover(rank, memory.blocks, transports, PrivateDirectory(str(tmp_path)))
        mover.start()
        running.append(mover)
        kept.append((memory, nonce))
        infos.append(MoverInfo(rank, mover.endpoint, mover.thread, describe(memory, nonce), "", "cpu", ""))
    yield infos
    for mover in running:
        mover.close()


@pytest.mark.asyncio
async def test_every_rank_reaches_its_peer_by_the_transport(
    sources: list[SourceProcess], infos: list[MoverInfo]
) -> None:
    movers = Movers(infos, ("local", "tcp"))
    near = [source.peer for source in sources]
    assert await movers.probe(SourceMemory(FACTS, near)) == "local"
    # The first rank is a neighbour, the second is not.
    apart = [near[0], msgspec.structs.replace(near[1], boot_id="another")]
    assert await movers.probe(SourceMemory(FACTS, apart)) == "tcp"
    nowhere = [msgspec.structs.replace(near[0], tcp=None), apart[1]]
    with pytest.raises(Refused) as refusal:
        await movers.probe(SourceMemory(FACTS, nowhere))
    assert refusal.value.reason is Reason.TRANSPORT_UNAVAILABLE
    local, tcp = refusal.value.detail.split("; ")
    assert local.startswith("local, rank 1: there runs on another host")
    assert tcp == "tcp, rank 0: the source does not serve its blocks"
    with pytest.raises(Refused, match="1 workers at the source, 2 here"):
        await movers.probe(SourceMemory(FACTS, near[:1]))
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
        copy = BlockCopy(job=job, src_blocks=[1], dst_blocks=[2], transport=transport, deadline_s=5.0)
        await movers.pull([copy], SourceMemory(FACTS, peers, CAPABILITY))
    assert len(set(map(id, paces.values()))) == 2 * RANKS
    movers.close()


@pytest.mark.asyncio
async def test_a_mover_that_ended_alone_is_not_waited_for(
    infos: list[MoverInfo], running: list[Mover], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[str] = []
    movers = Movers(infos, ("local",), on_lost=losses.append)
    await movers.stop(movers.next_job())
    monkeypatch.setattr(running[1], "_turn", lambda: True)
    os.eventfd_write(running[1]._wake, 1)
    await asyncio.to_thread(running[1]._thread.join)
    async with asyncio.timeout(10.0):
        await movers.stop(movers.next_job())
        await movers.revoke(CAPABILITY)
    (loss,) = losses
    assert loss.startswith("mover 1 ")
    movers.close()


@pytest.mark.asyncio
async def test_a_mover_that_is_silent_is_waited_for(
    infos: list[MoverInfo],
    running: list[Mover],
    monkeypatch: pytest.MonkeyPatch,
    llumlet_log: pytest.LogCaptureFixture,
) -> None:
    """It may be at work on the blocks. Only no more are entrusted to it, and it is complained of once."""
    for name, seconds in (("ASK_SECONDS", 0.02), ("SILENT_SECONDS", 0.3)):
        monkeypatch.setattr(engine_memory, name, seconds)
    stop = MoverClient.stop
    monkeypatch.setattr(MoverClient, "stop", lambda client, job: stop(client, job, deadline_s=0.05))
    stands, go_on, told = threading.Event(), threading.Event(), asyncio.Event()
    losses: list[tuple[float, str]] = []
    turn = running[1]._turn

    def wait_first() -> bool:
        stands.set()
        go_on.wait()
        return turn()

    def lose(reason: str) -> None:
        losses.append((time.monotonic(), reason))
        told.set()

    monkeypatch.setattr(running[1], "_turn", wait_first)
    os.eventfd_write(running[1]._wake, 1)
    assert await asyncio.to_thread(stands.wait, 30.0)
    movers = Movers(infos, ("local",), on_lost=lose)
    began = time.monotonic()
    stopping = asyncio.create_task(movers.stop(movers.next_job()))
    try:
        await asyncio.wait_for(told.wait(), 30.0)
        await asyncio.sleep(0.2)
        lost, loss = losses[0]
        assert lost - began >= engine_memory.SILENT_SECONDS
        assert loss.startswith("a mover does not say that it is quiet: mover 1 has not answered")
        assert not stopping.done()
        kept = [record for record in llumlet_log.records if "blocks are kept" in record.message]
        assert len([record for record in kept if "mover 1 " in record.message]) == 1
    finally:
        go_on.set()
    async with asyncio.timeout(30.0):
        await stopping
    movers.close()
