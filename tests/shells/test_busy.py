# SPDX-License-Identifier: Apache-2.0
"""A destination that is well, but about to end, or in a step that takes long."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from llumlet.contract.errors import LlumletError
from llumlet.contract.types import AdoptRequest, Epoch, Reason
from llumlet.protocol.origin import streams
from llumlet.protocol.origin.placement import IN_FLIGHT
from tests.frontend.fakes import request
from tests.shells.cells import SOON_SECONDS, company, loses_tokens, moves
from tests.shells.circumstances import hanging, recorded, replays_only_at
from tests.shells.cluster import SECONDS, Cluster, Instance, cluster_of, retold, until
from tests.shells.marks import MARKS
from tests.shells.network import Kind
from tests.support.failures import failure
from vllm_llumnix.frontend.calls import state_of
from vllm_llumnix.wire.request_wire import encode

pytestmark = MARKS

STEP_SECONDS = 0.3


@failure("the destination is shutting down", "reserving", "shutting_down: stayed")
@retold
async def test_a_move_to_an_instance_that_ends(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        cluster["B"].engine.kvconn.draining = True
        stream = await company(cluster)
        assert await moves(cluster, stream) == "stayed"
        assert cluster.last_report.reason == Reason.SHUTTING_DOWN
        return await cluster.verdict(stream)


@failure("the destination is asked to shut down", "reserved", "moved all the same: it moves on from there")
@retold
async def test_an_instance_that_is_asked_to_end(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        loop = cluster["B"].engine.kvconn

        def end(_: object) -> bool:
            loop.draining = True
            return False

        cluster.network.arm("CopyRound", Kind.DROPPED, only=end)
        stream = await company(cluster)
        assert await moves(cluster, stream) == "moved"
        assert loop.draining
        return await cluster.verdict(stream)


@failure("the engine that is to go on with a lost request is shutting down", "replay", "another one takes it")
@retold
async def test_a_replay_on_an_instance_that_ends(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        calls = recorded(cluster, "Adopt")
        cluster["C"].engine.kvconn.draining = True
        stream = await company(cluster)
        with replays_only_at(cluster, stream, "CA"):
            assert await loses_tokens(cluster, stream) == "moved"
        assert cluster.owners(stream) == {"A"}
        assert [call.epoch.term for call in calls] == [1, 2]
        with pytest.raises(LlumletError) as refused:
            await cluster.llumlet("C").adopt(calls[-1])
        assert refused.value.reason == Reason.SHUTTING_DOWN
        return await cluster.verdict(stream)


@failure("the request may grow longer than an engine's max_model_len", "move, replay", "another engine takes it")
@retold
async def test_an_engine_that_is_too_small(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        cluster["B"].engine.vllm_config.model_config.max_model_len = 400
        stream = await company(cluster)
        assert await moves(cluster, stream) == "stayed"
        assert cluster.last_report.reason == Reason.REQUEST_TOO_LONG
        assert "450 positions, this engine has 400" in cluster.last_report.detail
        with replays_only_at(cluster, stream, "BC"):
            await cluster["A"].die()
            await until(lambda: bool(stream.at.client.origin.core.num_replayed), lambda: "not replayed")
            await until(lambda: cluster.owners(stream) == {"C"}, lambda: str(cluster.owners(stream)))
        return await cluster.verdict(stream)


@failure("the destination is in a long step", "Commit on its way", "frozen until the step ends: moved")
@retold
async def test_a_long_step(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        await cluster.stream("B")
        stream = await company(cluster)
        with hanging_from(cluster, "B", "Commit"):
            moving = cluster.begin(moves(cluster, stream))
            await until(lambda: cluster.network.seen["Commit"] > 0, lambda: "no Commit")
            await asyncio.sleep(STEP_SECONDS)
            assert not moving.done()
        assert await moving == "moved"
        return await cluster.verdict(stream)


@failure("the destination is in a step longer than Commit may take", "Commit on its way", "withdrawn: stayed")
@retold
async def test_a_step_that_is_too_long(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        cluster.deadlines["commit_s"] = SOON_SECONDS
        await cluster.stream("B")
        stream = await company(cluster)
        with hanging_from(cluster, "B", "Commit"):
            assert await moves(cluster, stream) == "stayed"
            await stream.reaches(len(stream.tokens) + 20)
            # B, which never had the request, has not told its origin that it has.
            await asyncio.sleep(2 * streams.CONFIRM_SECONDS)
        assert not stream.at.client.origin.core.num_replayed
        return await cluster.verdict(stream)


@failure("grammars take for ever to compile", "replay; then reserving, and replay", "other requests come all the same")
@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
@retold
async def test_grammars_that_take_for_ever(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        adoptions = cluster["B"].engine.agent.adoptions
        stream = await company(cluster)
        with compiled_slowly(cluster["B"]):
            client = cluster.llumlet("B")
            attempts = [asyncio.create_task(client.adopt(guided(cluster, f"guided-{n}"))) for n in range(IN_FLIGHT)]
            await until(lambda: adoptions._num_adopting == IN_FLIGHT, lambda: "they are not accepted")
            with replays_only_at(cluster, stream, "B"):
                assert await loses_tokens(cluster, stream) == "moved"
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        await until(lambda: not adoptions._num_adopting, lambda: "they are not over")
        return await cluster.verdict(stream)


def guided(cluster: Cluster, request_id: str) -> AdoptRequest:
    """A request of a client of A that has to follow a grammar."""
    structured = StructuredOutputsParams(regex="[a-z]+")
    structured._backend = "xgrammar"
    asked = request(request_id, sampling_params=SamplingParams(max_tokens=9, structured_outputs=structured))
    home = cluster["A"]
    state = state_of(asked, [], home.client.relay_address, None)
    digest = home.engine.agent.context.identity.facts.digest
    return AdoptRequest(epoch=Epoch(term=1), compatibility_digest=digest, request_state=encode(state))


@contextlib.contextmanager
def compiled_slowly(instance: Instance) -> Iterator[None]:
    """It compiles no grammar meanwhile."""
    go_on = threading.Event()
    manager = instance.engine.structured_output_manager
    stock = manager._create_grammar

    def create(request: Request) -> Any:
        go_on.wait()
        return stock(request)

    with mock.patch.object(manager, "_create_grammar", create):
        try:
            yield
        finally:
            go_on.set()


@contextlib.contextmanager
def hanging_from(cluster: Cluster, name: str, message: str) -> Iterator[None]:
    """Its loop, which has something to do, is stuck in a model step when the message is sent."""

    def begin(_: object) -> bool:
        hang.enter_context(hanging(cluster[name]))
        return not cluster[name].engine.model_executor.stuck.wait(SECONDS)

    cluster.network.arm(message, Kind.DROPPED, only=begin)
    with contextlib.ExitStack() as hang:
        yield
