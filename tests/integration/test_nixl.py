# SPDX-License-Identifier: Apache-2.0
"""Requests move between real engines over NIXL, and go on where they are, or by their tokens, when its process dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Engines
from tests.kv.fakes import until
from tests.support.client import Client
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import move_stream
from vllm_llumnix.kv.networks.nixl import STARTED

pytestmark = [pytest.mark.asyncio, pytest.mark.rest]

PROMPT = list(range(100, 180))
GREEDY: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def pair(model_dir: Path, log_dir: Path) -> Iterator[Engines]:
    flags = ("--llumlet-transport", "nixl", "--llumlet-nixl-devices", "lo")
    with Fleet(log_dir / "nixl") as fleet:
        specs = [ServerSpec(model_dir, name=name, instance_id=name, flags=flags) for name in Engines._fields]
        yield Engines(*fleet.start(*specs))


def process_beside(server: Server) -> psutil.Process:
    """NIXL's, beside the one worker."""
    (found,) = (process for process in map(psutil.Process, server.pids()) if STARTED in process.cmdline())
    return found


async def test_there_and_back_and_without_its_process(pair: Engines) -> None:
    a, b = pair
    async with Client(a.base_url) as client:
        expected = await (await client.complete(PROMPT, 500, **GREEDY, cache_salt="unmoved")).result()
        stream = await client.complete(PROMPT, 500, **GREEDY, cache_salt="moved")
        for number, (source, destination) in enumerate([(a, b), (b, a)], 1):
            await stream.wait_for(100 * number)
            move = await move_stream(source, destination, stream, method="live")
            assert move.live, f"{move.phase} {move.reason} {move.detail}"
            assert (move.transport, move.copied_bytes > 0) == ("nixl", True)

        process = process_beside(b)
        process.kill()
        until(lambda: process.status() == psutil.STATUS_ZOMBIE)  # its worker has not looked yet
        await stream.wait_for(len(stream.token_ids) + 5)  # it has settled where it came to
        move = await move_stream(a, b, stream, method="live")
        assert (move.moved, move.reason) == (False, "transport_unavailable")
        assert "NIXL" in move.detail
        assert (await stream.result()).token_ids == expected.token_ids

        other = await client.complete(PROMPT, 150, **GREEDY, cache_salt="tokens")
        await other.wait_for(30)
        assert (await move_stream(a, b, other, method="auto")).moved
        assert len((await other.result()).token_ids) == 150
    assert process_beside(a).is_running()
