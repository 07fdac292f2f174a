# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a mover: calls end with its answer, with a deadline, or with its death.

A mover whose connection is lost, or whose thread has ended, is lost for good. Whether it still writes is another
question, and silence no answer to it: that a mover is quiet it says itself, or the kernel, which knows when its thread
has ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.layout import WHOLE, Cuts
from vllm_llumnix.kv.mover import messages
from vllm_llumnix.kv.mover.process import has_ended

GRACE_S = 1.0
"""Seconds after a pull's own deadline within which its report may come."""

_Answer = TypeVar("_Answer", messages.PullReport, messages.Stopped, messages.ProbeReport, messages.Revoked)


class MoverClient:
    """Commands for one mover. Belongs to the asyncio loop that is running when it is made.

    Every call raises TransferFailed when the mover dies, refuses to understand, or does not answer
    in time. `on_lost` is told once, why, when no call will be answered any more.
    """

    def __init__(
        self,
        info: messages.MoverInfo,
        context: zmq.asyncio.Context | None = None,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.info = info
        self._on_lost = on_lost
        self._own_context = zmq.asyncio.Context() if context is None else None
        self._socket: zmq.asyncio.Socket = (context or self._own_context).socket(zmq.DEALER)  # type: ignore[union-attr]
        self._socket.linger = 0
        # A mover that is gone stays gone: its successor has another endpoint.
        self._socket.reconnect_ivl = -1
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(info.endpoint)
        self._lost: str | None = None
        self._waiting: dict[tuple[type[Any], int], list[asyncio.Future[Any]]] = {}
        self._questions = itertools.count(1)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def pull(self, pull: messages.Pull) -> messages.PullReport:
        """Pull blocks; `report.error` tells a failure.

        Raises ValueError while another pull of this client runs under the same job. A report, of whatever kind, means
        that nothing of this job will be written any more. After TransferFailed, and after cancellation, that is not
        known: `stop` finds out.
        """
        if (messages.PullReport, pull.job) in self._waiting:
            raise ValueError(f"job {pull.job} is running already")
        return await self._call(pull, messages.PullReport, pull.deadline_s + GRACE_S)

    async def stop(self, job: int, deadline_s: float = 5.0) -> None:
        """End a pull; returns when the mover is quiet for that job, at once if it knows none, or has ended.

        The pull reports, too.
        """
        await self._silence(messages.StopPull(job), messages.Stopped, deadline_s)

    async def probe(
        self, peer: messages.PeerMemory, transport: str, cuts: Cuts = WHOLE, deadline_s: float = 5.0
    ) -> str | None:
        """Why `transport` does not reach `peer`, or its pages, cut so, are others than ours; None if it does."""
        probe = messages.Probe(next(self._questions), peer, transport, cuts)
        return (await self._call(probe, messages.ProbeReport, deadline_s)).obstacle

    async def grant(self, capability: bytes, blocks: list[int]) -> None:
        """Peers who show the capability may be sent these blocks, too."""
        await self._send(messages.Grant(next(self._questions), capability, blocks))

    async def revoke(self, capability: bytes, deadline_s: float = 5.0) -> None:
        """Returns when nothing is sent under it any more; nothing is, of a mover that has ended."""
        await self._silence(messages.Revoke(next(self._questions), capability), messages.Revoked, deadline_s)

    def close(self) -> None:
        """Fail pending calls and let go of the socket. A running pull goes on in the mover."""
        if self._socket.closed:
            return
        self._on_lost = lambda reason: None  # nobody is lost
        self._lose("closed")
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        if self._own_context is not None:
            self._own_context.term()

    async def _silence(self, command: messages.Command, kind: type[_Answer], deadline_s: float) -> None:
        try:
            await self._call(command, kind, deadline_s)
        except TransferFailed:
            if not self._has_ended():
                raise

    def _has_ended(self) -> bool:
        return has_ended(self.info.thread, self.info.memory)

    async def _call(self, command: messages.Command, kind: type[_Answer], deadline_s: float) -> _Answer:
        key = (kind, command.job)
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(command)
                return await future
        except TimeoutError:
            if self._has_ended():
                # Without a word: whatever kept it from closing its socket.
                self._lose(self._gone())
            raise TransferFailed(f"mover {self.info.rank} has not answered for {deadline_s:.1f} s") from None
        finally:
            waiting = self._waiting[key]
            waiting.remove(future)
            if not waiting:
                del self._waiting[key]

    async def _send(self, command: messages.Command) -> None:
        """Raises TransferFailed. Without waiting: to a mover that has just gone, sending would never end."""
        if self._lost is not None:
            raise TransferFailed(self._lost)
        try:
            await self._socket.send(messages.encode(command), zmq.DONTWAIT)
        except zmq.Again:
            raise TransferFailed(f"mover {self.info.rank} takes no commands") from None

    async def _receive(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                answer = messages.decode_answer(frame)
            except msgspec.DecodeError as error:
                self._fail_all(f"mover {self.info.rank} answers in another language: {error}")
                continue
            if isinstance(answer, messages.Rejected):
                reason = f"mover {self.info.rank} rejects a command: {answer.reason}"
                if answer.job is None:
                    self._fail_all(reason)
                else:
                    _fail(self._waiting.get((messages.PullReport, answer.job), ()), reason)
                continue
            for future in self._waiting.get((type(answer), answer.job), ()):
                if not future.done():
                    future.set_result(answer)

    async def _watch(self) -> None:
        await recv_monitor_message(self._monitor)
        self._lose(self._gone())

    def _gone(self) -> str:
        return f"mover {self.info.rank} (pid {self.info.memory.pid}) has gone"

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._fail_all(reason)
            self._on_lost(reason)

    def _fail_all(self, reason: str) -> None:
        for futures in self._waiting.values():
            _fail(futures, reason)


def _fail(futures: Iterable[asyncio.Future[Any]], reason: str) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(TransferFailed(reason))
