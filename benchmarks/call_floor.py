# SPDX-License-Identifier: Apache-2.0
"""What gRPC alone takes of a move: the calls that a move makes, with messages of their size and nothing behind them.

    with Calls() as calls:
        milliseconds = calls.cost(40, pause_s=0.25)

Three processes, as the asker and the llumlets of two engines: a call of the first to the second, which answers with
two events, and makes four calls to the third meanwhile. All with grpc.aio, as the llumlet's are. Processes that rest
between two moves find their caches cold, which is part of what a move costs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import grpc
import uvloop

from tests.support.threads import threads_of

PEER_CALLS = (6000, 800, 400, 100)
"""Bytes of Reserve, CopyRound, Commit and Close, of a request with 1,000 tokens."""
BETWEEN_SECONDS = 0.015
"""Between two of them a copy is made, or a step waited for."""
EVENTS = (300, 50)
WARM_UP = 5
DEADLINE_SECONDS = 5.0
SERVICE = "floor.Calls"


class Calls:
    """The three processes."""

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        try:
            destination, destination_pid = self._start(_destination)
            source, source_pid = self._start(_source, destination.recv())
            self._asker, self._asker_pid = self._start(_asker, source.recv())
        except BaseException:
            self.close()
            raise
        self._llumlets = (source_pid, destination_pid)
        self._ask(WARM_UP, 0.0)

    def _start(self, role: Callable[..., Any], *args: Any) -> tuple[Connection, int]:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=role, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        assert process.pid is not None
        return ours, process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def cost(self, num_moves: int, pause_s: float) -> dict[str, float]:
        """Milliseconds a move of `llumlets` (their event loops), `asker`, and `libraries` (gRPC's threads in the
        llumlets)."""
        before = self._read()
        self._ask(num_moves, pause_s)
        after = self._read()
        return {part: (after[part] - before[part]) / num_moves for part in after}

    def _ask(self, num_moves: int, pause_s: float) -> None:
        self._asker.send((num_moves, pause_s))
        self._asker.recv()

    def _read(self) -> dict[str, float]:
        threads = [(pid, thread) for pid in self._llumlets for thread in threads_of(pid)]
        return {
            "llumlets": 1e3 * sum(thread.seconds for pid, thread in threads if thread.number == pid),
            "asker": 1e3 * sum(thread.seconds for thread in threads_of(self._asker_pid)),
            "libraries": 1e3 * sum(thread.seconds for pid, thread in threads if thread.number != pid),
        }


async def _serve(pipe: Connection, handler: grpc.RpcMethodHandler) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(port)
    await server.wait_for_termination()


def _destination(pipe: Connection) -> None:
    async def answer(message: bytes, _: Any) -> bytes:
        return message

    uvloop.run(_serve(pipe, grpc.unary_unary_rpc_method_handler(answer)))


def _source(pipe: Connection, port: int) -> None:
    async def serve() -> None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        peer = channel.unary_unary(f"/{SERVICE}/Call")

        async def move(_message: bytes, _: Any) -> AsyncIterator[bytes]:
            for size in PEER_CALLS:
                await peer(bytes(size), timeout=DEADLINE_SECONDS)
                await asyncio.sleep(BETWEEN_SECONDS)
            for size in EVENTS:
                yield bytes(size)

        await _serve(pipe, grpc.unary_stream_rpc_method_handler(move))

    uvloop.run(serve())


def _asker(pipe: Connection, port: int) -> None:
    async def moves(migrate: Any, count: int, pause_s: float) -> None:
        for _ in range(count):
            async for _event in migrate(bytes(200), timeout=DEADLINE_SECONDS):
                pass
            await asyncio.sleep(pause_s)

    async def ask() -> None:
        migrate = grpc.aio.insecure_channel(f"127.0.0.1:{port}").unary_stream(f"/{SERVICE}/Call")
        while True:
            count, pause_s = await asyncio.to_thread(pipe.recv)
            await moves(migrate, count, pause_s)
            pipe.send(None)

    asyncio.run(ask())
