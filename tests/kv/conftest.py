# SPDX-License-Identifier: Apache-2.0
"""Movers for the tests of the data plane."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from tests.kv.fakes import FakeEvent, FakeStream, FakeWorker, Memory, SourceProcess, packed, source_process
from tests.kv.staged import BIG, Over, Reader, Source
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.worker import start_mover, stop_mover

SHAPES = [(4, 65536)]
"""Four layers of 64 KiB, 32 blocks: 8 MiB."""


@pytest.fixture(autouse=True)
def nothing_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mover of another test has settled on in this process does not count."""
    monkeypatch.setattr(kernels, "_settled", {})


@pytest.fixture(scope="package")
def source() -> Iterator[SourceProcess]:
    """A source worker in a process of its own. Not to be killed."""
    with source_process(shapes=SHAPES, seed=1) as process:
        yield process


@pytest.fixture
def memory() -> Memory:
    """The memory of the destination worker: of the same shape, with other bytes."""
    return Memory(shapes=SHAPES, seed=2)


@pytest.fixture
def info(memory: Memory, tmp_path: Path) -> Iterator[MoverInfo]:
    """The destination worker's mover."""
    worker = FakeWorker(memory)
    yield msgspec.msgpack.decode(start_mover(worker, packed(directory=str(tmp_path))), type=MoverInfo)
    stop_mover(worker)


@pytest_asyncio.fixture
async def client(info: MoverInfo) -> AsyncIterator[MoverClient]:
    client = MoverClient(info)
    yield client
    client.close()


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    opened: list[Any] = []
    yield opened
    for one in reversed(opened):
        one.close()


@pytest.fixture
def pair(over: Over, closing: list[Any]) -> tuple[Source, Reader]:
    """Both ends of a network, which the test module's `over` names."""
    source = Source(over, Memory(shapes=BIG, seed=1, num_blocks=64))
    reader = Reader(over, Memory(shapes=BIG, seed=2, num_blocks=64))
    closing += [source, reader.transport]
    return source, reader


@pytest.fixture
def gpu_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA streams that are none, and a GPU whose memory is ours: see `on_gpu`."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(device))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
