# SPDX-License-Identifier: Apache-2.0
"""An instance is asked to end, by SIGTERM or by `llumnix drain`, while it serves.

`haven` takes the requests; the instance that ends is a new one in every story. In float32, so that the tokens can be
compared with those of an undisturbed run whatever company a request has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.client import Client, Stream, StreamFailed
from benchmarks.harness import Fleet, Server, ServerSpec
from benchmarks.moves import move_stream
from llumlet.errors import LlumletUnreachable
from tests.integration.test_command_line import lines, llumnix
from tests.integration.test_lost_owner import PROMPT, assert_goes_on
from tests.integration.test_lost_owner import SAMPLINGS as PARAMETERS
from tests.llumlet.fake_agent import until
from tests.support.conservation import assert_conserved, wait_idle

pytestmark = pytest.mark.asyncio

AT = 40
"""Tokens that have arrived when the end is asked for."""
LENGTH = 1500
SAMPLINGS = ("greedy", "seeded", "logprobs", "greedy")


class Stage:
    def __init__(self, fleet: Fleet, model: Path) -> None:
        self._fleet = fleet
        self._model = model
        self.haven = self.start("haven")

    def start(self, name: str, *flags: str, **fields: Any) -> Server:
        flags = ("--dtype", "float32", *flags)
        return self._fleet.start(ServerSpec(self._model, name=name, instance_id=name, flags=flags, **fields))[0]


@pytest.fixture(scope="module")
def stage(model_dir: Path, log_dir: Path) -> Iterator[Stage]:
    with Fleet(log_dir / "drain") as fleet:
        yield Stage(fleet, model_dir)


@pytest.fixture(scope="module")
def expected(stage: Stage) -> dict[str, Stream]:
    """The undisturbed streams."""

    async def run() -> dict[str, Stream]:
        async with Client(stage.haven.base_url) as client:
            return {name: await (await begin(client, name)).result() for name in set(SAMPLINGS)}

    return asyncio.run(run())


async def begin(client: Client, sampling: str) -> Stream:
    return await client.complete(PROMPT, LENGTH, ignore_eos=True, **PARAMETERS[sampling])


async def warm_up(server: Server) -> None:
    """The first logprobs are compiled for many seconds, in which the loop hangs and the request goes on elsewhere."""
    for parameters in PARAMETERS.values():
        await asyncio.to_thread(server.generate, PROMPT, 4, **parameters)
    deadline = time.monotonic() + 60.0
    while True:
        try:
            await wait_idle(server)
        except LlumletUnreachable:
            assert time.monotonic() < deadline
        else:
            return


async def exit_code(server: Server, timeout_s: float = 30.0) -> int | None:
    await until(lambda: not server.alive(), timeout_s)
    return server._process.returncode


async def test_sigterm_moves_everything_away(stage: Stage, expected: dict[str, Stream]) -> None:
    before = {stage.haven: await wait_idle(stage.haven)}
    leaver = stage.start("leaver", "--llumlet-peers", str(stage.haven.llumlet))
    await warm_up(leaver)
    async with Client(leaver.base_url) as client, Client(stage.haven.base_url) as elsewhere:
        guest = await begin(elsewhere, "seeded")
        await guest.wait_for(AT)
        assert (await move_stream(stage.haven, leaver, guest)).live
        streams = [await begin(client, sampling) for sampling in SAMPLINGS]
        for stream in streams:
            await stream.wait_for(AT)
        os.kill(leaver.pid, signal.SIGTERM)
        await until_refusing(client)
        with pytest.raises(StreamFailed, match="503"):
            await begin(client, "greedy")
        for stream, sampling in zip((*streams, guest), (*SAMPLINGS, "seeded"), strict=True):
            assert_goes_on(await stream.result(), expected[sampling], 3.0)
        assert await exit_code(leaver) == 0
    assert "5 moved away" in leaver.log_text()
    await assert_conserved(before)


async def test_the_command_shows_progress_and_says_where_to(stage: Stage, expected: dict[str, Stream]) -> None:
    before = {stage.haven: await wait_idle(stage.haven)}
    leaver = stage.start("told")
    async with Client(leaver.base_url) as client:
        streams = [await begin(client, sampling) for sampling in ("greedy", "seeded")]
        for stream in streams:
            await stream.wait_for(AT)
        at, to = str(leaver.llumlet), str(stage.haven.llumlet)
        code, text = await llumnix("drain", "--llumlet", at, "--to", to, "--timeout", "40", "--json")
        assert code == 0, text
        *progress, summary = lines(text)
        assert {event["event"] for event in progress} == {"progress"}
        assert (summary["event"], summary["num_moved"], summary["num_cut"]) == ("summary", 2, 0)
        for stream, sampling in zip(streams, ("greedy", "seeded"), strict=True):
            assert_goes_on(await stream.result(), expected[sampling], 3.0)
    assert await exit_code(leaver) == 0
    await assert_conserved(before)


async def test_without_room_elsewhere_streams_end_here(stage: Stage, expected: dict[str, Stream]) -> None:
    full = stage.start("full", "--llumlet-max-migrations-in", "0")
    leaver = stage.start("stays", "--llumlet-peers", str(full.llumlet))
    async with Client(leaver.base_url) as client:
        stream = await begin(client, "greedy")
        await stream.wait_for(AT)
        os.kill(leaver.pid, signal.SIGTERM)
        assert_goes_on(await stream.result(), expected["greedy"], 3.0)
    assert await exit_code(leaver) == 0
    assert "0 moved away" in leaver.log_text()
    await wait_idle(full)


async def test_a_second_signal_ends_it_at_once(stage: Stage) -> None:
    before = {stage.haven: await wait_idle(stage.haven)}
    leaver = stage.start("hurried", "--llumlet-peers", str(stage.haven.llumlet), "--llumlet-drain-seconds", "600")
    async with Client(leaver.base_url) as client:
        stream = await client.complete(list(range(100, 200)), 8000, ignore_eos=True)
        await stream.wait_for(AT)
        os.kill(leaver.pid, signal.SIGTERM)
        await until_refusing(client)
        await until(lambda: "1 moved away" in leaver.log_text(), 20.0)
        began = time.monotonic()
        os.kill(leaver.pid, signal.SIGTERM)
        with contextlib.suppress(StreamFailed):
            await stream.result(timeout_s=20.0)
        assert await exit_code(leaver) == 0
        assert time.monotonic() - began < 10.0
    assert stream.finish_reason != "length"
    await assert_conserved(before)


async def test_without_peers_vllm_ends_as_ever(stage: Stage) -> None:
    leaver = stage.start("alone")
    async with Client(leaver.base_url) as client:
        stream = await client.complete(list(range(100, 200)), 8000, ignore_eos=True)
        await stream.wait_for(AT)
        began = time.monotonic()
        os.kill(leaver.pid, signal.SIGTERM)
        await until(lambda: "Waiting for connections" in leaver.log_text(), 10.0)
        await stream.disconnect()  # stock vLLM leaves the client waiting
        assert await exit_code(leaver) == 0
        assert time.monotonic() - began < 15.0
    assert "draining" not in leaver.log_text()


async def until_refusing(client: Client, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while await client.status("/health") != 503:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
