# SPDX-License-Identifier: Apache-2.0
"""Real engines behind a real gateway and scheduler: what users of the cluster count on.

Two engines that report to the scheduler's embedded CMS, its rescheduler switched on with the defaults, a gateway in
front. In float32: a stream that is continued elsewhere is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from llumsched.up.ports import free_port
from tests.integration.test_command_line import llumnix
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.control import Control, rescheduling
from tests.support.failures import failure
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import requests

pytestmark = pytest.mark.asyncio

PROMPT = [100 + index * 7 % 900 for index in range(200)]
LENGTH = 400
AT = 30
RESCHEDULING = ("--enable-rescheduling", "--colocated-rescheduling-mode")
NUM_BLOCKS = 300
"""Of 32 tokens: six streams of 1400 fill nearly all of an engine."""
HUNG_SECONDS = 12.0
"""Pause when an engine hangs: 4.5 s until it counts as lost, one prefill, a second, and some for two cores that serve
everything."""
SECONDS = 60.0


class Cluster:
    """Scheduler, gateway and the engines that live now."""

    def __init__(self, fleet: Fleet, model: Path, logs: Path) -> None:
        self._fleet = fleet
        self._model = model
        self.cms = f"127.0.0.1:{free_port()}"
        self.control = Control(logs, f"listen://{self.cms}", model=model, schedulers=[RESCHEDULING])
        try:
            self.engines = self.add(2)
        except BaseException:
            self.control.stop()
            raise

    @property
    def gateway_url(self) -> str:
        return self.control.gateway_url

    def add(self, number: int) -> list[Server]:
        """New engines, each with an id of its own."""
        names = [f"e{uuid.uuid4().hex[:6]}" for _ in range(number)]
        flags = ("--dtype", "float32", "--llumlet-cms", self.cms)
        spec = ServerSpec(self._model, max_model_len=4096, num_kv_blocks=NUM_BLOCKS, flags=flags)
        return self._fleet.start(*(dataclasses.replace(spec, name=name, instance_id=name) for name in names))

    def replace(self, engine: Server) -> None:
        """Another engine instead of one that is gone."""
        self._fleet.stop(engine)
        self.engines[self.engines.index(engine)] = self.add(1)[0]


@pytest.fixture(scope="module")
def cluster(model_dir: Path, log_dir: Path) -> Iterator[Cluster]:
    with Fleet(log_dir / "cluster") as fleet:
        cluster = Cluster(fleet, model_dir, log_dir / "cluster")
        try:
            yield cluster
        finally:
            cluster.control.stop()


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[int]:
    """The tokens of an undisturbed stream."""

    async def run() -> list[int]:
        async with Client(cluster.engines[0].base_url) as client:
            stream = await (await client.complete(PROMPT, LENGTH, ignore_eos=True)).result()
            return stream.token_ids

    return asyncio.run(run())


async def begin(client: Client, length: int = LENGTH, **parameters: Any) -> Stream:
    return await client.complete(PROMPT, length, ignore_eos=True, cache_salt=uuid.uuid4().hex, **parameters)


@contextlib.asynccontextmanager
async def four_streams(cluster: Cluster) -> AsyncIterator[tuple[Client, list[Stream], Server]]:
    """Through the gateway, decoding on two engines; with the engine that has the first of them."""
    await cluster.control.knows(2)
    async with Client(cluster.gateway_url) as client:
        streams = [await begin(client) for _ in range(4)]
        for stream in streams:
            await stream.wait_for(AT)
        yield client, streams, await home_of(cluster, streams[0])


async def homes(engines: Sequence[Server], streams: list[Stream]) -> Counter[str]:
    """How many of the streams each engine has."""
    found: Counter[str] = Counter()
    for engine in engines:
        listed = await requests(engine)
        found[engine.name] = sum(any(stream.is_engine_id(info.request_id) for stream in streams) for info in listed)
    return found


async def home_of(cluster: Cluster, stream: Stream) -> Server:
    for engine in cluster.engines:
        if any(stream.is_engine_id(info.request_id) for info in await requests(engine)):
            return engine
    raise AssertionError("no engine has the stream")


async def assert_relieved(rescheduler_url: str, engines: Sequence[Server], expected: list[int]) -> None:
    """All streams begin at one of two engines, past the gateway; the rescheduler moves some of them.

    The one from which something was moved last, if anything was: nothing goes back between two engines for
    `--rescheduling-pair-cooldown-seconds`, as long as these streams last.
    """
    sources = [move["source"] for move in (await rescheduling(rescheduler_url))["moves"]]
    hot, cold = sorted(engines, key=lambda engine: engine.name not in sources[-1:])
    async with Client(hot.base_url) as client:
        streams = [await begin(client, 1200) for _ in range(6)]
        async with asyncio.timeout(SECONDS):
            while (await homes(engines, streams))[cold.name] < 2:
                if any(stream.done for stream in streams):
                    pytest.fail(f"too late: {json.dumps(await rescheduling(rescheduler_url))}")
                await asyncio.sleep(0.3)
        for stream in streams:
            assert (await stream.result()).token_ids[:LENGTH] == expected
    for engine in engines:
        await wait_idle(engine)


async def assert_whole(streams: Sequence[Stream], expected: list[int]) -> None:
    """Each ends as if it had never changed its engine."""
    for stream in streams:
        assert (await stream.result()).token_ids == expected
        assert stream.usage is not None
        assert stream.usage["completion_tokens"] == LENGTH
        assert stream.finish_reason == "length"


async def test_requests_are_spread(cluster: Cluster, expected: list[int]) -> None:
    await cluster.control.knows(2)
    async with Client(cluster.gateway_url) as client:
        streams = [await begin(client) for _ in range(6)]
        for stream in streams:
            await stream.wait_for(AT)
        assert sorted((await homes(cluster.engines, streams)).values()) == [3, 3]
        for stream in streams:
            assert (await stream.result()).token_ids == expected


async def test_gateway_answers_as_the_engine_does(cluster: Cluster) -> None:
    """Not streamed, chat, models, and an error of the engine's."""
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 7, "temperature": 0}
    async with aiohttp.ClientSession() as session:

        async def ask(url: str) -> tuple[int, Any]:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                return answer.status, await answer.json()

        (status, ours), (_, theirs) = await ask(cluster.gateway_url), await ask(cluster.engines[0].base_url)
        assert status == 200
        assert ours["choices"] == theirs["choices"]
        assert ours["usage"] == theirs["usage"]
        body["max_tokens"] = -1
        ours, theirs = await ask(cluster.gateway_url), await ask(cluster.engines[0].base_url)
        assert ours[0] == theirs[0] == 400
        async with session.get(f"{cluster.gateway_url}/v1/models") as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["model"]


def _lasting(value: Any) -> Any:
    """Without what no two answers have in common."""
    if isinstance(value, dict):
        own = ("id", "item_id", "created_at", "request_id")
        return {name: _lasting(part) for name, part in value.items() if name not in own}
    return [_lasting(part) for part in value] if isinstance(value, list) else value


def _told(content: str) -> tuple[list[str], str]:
    """By a stream: the names of its events, each once, and the text. Engines tell several tokens together if they are
    late."""
    names: dict[str, None] = {}
    text = ""
    for event in content.split("\n\n")[:-1]:
        name, data = (line.partition(": ")[2] for line in event.split("\n"))
        names[name] = None
        delta = json.loads(data).get("delta", "")
        text += delta if isinstance(delta, str) else delta.get("text", "")
    return list(names), text


async def test_other_paths_are_answered_as_by_the_engine(cluster: Cluster) -> None:
    """Streamed and in one piece, taken and refused."""
    await cluster.control.knows(2)
    text = "A gateway is a door."
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": text}),
        ("/detokenize", {"tokens": [100, 200, 300]}),
        ("/v1/responses", {"input": text, "max_output_tokens": 9, "temperature": 0}),
        ("/v1/responses", {"input": text, "max_output_tokens": 9, "temperature": 0, "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 9, "temperature": 0}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": text}], "max_tokens": 9, "temperature": 0, "stream": True},
        ),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/messages", {"messages": "none"}),
        ("/v1/embeddings", {"input": text}),
    ]
    async with aiohttp.ClientSession() as session:

        async def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
            async with session.post(url + path, json={"model": "model"} | body) as answer:
                content = await answer.text()
                is_stream = answer.content_type == "text/event-stream"
                told = _told(content) if is_stream else _lasting(json.loads(content))
                return answer.status, answer.content_type, told

        for path, body in bodies:
            ours = await ask(cluster.gateway_url, path, body)
            assert ours == await ask(cluster.engines[0].base_url, path, body), path
            is_refused = path == "/v1/embeddings" or body.get("messages") == "none"
            assert (ours[0] == 200) != is_refused, (path, ours)
            assert not body.get("stream") or (len(ours[2][0]) > 5 and ours[2][1]), ours


async def test_status_names_requests_of_every_path_as_the_gateway_does(cluster: Cluster) -> None:
    await cluster.control.knows(2)
    text = "A gateway is a door."
    messages = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [text, text], "n": 2},
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": text, "max_output_tokens": 9},
        "/v1/messages": {"messages": messages},
    }
    async with aiohttp.ClientSession() as session:
        for path, body in bodies.items():
            name = f"gate-{uuid.uuid4().hex}{path}".replace("/", ".")
            body = {"model": "model", "max_tokens": 9} | body
            async with session.post(cluster.gateway_url + path, json=body, headers={"X-Request-Id": name}) as answer:
                assert answer.status == 200, await answer.text()
            await cluster.control.names(name)


async def test_a_hot_engine_is_relieved(cluster: Cluster, expected: list[int]) -> None:
    await cluster.control.knows(2)
    await assert_relieved(cluster.control.scheduler_url, cluster.engines, expected)


@failure("an instance is drained while the gateway has streams there", "decoding", "moved away; new ones go elsewhere")
async def test_a_drained_engine_loses_no_stream(cluster: Cluster, expected: list[int]) -> None:
    async with four_streams(cluster) as (client, streams, leaver):
        code, text = await llumnix("drain", leaver.name, "--cms", cluster.cms, "--timeout", "120", "--json")
        assert code == 0, text
        assert json.loads(text.splitlines()[-1])["num_cut"] == 0
        late = await begin(client)
        for stream in (*streams, late):
            assert (await stream.result()).token_ids == expected
    cluster.replace(leaver)


@failure("the engine of an instance in a cluster is killed", "decoding", "replayed by its API server")
@failure("all of an instance in a cluster is killed", "decoding", "continued by the gateway")
@pytest.mark.parametrize("what", ["engine", pytest.param("instance", marks=pytest.mark.rest)])
async def test_a_killed_engine_loses_no_stream(cluster: Cluster, expected: list[int], what: str) -> None:
    async with four_streams(cluster) as (client, streams, victim):
        for pid in victim.pids() if what == "instance" else [victim.process("EngineCore")]:
            os.kill(pid, signal.SIGKILL)
        await assert_whole(streams, expected)
        late = await (await begin(client)).result()
        assert late.token_ids == expected
        assert {stream.text for stream in streams} == {late.text}
    cluster.replace(victim)


@failure("the engine of an instance in a cluster stops", "decoding", "goes on elsewhere within 12 s")
@pytest.mark.rest
async def test_a_hung_engine_loses_no_stream(cluster: Cluster, expected: list[int]) -> None:
    async with four_streams(cluster) as (client, streams, victim):
        engine = psutil.Process(victim.process("EngineCore"))
        engine.send_signal(signal.SIGSTOP)
        try:
            for stream in streams:
                assert (await stream.result()).token_ids == expected
            await cluster.control.knows(1)
            late = await (await begin(client)).result()
            assert late.token_ids == expected
        finally:
            engine.send_signal(signal.SIGCONT)
        assert max(max(stream.gaps) for stream in streams) < HUNG_SECONDS
    await cluster.control.knows(2)


@pytest.mark.rest
async def test_a_new_engine_fills(cluster: Cluster) -> None:
    """It is empty when it comes: running requests are moved to it, though nobody sends it any."""
    await cluster.control.knows(2)
    full, leaver = cluster.engines
    code, text = await llumnix("drain", leaver.name, "--cms", cluster.cms, "--timeout", "60", "--json")
    assert code == 0, text
    starting = asyncio.create_task(asyncio.to_thread(cluster.replace, leaver))
    async with Client(full.base_url) as client:
        streams = [await begin(client, 2000) for _ in range(4)]

        filled = False
        async with asyncio.timeout(4 * SECONDS):
            while not filled:
                await asyncio.sleep(0.3)
                for index, stream in enumerate(streams):
                    if stream.done:
                        streams[index] = await begin(client, 2000)
                filled = starting.done() and (await homes(cluster.engines, streams))[cluster.engines[1].name] > 0
        await starting
        for stream in streams:
            await stream.disconnect()
    for engine in cluster.engines:
        await wait_idle(engine)
