# SPDX-License-Identifier: Apache-2.0
"""What is NIXL's own in `nixl`: a process that may be ended, stopped and written to, and takes no worker with it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from tests.kv.fakes import Memory, on_gpu, pull_of, source_process, until
from tests.kv.staged import BIG, CAPABILITY, OverNixl, Reader, Source
from vllm_llumnix.errors import TransferFailed, TransportError, TransportUnavailable
from vllm_llumnix.kv import data_plane
from vllm_llumnix.kv.memory.block_memory import HostMemory
from vllm_llumnix.kv.mover.messages import DEPTH, GREETING_BYTES, NixlMemory
from vllm_llumnix.kv.networks import nixl, nixl_process
from vllm_llumnix.kv.networks.nixl import NixlEngine, environment_of
from vllm_llumnix.kv.networks.nixl_process import Agent, NixlError, ReadEnd, Ready, Unusable, encode
from vllm_llumnix.kv.networks.staging import SharedStagingArea
from vllm_llumnix.kv.settings import NixlSettings
from vllm_llumnix.kv.transport import staged
from vllm_llumnix.kv.transport.tcp import TcpTransport

EVERY = list(range(64))


@pytest.fixture
def over() -> Iterator[OverNixl]:
    """Processes of each test's own: they may come to an end."""
    over = OverNixl()
    yield over
    over.close()


@pytest.fixture
def over_tcp(over: OverNixl, monkeypatch: pytest.MonkeyPatch) -> OverNixl:
    """As between two hosts: UCX would have the kernel copy, which needs nobody at the source."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return over


def engine_of(end: Source | Reader, over: OverNixl) -> NixlEngine:
    return next(it.engine for it in over._started.values() if end.area in (it.outgoing, it.incoming))


def process_of(end: Source | Reader, over: OverNixl) -> subprocess.Popen[bytes]:
    return engine_of(end, over)._process


def lying(source: Source, **changed: Any) -> Any:
    """What a peer says of itself, but for some of what it says of NIXL."""
    memory = source.peer.nixl
    assert memory is not None
    return msgspec.structs.replace(source.peer, nixl=msgspec.structs.replace(memory, **changed))


def begun(pair: tuple[Source, Reader]) -> Any:
    """A pull of everything, of which something has come."""
    source, reader = pair
    source.grants.allow(CAPABILITY, EVERY)
    pull = reader.pull(source.peer, EVERY, EVERY, chunk_bytes=1 << 18)
    while not next(pull):
        pass
    return pull


def comes_over_tcp(source: Source, reader: Reader) -> bool:
    """Whether blocks get from one to the other by another transport, as a move would try next."""
    transport = TcpTransport(HostMemory(reader.memory.blocks))
    transport.probe(source.peer)
    copied = sum(transport.pull(pull_of(source.peer, EVERY, EVERY, CAPABILITY), 8 << 20))
    transport.close()
    return copied == source.memory.bytes.nbytes and np.array_equal(source.memory.bytes, reader.memory.bytes)


@pytest.mark.parametrize("whose", ["source", "destination"])
def test_a_process_killed_in_the_middle(whose: str, pair: tuple[Source, Reader], over: OverNixl) -> None:
    source, reader = pair
    pull = begun(pair)
    process = process_of(source if whose == "source" else reader, over)
    process.kill()
    process.wait()
    with pytest.raises(TransportError, match=r"could not read|process has ended"):
        list(pull)
    obstacle = "could not read" if whose == "source" else "process has ended: signal 9"
    with pytest.raises(TransportUnavailable, match=obstacle):
        reader.transport.probe(source.peer)
    until(lambda: reader.all_free)
    assert comes_over_tcp(source, reader)


@pytest.mark.usefixtures("over_tcp")
def test_a_process_stopped_in_the_middle(
    pair: tuple[Source, Reader], over: OverNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that may still be written to are not used again until that is over."""
    source, reader = pair
    pull = begun(pair)
    process = process_of(source, over)
    process.send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as hurried:
            hurried.setattr(staged, "STALL_SECONDS", 0.3)
            hurried.setattr(staged, "STUCK_SECONDS", 0.1)
            with pytest.raises(TransferFailed, match="nothing has come"):
                list(pull)
        assert not reader.all_free
        with pytest.raises(TransportUnavailable, match="not come to an end"):
            reader.transport.probe(source.peer)
    finally:
        process.send_signal(signal.SIGCONT)
    until(lambda: reader.all_free)
    assert sum(reader.pull(source.peer, EVERY, EVERY)) == source.memory.bytes.nbytes
    assert np.array_equal(source.memory.bytes, reader.memory.bytes)


@pytest.mark.usefixtures("over_tcp")
def test_a_process_that_is_stopped_before(
    pair: tuple[Source, Reader], over: OverNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe has an end, and its buffer is kept until the read has one."""
    source, reader = pair
    monkeypatch.setattr(nixl, "TRIAL_SECONDS", 0.3)
    process = process_of(source, over)
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(TransportUnavailable, match="NIXL has not read from"):
            reader.transport.probe(source.peer)
        assert not reader.all_free
    finally:
        process.send_signal(signal.SIGCONT)
    until(lambda: reader.all_free)
    with pytest.raises(TransportUnavailable, match="NIXL has not read from"):
        reader.transport.probe(source.peer)  # it is believed for a minute


@pytest.mark.usefixtures("over_tcp")
def test_all_that_others_reach_is_the_process_of_nixl(pair: tuple[Source, Reader], over: OverNixl) -> None:
    """Where no network card keeps to what is registered, UCX reads and writes what its messages name. That ends its
    process, if there is nothing at an address that the worker has its KV cache at; and the worker goes on."""
    source, reader = pair
    memory = source.peer.nixl
    assert memory is not None
    begins_at, told = source.memory.blocks.base, struct.pack("<QQ", memory.address, memory.num_bytes)
    assert memory.metadata.count(told) == 1
    everything = memory.metadata.replace(told, struct.pack("<QQ", 4096, 2**47 - 8192))
    before = source.memory.bytes.copy()
    (slot,) = reader.area.take(1)
    peer = msgspec.structs.replace(memory, metadata=everything, address=begins_at, num_bytes=1 << 30)
    read = engine_of(reader, over).begin_read(peer, slot, 0, 4096)
    until(lambda: read.poll() is not None)
    assert read.poll() is False
    assert not any(ctypes.string_at(slot.memory.data_ptr(), 4096))
    assert np.array_equal(before, source.memory.bytes)
    source.grants.allow(CAPABILITY, EVERY)
    assert comes_over_tcp(source, reader)


def test_damaged_metadata(pair: tuple[Source, Reader], over: OverNixl) -> None:
    """UCX ends its process when an address is of a version that it does not know. Moves go on by another transport."""
    source, reader = pair
    memory = source.peer.nixl
    assert memory is not None
    at = memory.metadata.index(b"UCX|c") + len(b"UCX|c") + 8
    damaged = memory.metadata[:at] + b"\x24" + memory.metadata[at + 1 :]
    with pytest.raises(TransportUnavailable, match="could not read"):
        reader.transport.probe(lying(source, metadata=damaged))
    assert process_of(reader, over).wait(5) == -signal.SIGABRT
    with pytest.raises(TransportUnavailable, match="process has ended: signal 6"):
        reader.transport.probe(source.peer)
    source.grants.allow(CAPABILITY, EVERY)
    assert comes_over_tcp(source, reader)


def test_impostor_agent_is_refused(pair: tuple[Source, Reader], over: OverNixl) -> None:
    """NIXL goes by the name in the metadata, so that is looked at before NIXL is."""
    source, reader = pair
    stranger = over.start("stranger", source.memory).engine.memory
    reader.transport.probe(source.peer)
    assert source.peer.nixl is not None
    for changed in (
        {"agent": stranger.agent},
        {"metadata": stranger.metadata},
        {"metadata": b"nonsense"},
    ):
        (slot,) = reader.area.take(1)
        read = engine_of(reader, over).begin_read(lying(source, **changed).nixl, slot, 0, GREETING_BYTES)
        until(lambda read=read: read.poll() is not None)
        assert read.poll() is False
        reader.area.give_back([slot])
    source.grants.allow(CAPABILITY, EVERY)
    assert sum(reader.pull(source.peer, EVERY, EVERY)) == source.memory.bytes.nbytes


def test_a_probe_sees_an_end_at_once(pair: tuple[Source, Reader], over: OverNixl) -> None:
    """So that a move does not begin with what cannot be."""
    source, reader = pair
    reader.transport.probe(source.peer)
    process = process_of(reader, over)
    process.kill()
    process.wait()
    with pytest.raises(TransportUnavailable, match="process has ended: signal 9"):
        reader.transport.probe(source.peer)


def test_an_end_is_noticed_without_reads(pair: tuple[Source, Reader], over: OverNixl) -> None:
    _, reader = pair
    reader.transport.tidy()
    assert engine_of(reader, over).problem is None
    process_of(reader, over).kill()
    until(lambda: reader.transport.tidy() or engine_of(reader, over).problem)
    assert process_of(reader, over).returncode == -signal.SIGKILL


def test_after_a_read_that_failed(pair: tuple[Source, Reader], over: OverNixl) -> None:
    """The next one connects anew."""
    source, reader = pair
    memory = source.peer.nixl
    assert memory is not None
    told, more = struct.pack("<QQ", memory.address, memory.num_bytes), memory.num_bytes + (1 << 40)
    metadata = memory.metadata.replace(told, struct.pack("<QQ", memory.address, more))
    peer = msgspec.structs.replace(memory, metadata=metadata, num_bytes=more)
    (slot,) = reader.area.take(1)
    for offset, arrives in ((0, True), (1 << 40, False), (0, True)):
        read = engine_of(reader, over).begin_read(peer, slot, offset, GREETING_BYTES)
        until(lambda read=read: read.poll() is not None)
        assert read.poll() is arrives
    assert bytes(slot.memory[:GREETING_BYTES].numpy()) == memory.greeting


def test_another_greeting(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    with pytest.raises(TransportUnavailable, match="NIXL reads another process than"):
        reader.transport.probe(lying(source, greeting=bytes(GREETING_BYTES)))


def test_bytes_outside_of_the_area(pair: tuple[Source, Reader], over: OverNixl) -> None:
    """What a source says of a buffer's place is checked before anything is read."""
    source, reader = pair
    assert source.peer.nixl is not None
    (slot,) = reader.area.take(1)
    for offset, num_bytes in ((-1, 10), (source.peer.nixl.num_bytes - 5, 10), (2**62, 10)):
        with pytest.raises(TransferFailed, match="do not lie in the source's staging area"):
            engine_of(reader, over).begin_read(source.peer.nixl, slot, offset, num_bytes)


@pytest.mark.parametrize(
    "changed", [{"agent": "x"}, {"metadata": b"x" * (1 << 17)}, {"address": 2**60}, {"greeting": b""}, {"num_bytes": 0}]
)
def test_peer_s_description_is_bounded(changed: dict[str, Any]) -> None:
    good = {"agent": f"llumnix-{'0' * 32}", "metadata": b"x", "address": 0, "num_bytes": 4096, "greeting": bytes(32)}
    assert msgspec.convert(good, NixlMemory)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | changed, NixlMemory)


def test_a_process_goes_with_its_worker() -> None:
    with source_process(CAPABILITY, "nixl", shapes=BIG) as source:
        (process,) = psutil.Process(source.peer.pid).children()
        source.kill()
        until(lambda: not process.is_running())


def test_the_file_of_an_area_keeps_its_size() -> None:
    """Else its other process could end the worker by making it shorter."""
    area = SharedStagingArea(Memory().blocks)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(area.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(area.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    area.close()


def test_no_secrets_in_its_environment() -> None:
    given = {
        "HF_TOKEN": "secret",
        "UCX_TLS": "tcp",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "3",
        "NIXL_LOG_LEVEL": "TRACE",
    }
    assert environment_of("eth1", given) == {
        "UCX_TLS": "tcp",
        "PATH": "/bin",
        "NIXL_LOG_LEVEL": "TRACE",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "UCX_TCP_SYN_CNT": "1",
        "UCX_NET_DEVICES": "eth1",
        "CUDA_VISIBLE_DEVICES": "",
    }


READY = encode(Ready(b"metadata", 4096))


@pytest.mark.parametrize(
    ("packets", "complaint"),
    [
        ([], "has ended"),
        ([b"\xc1 garbage"], "does not answer"),
        ([encode(Unusable("no network"))], "no network"),
        ([encode(ReadEnd(1))], "has ended"),
        ([encode(Ready(b"", 0))], "metadata"),
    ],
)
def test_a_process_that_does_not_start(packets: list[bytes], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportUnavailable, match=f"NIXL does not start with the network devices 'lo': .*{complaint}"):
        _lied_to(packets, monkeypatch)


@pytest.mark.parametrize("after", [b"\xc1", encode(Unusable("x")), READY])
def test_a_process_that_speaks_another_language(after: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended; an end of a read that is not known is no reason."""
    engine = _lied_to([READY, encode(ReadEnd(2**40)), after], monkeypatch)
    until(lambda: engine.hear() or engine.problem)
    assert engine._process.returncode is not None


def test_reads_after_the_end(over: OverNixl) -> None:
    """Of a probe's thread, which may come late."""
    engine, _, incoming = over.start("ended", Memory())
    engine.close()
    (slot,) = incoming.take(1)
    assert engine.begin_read(engine.memory, slot, 0, 32).poll() is False


def _lied_to(packets: list[bytes], monkeypatch: pytest.MonkeyPatch) -> NixlEngine:
    monkeypatch.setenv("NIXL_LIE", " ".join(packet.hex() for packet in packets))
    monkeypatch.setattr(nixl, "STARTED", "tests.kv.not_nixl")
    return NixlEngine("lo", *(SharedStagingArea(Memory().blocks) for _ in range(2)))


def test_devices_that_are_not_there() -> None:
    with pytest.raises(TransportUnavailable, match="NIXL does not start with the network devices 'nosuch0'"):
        NixlEngine("nosuch0", *(SharedStagingArea(Memory().blocks) for _ in range(2)))


@pytest.mark.usefixtures("gpu_in_main_memory")
@pytest.mark.parametrize("gpu", [False, True], ids=["main memory", "gpu"])
def test_worker_starts_its_agent(gpu: bool) -> None:
    """Buffers in main memory, also for a GPU's blocks, and nothing is used where others can still write to it."""
    memory = Memory()
    wanted = NixlSettings(devices="lo", required=True, max_in=2, max_out=3)
    found = data_plane._nixl(on_gpu(memory) if gpu else HostMemory(memory.blocks), wanted)
    found.engine.close()
    assert found.exposed
    assert [type(area) for area in (found.outgoing, found.incoming)] == [SharedStagingArea] * 2
    assert [area.num_free for area in (found.outgoing, found.incoming)] == [3 * DEPTH, 2 * DEPTH]


def test_peers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were read least lately, and none that is being read. Of one that came again, what it said first."""
    monkeypatch.setattr(nixl_process, "MAX_PEERS", 3)
    known: list[str] = []
    fake = SimpleNamespace(
        loadRemoteMD=lambda metadata: known.append(metadata[24:].decode()), invalidateRemoteMD=known.remove
    )
    agent = Agent.__new__(Agent)
    agent.name, agent._agent, agent._errors, agent._under_way = "me", fake, (), {}
    agent._peers = nixl_process.OrderedDict()

    def metadata(name: str, rest: bytes = b"") -> bytes:
        return b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + rest

    agent._under_way[0] = "a", 0
    for name in ("a", "b", "c", "a", "d", "e"):
        agent._meet(name, metadata(name))
    assert known == ["a", "d", "e"]
    with pytest.raises(NixlError, match="two processes"):
        agent._meet("a", metadata("a", b"x"))
    del agent._under_way[0]
    agent._meet("a", metadata("a", b"x"))
    assert known == ["d", "e", "ax"]
    for name, said in (("me", metadata("me")), ("f", metadata("g")), ("f", b"")):
        with pytest.raises(NixlError, match="another agent"):
            agent._meet(name, said)


def test_it_listens_at_the_addresses_of_its_devices(over: OverNixl) -> None:
    process = psutil.Process(over.start("listening", Memory()).engine.pid)
    listening = {it.laddr.ip for it in process.net_connections("tcp") if it.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_an_idle_process_takes_no_time(over: OverNixl) -> None:
    """NIXL's own thread would never sleep, by default."""
    process = psutil.Process(over.start("idle", Memory()).engine.pid)
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(1.0)
    after = process.cpu_times()
    assert (after.user + after.system - before.user - before.system) / (time.monotonic() - began) < 0.1
