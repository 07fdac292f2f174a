# SPDX-License-Identifier: Apache-2.0
"""The process beside a worker that NIXL runs in, and what the two say to each other: one message a packet.

UCX, which carries NIXL, lets whoever reaches its ports read and write all memory of the process that it runs in: where
no card does it, a read is a message with an address, and the other end takes it at its word, registered or not. And
what a peer says of itself goes to UCX as it is, which ends its process when that is damaged. So neither is the worker:
here are two staging areas, and nothing else that anybody would want. What a worker believes of what lies there, and of
what this process says, is in `transport.staged` and in `nixl`.

    python -m vllm_llumnix.kv.networks.nixl_process CHANNEL OUTGOING INCOMING AGENT    (file descriptors, and a name)
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import mmap
import os
import select
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias

import msgspec

MODULES: Final = ("nixl_cu13", "nixl_cu12", "nixl_rocm", "nixl")
"""Where NIXL's bindings are, the first that is installed: without a GPU's memory they are all the same. The last one
asks torch which of the others to take, for which it may have to import it."""
BACKEND: Final = "UCX"
PACKET_BYTES: Final = 128 << 10
PROGRESS_MICROSECONDS: Final = 100_000
"""Period in which NIXL's thread looks for work that no event tells of. With 0, its default, it never sleeps."""
LOOK_SECONDS: Final = 50e-6
MAX_PEERS: Final = 256
MAX_REASON: Final = 300
_HEAD: Final = b"nixlSerDes|Agent"
"""Beginning of metadata, before the length of the agent's name in eight bytes, and the name."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ReadOrder(msgspec.Struct, frozen=True):
    """Read from `source`, an address in the process of the agent that `metadata` describes, to `offset` of INCOMING."""

    number: _Count
    agent: str
    metadata: bytes
    source: _Count
    offset: _Count
    num_bytes: _Count


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """This agent's own metadata, and where OUTGOING lies."""

    metadata: bytes
    address: _Count


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    reason: str


class ReadEnd(msgspec.Struct, frozen=True, tag="end"):
    """Nothing of this read will be written any more. All bytes have arrived if and only if `error` is None."""

    number: _Count
    error: str | None = None


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(ReadOrder).decode
decode_answer = msgspec.msgpack.Decoder(Ready | Unusable | ReadEnd).decode


def why_not_installed() -> str | None:
    """Reason why NIXL cannot be started; None if nothing is, as far as can be seen without starting it."""
    if any(importlib.util.find_spec(name) is not None for name in MODULES):
        return None
    return "NIXL is not installed: pip install vllm-llumnix[nixl]"


def begins_with(agent: str, metadata: bytes) -> bool:
    """True if metadata is of the agent of that name: NIXL takes it for the name that is in it, whoever brings it."""
    return metadata.startswith(_HEAD + len(agent).to_bytes(8, "little") + agent.encode())


def bindings() -> Any:
    """NIXL's, of the first module that is there. Raises ImportError."""
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError(f"none of {', '.join(MODULES)} is installed")


class NixlError(Exception):
    """An error that NIXL has raised: its own errors have no class in common."""


class Agent:
    """NIXL's agent, with a progress thread that sleeps while nothing happens. Everything raises NixlError."""

    def __init__(self, name: str) -> None:
        """Raises ImportError, too."""
        self.nixl = bindings()
        own = (kind for kind in vars(self.nixl).values() if isinstance(kind, type) and issubclass(kind, Exception))
        self._errors: tuple[type[Exception], ...] = (*own, RuntimeError, ValueError, TypeError)
        config = self.nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
        config.useListenThread = False
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_STRICT
        self.name = name
        self._agent = self._do(self.nixl.nixlAgent, name, config)
        self._backends = [self._do(self._agent.createBackend, BACKEND, {})]
        self._peers: OrderedDict[str, bytes] = OrderedDict()
        """Metadata of those that are known to NIXL, the one that was read from last at the end."""
        self._under_way: dict[int, tuple[str, int]] = {}
        """Agent and NIXL's handle of each read, by number."""

    def register(self, memory: memoryview) -> Any:
        """NIXL's descriptors of memory that it may read and write from now on. It has to stay."""
        descriptors = self.nixl.nixlRegDList(self.nixl.DRAM_SEG)
        descriptors.addDesc((address_of(memory), len(memory), 0, b""))
        self._do(self._agent.registerMem, descriptors, self._backends)
        return descriptors

    def metadata(self, descriptors: Any) -> bytes:
        """The metadata for peers, who may read what is described."""
        metadata = bytes(self._do(self._agent.getLocalPartialMD, descriptors, True, self._backends))
        if not begins_with(self.name, metadata):
            raise NixlError("its metadata is of another form than that of NIXL 1.5")
        return metadata

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def begin(self, order: ReadOrder, destination: int) -> None:
        """Where it raises, nothing is under way."""
        self._meet(order.agent, order.metadata)
        here, there = (self.nixl.nixlXferDList(self.nixl.DRAM_SEG) for _ in range(2))
        here.addDesc((destination, order.num_bytes, 0))
        there.addDesc((order.source, order.num_bytes, 0))
        read = self.nixl.NIXL_READ, here, there, order.agent, b"", self._backends
        handle = self._do(self._agent.createXferReq, *read)
        self._under_way[order.number] = order.agent, handle
        try:
            self._do(self._agent.postXferReq, handle, b"")
        except NixlError:
            self._over(order.number, failed=True)
            raise

    def ended(self) -> list[ReadEnd]:
        """Reads that have ended since this was asked last."""
        ends = []
        for number, (_, handle) in list(self._under_way.items()):
            error = None
            try:
                if self._do(self._agent.getXferStatus, handle) == self.nixl.NIXL_IN_PROG:
                    continue
            except NixlError as raised:
                error = said(raised)
            self._over(number, failed=error is not None)
            ends.append(ReadEnd(number, error))
        return ends

    def _over(self, number: int, *, failed: bool) -> None:
        """A read has ended. A connection that has failed once is not used again: NIXL makes a new one."""
        agent, handle = self._under_way.pop(number)
        self._do(self._agent.releaseXferReq, handle)
        if failed and not self._is_read(agent):
            self._forget(agent)

    def _meet(self, agent: str, metadata: bytes) -> None:
        if not begins_with(agent, metadata) or agent == self.name:
            raise NixlError("this metadata is another agent's")
        if agent in self._peers and self._peers[agent] != metadata:
            if self._is_read(agent):
                raise NixlError("two processes say that they are this agent")
            self._forget(agent)
        if agent not in self._peers:
            for idle in [name for name in self._peers if not self._is_read(name)][: len(self._peers) - MAX_PEERS + 1]:
                self._forget(idle)
            self._do(self._agent.loadRemoteMD, metadata)
            self._peers[agent] = metadata
        self._peers.move_to_end(agent)

    def _forget(self, agent: str) -> None:
        if self._peers.pop(agent, None) is not None:
            self._do(self._agent.invalidateRemoteMD, agent)

    def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._errors as error:
            raise NixlError(said(error)) from error

    def _is_read(self, agent: str) -> bool:
        return any(name == agent for name, _ in self._under_way.values())


def serve(channel: socket.socket, agent: Agent, incoming: int) -> None:
    """Until the worker has gone. `incoming`: where that area lies here."""
    while True:
        ready, _, _ = select.select([channel], [], [], LOOK_SECONDS if agent.is_busy else None)
        if ready:
            packet = channel.recv(PACKET_BYTES)
            if not packet:
                return
            order = decode_order(packet)
            try:
                agent.begin(order, incoming + order.offset)
            except NixlError as error:
                channel.send(encode(ReadEnd(order.number, said(error))))
        for end in agent.ended():
            channel.send(encode(end))


def said(error: Exception) -> str:
    return (str(error) or repr(error))[:MAX_REASON]


def mapped(fd: int) -> memoryview:
    """All of a memory file."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the worker ends us
    channel = socket.socket(fileno=int(argv[0]))
    try:
        agent = Agent(argv[3])
        outgoing, incoming = mapped(int(argv[1])), mapped(int(argv[2]))
        metadata = agent.metadata(agent.register(outgoing))
        agent.register(incoming)
    except (ImportError, NixlError) as error:
        channel.send(encode(Unusable(said(error))))
        return
    channel.send(encode(Ready(metadata, address_of(outgoing))))
    serve(channel, agent, address_of(incoming))


if __name__ == "__main__":
    # Not by returning: UCX would wait for peers that may have gone, and complain of reads under way.
    try:
        main(sys.argv[1:])
    except ConnectionError:
        os._exit(0)  # the worker has gone
    except Exception:
        logging.exception("NIXL's process ends")
        os._exit(1)
    os._exit(0)
