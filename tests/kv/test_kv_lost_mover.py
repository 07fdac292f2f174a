# SPDX-License-Identifier: Apache-2.0
"""A mover's thread that ends alone, in a process that lives: what is known of the blocks that it worked on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from tests.kv.fakes import Memory, SourceProcess, pull_of, until
from tests.support.faults import arm
from vllm_llumnix import faults
from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv import worker
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.mover.mover_thread import Mover
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES, ENDED
from vllm_llumnix.kv.settings import Limit
from vllm_llumnix.kv.transport.local import LocalTransport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

ALL = list(range(32))
SLOW = Limit(bytes_per_s=1e6)
"""At which all blocks of the source take 8 s."""
CAPABILITY = bytes(CAPABILITY_BYTES)


@pytest.fixture
def losses() -> list[str]:
    """What `client` was told."""
    return []


@pytest_asyncio.fixture
async def client(info: MoverInfo, losses: list[str]) -> AsyncIterator[MoverClient]:
    client = MoverClient(info, on_lost=losses.append)
    yield client
    client.close()


def running() -> Mover:
    assert worker._running is not None
    return worker._running.mover


def kill_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the mover's next turn."""
    monkeypatch.setattr(faults, "inject", arm('[{"point": "mover.turn", "action": "raise"}]'))
    os.eventfd_write(running()._wake, 1)


async def ended(client: MoverClient) -> None:
    """Python's threads are joined a little before the kernel's end."""
    await asyncio.to_thread(until, client._has_ended)


async def begun(client: MoverClient, source: SourceProcess, memory: Memory) -> asyncio.Task[object]:
    """A pull that has written something, and has most of its blocks to write."""
    before = memory.bytes.copy()
    pull = asyncio.create_task(client.pull(pull_of(source.peer, ALL, ALL, deadline_s=20, limit=SLOW)))
    await asyncio.to_thread(until, lambda: not np.array_equal(before, memory.bytes))
    return pull


async def test_it_writes_no_more(
    client: MoverClient,
    source: SourceProcess,
    memory: Memory,
    losses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pull = await begun(client, source, memory)
    kill_the_thread(monkeypatch)
    with pytest.raises(TransferFailed, match=r"mover 0 .* has gone"):
        await pull
    await ended(client)
    await client.stop(1)
    await client.revoke(CAPABILITY)
    left = memory.bytes.copy()
    await asyncio.sleep(0.3)
    assert np.array_equal(left, memory.bytes)
    with pytest.raises(TransferFailed, match="has gone"):
        await client.probe(source.peer, "local")
    (loss,) = losses
    assert "has gone" in loss
    (record,) = [record for record in caplog.records if "its thread ends" in record.message]
    assert record.levelname == "ERROR"


async def test_transports_that_cannot_be_closed_keep_nothing(
    client: MoverClient, source: SourceProcess, memory: Memory, losses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(transport: LocalTransport) -> None:
        raise OSError("cannot close")

    monkeypatch.setattr(LocalTransport, "close", broken)
    pull = await begun(client, source, memory)
    kill_the_thread(monkeypatch)
    with pytest.raises(TransferFailed, match="has gone"):
        await pull
    await ended(client)
    await client.stop(1)
    assert losses


async def test_an_end_without_a_word(
    client: MoverClient, source: SourceProcess, memory: Memory, losses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stands: only the kernel knows."""
    end = Mover._end
    monkeypatch.setattr(Mover, "_end", lambda mover: None)
    pull = await begun(client, source, memory)
    kill_the_thread(monkeypatch)
    await ended(client)
    assert not losses
    await client.stop(1, deadline_s=0.1)
    assert len(losses) == 1
    with pytest.raises(TransferFailed, match="has gone"):
        await pull
    end(running())


async def test_nothing_is_sent_any_more(
    client: MoverClient, source: SourceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who send have threads of their own: the grants go with the one through which they came."""
    mover = running()
    await client.grant(CAPABILITY, ALL)
    assert await client.probe(source.peer, "local") is None
    cut, reading, gone_on = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with mover.grants.reading(CAPABILITY, ALL, cut.set, 5.0):
            reading.set()
            gone_on.wait(5.0)

    sender = threading.Thread(target=read)
    sender.start()
    assert reading.wait(5.0)
    kill_the_thread(monkeypatch)
    assert await asyncio.to_thread(cut.wait, 5.0)
    # What is on its way is waited for: until then nobody may say that the blocks are quiet.
    with pytest.raises(TransferFailed, match="has not answered"):
        await client.revoke(CAPABILITY, deadline_s=0.2)
    gone_on.set()
    await asyncio.to_thread(sender.join)
    await ended(client)
    await client.revoke(CAPABILITY)
    with pytest.raises(TransferFailed, match=ENDED), mover.grants.reading(CAPABILITY, ALL, cut.set, 5.0):
        pass


async def test_a_client_that_is_closed_has_lost_nobody(info: MoverInfo, losses: list[str]) -> None:
    client = MoverClient(info, on_lost=losses.append)
    client.close()
    await asyncio.sleep(0)
    assert not losses


async def test_messages_before_the_loss_is_noticed_fail(info: MoverInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection has ended, and its end is not noticed before the command is on its way: nothing waits for it."""

    async def see_nothing(client: MoverClient) -> None:
        """The monitor's word is late."""

    monkeypatch.setattr(MoverClient, "_watch", see_nothing)
    client = MoverClient(info)
    await client.stop(1)
    kill_the_thread(monkeypatch)
    await ended(client)
    async with asyncio.timeout(2.0):
        for _ in range(20):
            with pytest.raises(TransferFailed, match="takes no commands"):
                await client.grant(CAPABILITY, ALL)
        await client.stop(1)
    client.close()
