# SPDX-License-Identifier: Apache-2.0
"""`tcp` from a device to a device: gather, send, receive and scatter at work at a time, and each buffer one's alone.

The devices are fakes, `FakeDevice`: main memory, copied by a thread of theirs as slowly as a test says. What they
cannot show is whether CUDA's streams and events do what the code takes them to do.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.kv.fakes import Memory, describe, pull_of, until
from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv import kernels
from vllm_llumnix.kv.kernels import Chunk, Uploaded
from vllm_llumnix.kv.memory.block_memory import Cuttable, HostMemory
from vllm_llumnix.kv.mover.messages import PeerMemory
from vllm_llumnix.kv.mover.process import NoncePage
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES, Grants
from vllm_llumnix.kv.transport import bounce
from vllm_llumnix.kv.transport.blocks_tcp import receive_into, send_from
from vllm_llumnix.kv.transport.bounce import Bounced
from vllm_llumnix.kv.transport.tcp import TcpTransport

CAPABILITY = bytes(CAPABILITY_BYTES)
NUM_CHUNKS = 16
CHUNK_BLOCKS = 2
POISON = 0xEE
PATIENCE_S = 20.0
"""Nobody waits so long unless something is wrong."""
EVERYTHING = list(range(NUM_CHUNKS * CHUNK_BLOCKS))
MOVED = EVERYTHING[::-1]

Hook = Callable[[str], None]


class FakeCopy(Future[None]):
    def synchronize(self) -> None:
        self.result(PATIENCE_S)


class FakeDevice(Cuttable):
    """Implements `bounce.Device` and what `tcp` needs of a `BlockMemory`.

    `hook` is called when a copy begins, in the device's thread: it may wait, or raise, and then the copy fails. So does
    one whose buffer was touched meanwhile.
    """

    layers_outermost = False

    def __init__(self, memory: Memory, hook: Hook = lambda step: None) -> None:
        self.layout = memory.blocks
        self.chunk_bytes = CHUNK_BLOCKS * memory.blocks.bytes_per_block
        self.under_way = 0
        self.hook = hook
        self._host = HostMemory(memory.blocks)
        self._queue: queue.SimpleQueue[tuple[FakeCopy, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def transfer(self, block_ids: Sequence[int], layers_outermost: bool) -> Bounced:
        return Bounced(self, block_ids, layers_outermost)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def ids(self, block_ids: Sequence[int]) -> Uploaded:
        return Uploaded.to(torch.device("cpu"), block_ids)

    def begin_gather(self, chunk: Chunk, buffer: torch.Tensor) -> FakeCopy:
        return self._begin("gather", chunk, buffer.fill_(POISON))

    def begin_scatter(self, chunk: Chunk, buffer: torch.Tensor) -> FakeCopy:
        return self._begin("scatter", chunk, buffer)

    def _begin(self, step: str, chunk: Chunk, buffer: torch.Tensor) -> FakeCopy:
        before, copy = buffer.clone(), FakeCopy()

        def carry_out() -> None:
            self.hook(step)
            assert torch.equal(buffer, before), f"a buffer was touched before its {step} was over"
            copying = kernels.gather if step == "gather" else kernels.scatter
            copying(self._host.storage, chunk.layout, chunk.ids, buffer)

        self.under_way += 1
        self._queue.put((copy, carry_out))
        return copy

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            copy, carry_out = entry
            failure: Exception | None = None
            try:
                carry_out()
            except (AssertionError, RuntimeError) as error:
                failure = error
            self.under_way -= 1
            if failure is None:
                copy.set_result(None)
            else:
                copy.set_exception(failure)


@dataclass
class Ends:
    there: Memory
    here: Memory
    source: FakeDevice
    destination: FakeDevice
    transport: TcpTransport
    peer: PeerMemory
    grants: Grants

    def pull(self) -> Iterator[int]:
        return self.transport.pull(pull_of(self.peer, EVERYTHING, MOVED, CAPABILITY), 1 << 20)

    def require_moved(self) -> None:
        for theirs, ours in zip(EVERYTHING, MOVED, strict=True):
            assert self.here.block(ours) == self.there.block(theirs)


@pytest.fixture
def ends() -> Iterator[Ends]:
    there, here = Memory(num_blocks=len(EVERYTHING), seed=1), Memory("BLHNC", num_blocks=len(EVERYTHING), seed=2)
    with contextlib.ExitStack() as stack:
        source, destination = (stack.enter_context(contextlib.closing(FakeDevice(it))) for it in (there, here))
        page, grants = NoncePage(), Grants()
        stack.callback(page.revoke)
        grants.allow(CAPABILITY, EVERYTHING)
        server = stack.enter_context(contextlib.closing(BlockServer(source, page.value, grants, "127.0.0.1")))
        server.start()
        transport = stack.enter_context(contextlib.closing(TcpTransport(destination)))
        peer = describe(there, page, tcp=f"127.0.0.1:{server.port}")
        yield Ends(there, here, source, destination, transport, peer, grants)


@pytest.fixture
def steps(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Callable[[Hook], None]:
    """Has each of the four steps of a pull call a hook with its name: the devices' when they begin, the network's
    beside the bytes, a chunk at a time."""

    def set_hook(hook: Hook) -> None:
        def sending(connection: socket.socket, buffer: memoryview, more: bool) -> int:
            hook("send")
            return send_from(connection, buffer, more=more)

        def receiving(connection: socket.socket, buffer: memoryview) -> int:
            received = receive_into(connection, buffer)
            if received == len(buffer):  # a chunk is complete
                hook("receive")
            return received

        ends.source.hook = ends.destination.hook = hook
        monkeypatch.setattr(bounce, "send_from", sending)
        monkeypatch.setattr(bounce, "receive_into", receiving)

    return set_hook


def test_bytes(ends: Ends) -> None:
    before = ends.here.bytes.copy()
    for _ in range(3):  # over the same connection
        assert sum(ends.pull()) == ends.here.bytes.nbytes
        ends.require_moved()
        ends.here.bytes[:] = before
    assert ends.source.under_way == ends.destination.under_way == 0


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_few_blocks(ends: Ends, blocks: int) -> None:
    """Less than a chunk, one, and a last one that is not full."""
    assert sum(ends.transport.pull(pull_of(ends.peer, EVERYTHING[:blocks], MOVED[:blocks], CAPABILITY), 100))
    for theirs, ours in zip(EVERYTHING[:blocks], MOVED[:blocks], strict=True):
        assert ends.here.block(ours) == ends.there.block(theirs)


def test_each_step_goes_on_while_the_others_do(ends: Ends, steps: Callable[[Hook], None]) -> None:
    """By rendezvous, whatever the time: a chunk is sent only once the next is being gathered, and scattered only once
    the next has been received."""
    changed, begun = threading.Condition(), Counter[str]()
    ahead = {"send": "gather", "scatter": "receive"}

    def meet(step: str) -> None:
        with changed:
            begun[step] += 1
            changed.notify_all()
            if step in ahead:
                wanted = min(begun[step] + 1, NUM_CHUNKS)
                assert changed.wait_for(lambda: begun[ahead[step]] >= wanted, PATIENCE_S), (step, begun)

    steps(meet)
    assert sum(ends.pull()) == ends.here.bytes.nbytes
    ends.require_moved()
    assert set(begun.values()) == {NUM_CHUNKS}


def test_a_transfer_takes_as_long_as_its_slowest_step(ends: Ends, steps: Callable[[Hook], None]) -> None:
    spent: Counter[str] = Counter()

    def linger(step: str) -> None:
        began = time.perf_counter()
        time.sleep(0.01)
        spent[step] += time.perf_counter() - began

    def attempt() -> tuple[float, float]:
        """What a pull took, by its longest step and by the sum of all."""
        spent.clear()
        began = time.perf_counter()
        assert sum(ends.pull()) == ends.here.bytes.nbytes
        took = time.perf_counter() - began
        assert len(spent) == 4
        return took / max(spent.values()), took / spent.total()

    steps(linger)
    attempts = [attempt() for _ in range(3)]
    # Three more steps of one chunk each make 1.2.
    assert any(of_longest < 1.5 and of_sum < 0.4 for of_longest, of_sum in attempts), attempts
    ends.require_moved()


class Lazy(Cuttable):
    """Implements `bounce.Device`. A copy is carried out when somebody waits for it, as late as a device may do it;
    `kept` says for each if the memory of its ids was still there."""

    class Memory(np.ndarray):
        """An array to which there are weak references."""

    def __init__(self) -> None:
        self.layout = Memory(num_blocks=8).blocks
        self.chunk_bytes = self.layout.bytes_per_block
        self.kept: list[bool] = []

    def ids(self, block_ids: Sequence[int]) -> Uploaded:
        memory = np.array(block_ids, np.int64).view(Lazy.Memory)
        self._memory = weakref.ref(memory)
        return Uploaded(np.array(block_ids, np.int64), torch.from_numpy(memory))

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def begin_gather(self, chunk: Chunk, buffer: torch.Tensor) -> Lazy:
        return self

    begin_scatter = begin_gather

    def synchronize(self) -> None:
        self.kept.append(self._memory() is not None)


@pytest.mark.parametrize("step", ["send", "receive"])
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_ids_are_kept_until_their_copies_are_over(step: str, wanted: int) -> None:
    """The device reads them after the last copy was enqueued: freed memory may hold the ids of another transfer."""
    device = Lazy()
    transfer, size = Bounced(device, range(wanted), layers_outermost=False), device.chunk_bytes
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(wanted):
            if step == "send":
                sent = 0
                while sent < size:
                    sent += transfer.send(ours, size - sent)
                    theirs.recv(size)
            else:
                left = size
                while left:
                    theirs.sendall(bytes(part := min(left, 4096)))
                    while part:
                        received = transfer.receive(ours, part)
                        part, left = part - received, left - received
    transfer.close()
    assert device.kept == [True] * wanted
    assert device._memory() is None


def failing(step: str, number: int) -> Hook:
    """A hook that fails the copy of that number, from 1 on."""
    counted: Counter[str] = Counter()

    def hook(begun: str) -> None:
        counted[begun] += 1
        if begun == step and counted[begun] == number:
            raise RuntimeError("out of order")

    return hook


@pytest.mark.parametrize("number", [1, 2, NUM_CHUNKS])
def test_a_gather_that_fails(ends: Ends, number: int) -> None:
    ends.source.hook = failing("gather", number)
    with pytest.raises(TransferFailed, match="closed the connection"):
        list(ends.pull())
    assert ends.destination.under_way == 0
    until(lambda: ends.source.under_way == 0)
    assert sum(ends.pull()) == ends.here.bytes.nbytes
    ends.require_moved()


@pytest.mark.parametrize("number", [1, 2, NUM_CHUNKS - 1, NUM_CHUNKS])
def test_a_scatter_that_fails(ends: Ends, number: int) -> None:
    """Also if it is the last: what is reported as pulled is in its place."""
    ends.destination.hook = failing("scatter", number)
    with pytest.raises(RuntimeError, match="out of order"):
        list(ends.pull())
    assert ends.destination.under_way == 0
    ends.grants.revoke(CAPABILITY)
    assert ends.source.under_way == 0


def test_nothing_is_written_after_a_pull_was_stopped(ends: Ends) -> None:
    going = threading.Event()

    def slowly(step: str) -> None:
        assert going.wait(PATIENCE_S)
        time.sleep(0.01)

    ends.destination.hook = slowly
    pull = ends.pull()
    while not ends.destination.under_way:
        next(pull)
    threading.Timer(0.1, going.set).start()
    pull.close()  # type: ignore[attr-defined]
    assert going.is_set(), "it has not waited for what was under way"
    assert ends.destination.under_way == 0
    after = ends.here.bytes.copy()
    time.sleep(0.1)
    assert (ends.here.bytes == after).all()


def test_nothing_is_read_after_a_grant_was_taken_back(ends: Ends) -> None:
    """Though it was begun ahead: then the source's blocks, or all of its memory, may be somebody else's."""
    reading = threading.Event()

    def slowly(step: str) -> None:
        reading.set()
        time.sleep(0.05)

    ends.source.hook = slowly

    def revoke() -> None:
        assert reading.wait(PATIENCE_S)
        ends.grants.revoke(CAPABILITY)
        left.append(ends.source.under_way)

    left: list[Any] = []
    revoker = threading.Thread(target=revoke)
    revoker.start()
    with pytest.raises(TransferFailed):
        list(ends.pull())
    revoker.join()
    assert left == [0]
