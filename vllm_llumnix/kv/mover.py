# SPDX-License-Identifier: Apache-2.0
"""The mover: a daemon thread in each worker process that pulls KV blocks from peers.

It listens on a ROUTER socket for the commands in `messages` and does one thing at a time: a chunk
of a pull, then a look at the socket. So stops and probes are answered while a pull runs, waits for
the pace end early, and a stopped pull is certainly quiet, all without a lock. With nothing to do it
sleeps in `poll`.

Destination blocks belong to the job from the moment its Pull arrives until its PullReport leaves.
The mover trusts the engine that commands it in *which* of our blocks may be written, and a peer in
nothing: see `transport`.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from vllm_llumnix import faults
from vllm_llumnix.errors import LlumnixError, TransportError
from vllm_llumnix.kv import messages
from vllm_llumnix.kv.endpoint import PrivateDirectory
from vllm_llumnix.kv.grants import Grants
from vllm_llumnix.kv.layout import BlockLayout
from vllm_llumnix.kv.messages import (
    Grant,
    Probe,
    ProbeReport,
    Pull,
    PullReport,
    Rejected,
    Revoke,
    Revoked,
    Stopped,
    StopPull,
)
from vllm_llumnix.kv.pace import Pace
from vllm_llumnix.kv.settings import Limit
from vllm_llumnix.kv.transport.base import Transport

logger = logging.getLogger(__name__)

_Key = tuple[bytes, int]

SLEPT_SECONDS = 0.001
"""What is left of a pace is slept when it is less: polling knows whole milliseconds."""
MAX_PACES = 64


@dataclass(slots=True)
class _Job:
    pull: Pull
    pace: Pace
    order: int
    deadline: float
    total: int
    chunks: Iterator[int] | None = None
    started: float = 0.0
    bytes: int = 0


@dataclass
class Mover:
    """The thread and its socket.

    `start` and `close` belong to the thread that made it, everything else to the mover's, which runs where the one that
    calls `start` may.

    transports: in order of preference; without any, `unavailable` says why. layout: our own memory,
    which a `corrupt` fault writes to. grants: what peers may be sent, for those who send it.
    """

    rank: int
    layout: BlockLayout
    transports: Sequence[Transport]
    directory: PrivateDirectory
    unavailable: str = "this worker has no transport"
    grants: Grants = field(default_factory=Grants)
    num_errors: int = 0
    _jobs: dict[_Key, _Job] = field(default_factory=dict)
    _paces: OrderedDict[Limit, Pace] = field(default_factory=OrderedDict)
    _order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.directory.socket_path}"

    def start(self) -> None:
        """Listen, then run. Raises `zmq.ZMQError` if the endpoint cannot be had."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(self.endpoint)
        self._wake = os.eventfd(0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="llumnix-mover", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the chunk it is copying, and remove the endpoint."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        os.close(self._wake)
        self.directory.close()

    # The thread

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
        finally:
            for transport in self.transports:
                transport.close()
            self._socket.close()
            self._context.term()

    def _turn(self) -> bool:
        """Wait for a command or for the pace, then copy a chunk. True when it is time to end."""
        try:
            ready = self._poller.poll(self._patience())
            if any(source == self._wake for source, _ in ready):
                return True
            if ready:
                self._receive_all()
            self._give_up_late()
            if self._jobs and (delay := self._delay()) < SLEPT_SECONDS:
                if delay:
                    time.sleep(delay)
                self._advance()
        except zmq.ZMQError:
            logger.exception(
                "mover %d: its socket is broken; no more blocks are pulled into this worker",
                self.rank,
            )
            return True
        except Exception as error:
            self.num_errors += 1
            logger.exception("mover %d: unexpected error %d", self.rank, self.num_errors)
            for key in list(self._jobs):
                self._report(key, f"unexpected error in the mover: {error!r}")
        return False

    def _patience(self) -> int | None:
        """Milliseconds until a chunk or a deadline is due, None for ever.

        Rounded down for a chunk, whose last fraction is slept, and up for a deadline.
        """
        if not self._jobs:
            return None
        deadline = min(job.deadline for job in self._jobs.values()) - time.monotonic()
        return max(0, min(int(self._delay() * 1000), math.ceil(deadline * 1000)))

    def _delay(self) -> float:
        """Seconds until one of the jobs may go on."""
        return min(job.pace.delay() for job in self._jobs.values())

    def _receive_all(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self._socket.recv_multipart()
            self._obey(identity, frames)

    def _obey(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            command = messages.decode_command(b"".join(frames))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._answer(identity, Rejected(f"not a command: {error}"))
            return
        key = (identity, command.job)
        match command:
            case Pull():
                self._accept(key, command)
            case StopPull():
                if key in self._jobs:
                    self._report(key, "stopped")
                self._answer(identity, Stopped(command.job))
            case Probe():
                self._answer(identity, self._probe(command))
            case Grant():
                self.grants.allow(command.capability, command.blocks)
            case Revoke():
                self.grants.revoke(command.capability)
                self._answer(identity, Revoked(command.job))

    def _accept(self, key: _Key, pull: Pull) -> None:
        if key in self._jobs:
            self._answer(key[0], Rejected(f"job {pull.job} is running already", pull.job))
            return
        try:
            pace = self._pace(pull.limit)
        except ValueError as error:
            self._answer(key[0], PullReport(pull.job, 0, 0.0, str(error)))
            return
        self._jobs[key] = _Job(
            pull,
            pace,
            order=next(self._order),
            deadline=time.monotonic() + pull.deadline_s,
            total=len(pull.dst_blocks) * self.layout.bytes_per_block,
        )
        if not any(transport.name == pull.transport for transport in self.transports):
            names = ", ".join(transport.name for transport in self.transports)
            self._report(key, f"no transport {pull.transport!r}: {names or self.unavailable}")

    def _probe(self, probe: Probe) -> ProbeReport:
        reasons = []
        for transport in self.transports:
            try:
                transport.probe(probe.peer)
            except TransportError as error:
                reasons.append(f"{transport.name}: {error}")
            else:
                return ProbeReport(probe.job, transport.name)
        return ProbeReport(probe.job, None, "; ".join(reasons) or self.unavailable)

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for key in [key for key, job in self._jobs.items() if now >= job.deadline]:
            self._report(key, "deadline passed")

    def _advance(self) -> None:
        """One chunk of the most urgent pull that may go on: final ones first, then in order of arrival."""
        free = [key for key, job in self._jobs.items() if not job.pace.delay()]
        if not free:
            return
        key = min(free, key=lambda key: (not self._jobs[key].pull.final, self._jobs[key].order))
        job = self._jobs[key]
        began = time.monotonic()
        try:
            if job.chunks is None:
                job.started = began
                job.chunks = self._begin(job)
            for copied in job.chunks:
                job.bytes += copied
                job.pace.spend(copied, began)
                if job.bytes < job.total or job.pace.delay() > 0:
                    return
            self._pulled(job.pull)
            self._report(key, None)
        except (LlumnixError, ValueError) as error:
            self._report(key, str(error))

    def _pace(self, limit: Limit) -> Pace:
        """The same for all pulls of one limit. Raises ValueError for a limit that is none."""
        pace = self._paces.get(limit)
        if pace is None:
            pace = self._paces[limit] = Pace(limit)
            if len(self._paces) > MAX_PACES:
                self._paces.popitem(last=False)
        return pace

    def _begin(self, job: _Job) -> Iterator[int]:
        pull = job.pull
        transport = next(transport for transport in self.transports if transport.name == pull.transport)
        chunk_bytes = job.pace.chunk_bytes()
        return transport.pull(pull.peer, pull.src_blocks, pull.dst_blocks, chunk_bytes, pull.capability)

    def _report(self, key: _Key, error: str | None) -> None:
        """The end of a job: nothing of it runs any more when the report leaves."""
        job = self._jobs.pop(key)
        seconds = time.monotonic() - job.started if job.chunks is not None else 0.0
        job.chunks = None
        self._answer(key[0], PullReport(job.pull.job, job.bytes, seconds, error))

    def _answer(self, identity: bytes, answer: messages.Answer) -> None:
        self._socket.send_multipart([identity, messages.encode(answer)])

    def _pulled(self, pull: Pull) -> None:
        spec = faults.hit(
            "mover.pulled",
            rank=self.rank,
            job=pull.job,
            final=pull.final,
            tag=pull.tag,
            num_blocks=len(pull.dst_blocks),
        )
        if spec is not None and pull.dst_blocks:
            corrupt(self.layout, pull.dst_blocks, spec)


def corrupt(layout: BlockLayout, blocks: Sequence[int], spec: dict[str, Any]) -> None:
    """Invert one byte of our memory, for tests that must see it.

    The byte lies in the page of layer `layer` of the `which` (first, middle, last) of `blocks`.
    `offset` within the page is by default the most significant byte of the page's first element,
    which holds the first token's key in every layout: in use however short the block is. All bits
    are inverted, so that the element changes its sign and its order of magnitude.
    """
    which = {"first": 0, "middle": len(blocks) // 2, "last": -1}[spec["which"]]
    address, page_bytes = layout.page_address(blocks[which], spec["layer"])
    offset = spec.get("offset", layout.element_bytes - 1)
    if not 0 <= offset < page_bytes:
        raise ValueError(f"a page has {page_bytes} bytes, not {offset}")
    ctypes.c_ubyte.from_address(address + offset).value ^= 0xFF
