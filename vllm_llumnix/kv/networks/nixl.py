# SPDX-License-Identifier: Apache-2.0
"""NIXL, as far as it is used here: one process reads a buffer of another's, by UCX over whatever connects the two.

It runs in a process of its own, see `nixl_process`; buffers lie in memory files that both have. Nobody is
authenticated, and nothing is believed for lying in a buffer: see `staging`. A read that was given up may still write
until `poll` says how it ended. Without its process every read has ended, and none begins any more: peers are read by
another transport then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.mover.messages import GREETING_BYTES, NixlMemory, PeerMemory
from vllm_llumnix.kv.networks.nixl_process import (
    MAX_REASON,
    PACKET_BYTES,
    ReadEnd,
    ReadOrder,
    Ready,
    Unusable,
    decode_answer,
    encode,
    why_not_installed,
)

if TYPE_CHECKING:
    from vllm_llumnix.kv.networks.staging import SharedStagingArea, Slot

logger = logging.getLogger(__name__)

START_SECONDS: Final = 60.0
END_SECONDS: Final = 1.0
STARTED: Final = "vllm_llumnix.kv.networks.nixl_process"
_KEPT: Final = ("UCX_", "NIXL_", "LD_", "LC_", "PYTHON")
_KEPT_NAMES: Final = ("HOME", "LANG", "PATH", "TMPDIR", "VIRTUAL_ENV")
_VARIABLES: Final = {
    "NIXL_LOG_LEVEL": "WARN",
    # As vLLM has it: against a leak in UCX.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # UCX connects to a peer over TCP while nothing else is read: for three seconds then, and not for two minutes.
    "UCX_TCP_SYN_CNT": "1",
}
"""NIXL's and UCX's own settings, unless they are set."""


def environment_of(devices: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of NIXL's process: no secrets that others may have put into ours, and no GPU."""
    kept = {name: value for name, value in environ.items() if name.startswith(_KEPT) or name in _KEPT_NAMES}
    return _VARIABLES | kept | {"UCX_NET_DEVICES": devices, "CUDA_VISIBLE_DEVICES": ""}


class NixlEngine:
    """The process, from the constructor until `close`. Thread-safe. `memory` is what peers are told.

    outgoing, incoming: what peers read, and what is read into. Their descriptors are closed here.
    """

    def __init__(self, devices: str, outgoing: SharedStagingArea, incoming: SharedStagingArea) -> None:
        """Raises TransportUnavailable, with what is missing."""
        self.problem: str | None = None
        """Why nothing can be read any more."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._reads: dict[int, NixlRead] = {}
        agent = f"llumnix-{secrets.token_hex(16)}"
        with contextlib.closing(outgoing), contextlib.closing(incoming):
            if (problem := why_not_installed()) is not None:
                raise TransportUnavailable(problem)
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fds = theirs.fileno(), outgoing.fd, incoming.fd
                num_bytes = os.fstat(outgoing.fd).st_size
                self._process = subprocess.Popen(
                    [sys.executable, "-m", STARTED, *map(str, fds), agent],
                    pass_fds=fds,
                    env=environment_of(devices),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # UCX logs there
                )
        try:
            ready = self._first_answer()
            described = {
                "agent": agent,
                "metadata": ready.metadata,
                "address": ready.address,
                "num_bytes": num_bytes,
                "greeting": outgoing.greeting,
            }
            self.memory = msgspec.convert(described, NixlMemory)
        except (TransportUnavailable, msgspec.ValidationError) as error:
            self.close()
            raise TransportUnavailable(f"NIXL does not start with the network devices {devices!r}: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin_read(self, peer: NixlMemory, slot: Slot, offset: int, num_bytes: int) -> NixlRead:
        """Copy from `offset` of a peer's area to the start of `slot`. Raises TransferFailed for what is not in it."""
        if not 0 <= offset <= offset + num_bytes <= peer.num_bytes:
            raise TransferFailed(f"{num_bytes} bytes at {offset} do not lie in the source's staging area")
        read = NixlRead(self)
        with self._lock:
            if self.problem is not None:
                read.end(self.problem)
                return read
            number = next(self._numbers)
            self._reads[number] = read
            order = ReadOrder(number, peer.agent, peer.metadata, peer.address + offset, slot.address, num_bytes)
            try:
                self._channel.send(encode(order))
            except BlockingIOError:
                del self._reads[number]
                read.end("its process takes no orders")
            except OSError:
                self._lose()
        return read

    def hear(self) -> None:
        """Take note of reads that have ended."""
        with self._lock:
            while self.problem is None:
                try:
                    packet = self._channel.recv(PACKET_BYTES)
                    answer = decode_answer(packet) if packet else None
                except BlockingIOError:
                    return
                except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
                    answer = None
                if not isinstance(answer, ReadEnd):
                    self._lose()
                elif (read := self._reads.pop(answer.number, None)) is not None:
                    read.end(answer.error)

    def close(self) -> None:
        """Peers read nothing any more, and nothing is read."""
        with self._lock:
            self._lose("it was ended")

    def _first_answer(self) -> Ready:
        """Raises TransportUnavailable."""
        self._channel.settimeout(START_SECONDS)
        try:
            packet = self._channel.recv(PACKET_BYTES)
            answer = decode_answer(packet) if packet else None
            self._channel.setblocking(False)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransportUnavailable(f"its process does not answer: {error}") from error
        match answer:
            case Ready():
                return answer
            case Unusable():
                raise TransportUnavailable(answer.reason[:MAX_REASON])
        raise TransportUnavailable("its process has ended: see its log")

    def _lose(self, why: str | None = None) -> None:
        """The lock is held. Nothing is written any more when its process has ended."""
        if self.problem is not None:
            return
        self._channel.close()
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if why is None:
            why = f"signal {-status}" if status < 0 else f"status {status}"
            logger.error("NIXL's process has ended (%s): moves go by other transports from now on", why)
        self.problem = f"NIXL's process has ended: {why}"
        reads, self._reads = self._reads, {}
        for read in reads.values():
            read.end(self.problem)


class NixlRead:
    def __init__(self, engine: NixlEngine) -> None:
        self._engine = engine
        self._arrived: bool | None = None

    def cancel(self) -> bool:
        return False

    def poll(self) -> bool | None:
        """True if all bytes have arrived; None while they are under way."""
        if self._arrived is None:
            self._engine.hear()
        return self._arrived

    def end(self, error: str | None) -> None:
        if error is not None:
            logger.info("a read by NIXL has failed: %s", error)
        self._arrived = error is None


TRIAL_SECONDS: Final = 2.0
"""Seconds that the first read may take, for which UCX connects. Who asks waits for five in all."""
SLOT_SECONDS: Final = 0.5
TRIAL_POLL_SECONDS: Final = 1e-3


class NixlNetwork:
    """Implements `staged.Network`. Places are the names of agents."""

    name: Final = "nixl"
    title: Final = "NIXL"

    def __init__(self, engine: NixlEngine, area: SharedStagingArea) -> None:
        self._engine = engine
        self._area = area

    def place_of(self, peer: PeerMemory) -> str:
        return self._memory_of(peer).agent

    def obstacle(self, peer: PeerMemory) -> str | None:
        """Its greeting is read: that connects the two as well, for which no stream has to wait then."""
        memory = self._memory_of(peer)
        try:
            (slot,) = self._area.take(1, SLOT_SECONDS)
        except TransferFailed as error:
            raise TransportUnavailable(str(error)) from error
        read = self._engine.begin_read(memory, slot, 0, GREETING_BYTES)
        deadline = time.monotonic() + TRIAL_SECONDS
        while read.poll() is None and time.monotonic() < deadline:
            time.sleep(TRIAL_POLL_SECONDS)
        if (arrived := read.poll()) is None:
            self._area.quarantine(slot, lambda: read.poll() is not None)
            return f"NIXL has not read from {memory.agent} within {TRIAL_SECONDS:.0f} s"
        greeting = bytes(slot.memory[:GREETING_BYTES].numpy())
        self._area.give_back([slot])
        if not arrived:
            return f"NIXL could not read from {memory.agent}"
        return None if greeting == memory.greeting else f"NIXL reads another process than {memory.agent}"

    def begin_read(self, peer: PeerMemory, slot: Slot, address: int, num_bytes: int) -> NixlRead:
        return self._engine.begin_read(self._memory_of(peer), slot, address, num_bytes)

    def tidy(self) -> None:
        """Its process may have ended: somebody wants to know, and it has to be waited for."""
        self._engine.hear()

    def _memory_of(self, peer: PeerMemory) -> NixlMemory:
        self._engine.hear()
        if self._engine.problem is not None:
            raise TransportUnavailable(self._engine.problem)
        if peer.nixl is None:
            raise TransportUnavailable("the source does not run NIXL")
        return peer.nixl
