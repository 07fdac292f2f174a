# SPDX-License-Identifier: Apache-2.0
"""Asks for moves from a process of its own, so that the process that takes the times does nothing else.

    async with Mover(servers) as mover:
        move = await mover.move(source, destination, stream)

The messages of a move would otherwise be decoded on the event loop that notes when tokens arrive,
just when it matters. The clock is `CLOCK_MONOTONIC`, the same in both processes. Connections are
opened before the first move, as a scheduler's are.

The child (`python -m benchmarks.mover HOST:PORT …`) reads one JSON object a line and answers each with one, of the same
`number`, when that move is settled; it ends with its standard input.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from tests.support.client import Stream
from tests.support.harness import LlumletAddress, Server
from tests.support.moves import Move, migrate_through


class MoveFailed(RuntimeError):
    """A move could not be asked for, or was not made; the text says why. `reason` is an engine's word for it."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


ENDED = "the process that asks for moves has ended"


class Mover:
    """The child process and what is said to it. Any number of moves at a time."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        addresses = [str(server.llumlet) for server in self._servers]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.mover",
            *addresses,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise MoveFailed("the process that asks for moves has not started")
        self._reading = asyncio.create_task(self._read_answers(self._process.stdout))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reading is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process is not None
        return self._process.pid

    async def move(
        self, source: Server, destination: Server, stream: Stream, *, method: str = "live", force: bool = False
    ) -> Move:
        """Move the request behind `stream` and wait until that is settled. Raises MoveFailed unless it has moved."""
        order = {
            "source": source.llumlet,
            "destination": destination.llumlet,
            "engine_id": stream.engine_id,
            "external_id": f"{stream.kind}-{stream.request_id}",
            "method": method,
            "force": force,
        }
        fields = await self._ask(order)
        if "error" in fields:
            raise MoveFailed(fields["error"])
        fields["phases"] = tuple(tuple(phase) for phase in fields["phases"])
        move = Move(**fields | {"epoch": tuple(fields["epoch"])})
        stream.engine_id = move.request_id
        if not move.moved:
            raise MoveFailed(f"the request {move.phase}: {move.reason} {move.detail}".rstrip(), move.reason)
        return move

    async def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reading is not None
        if self._reading.done():
            raise MoveFailed(ENDED)
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps(order | {"number": number}).encode() + b"\n")
        return await answer

    async def _read_answers(self, answers: asyncio.StreamReader) -> None:
        while line := await answers.readline():
            fields = json.loads(line)
            asked = self._asked.pop(fields.pop("number"))
            if not asked.done():  # somebody may have stopped waiting
                asked.set_result(fields)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(MoveFailed(ENDED))


async def _execute(order: dict[str, Any], clients: dict[str, LlumletClient]) -> dict[str, Any]:
    source, destination = LlumletAddress(*order["source"]), LlumletAddress(*order["destination"])
    client = clients[str(source)]
    engine_id = order["engine_id"]
    if not engine_id:
        held = (await client.list_requests()).requests
        found = [r.request_id for r in held if r.request_id.startswith(order["external_id"])]
        if len(found) != 1:
            return {"error": f"{source} holds {len(found)} requests called {order['external_id']}"}
        engine_id = found[0]
    moves = await migrate_through(
        client, source, destination, request_ids=[engine_id], method=order["method"], force=order["force"]
    )
    return dataclasses.asdict(moves[0]) if moves else {"error": f"nothing was reported of {engine_id}"}


async def _answer(order: dict[str, Any], clients: dict[str, LlumletClient]) -> None:
    try:
        answer = await _execute(order, clients)
    except LlumletCallFailed as error:
        answer = {"error": str(error)}
    print(json.dumps(answer | {"number": order["number"]}), flush=True)


async def _serve(addresses: Sequence[str]) -> None:
    clients = {address: LlumletClient(address) for address in addresses}
    for client in clients.values():
        await client.get_instance_status(deadline_s=30)
    print("{}", flush=True)
    async with asyncio.TaskGroup() as moves:
        while line := await asyncio.to_thread(sys.stdin.readline):
            moves.create_task(_answer(json.loads(line), clients))
    for client in clients.values():
        await client.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1:]))
