# SPDX-License-Identifier: Apache-2.0
"""`tcp`: the right bytes, to those who may have them, for as long as they may."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llumlet.process.secret_files import LOOK_S
from tests.kv.fakes import Memory, describe, pull_of, source_process, until
from tests.support.authority import Authority, credential_files, token_file
from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.data_plane import tls_context
from vllm_llumnix.kv.memory.block_memory import HostMemory
from vllm_llumnix.kv.mover.messages import PeerMemory, decode_block_answer
from vllm_llumnix.kv.mover.process import NoncePage
from vllm_llumnix.kv.serving import block_server
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES, Grants
from vllm_llumnix.kv.settings import WorkerSettings
from vllm_llumnix.kv.transport import connections, tcp
from vllm_llumnix.kv.transport.blocks_tcp import receive_frame
from vllm_llumnix.kv.transport.tcp import TcpTransport

CHUNK = 1 << 20
CAPABILITY = bytes(range(CAPABILITY_BYTES))
BIG = [(4, 65536)]


@dataclass
class Source:
    memory: Memory
    peer: PeerMemory
    grants: Grants
    server: BlockServer


@contextlib.contextmanager
def serving(memory: Memory, tls: WorkerSettings | None = None) -> Iterator[Source]:
    nonce, grants = NoncePage(), Grants()
    context = tls_context(tls, server_side=True) if tls else None
    server = BlockServer(HostMemory(memory.blocks), nonce.value, grants, "127.0.0.1", context)
    server.start()
    try:
        yield Source(memory, describe(memory, nonce, tcp=f"127.0.0.1:{server.port}"), grants, server)
    finally:
        server.close()


@contextlib.contextmanager
def reading(memory: Memory, tls: WorkerSettings | None = None) -> Iterator[TcpTransport]:
    transport = TcpTransport(HostMemory(memory.blocks), tls_context(tls, server_side=False) if tls else None)
    try:
        yield transport
    finally:
        transport.close()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    files = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > files or _block_threads():
        assert time.monotonic() < deadline, f"left behind: {_block_threads()}"
        time.sleep(0.01)


def _block_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("llumnix-blocks")]


@pytest.fixture
def identities(tmp_path: Path) -> tuple[WorkerSettings, WorkerSettings]:
    """Two workers with certificates of one authority."""
    authority, token = Authority(tmp_path), token_file(tmp_path)
    files = [credential_files(authority, name, token) for name in ("a", "b")]
    a, b = (WorkerSettings(instance="x", tls=(f.tls_cert, f.tls_key, f.tls_ca)) for f in files)
    return a, b


@pytest.mark.parametrize("secured", [False, True], ids=["clear", "tls"])
@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("theirs", "ours"), [("LBHNC", "LBHNC"), ("BLHNC", "BLHNC"), ("LBHNC", "BLHNC")])
def test_blocks_arrive_and_nothing_else_changes(
    theirs: str,
    ours: str,
    streams: int,
    secured: bool,
    identities: tuple[WorkerSettings, WorkerSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "BYTES_PER_STREAM", 1 if streams > 1 else 1 << 30)
    shapes = [(3, 4096), (1, 512)]
    there, here, before = Memory(theirs, shapes, seed=1), Memory(ours, shapes, seed=2), Memory(ours, shapes, seed=2)
    a, b = identities if secured else (None, None)
    with serving(there, a) as source, reading(here, b) as transport:
        transport.probe(source.peer)
        source.grants.allow(CAPABILITY, [5, 6, 30, 0])
        sizes = list(transport.pull(pull_of(source.peer, [5, 6, 30, 0], [9, 10, 1, 31], CAPABILITY), 700))
        assert len(source.server._connections) == streams
    assert sum(sizes) == 4 * here.blocks.bytes_per_block
    assert max(sizes) <= 700
    moved = {9: 5, 10: 6, 1: 30, 31: 0}
    for block in range(here.num_blocks):
        assert here.block(block) == (there.block(moved[block]) if block in moved else before.block(block))


def test_from_another_process_again_and_again() -> None:
    shape = {"shapes": BIG, "num_blocks": 200}
    here = Memory(seed=2, **shape)
    random = np.random.default_rng(3)
    with source_process(seed=1, capability=CAPABILITY, **shape) as source, reading(here) as transport:
        for _ in range(5):
            ids = random.permutation(200)
            source_ids, destination_ids = ids[:150].tolist(), ids[::-1][:150].tolist()
            copied = sum(transport.pull(pull_of(source.peer, source_ids, destination_ids, CAPABILITY), CHUNK))
            assert copied == 150 * here.blocks.bytes_per_block
            for source_id, destination_id in zip(source_ids, destination_ids, strict=True):
                assert here.block(destination_id) == source.memory.block(source_id)
        assert len(transport.connections.idle) == tcp.MAX_STREAMS


def test_only_what_is_granted() -> None:
    there, here = Memory(seed=1), Memory(seed=2)
    before = here.bytes.copy()
    with serving(there) as source, reading(here) as transport, pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_server, "GRANT_SECONDS", 0.05)
        source.grants.allow(CAPABILITY, [1, 2])
        for blocks, capability in (([1, 3], CAPABILITY), ([1], b"x" * CAPABILITY_BYTES), ([1], b"")):
            with pytest.raises(TransferFailed, match="not granted"):
                list(transport.pull(pull_of(source.peer, blocks, list(range(len(blocks))), capability), CHUNK))
        source.grants.revoke(CAPABILITY)
        with pytest.raises(TransferFailed, match="not granted"):
            list(transport.pull(pull_of(source.peer, [1], [1], CAPABILITY), CHUNK))
        assert np.array_equal(before, here.bytes)


def test_a_grant_may_come_after_the_request() -> None:
    there, here = Memory(seed=1), Memory(seed=2)
    with serving(there) as source, reading(here) as transport:
        pull = transport.pull(pull_of(source.peer, [1], [2], CAPABILITY), CHUNK)
        assert next(pull) == 0
        source.grants.allow(CAPABILITY, [1])
        assert sum(pull) == here.blocks.bytes_per_block
        assert here.block(2) == there.block(1)


def test_nothing_is_sent_after_a_grant_was_revoked() -> None:
    """The source may use its blocks for something else as soon as `revoke` returns."""
    there, here = Memory(shapes=BIG, seed=1, num_blocks=300), Memory(shapes=BIG, seed=2, num_blocks=300)
    blocks = list(range(300))
    with serving(there) as source, reading(here) as transport:
        source.grants.allow(CAPABILITY, blocks)
        pull, copied, page = transport.pull(pull_of(source.peer, blocks, blocks, CAPABILITY), CHUNK), 0, BIG[0][1]
        while copied < 8 * page:
            copied += next(pull)
        source.grants.revoke(CAPABILITY)
        was = there.bytes.copy()
        there.bytes[:] = 0
        with pytest.raises(TransferFailed):
            list(pull)
        arrived = here.bytes.reshape(-1, page)
        old, own = was.reshape(-1, page), Memory(shapes=BIG, seed=2, num_blocks=300).bytes.reshape(-1, page)
        whole = [row for row in range(len(arrived)) if not np.array_equal(arrived[row], own[row])]
        assert len(whole) > 4
        # What has arrived was there before; of a page in which a stream was cut, a part.
        assert all(np.all((arrived[row] == old[row]) | (arrived[row] == own[row])) for row in whole)


def test_a_pull_that_is_given_up() -> None:
    there, here = Memory(shapes=BIG, seed=1), Memory(shapes=BIG, seed=2)
    blocks = list(range(32))
    with serving(there) as source, reading(here) as transport:
        source.grants.allow(CAPABILITY, blocks)
        pull = transport.pull(pull_of(source.peer, blocks, blocks, CAPABILITY), 1000)
        while not next(pull):
            pass
        pull.close()  # type: ignore[attr-defined]
        copy = here.bytes.copy()
        assert not transport.connections.idle
        source.grants.revoke(CAPABILITY)
        assert np.array_equal(copy, here.bytes)
        source.grants.allow(CAPABILITY, blocks)
        assert sum(transport.pull(pull_of(source.peer, blocks, blocks, CAPABILITY), CHUNK)) == len(there.bytes)
        assert np.array_equal(here.bytes, there.bytes)


def test_a_source_killed_in_the_middle() -> None:
    shape = {"shapes": BIG, "num_blocks": 200}
    here = Memory(seed=2, **shape)
    with source_process(seed=1, capability=CAPABILITY, **shape) as source, reading(here) as transport:
        blocks = list(range(200))
        pull = transport.pull(pull_of(source.peer, blocks, blocks, CAPABILITY), 1000)
        while not next(pull):
            pass
        source.kill()
        with pytest.raises(TransferFailed):
            list(pull)
        with pytest.raises(TransferFailed, match="refused"):
            transport.probe(source.peer)


def test_a_source_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.2)
    here = Memory()
    with socket.create_server(("127.0.0.1", 0)) as listener, reading(here) as transport:
        peer = describe(here, NoncePage(), tcp=f"127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(TransferFailed, match="timed out"):
            transport.probe(peer)
        with pytest.raises(TransferFailed, match="nothing has come"):
            list(transport.pull(pull_of(peer, [0], [1], CAPABILITY), CHUNK))
        assert time.monotonic() - began < 5


def test_a_reader_that_takes_nothing_does_not_hold_up_a_revocation() -> None:
    there, here = Memory(shapes=BIG, seed=1, num_blocks=300), Memory(shapes=BIG, seed=2, num_blocks=300)
    blocks = list(range(300))
    with serving(there) as source, reading(here) as transport:
        source.grants.allow(CAPABILITY, blocks)
        pull = transport.pull(pull_of(source.peer, blocks, blocks, CAPABILITY), CHUNK)
        while not next(pull):
            pass
        time.sleep(0.2)  # the sender's buffers are full
        began = time.monotonic()
        source.grants.revoke(CAPABILITY)
        assert time.monotonic() - began < 1.0
        pull.close()  # type: ignore[attr-defined]


def test_probe_says_why_not() -> None:
    here = Memory()
    with serving(Memory()) as source, reading(here) as transport:
        for change, complaint in [
            ({"unavailable": "on a GPU"}, "on a GPU"),
            ({"tcp": None}, "does not serve"),
            ({"layout": Memory(layout="LBNHC").blocks}, "layouts differ"),
        ]:
            with pytest.raises(TransportUnavailable, match=complaint):
                transport.probe(msgspec.structs.replace(source.peer, **change))
        with pytest.raises(TransferFailed, match="another process"):
            transport.probe(msgspec.structs.replace(source.peer, nonce=bytes(32)))
        with pytest.raises(ValueError, match="block ids"):
            list(transport.pull(pull_of(source.peer, [0], [99], CAPABILITY), CHUNK))
        source.grants.allow(CAPABILITY, [99])
        with pytest.raises(TransferFailed, match="block ids"):
            list(transport.pull(pull_of(source.peer, [99], [0], CAPABILITY), CHUNK))


def test_a_message_is_given_so_long_however_it_is_cut() -> None:
    one, other = socket.socketpair()
    with one, other:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for byte in struct.pack(">I", 1000) + bytes(1000):
                    other.send(bytes([byte]))
                    time.sleep(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            receive_frame(one, decode_block_answer, 0.3)
        assert time.monotonic() - began < 20, "as long as all bytes take"
        one.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\xff\xff\xff\xff", b"\0\0\0\2\x91\x01", b"\0\0\0\1\xc1", b"GET / HTTP/1.1\r\n\r\n", bytes(100)],
    ids=["nothing", "half a length", "too long", "no request", "no msgpack", "http", "zeros"],
)
def test_foreign_protocol_is_disconnected(data: bytes) -> None:
    here = Memory(seed=2)
    with serving(Memory(seed=1)) as source, reading(here) as transport:
        with socket.create_connection(("127.0.0.1", source.server.port), timeout=5) as stranger:
            stranger.sendall(data)
            # Reset, by now or soon, if some of it was not read when it was closed.
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""
        source.grants.allow(CAPABILITY, [3])
        assert sum(transport.pull(pull_of(source.peer, [3], [4], CAPABILITY), CHUNK)) == here.blocks.bytes_per_block


def test_silent_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "HANDSHAKE_SECONDS", 0.1)
    with serving(Memory()) as source:
        stranger = socket.create_connection(("127.0.0.1", source.server.port), timeout=5)
        with stranger:
            assert stranger.recv(100) == b""


def test_no_more_connections_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 2)
    with serving(Memory()) as source, contextlib.ExitStack() as stack:
        where = ("127.0.0.1", source.server.port)
        connections = [stack.enter_context(socket.create_connection(where, timeout=5)) for _ in range(3)]
        assert connections[2].recv(100) == b""


def test_idle_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more peers than connections pull one after the other, and keep what they have for the next time."""
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 2)
    with serving(Memory(seed=1)) as source, contextlib.ExitStack() as stack:
        source.grants.allow(CAPABILITY, [3])
        peers = [stack.enter_context(reading(Memory(seed=2))) for _ in range(5)]
        for transport in [*peers, *peers]:
            until(lambda: len(source.server._idle) == len(source.server._connections))
            assert sum(transport.pull(pull_of(source.peer, [3], [4], CAPABILITY), CHUNK)) > 0
        assert len(source.server._connections) == 2


def test_sender_yields_cores_except_for_a_final_pull() -> None:
    with serving(Memory(seed=1)) as source, reading(Memory(seed=2)) as transport:
        source.grants.allow(CAPABILITY, [3])
        for final, policy in ((False, os.SCHED_BATCH), (True, os.SCHED_OTHER), (False, os.SCHED_BATCH)):
            assert sum(transport.pull(pull_of(source.peer, [3], [4], CAPABILITY, final=final), CHUNK)) > 0
            (sender,) = [thread for thread in threading.enumerate() if thread.name.startswith("llumnix-blocks-")]
            assert sender.native_id is not None
            assert os.sched_getscheduler(sender.native_id) == policy


def test_strangers_hear_nothing(identities: tuple[WorkerSettings, WorkerSettings], tmp_path: Path) -> None:
    a, b = identities
    (elsewhere := tmp_path / "elsewhere").mkdir()
    files = credential_files(Authority(elsewhere), "b", token_file(elsewhere))
    stranger = WorkerSettings(instance="x", tls=(files.tls_cert, files.tls_key, b.tls[2] if b.tls else ""))
    here = Memory(seed=2)
    with serving(Memory(seed=1), a) as source:
        source.grants.allow(CAPABILITY, [0])
        for settings in (stranger, None):
            with reading(here, settings) as transport, pytest.raises(TransferFailed):
                transport.probe(source.peer)
        with reading(here, b) as transport:
            transport.probe(source.peer)


def test_new_certificates_are_used_by_the_next_connection(
    identities: tuple[WorkerSettings, WorkerSettings], tmp_path: Path
) -> None:
    a, b = identities
    (elsewhere := tmp_path / "elsewhere").mkdir()
    new, others = Authority(elsewhere, "new"), Authority(elsewhere, "others")
    late = credential_files(new, "late", token_file(elsewhere))
    newcomer = WorkerSettings(instance="x", tls=(late.tls_cert, late.tls_key, late.tls_ca))
    with serving(Memory(seed=1), a) as source, reading(Memory(seed=2), b) as transport:
        transport.probe(source.peer)
        for settings in identities:
            assert settings.tls
            cert, key = new.issue("next")
            for path, content in zip(settings.tls, (cert, key, new.path), strict=True):
                Path(path).write_bytes(content.read_bytes())
        transport.probe(source.peer)  # over the connection that is open
        until(lambda: _is_known(source, newcomer), 60)
        transport.connections.close()
        until(lambda: _reaches(transport, source), 60)
        assert a.tls
        Path(a.tls[0]).write_bytes(others.path.read_bytes())  # the key does not fit: the former ones stay
        time.sleep(LOOK_S + 0.1)
        assert _is_known(source, newcomer)


def _is_known(source: Source, settings: WorkerSettings) -> bool:
    with reading(Memory(seed=3), settings) as transport:
        return _reaches(transport, source)


def _reaches(transport: TcpTransport, source: Source) -> bool:
    try:
        transport.probe(source.peer)
    except TransferFailed:
        return False
    return True
