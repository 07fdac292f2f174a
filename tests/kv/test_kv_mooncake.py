# SPDX-License-Identifier: Apache-2.0
"""What is Mooncake's own in `mooncake`: its protocols, its buffers on GPUs, its ports."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.kv.fakes import ROOT, Memory, on_gpu, until
from tests.kv.staged import CAPABILITY, OverMooncake, Reader, Source
from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv import data_plane
from vllm_llumnix.kv.networks.mooncake import MooncakeEngine
from vllm_llumnix.kv.networks.staging import GpuStagingArea, StagingArea
from vllm_llumnix.kv.serving import block_server
from vllm_llumnix.kv.settings import MooncakeSettings
from vllm_llumnix.kv.transport import staged
from vllm_llumnix.kv.transport.staged import REMEMBERED_SECONDS, Obstacles


@pytest.fixture(scope="module")
def over() -> Iterator[OverMooncake]:
    over = OverMooncake()
    yield over
    over.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.usefixtures("gpu_in_main_memory")
@pytest.mark.parametrize("slot_blocks", [1, 3, 100])
@pytest.mark.parametrize(("there", "here"), [(True, True), (True, False), (False, True)], ids=["both", "from", "to"])
def test_buffers_on_gpus(there: bool, here: bool, slot_blocks: int, over: OverMooncake, closing: list[Any]) -> None:
    """What a network card does between them, Mooncake does over TCP."""
    shapes = [(3, 4096), (1, 512)]
    memories = [Memory(layout, shapes, seed=seed) for layout, seed in (("LBHNC", 1), ("BLHNC", 2))]
    area = {"slot_bytes": slot_blocks * memories[0].blocks.bytes_per_block, "area_bytes": 1}
    source = Source(over, memories[0], gpu=there, **area)
    reader = Reader(over, memories[1], exposed=True, gpu=here, **area)
    closing += [source, reader.transport]
    source.grants.allow(CAPABILITY, range(32))
    assert sum(reader.pull(source.peer, [5, 0, 31, 7, 8], [1, 2, 3, 30, 0]))
    for theirs, ours in zip([5, 0, 31, 7, 8], [1, 2, 3, 30, 0], strict=True):
        assert memories[1].block(ours) == memories[0].block(theirs)
    until(lambda: source.all_free)
    assert not any(ctypes.string_at(source.area.address, source.area.num_bytes))


def test_kv_memory_is_out_of_reach(pair: tuple[Source, Reader], over: OverMooncake) -> None:
    """Only what is staged can be read."""
    source, reader = pair
    before = reader.memory.bytes.copy()
    (slot,) = reader.area.take(1)
    read = over.engines[1].begin_read(over.engines[0].segment, slot, source.memory.blocks.base, 4096)
    until(lambda: read.poll() is not None)
    assert read.poll() is False
    assert not any(ctypes.string_at(slot.address, 4096))
    assert np.array_equal(before, reader.memory.bytes)


@pytest.mark.parametrize(("protocol", "expected"), [("tcp", ("1", None)), ("rdma", (None, "1"))])
def test_the_protocol_is_mooncakes_too(
    protocol: str, expected: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses by itself unless it is forced; RDMA is not here, so that a stand-in looks at what it is told."""
    told = []

    class Engine:
        def initialize(self, *_: str) -> int:
            told.append((os.environ.get("MC_FORCE_TCP"), os.environ.get("MC_FORCE_HCA")))
            return 0

        def get_rpc_port(self) -> int:
            return 1

    for variable in ("MC_FORCE_TCP", "MC_FORCE_HCA"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr("mooncake.engine.TransferEngine", Engine)
    MooncakeEngine("127.0.0.1", protocol).close()
    assert told == [expected]


OVER_IPV6 = """
import os
from vllm_llumnix.kv.memory.layout import BlockLayout
from vllm_llumnix.kv.networks.mooncake import MooncakeEngine
from vllm_llumnix.kv.networks.staging import StagingArea

engine = MooncakeEngine("::1", "tcp")
area = StagingArea(BlockLayout(0, 0, 0, (), ""), slot_bytes=4096)
engine.register(area.address, area.num_bytes)
here, there = area.take(2)
there.memory[:4096] = 7
read = engine.begin_read(engine.segment, here, there.address, 4096)
while read.poll() is None:
    pass
print(engine.segment, read.poll(), int(here.memory[:4096].sum()) // 4096, flush=True)
os._exit(0)
"""


def test_at_an_ipv6_address() -> None:
    """In a process of its own: Mooncake reads its settings once."""
    answer = subprocess.run([sys.executable, "-c", OVER_IPV6], cwd=ROOT, capture_output=True, timeout=60, check=False)
    segment, arrived, value = answer.stdout.decode().split()[-3:]
    assert segment.startswith("[::1]:")
    assert (arrived, value) == ("True", "7")


def test_a_segment_out_of_reach(pair: tuple[Source, Reader]) -> None:
    """A packet filter before Mooncake's ports: the block server is there, Mooncake is not."""
    source, reader = pair
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        segment = f"127.0.0.1:{nobody.getsockname()[1]}"
    for wrong in (segment, "nonsense"):
        with pytest.raises(TransportUnavailable, match=f"cannot be reached at {wrong}: "):
            reader.transport.probe(msgspec.structs.replace(source.peer, mooncake=wrong))
    reader.transport.probe(source.peer)


def test_a_segment_that_cannot_be_read(pair: tuple[Source, Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes connections need not be Mooncake: after a read that failed, another transport has its turn."""
    monkeypatch.setattr(block_server, "GRANT_SECONDS", 0.05)
    source, reader = pair
    clock = Clock()
    reader.transport.obstacles = Obstacles(clock)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        peer = msgspec.structs.replace(source.peer, mooncake=f"127.0.0.1:{deaf.getsockname()[1]}")
        reader.transport.probe(peer)
        with pytest.raises(TransferFailed, match="not granted"):
            list(reader.pull(peer, [1], [1]))
        reader.transport.probe(peer)  # that was the source's word
        source.grants.allow(CAPABILITY, range(64))
        with pytest.raises(TransferFailed):
            list(reader.pull(peer, [1], [1]))
        with pytest.raises(TransportUnavailable, match=r"could not read|not come to an end"):
            reader.transport.probe(peer)
        reader.transport.probe(source.peer)
        clock.now += REMEMBERED_SECONDS
        reader.transport.probe(peer)
        monkeypatch.setattr(staged, "STUCK_SECONDS", 0.1)
        given_up = reader.pull(peer, [1], [1])
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            assert not next(given_up)
        given_up.close()
        with pytest.raises(TransportUnavailable, match="not come to an end"):
            reader.transport.probe(peer)
    until(lambda: reader.all_free, 20)


class FakeEngine:
    """Registers no memory of a GPU, or any; a network card is not here."""

    segment = "127.0.0.1:1"

    def __init__(self, obstacle: int) -> None:
        self.registered: list[int] = []
        self._obstacle = obstacle

    def register(self, address: int, num_bytes: int) -> None:
        self._obstacle -= 1
        if self._obstacle == 0:
            raise TransportUnavailable("Bad address")
        self.registered.append(address)

    def unregister(self, address: int) -> None:
        self.registered.remove(address)


@pytest.mark.usefixtures("gpu_in_main_memory")
@pytest.mark.parametrize(
    ("protocol", "gpu_direct", "obstacle", "expected"),
    [
        ("rdma", True, 0, GpuStagingArea),
        ("rdma", True, 1, StagingArea),
        ("rdma", True, 2, StagingArea),
        ("rdma", False, 0, StagingArea),
        ("tcp", True, 0, StagingArea),
    ],
)
def test_which_buffers(
    protocol: str, gpu_direct: bool, obstacle: int, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU over RDMA, if that can reach it, and both areas or none."""
    engine = FakeEngine(obstacle)
    monkeypatch.setattr(data_plane, "MooncakeEngine", lambda *_: engine)
    wanted = MooncakeSettings(
        host="127.0.0.1", protocol=protocol, gpu_direct=gpu_direct, required=True, max_in=1, max_out=1
    )
    mooncake = data_plane._mooncake(on_gpu(Memory()), wanted)
    assert [type(area) for area in (mooncake.outgoing, mooncake.incoming)] == [expected] * 2
    areas = [mooncake.outgoing, mooncake.incoming] if protocol == "rdma" else [mooncake.outgoing]
    assert engine.registered == [area.address for area in areas]
