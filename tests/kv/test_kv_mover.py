# SPDX-License-Identifier: Apache-2.0
"""A mover and its client over a real socket, a real source process, and a worker that is a fake."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio

from tests.kv.fakes import FakeWorker, Memory, SourceProcess, packed, pull_of, source_process, until
from tests.support.faults import arm, corrupt
from vllm_llumnix import faults
from vllm_llumnix.engine.attach import what_copies
from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv import data_plane, worker
from vllm_llumnix.kv.memory.block_memory import HostMemory
from vllm_llumnix.kv.mover import messages
from vllm_llumnix.kv.mover.messages import MoverInfo, PullReport, Rejected
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.serving.grants import ASLEEP, CAPABILITY_BYTES
from vllm_llumnix.kv.settings import Limit
from vllm_llumnix.kv.transport import connections
from vllm_llumnix.kv.transport.tcp import TcpTransport
from vllm_llumnix.kv.worker import start_mover, stop_mover

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

ALL = list(range(32))
PAGE = 65536
BLOCK = 4 * PAGE
TOTAL = 32 * BLOCK
CAPABILITY = bytes(CAPABILITY_BYTES)
SLOW = 1e6
"""Bytes per second at which all blocks of the source take 8 s, in chunks of 16 ms."""


async def started(client: MoverClient, source: SourceProcess, job: int) -> asyncio.Task[PullReport]:
    """A slow pull that the mover is certainly at work on: the turn in which it answered a later command is over."""
    pull = client.pull(pull_of(source.peer, ALL, ALL, job=job, deadline_s=20, limit=Limit(bytes_per_s=SLOW)))
    task = asyncio.create_task(pull)
    await asyncio.sleep(0)
    for _ in range(2):
        assert await client.probe(source.peer, "local") is None
    return task


class TestPull:
    async def test_the_blocks_arrive(self, client: MoverClient, source: SourceProcess, memory: Memory) -> None:
        report = await client.pull(pull_of(source.peer, [3, 4, 9], [8, 30, 1]))
        assert report.error is None
        assert report.bytes == 3 * memory.blocks.bytes_per_block
        assert 0 < report.seconds < 5
        for source_id, destination_id in [(3, 8), (4, 30), (9, 1)]:
            assert memory.block(destination_id) == source.memory.block(source_id)

    async def test_wrong_blocks_are_reported(self, client: MoverClient, source: SourceProcess, memory: Memory) -> None:
        before = memory.bytes.copy()
        report = await client.pull(pull_of(source.peer, [0], [32]))
        assert report == PullReport(1, 0, report.seconds, "block ids 32 to 32 are not all within 0 to 31")
        report = await client.pull(pull_of(source.peer, [0], [0], job=2, transport="pigeon"))
        assert report.error == "no transport 'pigeon': local"
        report = await client.pull(pull_of(source.peer, [0], [0], job=3, limit=Limit(bytes_per_s=0)))
        assert report.error == "a limit of 0.0 bytes per second"
        assert np.array_equal(before, memory.bytes)

    async def test_the_pace_is_kept(self, client: MoverClient, source: SourceProcess) -> None:
        for _ in range(2):  # an idle link saves nothing up
            began = time.monotonic()
            report = await client.pull(pull_of(source.peer, ALL, ALL, limit=Limit(bytes_per_s=80e6)))
            assert report.error is None
            assert TOTAL / 80e6 <= report.seconds <= time.monotonic() - began

    async def test_a_final_pull_goes_before_the_others(self, client: MoverClient, source: SourceProcess) -> None:
        order = []

        async def pull(job: int, ids: list[int], final: bool = False) -> None:
            report = await client.pull(
                pull_of(source.peer, ids, ids, job=job, limit=Limit(bytes_per_s=80e6), final=final)
            )
            assert report.error is None
            order.append(job)

        await asyncio.gather(pull(1, ALL), pull(2, ALL[:2]), pull(3, ALL[2:3], final=True))
        assert order == [3, 1, 2]

    async def test_only_a_final_pull_takes_cores_from_others(self, client: MoverClient, source: SourceProcess) -> None:
        (mover,) = [thread for thread in threading.enumerate() if thread.name == "llumnix-mover"]

        async def becomes(policy: int) -> None:
            """In the turn after the one in which all commands so far were taken, whichever that is."""
            await asyncio.to_thread(until, lambda: os.sched_getscheduler(mover.native_id) == policy)

        await becomes(os.SCHED_OTHER)
        background = await started(client, source, 1)
        await becomes(os.SCHED_BATCH)
        final = client.pull(
            pull_of(source.peer, ALL, ALL, job=2, deadline_s=20, limit=Limit(bytes_per_s=SLOW / 2), final=True)
        )
        urgent = asyncio.create_task(final)
        await becomes(os.SCHED_OTHER)
        for job, task in ((2, urgent), (1, background)):
            await client.stop(job)
            assert (await task).error == "stopped"
            await becomes(os.SCHED_BATCH if job == 2 else os.SCHED_OTHER)

    async def test_limits_do_not_hold_up_each_other(self, client: MoverClient, source: SourceProcess) -> None:
        slow = await started(client, source, 1)
        others = [
            (Limit(), ""),
            (Limit(share=1.0), ""),
            (Limit(bytes_per_s=1e9), ""),
            (Limit(bytes_per_s=SLOW), "other"),
        ]
        for limit, link in others:
            ids = ALL if link == "" else [0]  # a block takes a quarter of a second
            report = await client.pull(pull_of(source.peer, ids, ids, job=2, limit=limit, link=link))
            assert report.error is None
        assert not slow.done()
        await client.stop(1)
        assert (await slow).error == "stopped"

    async def test_silent_peer_delays_no_other_pull(
        self, memory: Memory, source: SourceProcess, tmp_path: Path
    ) -> None:
        """The mover looks for bytes of the silent one a few milliseconds at a time, however urgent they are."""
        here = FakeWorker(memory)
        (tmp_path / "other").mkdir()
        settings = packed(directory=str(tmp_path / "other"), transports=("local", "tcp"))
        client = MoverClient(msgspec.msgpack.decode(start_mover(here, settings), type=MoverInfo))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            peer = msgspec.structs.replace(source.peer, tcp=f"127.0.0.1:{silent.getsockname()[1]}")
            waiting = asyncio.create_task(
                client.pull(pull_of(peer, ALL, ALL, deadline_s=10, transport="tcp", final=True))
            )
            connection, _ = await asyncio.to_thread(silent.accept)
            for job in range(2, 12):
                report = await client.pull(pull_of(source.peer, [job], [job], job=job))
                assert report.error is None
            assert not waiting.done()
            await client.stop(1)
            assert (await waiting).error == "stopped"
            connection.close()
        client.close()
        stop_mover(here)

    async def test_probe_delays_no_pull(self, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pull over tcp goes on while somebody is probed who takes connections and says nothing."""
        monkeypatch.setattr(connections, "ANSWER_SECONDS", 3.5)
        here = FakeWorker(memory)
        settings = packed(directory=str(tmp_path), transports=("tcp",))
        client = MoverClient(msgspec.msgpack.decode(start_mover(here, settings), type=MoverInfo))
        with (
            source_process(CAPABILITY, shapes=[(4, PAGE)], seed=1) as live,
            socket.create_server(("127.0.0.1", 0)) as silent,
        ):
            assert await client.probe(live.peer, "tcp") is None
            peer = msgspec.structs.replace(live.peer, tcp=f"127.0.0.1:{silent.getsockname()[1]}")
            probes = [asyncio.create_task(client.probe(peer, "tcp")) for _ in range(3)]
            await asyncio.sleep(0.1)
            report = await client.pull(pull_of(live.peer, ALL, ALL, transport="tcp", capability=CAPABILITY))
            assert report.error is None
            assert not any(probe.done() for probe in probes)
            assert [await probe for probe in probes] == ["timed out"] * 3
            assert np.array_equal(memory.bytes, live.memory.bytes)
            ended = asyncio.create_task(client.probe(peer, "tcp"))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(stop_mover, here)
            assert not any(thread.name.startswith("llumnix-probe") for thread in threading.enumerate())
            with pytest.raises(TransferFailed, match="has gone"):
                await ended
        client.close()

    async def test_a_late_pull_is_given_up(self, client: MoverClient, source: SourceProcess) -> None:
        report = await client.pull(pull_of(source.peer, ALL, ALL, deadline_s=0.05, limit=Limit(bytes_per_s=SLOW)))
        assert report.error == "deadline passed"
        assert report.bytes < TOTAL

    async def test_the_source_dies(self, client: MoverClient) -> None:
        with source_process(shapes=[(4, PAGE)], seed=1) as source:
            pull = await started(client, source, 1)
            source.kill()
            report = await pull
        assert report.error is not None
        assert "has ended" in report.error
        assert ((await client.probe(source.peer, "local")) or "").startswith("worker 0 of there")

    async def test_clients_do_not_share_job_numbers(
        self, client: MoverClient, info: MoverInfo, source: SourceProcess
    ) -> None:
        other = MoverClient(info)
        reports = await asyncio.gather(
            client.pull(pull_of(source.peer, [0], [0])),
            other.pull(pull_of(source.peer, [1, 2], [1, 2])),
        )
        other.close()
        assert [report.bytes for report in reports] == [BLOCK, 2 * BLOCK]


class TestStop:
    async def test_a_running_pull_is_quiet_when_stop_returns(
        self, client: MoverClient, source: SourceProcess, memory: Memory
    ) -> None:
        before = memory.bytes.copy()
        pull = await started(client, source, 1)
        await client.stop(1)
        after = memory.bytes.copy()
        report = await pull
        assert report.error == "stopped"
        assert 0 < report.bytes < TOTAL
        assert not np.array_equal(before, after)
        # The mover works on, and nothing of the stopped pull arrives any more.
        assert (await client.pull(pull_of(source.peer, [], [], job=2))).error is None
        assert np.array_equal(after, memory.bytes)

    async def test_a_waiting_pull_is_stopped_too(self, client: MoverClient, source: SourceProcess) -> None:
        running, waiting = await started(client, source, 1), await started(client, source, 2)
        await client.stop(2)
        assert await waiting == PullReport(2, 0, 0.0, "stopped")
        assert not running.done()
        await client.stop(1)
        assert (await running).error == "stopped"

    async def test_nothing_is_copied_while_the_memory_is_away(
        self, client: MoverClient, source: SourceProcess, memory: Memory
    ) -> None:
        assert worker._running is not None
        mover = worker._running.mover
        pull = await started(client, source, 1)
        await asyncio.to_thread(mover.suspend)
        asleep = memory.bytes.copy()
        assert (await pull).error == ASLEEP
        assert await client.pull(pull_of(source.peer, ALL, ALL, job=2)) == PullReport(2, 0, 0.0, ASLEEP)
        assert np.array_equal(asleep, memory.bytes)
        mover.resume()
        assert (await client.pull(pull_of(source.peer, ALL, ALL, job=3))).error is None
        assert not np.array_equal(asleep, memory.bytes)

    async def test_a_pull_that_is_not_running(self, client: MoverClient) -> None:
        await client.stop(17)

    async def test_a_caller_that_gave_up_can_still_stop(self, client: MoverClient, source: SourceProcess) -> None:
        pull = await started(client, source, 1)
        with pytest.raises(ValueError, match="job 1 is running already"):
            await client.pull(pull_of(source.peer, [0], [0]))
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        with pytest.raises(TransferFailed, match="job 1 is running already"):
            await client.pull(pull_of(source.peer, [0], [0]))
        await client.stop(1)
        assert (await client.pull(pull_of(source.peer, [0], [0]))).error is None


class TestFailures:
    async def test_garbage_is_answered(self, info: MoverInfo, source: SourceProcess) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(info.endpoint)
        pull = pull_of(source.peer, [0], [0])
        beyond = msgspec.to_builtins(pull)
        beyond["peer"]["nonce"] = source.peer.nonce
        beyond["peer"]["layout"]["storage_bytes"] -= 1
        short = messages.encode(pull)[:-1]
        for frame, complaint in [
            (b"", "truncated"),
            (b"\xff\xff", ""),
            (b"not msgpack", ""),
            (short, "truncated"),
            (msgspec.msgpack.encode(beyond), "a region reaches beyond the storage"),
            (msgspec.msgpack.encode({"type": "format_disk"}), "Invalid value 'format_disk'"),
            (msgspec.msgpack.encode({"type": "pull", "job": "x"}), "Expected `int`, got `str`"),
        ]:
            await socket.send(frame)
            answer = messages.decode_answer(await socket.recv())
            assert isinstance(answer, Rejected)
            assert complaint in answer.reason
        await socket.send(messages.encode(pull))
        report = messages.decode_answer(await socket.recv())
        assert isinstance(report, PullReport)
        assert report.error is None
        socket.close()
        context.term()

    async def test_the_mover_ends(self, client: MoverClient, source: SourceProcess) -> None:
        pull = await started(client, source, 1)
        stop_mover(None)
        with pytest.raises(TransferFailed, match=r"mover 0 .* has gone"):
            await pull
        await asyncio.to_thread(until, client._has_ended)
        await client.stop(1)
        with pytest.raises(TransferFailed, match="has gone"):
            await client.probe(source.peer, "local")

    async def test_no_mover_at_all(self, info: MoverInfo, source: SourceProcess) -> None:
        nowhere = msgspec.structs.replace(info, endpoint=info.endpoint + "-not")
        client = MoverClient(nowhere)
        with pytest.raises(TransferFailed):
            await client.probe(source.peer, "local", deadline_s=0.2)
        client.close()

    async def test_a_mover_that_does_not_answer(self, info: MoverInfo, source: SourceProcess, tmp_path: Path) -> None:
        context = zmq.asyncio.Context()
        deaf = context.socket(zmq.ROUTER)
        deaf.linger = 0
        deaf.bind(f"ipc://{tmp_path}/deaf")
        client = MoverClient(msgspec.structs.replace(info, endpoint=f"ipc://{tmp_path}/deaf"))
        with pytest.raises(TransferFailed, match=r"has not answered for 0\.1 s"):
            await client.stop(1, deadline_s=0.1)
        probe = asyncio.create_task(client.probe(source.peer, "local"))
        identity, _ = await deaf.recv_multipart()
        identity, _ = await deaf.recv_multipart()
        await deaf.send_multipart([identity, b"nonsense"])
        with pytest.raises(TransferFailed, match="another language"):
            await probe
        client.close()
        deaf.close()
        context.term()

    async def test_a_closed_client_fails_its_calls(self, info: MoverInfo, source: SourceProcess) -> None:
        client = MoverClient(info)
        pull = await started(client, source, 1)
        client.close()
        client.close()
        with pytest.raises(TransferFailed, match="closed"):
            await pull
        with pytest.raises(TransferFailed, match="closed"):
            await client.probe(source.peer, "local")

    async def test_an_unexpected_error_is_reported_and_survived(
        self, client: MoverClient, source: SourceProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr("vllm_llumnix.kv.transport.local.pair_pieces", broken)
            report = await client.pull(pull_of(source.peer, [0], [0]))
        assert report.error == "unexpected error in the mover: RuntimeError('a bug')"
        assert (await client.pull(pull_of(source.peer, [0], [0]))).error is None

    async def test_gpu_memory_that_is_missing_fails_one_pull(
        self, client: MoverClient, source: SourceProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others go on: it says nothing about the mover."""

        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

        slow = await started(client, source, 1)
        with monkeypatch.context() as patch:
            patch.setattr("vllm_llumnix.kv.transport.local.pair_pieces", full)
            report = await client.pull(pull_of(source.peer, [0], [0], job=2, deadline_s=60))
        assert report.error == "CUDA out of memory. Tried to allocate 2.00 MiB"
        assert not slow.done()
        await client.stop(1)
        assert (await slow).error == "stopped"


class TestFaults:
    def arm(self, monkeypatch: pytest.MonkeyPatch, **spec: object) -> None:
        monkeypatch.setattr(faults, "inject", arm(json.dumps([{"point": "mover.pulled", **spec}])))

    @pytest.mark.parametrize(("which", "block"), [("first", 20), ("middle", 5), ("last", 7)])
    async def test_changed_byte_of_the_final_pull_is_found(
        self,
        client: MoverClient,
        source: SourceProcess,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        which: str,
        block: int,
    ) -> None:
        self.arm(monkeypatch, action="corrupt", which=which, layer=2, final=True)
        ids = [20, 5, 7]
        await client.pull(pull_of(source.peer, ids, ids))
        assert [memory.block(id_) for id_ in ids] == [source.memory.block(id_) for id_ in ids]
        await client.pull(pull_of(source.peer, ids, ids, job=2, final=True))
        pages = [(page, id_) for id_ in ids for page in range(4)]
        wrong = [(page, id_) for page, id_ in pages if memory.block(id_)[page] != source.memory.block(id_)[page]]
        assert wrong == [(2, block)]
        found, expected = memory.block(block)[2], source.memory.block(block)[2]
        assert found == expected[:1] + bytes([expected[1] ^ 0xFF]) + expected[2:]

    async def test_an_error_is_reported(
        self, client: MoverClient, source: SourceProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.arm(monkeypatch, action="raise", tag="this one")
        assert (await client.pull(pull_of(source.peer, [0], [0]))).error is None
        report = await client.pull(pull_of(source.peer, [0], [0], job=2, tag="this one"))
        assert report.error == "mover.pulled"

    async def test_a_byte_of_choice(self, memory: Memory) -> None:
        before = memory.bytes.copy()
        corrupt(memory.blocks, [4], {"which": "middle", "layer": 3, "offset": 255})
        at = (3 * 32 + 4) * PAGE + 255
        assert memory.bytes[at] == before[at] ^ 0xFF
        before[at] ^= 0xFF
        assert np.array_equal(before, memory.bytes)
        with pytest.raises(ValueError, match="a page has 65536 bytes"):
            corrupt(memory.blocks, [4], {"which": "first", "layer": 0, "offset": PAGE})


class TestStart:
    async def test_an_instance_at_an_ipv6_address(self, memory: Memory, source: SourceProcess, tmp_path: Path) -> None:
        there = Memory(shapes=memory.shapes, seed=3)
        fake = FakeWorker(there)
        settings = packed(directory=str(tmp_path), transports=("tcp",), host="::1")
        info = msgspec.msgpack.decode(start_mover(fake, settings), type=MoverInfo)
        try:
            assert info.memory.tcp is not None
            assert info.memory.tcp.startswith("[::1]:")
            assert worker._running is not None
            worker._running.mover.grants.allow(CAPABILITY, [3])
            transport = TcpTransport(HostMemory(memory.blocks))
            transport.probe(info.memory)
            assert sum(transport.pull(pull_of(info.memory, [3], [4], CAPABILITY), 1 << 20)) == BLOCK
            assert memory.block(4) == there.block(3)
            transport.close()
        finally:
            stop_mover(fake)

    async def test_the_model_is_called_by_what_it_has_made_of_its_configuration(
        self, memory: Memory, tmp_path: Path
    ) -> None:
        """Some correct it when they are built: the process that has the model knows, the engine's may not."""
        said = []
        for corrected in (False, True):
            fake = FakeWorker(memory)
            fake.vllm_config.model_config.hf_text_config.to_dict = lambda value=corrected: {"tuning": value}
            said.append(msgspec.msgpack.decode(start_mover(fake, packed(directory=str(tmp_path))), type=MoverInfo))
            stop_mover(fake)
        assert len({info.config for info in said}) == 2

    async def test_worker_describes_itself(self, info: MoverInfo, memory: Memory) -> None:
        assert info.memory.layout == memory.blocks
        assert info.memory.unavailable is None
        assert (info.rank, info.isa, info.device, info.memory.instance) == (0, "amx", "cpu", "here")
        threads = [thread for thread in threading.enumerate() if thread.name == "llumnix-mover"]
        assert [thread.daemon for thread in threads] == [True]

    async def test_a_second_start_replaces_the_first(
        self, info: MoverInfo, memory: Memory, source: SourceProcess
    ) -> None:
        wrapped = type("WorkerWrapper", (), {"worker": FakeWorker(memory)})()
        again = msgspec.msgpack.decode(start_mover(wrapped, packed()), type=MoverInfo)
        assert again.endpoint != info.endpoint
        assert again.memory.nonce != info.memory.nonce
        assert not _is_there(info.endpoint)
        client = MoverClient(again)
        assert (await client.pull(pull_of(source.peer, [0], [0]))).error is None
        client.close()
        stop_mover(wrapped)

    async def test_memory_of_another_device_is_out_of_reach(
        self, memory: Memory, source: SourceProcess, tmp_path: Path
    ) -> None:
        fake = FakeWorker(memory, device="xpu")
        settings = packed(directory=str(tmp_path))
        info = msgspec.msgpack.decode(start_mover(fake, settings), type=MoverInfo)
        client = MoverClient(info)
        assert info.isa == "xpu"
        assert info.memory.unavailable is not None
        assert "xpu device" in info.memory.unavailable
        assert what_copies([info]) == ""
        assert await client.probe(source.peer, "local") == f"no transport 'local': {info.memory.unavailable}"
        report = await client.pull(pull_of(source.peer, [0], [0]))
        assert report.error == f"no transport 'local': {info.memory.unavailable}"
        client.close()
        stop_mover(fake)

    async def test_an_idle_mover_sleeps(self, info: MoverInfo) -> None:
        before = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - before < 0.05

    async def test_the_mover_leaves_the_core_of_the_worker(
        self, info: MoverInfo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import os

        thread = next(t for t in threading.enumerate() if t.name == "llumnix-mover")
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == data_plane._unbound_cpus()


class TestFingerprint:
    async def test_equal_weights_are_equal_and_others_are_not(self) -> None:
        import torch

        def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
            torch.manual_seed(seed)
            linear = torch.nn.Linear(300, 200, dtype=dtype)
            linear.register_parameter("scale", torch.nn.Parameter(torch.rand(())))
            linear.register_parameter("packed", torch.nn.Parameter(torch.empty(0)))
            linear.register_parameter("turned", torch.nn.Parameter(torch.rand(100, 90).t()))
            return linear

        mine = worker.fingerprint(model(1))
        assert mine == worker.fingerprint(model(1))
        assert mine != worker.fingerprint(model(2))
        assert mine != worker.fingerprint(model(1, torch.float16))
        changed = model(1)
        with torch.no_grad():
            changed.turned[-1, -1] += 1
        assert mine != worker.fingerprint(changed)


def _is_there(endpoint: str) -> bool:
    return os.path.exists(endpoint.removeprefix("ipc://"))
