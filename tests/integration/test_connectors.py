# SPDX-License-Identifier: Apache-2.0
"""Moves between engines that have KV connectors of vLLM's: one that saves prompts in files and one that offloads, by a
worker that copies with the CPU; NIXL, by which the two engines prefill for each other meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from llumlet.contract.block_hashes import held_names
from llumlet.contract.client import LlumletClient
from llumlet.contract.types import CachedPrefixRequest
from tests.exactness.test_matrix import held_by
from tests.integration.test_lost_owner import engine_of
from tests.integration.test_prefix_cache import cached_tokens
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.failures import failure
from tests.support.harness import SERVED_NAME, Fleet, Server, ServerSpec, free_port
from tests.support.moves import move_stream
from tests.support.offload_on_cpu import offload_on_cpu

pytestmark = pytest.mark.asyncio

SIZE = 32
PROMPT = [100 + index * 41 % 900 for index in range(270)]
LENGTH = 300
AT = 20
GREEDY: dict[str, Any] = {"ignore_eos": True}
HAS_NIXL = importlib.util.find_spec("nixl") is not None
NIXL = pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed")


def offloading() -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "OffloadingSpec",
            "spec_module_path": "offload_on_cpu",
            "cpu_bytes_to_use": 1 << 28,
            "offload_prompt_only": False,
        },
    }


def saving(directory: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(directory)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def handing_over() -> dict[str, Any]:
    """For `mp` alone: the connector puts the thread that it is made by on the last core, and all that runs the model in
    its own process would share that."""
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    return connector | {"kv_connector_module_path": "nixl_on_few_cores"}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": connectors}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Pair(NamedTuple):
    a: Server
    b: Server
    events: tuple[str, str]
    """Whither each sends vLLM's KV events."""


@contextlib.contextmanager
def two(log_dir: Path, model: Path, connector: dict[str, Any], **fields: Any) -> Iterator[Pair]:
    """`fields`: further ones of `ServerSpec`."""
    name, ports, llumlets = log_dir.name, (free_port(), free_port()), (free_port(), free_port())
    specs = []
    for one, port, llumlet, peer in zip("ab", ports, llumlets, llumlets[::-1], strict=True):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}"}
        flags = ("--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(events))
        flags += ("--llumlet-port", str(llumlet), "--llumlet-peers", f"127.0.0.1:{peer}")
        side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
        specs.append(
            ServerSpec(
                model,
                name=f"{name}-{one}",
                instance_id=f"{name}-{one}",
                block_size=SIZE,
                num_kv_blocks=80,
                max_model_len=1024,
                flags=(*flags, "--enable-prompt-tokens-details", "--dtype", "float32"),
                env={"VLLM_SERVER_DEV_MODE": "1", **offload_on_cpu.ENVIRONMENT, **side_channel},
                **fields,
            )
        )
    with Fleet(log_dir) as fleet:
        a, b = fleet.start(*specs)
        yield Pair(a, b, (f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"))


@pytest.fixture(scope="module")
def offloads(log_dir: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """And saves: two connectors."""
    connector = several(offloading(), saving(tmp_path_factory.mktemp("kv")))
    with two(log_dir / "offloads", model_dir, connector) as pair:
        yield pair


@pytest.fixture(scope="module")
def nixl(log_dir: Path, model_dir: Path) -> Iterator[Pair]:
    with two(log_dir / "nixl", model_dir, handing_over(), executor="mp") as pair:
        yield pair


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


async def there_and_back(pair: Pair, stream: Stream) -> None:
    for source, destination in ((pair.a, pair.b), (pair.b, pair.a)):
        await held_by(source, stream, 1)
        await move_live(source, destination, stream)
        await stream.wait_for(len(stream.token_ids) + 20)


async def move_live(source: Server, destination: Server, stream: Stream) -> None:
    """A connector may still be copying what was computed where the request comes back to, or another one be on its way
    that is as much as may be: then again."""
    for _ in range(40):
        move = await move_stream(source, destination, stream, force=True)
        if move.reason not in ("handover_open", "source_busy", "destination_busy"):
            break
        await asyncio.sleep(0.05)
    assert (move.phase, move.mode) == ("moved", "live"), move


@pytest.mark.parametrize("pair", ["offloads", pytest.param("nixl", marks=[NIXL, pytest.mark.rest])], indirect=True)
async def test_there_and_back(pair: Pair) -> None:
    async with Client(pair.a.base_url) as client:
        expected = await (await client.complete(PROMPT, LENGTH, **GREEDY, cache_salt="unmoved")).result()
        streams = [await client.complete(PROMPT, LENGTH, **GREEDY, cache_salt=salt) for salt in ("one", "two")]
        for stream in streams:
            await stream.wait_for(AT)
        await asyncio.gather(*(there_and_back(pair, stream) for stream in streams))
        for stream in streams:
            assert (await stream.result()).token_ids == expected.token_ids
    for server in pair[:2]:
        await wait_idle(server)


async def test_moved_request_hits_offloaded_blocks(offloads: Pair) -> None:
    """Of who has moved, where it came to; and of who comes with its tokens alone."""
    prompt = PROMPT[::-1]
    async with Client(offloads.a.base_url) as client, Client(offloads.b.base_url) as there:
        stream = await client.complete(prompt, LENGTH, **GREEDY)
        await held_by(offloads.a, stream, AT)
        await move_live(offloads.a, offloads.b, stream)
        expected = await stream.result()
        await forget_blocks(offloads.b)
        again = await (await there.complete(prompt, LENGTH, **GREEDY)).result()
        await forget_blocks(offloads.b)
        before = await loaded_tokens(there)
        stream = await client.complete(prompt, LENGTH, **GREEDY)
        await held_by(offloads.a, stream, AT)
        recomputed = await move_stream(offloads.a, offloads.b, stream, method="recompute")
        moved = await stream.result()
        loaded = await loaded_tokens(there) - before
    assert cached_tokens(again) >= len(prompt) // SIZE * SIZE
    assert (recomputed.phase, recomputed.mode) == ("moved", "recompute")
    assert loaded >= len(prompt) // SIZE * SIZE
    assert expected.token_ids == again.token_ids == moved.token_ids


async def forget_blocks(server: Server) -> None:
    """What its own prefix cache holds, not its connector."""
    await wait_idle(server)

    async def forgotten() -> bool:
        async with aiohttp.ClientSession() as session, session.post(f"{server.base_url}/reset_prefix_cache") as answer:
            return answer.status == 200

    await asyncio.sleep(0.5)
    assert await forgotten()


async def loaded_tokens(client: Client) -> float:
    """That its connector has loaded."""
    found = re.search(r"^vllm:external_prefix_cache_hits_total\{.*\} (.*)$", await client.metrics(), re.M)
    return float(found[1]) if found else 0.0


class Follower:
    """Follows the KV events of one engine: the blocks that it believes in, by vLLM's names, with all tokens from the
    first to their last."""

    def __init__(self, endpoint: str) -> None:
        self.believed: dict[Any, list[int]] = {}
        self.num_events = 0
        self._known: dict[Any, list[int]] = {}
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 100)
        self._socket.bind(endpoint)  # vLLM connects
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while not self._ended.is_set():
            with contextlib.suppress(zmq.Again):
                _, _, payload = self._socket.recv_multipart()
                for event in decoder.decode(payload).events:
                    self._hear(event)

    def _hear(self, event: BlockStored | BlockRemoved) -> None:
        if event.medium != "GPU":
            return  # what a connector has elsewhere
        self.num_events += 1
        if isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self.believed.pop(name, None)
            return
        tokens = self._known[event.parent_block_hash] if event.parent_block_hash is not None else []
        for at, name in enumerate(event.block_hashes):
            tokens = [*tokens, *event.token_ids[at * SIZE : (at + 1) * SIZE]]
            self.believed[name] = self._known[name] = tokens

    async def heard_all(self) -> None:
        """Returns when nothing has come for a while."""
        heard = -1
        while heard != self.num_events:
            heard = self.num_events
            await asyncio.sleep(0.3)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()


@contextlib.asynccontextmanager
async def following(pair: Pair) -> AsyncIterator[dict[Server, Follower]]:
    followers = {server: Follower(endpoint) for server, endpoint in zip(pair[:2], pair.events, strict=True)}
    try:
        yield followers
    finally:
        for follower in followers.values():
            follower.close()


async def assert_holds(server: Server, follower: Follower) -> None:
    """Every block that is believed to be there is there."""
    await follower.heard_all()
    async with LlumletClient(str(server.llumlet)) as llumlet:
        for tokens in follower.believed.values():
            name = held_names(tokens, SIZE)[-8:]
            answer = await llumlet.cached_prefix(CachedPrefixRequest(blocks=name, block_size=SIZE))
            assert answer.num_tokens == SIZE, f"{server.name} does not have {tokens[-SIZE:]}"


@pytest.mark.rest
async def test_kv_events_stay_true(offloads: Pair) -> None:
    """Of two engines whose caches are too small for what runs there."""
    a, b = offloads[:2]
    async with following(offloads) as followers, Client(a.base_url) as client, Client(b.base_url) as there:
        for server, one in ((a, client), (b, there)):
            # Until the follower is connected.
            for _ in range(100):
                await (await one.complete([7] * 40, 1, cache_salt=uuid.uuid4().hex)).result()
                if followers[server].num_events:
                    break
            await followers[server].heard_all()
            followers[server].believed.clear()
        for number in range(3):
            for one in (client, there):
                filler = [200 + (number * 97 + index * 13) % 700 for index in range(600)]
                await (await one.complete(filler, 4, **GREEDY)).result()
            prompt = [100 + (index * 29 + number * 401) % 900 for index in range(500)]
            stream = await client.complete(prompt, 200, **GREEDY)
            await held_by(a, stream, AT)
            await move_live(a, b, stream)
            await stream.wait_for(AT + 20)
            result = await stream.result()
            for server, follower in followers.items():
                await wait_idle(server)
                await assert_holds(server, follower)
            whole = [*prompt, *result.token_ids]
            full = [whole[: end + SIZE] for end in range(0, len(whole) - SIZE, SIZE)]
            assert all(tokens in followers[b].believed.values() for tokens in full), "it has come, and is cached"
        gone = [tokens for tokens in followers[a]._known.values() if tokens not in followers[a].believed.values()]
        assert gone, "nothing was evicted: the test shows nothing"


async def prefilled(server: Server, prompt: list[int]) -> dict[str, Any]:
    """Has an engine compute a prompt for another; what that is to be told."""
    body = {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    async with aiohttp.ClientSession() as session, session.post(f"{server.base_url}/v1/completions", json=body) as it:
        answer = await it.json()
    found: dict[str, Any] = answer["kv_transfer_params"]
    return found


@NIXL
@pytest.mark.rest
async def test_prefill_and_decode_while_requests_move(nixl: Pair) -> None:
    """Both engines prefill for each other, and what they decode moves on: once and back, with the tokens of a stream
    that one engine has computed alone."""
    a, b = nixl[:2]
    prompts = [[100 + (index * 31 + number * 77) % 900 for index in range(200)] for number in range(2)]
    async with Client(a.base_url) as at_a, Client(b.base_url) as at_b:
        expected = [await (await at_a.complete(it, LENGTH, **GREEDY, cache_salt="alone")).result() for it in prompts]

        async def decode(number: int, prefiller: Server, decoder: Server, client: Client) -> Stream:
            parameters = await prefilled(prefiller, prompts[number])
            stream = await client.complete(prompts[number], LENGTH, **GREEDY, kv_transfer_params=parameters)
            await there_and_back(Pair(decoder, prefiller, nixl.events), stream)
            return await stream.result()

        loaded = [await transferred(client) for client in (at_a, at_b)]
        ways = [(0, a, b, at_b), (1, b, a, at_a)]
        done = await asyncio.gather(*(decode(*way) for way in ways))
        assert [stream.token_ids for stream in done] == [stream.token_ids for stream in expected]
        now = [await transferred(client) for client in (at_a, at_b)]
    assert [after - before for before, after in zip(loaded, now, strict=True)] == [1, 1]
    for server in (a, b):
        await wait_idle(server, 60)


async def transferred(client: Client) -> float:
    """Prompts that were fetched."""
    found = re.search(r"^vllm:nixl_xfer_time_seconds_count\{.*\} (.*)$", await client.metrics(), re.M)
    return float(found[1]) if found else 0.0


@NIXL
@pytest.mark.rest
async def test_request_awaiting_a_kv_fetch_stays(nixl: Pair) -> None:
    why = "its KV cache is to be fetched from here by another engine (do_remote_decode)"
    async with Client(nixl.a.base_url) as client:
        parameters = {"do_remote_decode": True, "do_remote_prefill": False}
        stream = await client.complete(PROMPT, 700, **GREEDY, kv_transfer_params=parameters)
        await stream.wait_for(3)
        move = await move_stream(nixl.a, nixl.b, stream)
        await stream.disconnect()
    assert (move.phase, move.reason, move.detail) == ("stayed", "not_portable", why)
    await wait_idle(nixl.a)


@failure(
    "an engine dies that decodes what another one has prefilled",
    "the prompt has been fetched",
    "the prompt is computed again where the request goes on",
)
@NIXL
@pytest.mark.rest
async def test_the_engine_that_decodes_is_lost(nixl: Pair) -> None:
    """The last story of these two: one dies. The prompt is computed again where the request goes on."""
    async with Client(nixl.a.base_url) as at_a, Client(nixl.b.base_url) as at_b:
        prompt = PROMPT[::2]
        expected = await (await at_a.complete(prompt, LENGTH, **GREEDY, cache_salt="alone")).result()
        parameters = await prefilled(nixl.a, prompt)
        stream = await at_b.complete(prompt, LENGTH, **GREEDY, kv_transfer_params=parameters)
        await stream.wait_for(AT)
        engine_of(nixl.b).kill()
        assert (await stream.result()).token_ids == expected.token_ids
