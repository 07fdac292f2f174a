# SPDX-License-Identifier: Apache-2.0
"""Engines of several workers: rank r reads from rank r. And data-parallel ranks: each is an instance of its own, and
those of a mixture of experts compute together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
import uuid
from pathlib import Path

import pytest

from llumlet.contract.client import LlumletClient
from llumsched.gateway.forwarded import RANK_HEADER
from llumsched.up.ports import free_port
from tests.integration.conftest import Engines
from tests.support.client import Client, Stream
from tests.support.control import Control
from tests.support.experts_on_cpu import experts_on_cpu
from tests.support.harness import Fleet, LlumletAddress, ServerSpec
from tests.support.moves import Move, migrate_through, move_stream
from tests.support.other_models import OTHER, build

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 180))
LENGTH = 240
SETTLE_SECONDS = 20.0
GOES_ON_SECONDS = 2.0
"""Less than an engine may stand still before its streams are started again elsewhere."""
# One API server: several would not know of each other's requests at once.
DATA_PARALLEL = ("--data-parallel-size", "2", "--api-server-count", "1", "--dtype", "float32")
# Without the variable, vLLM 0.33 wants a memory node for each rank.
ON_ONE_NODE = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}


async def begin(client: Client, length: int = LENGTH) -> Stream:
    return await client.complete(PROMPT, length, ignore_eos=True, cache_salt=uuid.uuid4().hex)


@pytest.mark.parametrize("how", ["tensor", pytest.param("pipeline", marks=pytest.mark.full)])
async def test_several_workers(engines: Engines, model_dir: Path, log_dir: Path, how: str) -> None:
    with Fleet(log_dir / how) as fleet:
        parallel = [f"--{how}-parallel-size", "2"]
        env = {}
        if how == "pipeline":
            # Eager, vLLM's CPU worker has no buffers for what a stage passes on: they come with the compiler's warm-up.
            parallel += ["--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}']
            env = {"TORCH_COMPILE_DISABLE": "0"}
        spec = ServerSpec(model_dir, name="one", instance_id="one", flags=tuple(parallel), env=env, executor="mp")
        # The destination chooses: there over tcp, back by reading the other workers' memory.
        tcp = dataclasses.replace(
            spec, name="other", instance_id="other", flags=(*parallel, "--llumlet-transport", "tcp")
        )
        one, other = fleet.start(spec, tcp)
        async with Client(one.base_url) as client:
            expected = await (await begin(client)).result()
            stream = await begin(client)
            moves = []
            for source, destination in ((one, other), (other, one)):
                await stream.wait_for(len(stream.token_ids) + 30)
                moves.append(await move_stream(source, destination, stream, force=True))
            assert all(move.live for move in moves), moves
            assert [move.transport for move in moves] == ["tcp", "local"]
            assert moves[0].copied_bytes > 0
            await stream.wait_for(len(stream.token_ids) + 10)
            refused = await move_stream(one, engines.a, stream)
            assert (refused.phase, refused.reason) == ("stayed", "incompatible_engine")
            assert (await stream.result()).token_ids == expected.token_ids


@pytest.mark.full
async def test_engines_of_two_workers_and_one_exchange_requests(
    engines: Engines, model_dir: Path, log_dir: Path
) -> None:
    """Where the operator accepts it. Sums over two workers round differently from those over one: in float32 that makes
    no other token of so few."""
    with Fleet(log_dir / "splits") as fleet:
        flags = ("--dtype", "float32", "--llumlet-accept", "parallel")
        one, two = fleet.start(
            # The destination chooses.
            ServerSpec(model_dir, name="one", instance_id="one", flags=(*flags, "--llumlet-transport", "tcp")),
            ServerSpec(
                model_dir,
                name="two",
                instance_id="two",
                flags=(*flags, "--tensor-parallel-size", "2"),
                executor="mp",
            ),
        )
        async with Client(two.base_url) as client:
            expected = await (await begin(client)).result()
            stream = await begin(client)
            await stream.wait_for(30)
            moves = []
            for source, destination in ((two, one), (one, two)):
                await stream.wait_for(len(stream.token_ids) + 30)
                moves.append(await move_stream(source, destination, stream, force=True))
            assert (await stream.result()).token_ids == expected.token_ids
            refused = await move_stream(two, engines.a, await begin(client), method="auto")
        assert all(move.live for move in moves), [(move.reason, move.detail) for move in moves]
        assert [move.transport for move in moves] == ["tcp", "local"]
        assert (refused.phase, refused.reason) == ("stayed", "incompatible_engine")
        assert "accept: none here, parallel at the source" in refused.detail


async def test_data_parallel(model_dir: Path, log_dir: Path) -> None:
    """Their API server balances by what it believes to be in flight at each rank: also after moves and aborts."""
    with Fleet(log_dir / "data-parallel") as fleet:
        spec = ServerSpec(model_dir, name="dp", instance_id="dp", flags=DATA_PARALLEL, env=ON_ONE_NODE)
        (server,) = fleet.start(spec)
        ranks = sorted(server.llumlets())
        assert [rank.instance_id for rank in ranks] == ["dp-dp0", "dp-dp1"]
        await assert_one_unit(ranks, server.port)
        async with Client(server.base_url) as client:
            expected = await (await begin(client)).result()
            for _ in range(2):
                streams = []
                for _ in range(4):
                    streams.append(await begin(client))
                    # Meanwhile the ranks say how much they have to do, every tenth of a second.
                    await streams[-1].wait_for(20)
                placed = await placement(ranks, streams)
                assert [len(placed[rank]) for rank in ranks] == [2, 2]
                moves = await asyncio.gather(
                    *(move(ranks[here], ranks[1 - here], stream) for here in (0, 1) for stream in placed[ranks[here]])
                )
                assert all(one.live for one in moves), moves
                await streams[0].disconnect()
                for stream in streams[1:]:
                    assert (await stream.result()).token_ids == expected.token_ids
                await idle(ranks)


@pytest.mark.full
async def test_the_scheduler_chooses_the_rank(model_dir: Path, log_dir: Path) -> None:
    """And vLLM's own balancer does not choose again: with three streams at one rank it would take the other for the
    next three. This scheduler takes them in turn."""
    cms = f"127.0.0.1:{free_port()}"
    logs = log_dir / "ranks-in-a-cluster"
    in_turn = ("--scheduling-policy", "round-robin")
    async with Control(logs, f"listen://{cms}", model=model_dir, schedulers=[in_turn]) as control:
        with Fleet(logs) as fleet:
            flags = (*DATA_PARALLEL, "--llumlet-cms", cms)
            spec = ServerSpec(model_dir, name="dp", instance_id="dp", flags=flags, env=ON_ONE_NODE)
            (server,) = fleet.start(spec)
            ranks = sorted(server.llumlets())
            await control.knows(2)
            async with contextlib.AsyncExitStack() as stack:
                direct = await stack.enter_async_context(Client(server.base_url, headers={RANK_HEADER: "0"}))
                client = await stack.enter_async_context(Client(control.gateway_url))
                before, streams = [await begin(direct) for _ in range(3)], []
                for stream in before:
                    await stream.wait_for(20)
                for _ in range(4):
                    streams.append(await begin(client))
                    await streams[-1].wait_for(20)
                placed = await placement(ranks, [*before, *streams])
                assert [len(placed[rank]) for rank in ranks] == [5, 2]
                assert await control.num_on_their_way() == 0, "each is in the status of the rank that was chosen"
                for stream in (*before, *streams):
                    await stream.result()


@pytest.mark.full
@pytest.mark.parametrize("experts", ["cut", "scattered"])
async def test_mixture_of_experts(log_dir: Path, experts: str) -> None:
    """Each rank has a part of every expert, or some of the experts, and no forward pass ends unless all ranks take
    part. A group that sleeps is woken by the request that arrives: its stream goes on at once. Between servers, between
    ranks of one, and home again."""
    flags = (*DATA_PARALLEL, *(["--enable-expert-parallel"] if experts == "scattered" else []))
    paths = [str(experts_on_cpu.PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = ON_ONE_NODE | {"PYTHONPATH": os.pathsep.join(paths)}
    model = build(OTHER["qwen3-moe"])
    with Fleet(log_dir / experts) as fleet:
        specs = [ServerSpec(model, name=name, instance_id=name, flags=flags, env=env) for name in ("home", "abroad")]
        home, abroad = fleet.start(*specs)
        async with Client(home.base_url) as client:
            expected = await (await begin(client, 2 * LENGTH)).result()
            stream = await begin(client, 2 * LENGTH)
            await stream.wait_for(20)
            placed = await placement(home.llumlets(), [stream])
            (first,), (other,) = ([rank for rank in placed if bool(placed[rank]) is held] for held in (True, False))
            moves = []
            for source, destination in itertools.pairwise([first, *abroad.llumlets(), other, first]):
                await stream.wait_for(len(stream.token_ids) + 30)
                moves.append(await move(source, destination, stream))
            await stream.result()
            await idle([*home.llumlets(), *abroad.llumlets()])
    assert all(one.live for one in moves), moves
    assert stream.token_ids == expected.token_ids
    assert max(stream.gaps) < GOES_ON_SECONDS


async def assert_one_unit(ranks: list[LlumletAddress], port: int) -> None:
    told = []
    for rank in ranks:
        async with LlumletClient(str(rank)) as client:
            told.append(await client.get_instance_metadata())
    assert len({one.unit_id for one in told}) == len({one.node_id for one in told}) == 1
    assert [(one.dp_rank, one.dp_local_rank, one.data_parallel_size) for one in told] == [(0, 0, 2), (1, 1, 2)]
    assert [(one.api_server_port, list(one.served_models)) for one in told] == [(port, ["model"])] * 2


async def move(source: LlumletAddress, destination: LlumletAddress, stream: Stream) -> Move:
    assert stream.engine_id is not None
    async with LlumletClient(str(source)) as client:
        (settled,) = await migrate_through(client, source, destination, request_ids=[stream.engine_id])
    return settled


async def placement(ranks: list[LlumletAddress], streams: list[Stream]) -> dict[LlumletAddress, list[Stream]]:
    """Which streams' requests each rank runs; the streams learn their engine's ids."""
    placed: dict[LlumletAddress, list[Stream]] = {}
    for rank in ranks:
        async with LlumletClient(str(rank)) as client:
            held = (await client.list_requests()).requests
        placed[rank] = []
        for info in held:
            (stream,) = [stream for stream in streams if stream.is_engine_id(info.request_id)]
            stream.engine_id = info.request_id
            placed[rank].append(stream)
    return placed


async def idle(ranks: list[LlumletAddress]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    for rank in ranks:
        async with LlumletClient(str(rank)) as client:
            while held := (await client.list_requests()).requests:
                assert time.monotonic() < deadline, f"{rank} still holds {held}"
                await asyncio.sleep(0.05)
