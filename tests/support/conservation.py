# SPDX-License-Identifier: Apache-2.0
"""What an idle engine must look like: every block free, no request, nothing moving in or out."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from llumlet.contract.client import LlumletClient
from tests.support.harness import Server


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What an engine holds at one moment, from its llumlet's answers."""

    total_blocks: int
    free_blocks: int
    pinned_blocks: int
    reserved_blocks: int
    draining_blocks: int
    running: int
    waiting: int
    migrating_in: int
    migrating_out: int
    requests: tuple[str, ...]

    @property
    def idle(self) -> bool:
        return not (
            self.requests
            or self.running
            or self.waiting
            or self.migrating_in
            or self.migrating_out
            or self.pinned_blocks
            or self.reserved_blocks
            or self.draining_blocks
        )


async def holdings(server: Server) -> Holdings:
    assert server.llumlet is not None
    async with LlumletClient(str(server.llumlet)) as client:
        status = await client.get_instance_status()
        listed = (await client.list_requests()).requests
    return Holdings(
        total_blocks=status.num_total_blocks,
        free_blocks=status.num_free_blocks,
        pinned_blocks=status.num_pinned_blocks,
        reserved_blocks=status.num_reserved_blocks,
        draining_blocks=status.num_draining_blocks,
        running=status.num_running_requests,
        waiting=status.num_waiting_requests,
        migrating_in=status.num_migrate_in_reqs,
        migrating_out=status.num_migrate_out_reqs,
        requests=tuple(request.request_id for request in listed),
    )


async def wait_idle(server: Server, timeout_s: float = 15.0) -> Holdings:
    """The holdings once the engine is idle; fails with what is still held after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (held := await holdings(server)).idle:
        assert time.monotonic() < deadline, f"{server.name} is not idle: {held}"
        await asyncio.sleep(0.05)
    return held


async def assert_conserved(before: dict[Server, Holdings], timeout_s: float = 15.0) -> None:
    """Every server of `before` is idle again and holds exactly what it held then.

    With asynchronous scheduling, blocks of a request that ended come back when the steps in flight are through.
    """
    for server, held_before in before.items():
        deadline = time.monotonic() + timeout_s
        while (held := await wait_idle(server, timeout_s)) != held_before:
            assert time.monotonic() < deadline, f"{server.name} has changed:\nbefore {held_before}\nafter  {held}"
            await asyncio.sleep(0.05)


async def reserved_at(server: Server, timeout_s: float = 20.0) -> None:
    """Blocks for a request on its way there."""
    await _held_at(server, "reserved_blocks", timeout_s)


async def pinned_at(server: Server, timeout_s: float = 20.0) -> None:
    """Blocks of a request on its way from there."""
    await _held_at(server, "pinned_blocks", timeout_s)


async def _held_at(server: Server, kind: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not getattr(held := await holdings(server), kind):
        assert time.monotonic() < deadline, f"{server.name} has no {kind}: {held}"
        await asyncio.sleep(0.02)
