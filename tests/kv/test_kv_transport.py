# SPDX-License-Identifier: Apache-2.0
"""`local` and its plain twin `loopback`: the right bytes, and nothing from the wrong process."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.fakes import Memory, SourceProcess, describe, pull_of, source_process, until
from tests.kv.loopback import LoopbackTransport
from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.memory.layout import pair_pieces
from vllm_llumnix.kv.mover import process
from vllm_llumnix.kv.mover.messages import Thread
from vllm_llumnix.kv.mover.process import (
    NoncePage,
    PinnedProcess,
    allow_readers,
    describe_thread,
    has_ended,
    start_time,
)
from vllm_llumnix.kv.transport import local
from vllm_llumnix.kv.transport.base import Transport
from vllm_llumnix.kv.transport.local import LocalTransport, read_pieces

CHUNK = 1 << 20


@pytest.fixture(params=[LocalTransport, LoopbackTransport])
def transport_class(
    request: pytest.FixtureRequest,
) -> type[LocalTransport | LoopbackTransport]:
    return request.param


class TestWithinOneProcess:
    """Both transports read their own process, so that each checks the other."""

    def test_blocks_arrive_and_nothing_else_changes(self, transport_class: type[LocalTransport]) -> None:
        nonce, there, here = NoncePage(), Memory(seed=1), Memory(seed=2)
        before = Memory(seed=2)
        transport: Transport = transport_class(here.blocks)
        peer = describe(there, nonce)
        transport.probe(peer)
        sizes = list(transport.pull(pull_of(peer, [5, 6, 30, 0], [9, 10, 1, 31]), 700))
        assert sum(sizes) == 4 * here.blocks.bytes_per_block
        assert max(sizes) <= 700
        moved = {9: 5, 10: 6, 1: 30, 31: 0}
        for block in range(here.num_blocks):
            expected = there.block(moved[block]) if block in moved else before.block(block)
            assert here.block(block) == expected
        transport.close()

    def test_nothing_is_a_valid_pull(self, transport_class: type[LocalTransport]) -> None:
        nonce, here = NoncePage(), Memory()
        transport = transport_class(here.blocks)
        assert list(transport.pull(pull_of(describe(here, nonce), [], []), CHUNK)) == []
        transport.close()

    def test_wrong_blocks_are_refused_before_a_byte_is_read(self, transport_class: type[LocalTransport]) -> None:
        nonce, there, here = NoncePage(), Memory(seed=1), Memory(seed=2)
        before = here.bytes.copy()
        transport = transport_class(here.blocks)
        with pytest.raises(ValueError, match="block ids 0 to 32"):
            list(transport.pull(pull_of(describe(there, nonce), [0, 32], [0, 1]), CHUNK))
        with pytest.raises(ValueError, match="block ids 0 to 99"):
            list(transport.pull(pull_of(describe(there, nonce), [0, 1], [0, 99]), CHUNK))
        assert np.array_equal(before, here.bytes)
        transport.close()

    def test_probe_says_why_not(self, transport_class: type[LocalTransport]) -> None:
        nonce, here = NoncePage(), Memory()
        transport = transport_class(here.blocks)
        peer = describe(here, nonce)
        for change, complaint in [
            ({"boot_id": "another"}, "another host"),
            ({"pid_ns": "pid:[1]"}, "pid namespace"),
            ({"unavailable": "on a GPU"}, "on a GPU"),
            ({"layout": Memory(layout="LBNHC").blocks}, "layouts differ"),
        ]:
            with pytest.raises(TransportUnavailable, match=complaint):
                transport.probe(msgspec.structs.replace(peer, **change))
        transport.close()

    def test_a_void_description_is_noticed(self, transport_class: type[LocalTransport]) -> None:
        nonce, here = NoncePage(), Memory()
        transport = transport_class(here.blocks)
        peer = describe(here, nonce)
        transport.probe(peer)
        nonce.revoke()
        with pytest.raises(TransferFailed, match="not what was"):
            transport.probe(peer)
        with pytest.raises(TransferFailed, match="not what was"):
            list(transport.pull(pull_of(peer, [0], [1]), CHUNK))
        transport.close()

    def test_a_description_that_becomes_void_during_the_pull(self, transport_class: type[LocalTransport]) -> None:
        nonce, there, here = NoncePage(), Memory(seed=1), Memory(seed=2)
        transport = transport_class(here.blocks)
        chunks = transport.pull(pull_of(describe(there, nonce), [0], [1]), CHUNK)
        next(chunks)
        nonce.revoke()
        with pytest.raises(TransferFailed, match="not what was"):
            list(chunks)
        transport.close()


class TestAcrossProcesses:
    @pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
    def test_blocks_arrive(self, layout: str) -> None:
        shape = {"layout": layout, "shapes": [(3, 4096), (1, 512)], "num_blocks": 600}
        here = Memory(seed=2, **shape)
        ids = np.random.default_rng(3).permutation(600)
        source_ids, destination_ids = ids[:500].tolist(), ids[::-1][:500].tolist()
        with source_process(seed=1, **shape) as source:
            transport = LocalTransport(here.blocks)
            transport.probe(source.peer)
            sizes = list(transport.pull(pull_of(source.peer, source_ids, destination_ids), 1 << 18))
            transport.close()
        assert sum(sizes) == 500 * here.blocks.bytes_per_block
        for source_id, destination_id in zip(source_ids, destination_ids, strict=True):
            assert here.block(destination_id) == source.memory.block(source_id)

    def test_a_source_killed_in_the_middle(self) -> None:
        here = Memory(seed=2)
        with source_process(seed=1) as source:
            transport = LocalTransport(here.blocks)
            chunks = transport.pull(pull_of(source.peer, [0, 1], [0, 1]), 1024)
            assert next(chunks) == 1024
            source.kill()
            with pytest.raises(TransferFailed, match="has ended"):
                list(chunks)
            with pytest.raises(TransferFailed, match="has ended"):
                transport.probe(source.peer)
            transport.close()

    def test_a_source_killed_after_the_last_byte(self) -> None:
        """The pull does not count: nobody knows any more whose bytes they were."""
        here = Memory(seed=2)
        with source_process(seed=1) as source:
            transport = LocalTransport(here.blocks)
            chunks = transport.pull(pull_of(source.peer, [0], [0]), CHUNK)
            assert next(chunks) == here.blocks.bytes_per_block
            source.kill()
            with pytest.raises(TransferFailed, match="has ended"):
                next(chunks)
            transport.close()

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"start_time": 1}, "its pid belongs to another process"),
            ({"nonce": bytes(32)}, "is not what was advertised"),
            ({"nonce_address": 4096}, "has no memory at the address"),
        ],
    )
    def test_another_process_than_the_one_described(
        self, source: SourceProcess, memory: Memory, change: dict[str, object], complaint: str
    ) -> None:
        here = memory
        before = here.bytes.copy()
        transport = LocalTransport(here.blocks)
        peer = msgspec.structs.replace(source.peer, **change)
        with pytest.raises(TransferFailed, match=complaint):
            list(transport.pull(pull_of(peer, [0], [0]), CHUNK))
        assert np.array_equal(before, here.bytes)
        transport.close()

    @pytest.mark.parametrize("shift", [16, -4096])
    def test_memory_that_the_source_does_not_offer(self, source: SourceProcess, memory: Memory, shift: int) -> None:
        """A peer that names somebody else's memory, or another part of it, gets nothing read."""
        before = memory.bytes.copy()
        transport = LocalTransport(memory.blocks)
        layout = msgspec.structs.replace(source.peer.layout, base=source.peer.layout.base + shift)
        peer = msgspec.structs.replace(source.peer, layout=layout)
        with pytest.raises(TransferFailed, match="is not what was advertised"):
            list(transport.pull(pull_of(peer, [0], [0]), CHUNK))
        assert np.array_equal(before, memory.bytes)
        transport.close()

    def test_loopback_reaches_no_other_process(self, source: SourceProcess, memory: Memory) -> None:
        with pytest.raises(TransportUnavailable, match="only this process"):
            LoopbackTransport(memory.blocks).probe(source.peer)

    def test_old_peers_are_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "MAX_PEERS", 2)
        nonces = [NoncePage() for _ in range(4)]
        here = Memory()
        before = len(os.listdir("/proc/self/fd"))
        transport = LocalTransport(here.blocks)
        for nonce in nonces:
            transport.probe(describe(here, nonce))
        assert len(os.listdir("/proc/self/fd")) == before + 2
        transport.close()
        assert len(os.listdir("/proc/self/fd")) == before


@settings(deadline=None)
@given(st.integers(1, 900), st.lists(st.integers(1, 500), min_size=1), st.integers(1, 7))
def test_calls_that_end_early_are_resumed(chunk: int, sizes: list[int], iov_max: int) -> None:
    """The kernel may stop anywhere, in the middle of a piece too."""
    there, here = Memory(shapes=[(3, 48)], seed=1), Memory(shapes=[(3, 48)], seed=2)
    pieces = pair_pieces(there.blocks, [3, 4, 7, 1], here.blocks, [5, 6, 2, 9])
    answers = iter(sizes * 4 * here.blocks.bytes_per_block)

    def short_call(pid: int, remote: np.ndarray, local_: np.ndarray) -> int:
        assert len(remote) == len(local_) <= iov_max
        assert remote[:, 1].tolist() == local_[:, 1].tolist()
        left = answer = min(next(answers), int(remote[:, 1].sum()))
        for (origin, length), (destination, _) in zip(remote.tolist(), local_.tolist(), strict=True):
            ctypes.memmove(destination, origin, min(length, left))
            left -= min(length, left)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_call", short_call)
        patch.setattr(local, "IOV_MAX", iov_max)
        counts = list(read_pieces(0, pieces, chunk))
    assert max(counts) <= chunk
    assert sum(counts) == 4 * here.blocks.bytes_per_block
    for source_id, destination_id in [(3, 5), (4, 6), (7, 2), (1, 9)]:
        assert here.block(destination_id) == there.block(source_id)


@pytest.mark.parametrize(
    ("code", "scope", "kind", "complaint"),
    [
        (errno.EPERM, 0, TransportUnavailable, "another user or is not dumpable"),
        (errno.EPERM, 1, TransportUnavailable, "ptrace_scope is 1; start the source with"),
        (errno.EPERM, 2, TransportUnavailable, "ptrace_scope is 2; .*CAP_SYS_PTRACE"),
        (errno.EPERM, 3, TransportUnavailable, "ptrace_scope is 3; only a reboot"),
        (errno.ENOSYS, 0, TransportUnavailable, "no process_vm_readv"),
        (errno.ESRCH, 0, TransferFailed, "has ended"),
        (errno.ENOMEM, 0, TransferFailed, "Cannot allocate memory"),
    ],
)
def test_the_system_says_no(
    monkeypatch: pytest.MonkeyPatch, code: int, scope: int, kind: type[Exception], complaint: str
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(local, "_readv", refuse)
    monkeypatch.setattr(local, "yama_scope", lambda: scope)
    nonce, here = NoncePage(), Memory()
    with pytest.raises(kind, match=complaint):
        LocalTransport(here.blocks).probe(describe(here, nonce))


def test_start_time_of_a_process_with_an_odd_name() -> None:
    """The name in /proc/PID/stat may look like the fields that follow it."""
    comm = Path("/proc/self/comm")
    name, before = comm.read_text(), start_time(os.getpid())
    comm.write_text(") R 1 (x)")
    try:
        assert start_time(os.getpid()) == before
    finally:
        comm.write_text(name)
    assert start_time(2**22 + 1) is None


def test_a_stopped_process_has_not_ended() -> None:
    """It goes on where it was when it wakes up."""
    with subprocess.Popen(["sleep", "60"]) as child:
        started = start_time(child.pid, child.pid)
        assert started is not None
        thread = Thread(child.pid, started)
        peer = msgspec.structs.replace(describe(Memory(), NoncePage()), pid=child.pid)
        assert not has_ended(thread, peer)
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert not has_ended(thread, peer)
        child.kill()
        child.wait()
        assert has_ended(thread, peer)


def test_a_thread_has_ended_and_its_process_lives() -> None:
    go_on = threading.Event()
    other = threading.Thread(target=go_on.wait)
    other.start()
    assert other.native_id is not None
    thread, here = describe_thread(other.native_id), describe(Memory(), NoncePage())
    assert not has_ended(thread, here)
    # An id that came again is another thread's.
    assert has_ended(msgspec.structs.replace(thread, start_time=thread.start_time - 1), here)
    go_on.set()
    other.join()
    until(lambda: has_ended(thread, here))


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another"}, {"pid_ns": "pid:[1]"}])
def test_ids_of_other_hosts_and_namespaces_tell_nothing(elsewhere: dict[str, str]) -> None:
    peer = msgspec.structs.replace(describe(Memory(), NoncePage()), **elsewhere)
    assert start_time(peer.pid, 0) is None
    assert not has_ended(Thread(0, 0), peer)


def test_a_pid_of_nobody() -> None:
    peer = msgspec.structs.replace(describe(Memory(), NoncePage()), pid=2**22 + 1)
    with pytest.raises(TransferFailed, match="has ended"):
        PinnedProcess(peer)


def test_readers_are_allowed_only_under_yama_scope_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for scope in (0, 2, 3):
        monkeypatch.setattr(process, "yama_scope", lambda scope=scope: scope)
        assert not allow_readers()
