# SPDX-License-Identifier: Apache-2.0
"""The mover: a daemon thread in each worker process that pulls KV blocks from peers.

It listens on a ROUTER socket for the commands in `messages` and does one thing at a time: a chunk
of a pull, then a look at the socket. So stops and probes are answered while a pull runs, waits for
the pace end early, and a stopped pull is certainly quiet, all without a lock. With nothing to do it
sleeps in `poll`, and looks every few seconds whether transports hold anything of peers that have
gone. Only probes that wait for a peer's answer have threads of their own, which hand the mover the
reports to send.

Destination blocks belong to the job from the moment its Pull arrives until its PullReport leaves,
or the thread has ended. Whatever brings it to its end, the thread ends after its last copy, and
after the last byte of what was granted through it: so its engine may ask the kernel where the mover
does not answer.

The mover trusts the engine that commands it in *which* of our blocks may be written, and a peer in
nothing: see `transport`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import torch
import zmq

from vllm_llumnix import faults
from vllm_llumnix.errors import LlumnixError, TransportError
from vllm_llumnix.kv.memory.layout import BlockLayout
from vllm_llumnix.kv.mover import messages
from vllm_llumnix.kv.mover.endpoint import PrivateDirectory
from vllm_llumnix.kv.mover.pace import Pace, PacedPull
from vllm_llumnix.kv.mover.process import describe_thread, name_thread, yield_cores
from vllm_llumnix.kv.serving.grants import ASLEEP, ENDED, Grants
from vllm_llumnix.kv.settings import Limit
from vllm_llumnix.kv.transport.base import Transport

logger = logging.getLogger(__name__)

_Key = tuple[bytes, int]

SLEPT_SECONDS = 0.001
"""Shorter rests of a pace, in seconds, are slept: polling knows whole milliseconds."""
MAX_PACES = 64
MAX_PROBES = 32
"""Most probes that wait for peers at a time; further ones wait for these."""
PROBE_THREAD = "llumnix-probe"
TIDY_SECONDS = 5.0
"""Seconds for which something of a peer that has gone may be held. A GPU's memory is free only when nobody maps it."""
SILENCE_SECONDS = 0.02
"""Time for which other pulls go before one that has just waited in vain for its peer, for a few milliseconds."""


@dataclass(slots=True)
class _Job:
    pull: messages.Pull
    pace: Pace
    paced: PacedPull = field(init=False)
    order: int
    deadline: float
    total: int
    chunks: Iterator[int] | None = None
    started: float = 0.0
    bytes: int = 0
    waits_until: float = 0.0
    """The time until which it waits, as its peer sends nothing at the moment."""

    def rank(self, now: float) -> tuple[bool, bool, int]:
        """The lowest goes on: final ones first, then in order of arrival; nobody waits for another's silent peer."""
        return self.waits_until > now, not self.pull.final, self.order


@dataclass
class Mover:
    """The thread and its socket.

    `start`, `suspend`, `resume` and `close` belong to the thread that made it, everything else to the mover's, which
    runs where the one that calls `start` may.

    missing: why transports that somebody may ask for are not there. layout: the worker's own memory, for tests that
    corrupt it. grants: what peers may be sent, for those who send it. at_start: what the thread does before anything
    else.
    """

    rank: int
    layout: BlockLayout
    transports: Sequence[Transport]
    directory: PrivateDirectory
    missing: Mapping[str, str] = field(default_factory=dict)
    grants: Grants = field(default_factory=Grants)
    at_start: Callable[[], None] = lambda: None
    num_errors: int = 0
    _jobs: dict[_Key, _Job] = field(default_factory=dict)
    _paces: OrderedDict[tuple[str, Limit], Pace] = field(default_factory=OrderedDict)
    _order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.directory.socket_path}"

    def start(self) -> None:
        """Listen, then run. Raises `zmq.ZMQError` if the endpoint cannot be had, TransportUnavailable without /proc."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(self.endpoint)
        self._wake = os.eventfd(0)
        self._closing = False
        self._suspended: str | None = None
        """Why."""
        self._tidies = True
        self._idle = threading.Event()
        """Since `suspend`."""
        self._polite = False
        self._tidy_at = time.monotonic() + TIDY_SECONDS
        self._probers = ThreadPoolExecutor(
            MAX_PROBES, thread_name_prefix=PROBE_THREAD, initializer=name_thread, initargs=(PROBE_THREAD,)
        )
        self._probed: queue.SimpleQueue[tuple[bytes, messages.ProbeReport]] = queue.SimpleQueue()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="llumnix-mover", daemon=True)
        self._thread.start()
        assert self._thread.native_id is not None
        self.thread = describe_thread(self._thread.native_id)

    @property
    def suspended(self) -> bool:
        return self._suspended is not None

    def suspend(self, why: str = ASLEEP, *, tidies: bool = True) -> None:
        """Returns when no block is copied any more, or sent to a peer; none is until `resume`, and peers are told why.

        With `tidies`, memory of peers that have gone is let go of as ever; without, a GPU is not touched in any way.
        """
        self._suspended, self._tidies = why, tidies
        self._idle.clear()
        os.eventfd_write(self._wake, 1)
        while not self._idle.wait(1.0) and self._thread.is_alive():
            pass
        self.grants.suspend(why)

    def resume(self) -> None:
        self.grants.resume()
        self._suspended, self._tidies = None, True

    def close(self) -> None:
        """End the thread, after the chunk it is copying and the probes that wait, and remove the endpoint."""
        if self._thread.is_alive():
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        os.close(self._wake)
        self.directory.close()

    # The thread

    def _run(self) -> None:
        name_thread("llumnix-mover")
        try:
            try:
                self.at_start()
                while not self._turn():
                    faults.hit("mover.turn")
            finally:
                self._end()
        except Exception:
            logger.exception("mover %d: its thread ends; no more blocks are pulled into this worker", self.rank)

    def _end(self) -> None:
        """Every step is taken, whatever becomes of those before it. The engine hears of it from the closed socket."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._context.term)
            last_first.callback(self._socket.close)
            for transport in self.transports:
                last_first.callback(transport.close)
            last_first.callback(functools.partial(self._probers.shutdown, cancel_futures=True))
            last_first.callback(self.grants.suspend, ENDED)
            for job in self._jobs.values():
                job.chunks = None

    def _turn(self) -> bool:
        """Wait for a command or for the pace, then copy a chunk. True when it is time to end."""
        try:
            self._make_way()
            ready = self._poller.poll(self._patience())
            if self._closing:
                return True
            if any(source == self._wake for source, _ in ready):
                self._report_probed()
            if ready:
                self._receive_all()
            if self._suspended is not None:
                self._rest(self._suspended)
            self._give_up_late()
            self._tidy()
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

    def _patience(self) -> int:
        """Milliseconds until a chunk, a deadline or a look at the transports is due.

        Rounded down for a chunk, whose last fraction is slept, and up otherwise.
        """
        due = min([self._tidy_at, *(job.deadline for job in self._jobs.values())]) - time.monotonic()
        patience = math.ceil(due * 1000)
        if self._jobs:
            patience = min(int(self._delay() * 1000), patience)
        return max(0, patience)

    def _delay(self) -> float:
        """Seconds until one of the jobs may go on."""
        return min(job.pace.delay() for job in self._jobs.values())

    def _rest(self, why: str) -> None:
        for key in list(self._jobs):
            self._report(key, why)
        self._idle.set()

    def _receive_all(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self._socket.recv_multipart()
            self._obey(identity, frames)

    def _obey(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            command = messages.decode_command(b"".join(frames))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._answer(identity, messages.Rejected(f"not a command: {error}"))
            return
        key = (identity, command.job)
        match command:
            case messages.Pull():
                self._accept(key, command)
            case messages.StopPull():
                if key in self._jobs:
                    self._report(key, "stopped")
                self._answer(identity, messages.Stopped(command.job))
            case messages.Probe():
                self._begin_probe(identity, command)
            case messages.Grant():
                self.grants.allow(command.capability, command.blocks)
            case messages.Revoke():
                self.grants.revoke(command.capability)
                self._answer(identity, messages.Revoked(command.job))

    def _accept(self, key: _Key, pull: messages.Pull) -> None:
        if key in self._jobs:
            self._answer(key[0], messages.Rejected(f"job {pull.job} is running already", pull.job))
            return
        try:
            pace = self._pace(pull.link, pull.limit)
            bytes_per_block = self.layout.cut(pull.cuts.destination).bytes_per_block
        except ValueError as error:
            self._answer(key[0], messages.PullReport(pull.job, 0, 0.0, str(error)))
            return
        self._jobs[key] = _Job(
            pull,
            pace,
            order=next(self._order),
            deadline=time.monotonic() + pull.deadline_s,
            total=len(pull.dst_blocks) * bytes_per_block,
        )
        if self._transport(pull.transport) is None:
            self._report(key, self._why_missing(pull.transport))

    def _begin_probe(self, identity: bytes, probe: messages.Probe) -> None:
        transport = self._transport(probe.transport)
        if self._suspended is not None:
            self._answer(identity, messages.ProbeReport(probe.job, self._suspended))
        elif transport is None:
            self._answer(identity, messages.ProbeReport(probe.job, self._why_missing(probe.transport)))
        elif transport.asks_peers:
            self._probers.submit(self._probe_aside, identity, probe, transport)
        else:
            self._answer(identity, _probe(probe, transport))

    def _probe_aside(self, identity: bytes, probe: messages.Probe, transport: Transport) -> None:
        """Probes a peer in a thread of its own."""
        try:
            report = _probe(probe, transport)
        except Exception as error:
            logger.exception("mover %d: unexpected error in a probe", self.rank)
            report = messages.ProbeReport(probe.job, f"unexpected error in the mover: {error!r}")
        self._probed.put((identity, report))
        os.eventfd_write(self._wake, 1)

    def _report_probed(self) -> None:
        os.eventfd_read(self._wake)
        while not self._probed.empty():
            self._answer(*self._probed.get())

    def _transport(self, name: str) -> Transport | None:
        return next((transport for transport in self.transports if transport.name == name), None)

    def _why_missing(self, name: str) -> str:
        names = ", ".join(transport.name for transport in self.transports)
        return f"no transport {name!r}: {self.missing.get(name) or names}"

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for key in [key for key, job in self._jobs.items() if now >= job.deadline]:
            self._report(key, "deadline passed")

    def _tidy(self) -> None:
        if time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + TIDY_SECONDS
            for transport in self.transports if self._tidies else ():
                transport.tidy()

    def _make_way(self) -> None:
        """While nobody waits for a final round, waking up takes no core from the model."""
        polite = bool(self._jobs) and not any(job.pull.final for job in self._jobs.values())
        if polite != self._polite:
            self._polite = polite
            yield_cores(polite)

    def _advance(self) -> None:
        """Copies one chunk of the next pull."""
        free = [key for key, job in self._jobs.items() if not job.pace.delay()]
        if not free:
            return
        began = time.monotonic()
        key = min(free, key=lambda key: self._jobs[key].rank(began))
        job = self._jobs[key]
        try:
            if job.chunks is None:
                job.started = began
                job.chunks = self._begin(job)
            for copied in job.chunks:
                job.bytes += copied
                job.paced.spend(copied, began)
                began = time.monotonic()
                job.waits_until = 0.0 if copied else began + SILENCE_SECONDS
                if job.bytes < job.total or job.pace.delay() > 0:
                    return
            pull = job.pull
            faults.hit("mover.pulled", final=pull.final, tag=pull.tag, layout=self.layout, blocks=pull.dst_blocks)
            self._report(key, None)
        except (LlumnixError, ValueError, torch.OutOfMemoryError) as error:
            self._report(key, str(error))

    def _pace(self, link: str, limit: Limit) -> Pace:
        """The pace, the same for all pulls over one link with one limit. Raises ValueError for a limit that is none."""
        pace = self._paces.get((link, limit))
        if pace is None:
            pace = self._paces[link, limit] = Pace(limit)
            if len(self._paces) > MAX_PACES:
                self._paces.popitem(last=False)
        return pace

    def _begin(self, job: _Job) -> Iterator[int]:
        transport = self._transport(job.pull.transport)
        assert transport is not None
        job.paced = job.pace.begin(job.total)
        return transport.pull(job.pull, job.paced.chunk_bytes())

    def _report(self, key: _Key, error: str | None) -> None:
        """The end of a job: nothing of it runs any more when the report leaves."""
        job = self._jobs.pop(key)
        seconds = time.monotonic() - job.started if job.chunks is not None else 0.0
        job.chunks = None
        self._answer(key[0], messages.PullReport(job.pull.job, job.bytes, seconds, error))

    def _answer(self, identity: bytes, answer: messages.Answer) -> None:
        self._socket.send_multipart([identity, messages.encode(answer)])


def _probe(probe: messages.Probe, transport: Transport) -> messages.ProbeReport:
    try:
        transport.probe(probe.peer, probe.cuts)
    except TransportError as error:
        return messages.ProbeReport(probe.job, str(error))
    return messages.ProbeReport(probe.job, None)
