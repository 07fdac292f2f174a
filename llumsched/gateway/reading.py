# SPDX-License-Identifier: Apache-2.0
"""The gateway's side of `reading_process`: a pool of processes with one job each at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Final, cast

import msgspec

from llumlet.process.tasks import cancel
from llumsched.gateway import frames
from llumsched.gateway.frames import CLOCK_PER_CPU, Answer, Job, Settings

_log = logging.getLogger(__name__)
_LEAST_LIFE_S: Final = 5.0
"""Shortest time between two starts of all processes."""
_NOT_STARTED: Final = "the processes that count tokens end at their start"
_END_S: Final = 2.0
_GRACE_S: Final = 5.0
_CLOCK_PER_CPU: Final = 2 * CLOCK_PER_CPU
"""Factor on the clock time of a job. A worker ends itself after half of that, so one that has not is stopped."""


class Unavailable(Exception):
    """Raised if no process was free in time, or none runs."""


class _Worker(asyncio.Protocol):
    """The gateway's end of a socket pair. It is free after its host's greeting and after the last answer to each
    job."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._buffer = bytearray()
        self._best: Answer | None = None
        self.is_lost = False
        self.ready: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._job: asyncio.Future[Answer] | None = self.ready

    async def answer(self, job: Job, content: bytes | bytearray) -> Answer:
        """The best answer of the process, which must be free."""
        self._best = None
        answer = self._job = asyncio.get_running_loop().create_future()
        self._transport.write(frames.job_head(job, len(content)))
        self._transport.write(content)
        return await asyncio.shield(answer)

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for answer in frames.take_answers(self._buffer):
                self._answered(answer)
        except msgspec.DecodeError:
            self.close()

    def _answered(self, answer: Answer) -> None:
        if self._job is None:
            self.close()  # a process that ends without a job would do so again and again
        elif not answer.is_last:
            self._best = answer
        else:
            job, self._job = self._job, None
            job.set_result(self._best if self._best and answer.num_tokens is None else answer)
            self._readers.freed(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        job, self._job = self._job, None
        if job is not None:
            job.set_result(self._best or Answer(is_last=True))
        self._readers.lost(self)


class Readers:
    """A pool of processes, started by the first job or before, and again if they end. `memory_bytes`: limit for each
    beyond its size at the start."""

    def __init__(self, tokenizers: dict[str, str], chat_template: str, num_processes: int, memory_bytes: int) -> None:
        self._settings = Settings(tokenizers, chat_template, memory_bytes, [])
        self._num_processes = num_processes
        self._process: asyncio.subprocess.Process | None = None
        self._workers: list[_Worker] = []
        self._free: deque[_Worker] = deque()
        self._waiting: deque[asyncio.Future[_Worker]] = deque()
        self._starting: asyncio.Task[None] | None = None
        self._started_s = -float("inf")
        self._is_ready = False

    async def start(self) -> None:
        """Raises ValueError if a tokenizer cannot be loaded."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._starting)

    async def run(self, job: Job, content: bytes | bytearray, wait_s: float) -> Answer:
        """Runs a job. Raises Unavailable if no process is free within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._start_again()
                worker = await self._take()
        except (OSError, ValueError):  # TimeoutError is an OSError
            raise Unavailable from None
        if worker.is_lost:
            raise Unavailable
        try:
            async with asyncio.timeout(_GRACE_S + _CLOCK_PER_CPU * job.cpu_s):
                return await worker.answer(job, content)
        except TimeoutError:
            worker.close()
            raise Unavailable from None

    async def close(self) -> None:
        if self._starting is not None:
            await cancel(self._starting)
        await self._end()

    async def _start_again(self) -> None:
        if self._starting is not None and self._starting.done() and not self._workers:
            if time.monotonic() - self._started_s < _LEAST_LIFE_S:
                raise Unavailable
            self._starting = None
        await self.start()

    async def _start(self) -> None:
        await self._end()
        self._started_s = time.monotonic()
        pairs = [socket.socketpair() for _ in range(self._num_processes)]
        theirs = [their.fileno() for _, their in pairs]
        settings = msgspec.structs.replace(self._settings, sockets=theirs)
        command = (sys.executable, "-P", "-m", "llumsched.gateway.reading_process", msgspec.json.encode(settings))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,
            )
        except OSError:
            for our, _ in pairs:
                our.close()
            raise
        finally:
            for _, their in pairs:
                their.close()
        loop = asyncio.get_running_loop()
        for our, _ in pairs:
            await loop.create_connection(self._new_worker, sock=our)
        faults = [(await asyncio.shield(worker.ready)).fault for worker in list(self._workers)]
        if any(faults) or not self._workers:
            await self._end()
            raise ValueError(next(filter(None, faults), _NOT_STARTED))
        self._is_ready = True

    def _new_worker(self) -> _Worker:
        worker = _Worker(self)
        self._workers.append(worker)
        return worker

    async def _take(self) -> _Worker:
        if self._free:
            return self._free.popleft()
        waiter: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.freed(waiter.result())
            raise

    def freed(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._free.append(worker)

    def lost(self, worker: _Worker) -> None:
        """Ends all processes; the next job starts them again."""
        if worker in self._workers:
            if self._is_ready:
                _log.warning("the reading processes have ended; the next request starts them again")
            self._kill()

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        self._free.clear()
        for worker in workers:
            worker.close()
        if self._process is not None:
            _kill_group(self._process)

    async def _end(self) -> None:
        """Ends the host after its workers, so that it can reap them."""
        process, self._process = self._process, None
        is_ready, self._is_ready = self._is_ready, False
        self._kill()
        if process is None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S if is_ready else 0.0)
        if process.returncode is None:
            _kill_group(process)
            await process.wait()


def _kill_group(host: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)
