# SPDX-License-Identifier: Apache-2.0
"""An instance is asked to end, by SIGTERM or by `llumnix drain`, while it serves; or the engine of several API servers
ends.

`haven` takes the requests; the instance that ends is a new one in every story. In float32, so that the tokens can be
compared with those of an undisturbed run whatever company a request has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_command_line import lines, llumnix
from tests.integration.test_lost_owner import KILLED_S, PROMPT, assert_goes_on, ends, engine_of
from tests.integration.test_lost_owner import SAMPLINGS as PARAMETERS
from tests.llumlet.fake_agent import until
from tests.support.client import Client, Stream, StreamFailed
from tests.support.conservation import assert_conserved, wait_idle
from tests.support.failures import failure
from tests.support.harness import Fleet, Server, ServerSpec, free_port
from tests.support.moves import move_stream

pytestmark = pytest.mark.asyncio

AT = 40
"""Tokens that have arrived when the end is asked for."""
LENGTH = 450
SAMPLINGS = ("greedy", "seeded", "logprobs", "greedy")


class Stage:
    """`haven`, and instances that end, one in every story. Engines start together: each alone leaves a core idle."""

    def __init__(self, fleet: Fleet, model: Path) -> None:
        self._fleet = fleet
        self._model = model
        self._port = free_port()
        haven = self._spec("haven", "--llumlet-port", str(self._port))
        self.haven, *self._leavers = fleet.start(haven, self._leaver(), self._leaver())
        self._alone: list[Server] = []
        self._twins: list[Server] = []

    def leaver(self) -> Server:
        """A new one that knows `haven`, and has time."""
        if not self._leavers:
            self._leavers = self._fleet.start(self._leaver())
        return self._leavers.pop()

    def alone(self) -> Server:
        """A new one that knows of no others, and takes nothing of theirs."""
        if not self._alone:
            self._alone = self._fleet.start(self._lonely(), self._lonely())
        return self._alone.pop()

    def rebuffed(self) -> tuple[Server, Server]:
        """A new one that has time and knows only the other, which takes nothing."""
        if not self._alone:
            self._alone = self._fleet.start(self._lonely(), self._lonely())
        other = self._alone[-1]
        assert other.llumlet is not None
        rebuffed, twin = self._fleet.start(self._leaver(port=other.llumlet.port), self._twin())
        self._twins.append(twin)
        return rebuffed, other

    def twin(self) -> Server:
        """A new one with two API servers, that knows `haven`, and has time."""
        if not self._twins:
            self._twins = self._fleet.start(self._twin(), self._twin())
        return self._twins.pop()

    def _leaver(self, *flags: str, port: int | None = None) -> ServerSpec:
        peer = f"127.0.0.1:{port or self._port}"
        return self._spec("leaver", "--llumlet-peers", peer, "--llumlet-drain-seconds", "600", *flags)

    def _twin(self) -> ServerSpec:
        return self._leaver("--api-server-count", "2")

    def _lonely(self) -> ServerSpec:
        return self._spec("alone", "--llumlet-max-migrations-in", "0")

    def _spec(self, name: str, *flags: str) -> ServerSpec:
        name = f"{name}{uuid.uuid4().hex[:6]}"
        return ServerSpec(self._model, name=name, instance_id=name, flags=("--dtype", "float32", *flags))


@pytest.fixture(scope="module")
def stage(model_dir: Path, log_dir: Path) -> Iterator[Stage]:
    with Fleet(log_dir / "drain") as fleet:
        yield Stage(fleet, model_dir)


@pytest.fixture(scope="module")
def expected(stage: Stage) -> dict[str, Stream]:
    """The undisturbed streams."""

    async def run() -> dict[str, Stream]:
        async with Client(stage.haven.base_url) as client:
            streams = {name: await begin(client, name) for name in set(SAMPLINGS)}
            return {name: await stream.result() for name, stream in streams.items()}

    return asyncio.run(run())


async def begin(client: Client, sampling: str) -> Stream:
    return await client.complete(PROMPT, LENGTH, ignore_eos=True, **PARAMETERS[sampling])


async def exit_code(server: Server, timeout_s: float = 30.0) -> int:
    await until(lambda: not server.alive(), timeout_s)
    return server.exit_code()


@failure(
    "SIGTERM to an instance that has peers",
    "serving, guests among its requests",
    "new work gets 503; each request moves away live; it ends when its last stream has",
)
async def test_sigterm_moves_everything_away(stage: Stage, expected: dict[str, Stream]) -> None:
    before = {stage.haven: await wait_idle(stage.haven)}
    leaver = stage.leaver()
    async with Client(leaver.base_url) as client, Client(stage.haven.base_url) as elsewhere:
        guest = await begin(elsewhere, "seeded")
        await guest.wait_for(AT)
        assert (await move_stream(stage.haven, leaver, guest)).live
        streams = [await begin(client, sampling) for sampling in SAMPLINGS]
        for stream in streams:
            await stream.wait_for(AT)
        os.kill(leaver.pid, signal.SIGTERM)
        await until_refusing(client)
        assert await client.status("/live") == 200
        with pytest.raises(StreamFailed, match="503"):
            await begin(client, "greedy")
        for stream, sampling in zip((*streams, guest), (*SAMPLINGS, "seeded"), strict=True):
            assert_goes_on(await stream.result(), expected[sampling], 3.0)
        assert await exit_code(leaver) == 0
    assert "5 moved away" in leaver.log_text()
    await assert_conserved(before)


@failure("`llumnix drain`", "serving", "the same, to the instances that were named")
@pytest.mark.rest
async def test_the_command_shows_progress_and_says_where_to(stage: Stage, expected: dict[str, Stream]) -> None:
    before = {stage.haven: await wait_idle(stage.haven)}
    leaver = stage.alone()
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


@failure("SIGTERM, and no peer takes anything", "serving", "its streams run to their end here, then it ends")
@pytest.mark.rest
async def test_without_room_elsewhere_streams_end_here(stage: Stage, expected: dict[str, Stream]) -> None:
    leaver, full = stage.rebuffed()
    async with Client(leaver.base_url) as client:
        stream = await begin(client, "greedy")
        await stream.wait_for(AT)
        os.kill(leaver.pid, signal.SIGTERM)
        assert_goes_on(await stream.result(), expected["greedy"], 3.0)
    assert await exit_code(leaver) == 0
    assert "0 moved away" in leaver.log_text()
    await wait_idle(full)


@failure(
    "a second SIGTERM",
    "its requests moved away, their streams go on",
    "the streams are cut, and it ends; nothing goes on elsewhere",
)
@pytest.mark.rest
async def test_a_second_signal_ends_it_at_once(stage: Stage) -> None:
    before = {stage.haven: await wait_idle(stage.haven)}
    leaver = stage.leaver()
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
        assert time.monotonic() - began < 4.0, "it has waited for its engine to end"
        assert await exit_code(leaver) == 0
    assert stream.finish_reason != "length"
    await assert_conserved(before)


@failure("SIGTERM to an instance without peers", "serving", "stock vLLM's end")
@pytest.mark.rest
async def test_without_peers_vllm_ends_as_ever(stage: Stage) -> None:
    leaver = stage.alone()
    async with Client(leaver.base_url) as client:
        stream = await client.complete(list(range(100, 200)), 8000, ignore_eos=True)
        await stream.wait_for(AT)
        began = time.monotonic()
        os.kill(leaver.pid, signal.SIGTERM)
        # Stock vLLM ends the stream with an error, or leaves its client waiting.
        await until(lambda: stream.done or "Waiting for connections" in leaver.log_text(), 10.0)
        await stream.disconnect()
        assert await exit_code(leaver) == 0
        assert time.monotonic() - began < 15.0
    assert "draining" not in leaver.log_text()


@failure(
    "SIGTERM, or `llumnix drain`, to an instance with several API servers",
    "serving",
    "each drains its own streams; the engine ends after them",
)
@pytest.mark.parametrize(
    "asked_by", [pytest.param("signal", marks=pytest.mark.rest), pytest.param("command", marks=pytest.mark.full)]
)
async def test_several_api_servers(stage: Stage, expected: dict[str, Stream], asked_by: str) -> None:
    before = {stage.haven: await wait_idle(stage.haven)}
    leaver = stage.twin()
    # On connections of their own: the kernel spreads those over the processes.
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(leaver.base_url)) for _ in range(4)]
        streams = [await begin(client, "greedy") for client in clients]
        for stream in streams:
            await stream.wait_for(AT)
        if asked_by == "signal":
            os.kill(leaver.pid, signal.SIGTERM)
        else:
            code, text = await llumnix("drain", "--llumlet", str(leaver.llumlet), "--json")
            assert code == 0, text
            summary = lines(text)[-1]
            assert (summary["event"], summary["num_moved"], summary["num_cut"]) == ("summary", 4, 0)
        for stream in streams:
            assert_goes_on(await stream.result(), expected["greedy"], 3.0)
        assert await exit_code(leaver) == 0
    assert leaver.log_text().count("llumlet: drained in") == 2
    await assert_conserved(before)


@failure(
    "kill -9 of the engine behind several API servers",
    "not moving",
    "each API server replays its own streams on a peer; all of them end after their last stream",
)
@pytest.mark.full
async def test_the_engine_of_several_api_servers_is_killed(stage: Stage, expected: dict[str, Stream]) -> None:
    """Streams of both outlive it, moved or not."""
    twin = stage.twin()
    async with Client(twin.base_url) as client:
        streams = [await begin(client, "greedy") for _ in range(6)]
        for stream in streams:
            await stream.wait_for(AT)
        for stream in streams[:2]:
            assert (await move_stream(twin, stage.haven, stream)).live
        engine_of(twin).kill()
        for stream in streams:
            assert_goes_on(await stream.result(), expected["greedy"], KILLED_S)
    await ends(twin)
    await wait_idle(stage.haven)


async def until_refusing(client: Client, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while await client.status("/health") != 503:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
