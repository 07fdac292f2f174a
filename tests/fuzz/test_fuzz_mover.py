# SPDX-License-Identifier: Apache-2.0
"""The mover's endpoint against commands nobody should give: answered or rejected, and not a byte of ours is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.hostile import anything, integers, texts
from tests.kv.conftest import SHAPES, memory, source
from tests.kv.fakes import FakeWorker, Memory, SourceProcess, packed, pull_of
from vllm_llumnix.kv import worker
from vllm_llumnix.kv.mover import messages
from vllm_llumnix.kv.mover.messages import MoverInfo, Probe, ProbeReport, PullReport, StopPull
from vllm_llumnix.kv.worker import start_mover, stop_mover

__all__ = ["memory", "source"]

numbers = integers(-(2**63), 2**63 - 1)
SECONDS = 5.0
thorough = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Harness:
    def __init__(self, info: MoverInfo, memory: Memory, source: SourceProcess) -> None:
        self.memory, self.source = memory, source
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(info.endpoint)
        self._job = 10**6

    def attack(self, data: bytes) -> None:
        """Send it, and wait until the mover has seen it: it has answered a later command."""
        self._socket.send(data)
        self._job += 1
        self._socket.send(messages.encode(StopPull(self._job)))
        while getattr(answer := self.answer(), "job", None) != self._job:
            assert not isinstance(answer, PullReport) or answer.error is not None or answer.bytes == 0, answer

    def answer(self) -> messages.Answer:
        assert self._socket.poll(int(SECONDS * 1000)), "the mover does not answer"
        return messages.decode_answer(self._socket.recv())

    def check(self) -> None:
        """A legal pull works."""
        self._job += 1
        self._socket.send(messages.encode(Probe(self._job, self.source.peer, "local")))
        while not isinstance(answer := self.answer(), ProbeReport) or answer.job != self._job:
            pass
        assert answer.obstacle is None
        self._socket.send(messages.encode(pull_of(self.source.peer, [3], [30], job=self._job, deadline_s=SECONDS)))
        while not isinstance(report := self.answer(), PullReport) or report.job != self._job:
            pass
        assert report.error is None
        assert self.memory.block(30) == self.source.memory.block(3)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def harness(memory: Memory, source: SourceProcess, tmp_path: Path) -> Iterator[Harness]:
    assert memory.shapes == SHAPES
    fake = FakeWorker(memory)
    info = msgspec.msgpack.decode(start_mover(fake, packed(directory=str(tmp_path))), type=MoverInfo)
    harness = Harness(info, memory, source)
    try:
        harness.check()
        before, files = memory.bytes.copy(), len(os.listdir("/proc/self/fd"))
        yield harness
        assert np.array_equal(before, memory.bytes)
        harness.check()
        assert worker._running is not None
        assert worker._running.mover.num_errors == 0
        assert len(os.listdir("/proc/self/fd")) <= files
    finally:
        harness.close()
        stop_mover(fake)


@settings(parent=thorough)
@given(data=st.data())
def test_bytes(harness: Harness, data: st.DataObject) -> None:
    peer = msgspec.structs.replace(harness.source.peer, nonce=bytes(32))
    examples = [messages.encode(command) for command in (pull_of(peer, [0], [0]), Probe(1, peer, "local"), StopPull(1))]
    harness.attack(data.draw(anything(*examples)))


@settings(parent=thorough)
@given(data=st.data())
def test_other_memory(harness: Harness, data: st.DataObject) -> None:
    """Peers that describe what they do not offer: another process, address, layout or nonce."""
    true = harness.source.peer
    layout = {"base": numbers, "storage_bytes": numbers, "num_blocks": integers(0, 2**40)}
    change: dict[str, Any] = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "pid": st.one_of(st.just(os.getpid()), integers(-(2**31), 2**40)),
                "start_time": numbers,
                "boot_id": texts,
                "pid_ns": texts,
                "nonce_address": numbers,
                "nonce": st.binary(min_size=32, max_size=32),
            },
        ).filter(bool)
    )
    wire = msgspec.msgpack.decode(messages.encode(pull_of(true, [0], [0])))
    wire["peer"] |= change
    if data.draw(st.booleans()):
        wire["peer"]["layout"] |= data.draw(st.fixed_dictionaries({}, optional=layout))
    harness.attack(msgspec.msgpack.encode(wire))
    harness.attack(msgspec.msgpack.encode({"type": "probe", "job": 1, "peer": wire["peer"], "transport": "local"}))


@settings(parent=thorough)
@given(
    src=st.lists(integers(-1, 2**32), max_size=5),
    dst=st.lists(integers(32, 2**32), min_size=1, max_size=5),
    transport=st.one_of(st.just("local"), texts),
    deadline=st.floats(),
    limit=st.fixed_dictionaries({"bytes_per_s": st.none() | st.floats(), "share": st.none() | st.floats()}),
)
def test_other_blocks(
    harness: Harness, src: list[int], dst: list[int], transport: str, deadline: float, limit: Any
) -> None:
    """Block ids beyond the cache, lists of different lengths, limits that are none."""
    wire = {"type": "pull", "job": 1, "peer": harness.source.peer, "src_blocks": src, "dst_blocks": dst}
    wire |= {"transport": transport, "deadline_s": deadline, "limit": limit}
    harness.attack(msgspec.msgpack.encode(wire))
    harness.attack(messages.encode(StopPull(1)))
