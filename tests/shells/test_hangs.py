# SPDX-License-Identifier: Apache-2.0
"""An engine's loop hangs, and its requests go on elsewhere; where it hangs in a model step, with their KV cache."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from llumlet.contract.types import Health, InstanceStatus
from tests.shells.cells import company, goes_on, moves, too_late, wakes_up
from tests.shells.circumstances import hanging
from tests.shells.cluster import Cluster, cluster_of, retold
from tests.shells.marks import MARKS, both
from tests.support.failures import failure
from vllm_llumnix.engine.load.progress import COMPILING
from vllm_llumnix.steps.compiles import Compiles

pytestmark = MARKS

BUSY_SECONDS = 2.5
"""Three times what a hang is waited for here."""


@failure(
    "the loop hangs, later it goes on",
    "in a model step, several requests",
    "each goes on at a peer with its KV cache, and at nobody else",
)
@both
@retold
async def test_all_requests_of_an_engine(asynchronous: bool, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, asynchronous=asynchronous) as cluster:
        stream = await company(cluster, num_others=0)
        lost = [stream, *[await cluster.stream("A") for _ in range(3)]]
        await lost[-1].reaches(20)
        with hanging(cluster["A"]):
            assert {await goes_on(cluster, one) for one in lost} == {"rescued"}
        assert stream.at.client.origin.core.num_replayed == len(lost)
        return await cluster.verdict(stream)


@failure(
    "the loop goes on, and computes others in whatever is free",
    "a peer reads the KV cache",
    "the blocks are kept until they have been read",
)
@retold
async def test_the_loop_goes_on_meanwhile(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        assert await wakes_up(cluster, stream) == "rescued"
        return await cluster.verdict(stream)


@failure("the destination's loop hangs", "committed, in a model step", "goes on elsewhere with its KV cache")
@retold
async def test_after_a_move(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        assert await moves(cluster, stream) == "moved"
        await stream.reaches(len(stream.tokens) + 10)
        with hanging(cluster["B"]):
            assert await goes_on(cluster, stream) == "rescued"
        return await cluster.verdict(stream)


@failure("the loop hangs", "not in a model step", "its state may be half made: replayed without the KV cache")
@retold
async def test_outside_of_a_step(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        loop_goes_on = threading.Event()
        cluster.on_loop("A", loop_goes_on.wait)
        try:
            assert await goes_on(cluster, stream) == "computed again"
        finally:
            loop_goes_on.set()
        return await cluster.verdict(stream)


@failure(
    "the loop is busy with a call of the engine's utilities, of whatever length",
    "streams run",
    "suspect, and sent nothing new; its streams stay",
)
@both
@retold
async def test_busy_with_a_utility(asynchronous: bool, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, asynchronous=asynchronous) as cluster:
        stream = await company(cluster)
        health = await busy(cluster)
        assert (health.health, health.busy_with, health.schedulable) == (Health.SUSPECT, "compact", False)
        await stream.reaches(len(stream.tokens) + 20)
        assert not stream.at.client.origin.core.num_replayed
        assert cluster["A"].engine.agent.status.now().busy_with == ""
        return await cluster.verdict(stream)


@failure("the loop is busy with one call for longer than --llumlet-utility-seconds", "streams run", "replayed")
@retold
async def test_busy_for_too_long(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        cluster["A"].engine.kvconn.progress._utility_seconds = 0.9
        call = asyncio.create_task(busy(cluster))
        assert await goes_on(cluster, stream) == "computed again"
        assert (await call).health == Health.HUNG
        return await cluster.verdict(stream)


async def busy(cluster: Cluster) -> InstanceStatus:
    """A method of the engine takes much longer than a hang is waited for. Returns the status shortly before its end."""
    engine, client = cluster["A"].engine, cluster["A"].client
    engine.compact = lambda: time.sleep(BUSY_SECONDS)
    call = asyncio.create_task(client._call_utility_async("compact", engine=client.core_engine))
    ends = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < ends - 0.2:
        await asyncio.sleep(0.02)
        status = engine.agent.status.now()
    await call
    return status


@failure(
    "a worker compiles a kernel, for whatever time",
    "in a model step",
    "suspect, and sent nothing new; its streams stay",
)
@both
@retold
async def test_compiling_in_a_step(asynchronous: bool, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, asynchronous=asynchronous) as cluster:
        stream = await company(cluster)
        engine, compiler = cluster["A"].engine, compiler_of(cluster)
        compiler.begin()
        with hanging(cluster["A"]):
            ends = time.monotonic() + BUSY_SECONDS
            while time.monotonic() < ends:
                await asyncio.sleep(0.02)
                status = engine.agent.status.now()
            compiler.end()
        assert (status.health, status.busy_with, status.schedulable) == (Health.SUSPECT, COMPILING, False)
        await stream.reaches(len(stream.tokens) + 20)
        assert not stream.at.client.origin.core.num_replayed
        return await cluster.verdict(stream)


@failure("a kernel is compiled for longer than --llumlet-utility-seconds", "in a model step", "goes on elsewhere")
@failure("a kernel was compiled, and the step hangs all the same", "in a model step", "goes on elsewhere")
@pytest.mark.parametrize("compiles_on", [True, False], ids=["for ever", "before"])
@retold
async def test_compiling_for_too_long(compiles_on: bool, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        cluster["A"].engine.kvconn.progress._utility_seconds = 0.9 if compiles_on else 3600.0
        compiler = compiler_of(cluster)
        compiler.begin()
        with hanging(cluster["A"]):
            if not compiles_on:
                compiler.end()
            assert await goes_on(cluster, stream) == "rescued"
        return await cluster.verdict(stream)


def compiler_of(cluster: Cluster) -> Compiles:
    """As the worker of A writes when it compiles."""
    return Compiles(cluster["A"].engine.kvconn.record.place_of_workers, 0)


@failure("the KV cache is read for longer than it is kept", "the loop goes on meanwhile", "computed again")
@retold
async def test_too_late(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        assert await too_late(cluster, stream) == "computed again"
        return await cluster.verdict(stream)


@failure(
    "the engine that holds the KV cache is cut off",
    "a peer has read it",
    "computed again, for nobody says that it was right",
)
@retold
async def test_the_holder_does_not_answer(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        with hanging(cluster["A"]):
            cluster.network.cut("B>A", "C>A", at="EndClaim")
            assert await goes_on(cluster, stream) == "computed again"
            cluster.network.heal()
        return await cluster.verdict(stream)
