# SPDX-License-Identifier: Apache-2.0
"""Requests with a LoRA adapter: they move to engines that have it, there and back, and nowhere else.

A and B have the same adapters under other ids and paths, except for one that only A has, and one that is another under
the same name. Each engine holds one adapter at a time: the others are loaded when they are needed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError
from llumlet.contract.types import AdoptRequest, Epoch, Reason
from tests.exactness.test_matrix import PROMPT, company, held_by, outcome
from tests.integration.test_hostile_peers import state_of
from tests.support.adapters import RANK, write_adapter
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec, free_port
from tests.support.model import PRESETS, build
from tests.support.moves import Move, migrate

pytestmark = pytest.mark.asyncio

SPEC = PRESETS["tiny"]
LENGTH = 190
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 1.0, "seed": 7}}
ENVIRONMENT = {
    # For `resident`, and for adapters that are loaded later.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
HAVEN_S = 15.0


class Pair(NamedTuple):
    a: Server
    b: Server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four adapters, and copies of two of them elsewhere."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("story", "poem", "diary", "stranger")):
        write_adapter(root / name, SPEC, seed)
    for name in ("story", "poem"):
        shutil.copytree(root / name, root / "copies" / name)
    return root


def serving(name: str, dtype: str, block_size: int, *flags: str, **modules: Path) -> ServerSpec:
    """One engine with these adapters; ids follow their order, and the last one is loaded at first.

    Data types meet block sizes here that they do not meet in the matrix.
    """
    flags += ("--dtype", dtype, "--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "1")
    flags += ("--max-cpu-loras", "1", "--lora-modules", *(f"{name}={path}" for name, path in modules.items()))
    model = build(dataclasses.replace(SPEC, dtype=dtype))
    return ServerSpec(model, name=name, instance_id=name, block_size=block_size, flags=flags, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def pair(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    copies = files / "copies"
    of_a = {"story": files / "story", "poem": files / "poem", "diary": files / "diary", "song": files / "story"}
    of_b = {"poem": copies / "poem", "story": copies / "story", "song": files / "stranger"}
    with Fleet(tmp_path_factory.mktemp("lora")) as fleet:
        yield Pair(*fleet.start(serving("a", "bfloat16", 64, **of_a), serving("b", "bfloat16", 64, **of_b)))


async def post(server: Server, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{server.base_url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer = await asyncio.to_thread(direct.open, request, timeout=60)
    with answer:
        return str(answer.read().decode())


async def resident(server: Server) -> list[int]:
    """The ids of the adapters that the worker holds."""
    (ids,) = json.loads(await post(server, "/collective_rpc", {"method": "list_loras"}))["results"]
    return list(ids)


async def begin(client: Client, model: str | None, length: int = LENGTH, **parameters: Any) -> Stream:
    named = {"model": model} if model is not None else {}
    return await client.complete(PROMPT, length, ignore_eos=True, cache_salt=uuid.uuid4().hex, **named, **parameters)


async def unmoved(server: Server, model: str | None, **parameters: Any) -> Stream:
    async with Client(server.base_url) as client:
        return await (await begin(client, model, **parameters)).result()


async def try_move(path: list[Server], model: str, **parameters: Any) -> tuple[Stream, list[Move]]:
    moves = []
    async with Client(path[0].base_url) as client:
        stream = await begin(client, model, **parameters)
        for hop, (source, destination) in enumerate(itertools.pairwise(path)):
            held = await held_by(source, stream, 30 + 30 * hop)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        return await stream.result(), moves


@pytest.mark.parametrize(
    ("sampling", "before"),
    [
        ("greedy", "present"),
        pytest.param("seeded", "loadable", marks=pytest.mark.full),
        pytest.param("greedy", "loadable", marks=pytest.mark.full),
        pytest.param("seeded", "present", marks=pytest.mark.full),
    ],
)
async def test_there_and_back(pair: Pair, sampling: str, before: str) -> None:
    """Beside a request without an adapter at either engine; the adapter is loaded at B, or known there."""
    a, b = pair
    parameters = SAMPLINGS[sampling]
    await unmoved(b, "story" if before == "present" else "poem", length=2)
    assert await resident(b) == ([2] if before == "present" else [1])
    async with company({a, b}):
        first, second = [await unmoved(a, "story", **parameters) for _ in range(2)]
        assert outcome(first) == outcome(second), "void: two unmoved runs differ"
        without = await unmoved(a, None, **parameters)
        moved, moves = await try_move([a, b, a], "story", **parameters)
    assert [move.live for move in moves] == [True, True], moves
    assert outcome(moved) == outcome(first)
    assert moved.token_ids[:20] != without.token_ids[:20], "the adapter changes nothing"
    assert await resident(b) == [2]
    for server in pair:
        await wait_idle(server)


async def stays(pair: Pair, model: str, reason: str, detail: str) -> None:
    a, b = pair
    expected = await unmoved(a, model)
    stream, (move,) = await try_move([a, b], model)
    assert (move.phase, move.reason) == ("stayed", reason)
    assert detail in move.detail
    assert outcome(stream) == outcome(expected)
    await wait_idle(a)
    await wait_idle(b)


async def test_another_adapter_of_that_name(pair: Pair) -> None:
    await stays(pair, "song", "lora_not_available", "adapter 'song' has other contents here")


@pytest.mark.rest
async def test_absent_until_it_is_loaded(pair: Pair, files: Path) -> None:
    a, b = pair
    await stays(pair, "diary", "lora_not_available", "adapter 'diary' is not known here")
    await post(b, "/v1/load_lora_adapter", {"lora_name": "diary", "lora_path": str(files / "diary")})
    expected = await unmoved(a, "diary")
    stream, (move,) = await try_move([a, b], "diary")
    assert move.live, move
    assert outcome(stream) == outcome(expected)


@pytest.mark.full
async def test_batch_with_another_adapter(pair: Pair) -> None:
    """B's batch has its one adapter: a request with another would wait there for who knows how long."""
    async with Client(pair.b.base_url) as client:
        other = await begin(client, "poem", length=8000)
        await other.wait_for(1)
        a = pair.a
        expected = await unmoved(a, "story")
        stream, (move,) = await try_move([a, pair.b], "story")
        same, (joins,) = await try_move([a, pair.b], "poem")
        await other.disconnect()
    assert (move.phase, move.reason) == ("stayed", "destination_full")
    assert "--max-loras" in move.detail
    assert outcome(stream) == outcome(expected)
    assert joins.live, joins
    assert len(same.token_ids) == LENGTH
    for server in pair:
        await wait_idle(server)


@pytest.mark.rest
async def test_files_that_are_gone(pair: Pair, files: Path) -> None:
    """B would have to load the adapter again: its worker, and B with it, would end at that."""
    a, b = pair
    path = Path(shutil.copytree(files / "diary", files / "late"))
    for server in pair:
        await post(server, "/v1/load_lora_adapter", {"lora_name": "late", "lora_path": str(path)})
    await unmoved(b, "story", length=2)
    await unmoved(a, "late", length=2)
    shutil.rmtree(path)
    await stays(pair, "late", "lora_not_available", "has files that have changed since they were loaded")
    await unmoved(b, "story", length=2)


@pytest.mark.parametrize(
    ("name", "detail"),
    [("diaries", "is not known here"), ("../story", "is not known here"), ("story", "has other contents here")],
)
async def test_adopt_is_a_front_door(pair: Pair, name: str, detail: str) -> None:
    async with LlumletClient(str(pair.b.llumlet)) as b:
        digest = (await b.get_instance_metadata()).compatibility_digest
        state = state_of(lora_name=name, lora_digest="0" * 64)
        with pytest.raises(LlumletError) as refused:
            await b.adopt(AdoptRequest(epoch=Epoch(term=1), compatibility_digest=digest, request_state=state))
    assert refused.value.reason == Reason.LORA_NOT_AVAILABLE
    assert detail in refused.value.detail
    await wait_idle(pair.b)


@pytest.fixture(scope="module")
def mortal_and_haven(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One engine to be killed, and one that stays. In float32: what is lost is recomputed."""
    port = free_port()
    of_haven = {"story": files / "copies" / "story", "poem": files / "copies" / "poem"}
    peers = ("--llumlet-peers", f"127.0.0.1:{port}")
    with Fleet(tmp_path_factory.mktemp("mortal")) as fleet:
        mortal = serving("mortal", "float32", 128, *peers, story=files / "story")
        haven = serving("haven", "float32", 128, "--llumlet-port", str(port), **of_haven)
        yield Pair(*fleet.start(mortal, haven))


@pytest.mark.rest
async def test_in_float32(mortal_and_haven: Pair) -> None:
    mortal, haven = mortal_and_haven
    parameters = SAMPLINGS["seeded"]
    expected = await unmoved(mortal, "story", **parameters)
    moved, moves = await try_move([mortal, haven, mortal], "story", **parameters)
    assert [move.live for move in moves] == [True, True], moves
    assert outcome(moved) == outcome(expected)


@pytest.mark.rest
async def test_its_engine_is_killed(mortal_and_haven: Pair) -> None:
    """Its streams go on at an engine that has their adapter, not loaded at that moment."""
    mortal, haven = mortal_and_haven
    parameters = list(SAMPLINGS.values())
    await unmoved(haven, "poem", length=2)
    assert await resident(haven) == [2]
    expected = await asyncio.gather(*(unmoved(mortal, "story", **kind) for kind in parameters))
    without = [await unmoved(mortal, None, **kind) for kind in parameters]
    async with Client(mortal.base_url) as client:
        streams = [await begin(client, "story", **kind) for kind in parameters]
        for stream in streams:
            await stream.wait_for(40)
        psutil.Process(mortal.process("EngineCore")).kill()
        results = [await stream.result() for stream in streams]
    assert [result.token_ids for result in results] == [one.token_ids for one in expected]
    for result, other in zip(results, without, strict=True):
        assert result.token_ids[:20] != other.token_ids[:20], "the adapter changes nothing"
        assert max(result.gaps) < HAVEN_S
    assert await resident(haven) == [1]
    await wait_idle(haven)


async def test_a_move_leaves_adapters_where_they_are(pair: Pair) -> None:
    """B is idle, and has an adapter that the newcomer does not use."""
    a, b = pair
    await unmoved(b, "story", length=2)
    assert await resident(b) == [2]
    async with Client(a.base_url) as client:
        stream = await begin(client, None)
        held = await held_by(a, stream, 30)
        (move,) = await migrate(a, b, request_ids=[held.request_id])
        await stream.result()
    assert move.live, move
    assert await resident(b) == [2]
