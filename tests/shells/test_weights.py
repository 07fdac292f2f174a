# SPDX-License-Identifier: Apache-2.0
"""Weights are updated while engines run, one after the other: who goes on with whose requests meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

from llumlet.contract.types import MovePhase, Reason
from llumlet.protocol.origin import streams
from tests.shells.cells import company
from tests.shells.circumstances import recorded, replays_only_at
from tests.shells.cluster import Cluster, Stream, cluster_of, retold, until
from tests.shells.marks import MARKS
from tests.support.failures import failure

pytestmark = MARKS

FIRST = "default"
"""vLLM's name of the weights that an engine starts with."""


async def dies(cluster: Cluster, stream: Stream, others: str) -> None:
    """A's engine; returns when another one, sought in this order, goes on with the stream."""
    with replays_only_at(cluster, stream, others):
        await cluster["A"].die()
        await until(lambda: bool(stream.at.client.origin.core.num_replayed), lambda: "not replayed")
        await until(lambda: bool(cluster.owners(stream)), lambda: "nobody has it")


@failure("an owner is lost, and weights are being updated", "replay", "an engine with the same weights goes on")
@retold
async def test_a_replay_looks_for_the_same_weights(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        cluster["B"].engine.set_weight_version("7")
        stream = await company(cluster)
        calls = recorded(cluster, "Adopt")
        await dies(cluster, stream, "BC")
        assert cluster.owners(stream) == {"C"}
        assert {call.weight_version for call in calls} == {FIRST}
        return await cluster.verdict(stream)


@failure("an owner is lost, and no engine has its weights any more", "replay", "goes on with others after 5 s")
@retold
async def test_replay_waits_then_takes_other_weights(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        for name in "BC":
            cluster[name].engine.set_weight_version("7")
        stream = await company(cluster)
        calls = recorded(cluster, "Adopt")
        began = time.monotonic()
        await dies(cluster, stream, "BC")
        assert time.monotonic() - began > streams.WEIGHTS_SECONDS
        assert {call.weight_version for call in calls} == {FIRST, ""}
        known = stream.at.client.origin.core.streams.get(stream.request_id)
        assert known is not None
        await until(lambda: known.weight_version == "7", lambda: str(known.weight_version))
        return await cluster.verdict(stream)


@retold
async def test_the_weights_that_count_are_those_of_the_last_token(model_dir: Path) -> list[str]:
    """Of a request that has none, any do."""
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        known = stream.at.client.origin.core.streams.get(stream.request_id)
        assert known is not None
        for name in "AB":
            cluster[name].engine.set_weight_version("7")
        await until(lambda: known.weight_version == "7", lambda: str(known.weight_version))
        late = await cluster.stream(num_prompt=900)
        wanted = stream.at.client.origin.core.streams.get(late.request_id)
        assert wanted is not None
        assert wanted.weights_wanted(time.monotonic()) == ""
        # It is known of tokens that came by relay, too.
        assert (await cluster.migrate(stream)).phase == MovePhase.MOVED
        cluster["B"].engine.set_weight_version("8")
        await until(lambda: known.weight_version == "8", lambda: str(known.weight_version))
        return await cluster.verdict(stream)


@retold
async def test_a_move_waits_for_the_update(model_dir: Path) -> list[str]:
    """What was computed with other weights is not carried, and nobody is to blame for long."""
    async with cluster_of(model_dir) as cluster:
        cluster["B"].engine.set_weight_version("7")
        stream = await company(cluster)
        move = await cluster.migrate(stream)
        assert (move.phase, move.reason) == (MovePhase.STAYED, Reason.OTHER_WEIGHTS)
        assert move.detail == "the weights are of version '7' here, and not 'default'"
        cluster["A"].engine.set_weight_version("7")
        assert (await cluster.migrate(stream)).phase == MovePhase.MOVED
        return await cluster.verdict(stream)


@failure(
    "only one of two engines has got other weights yet, and nobody names them",
    "reserving",
    "the KV cache stays behind: the request comes with its tokens alone",
)
@retold
async def test_kv_cache_waits_for_weights_without_a_name(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, "AB") as cluster:
        stream, other = await cluster.stream("A", num_prompt=300), await cluster.stream("A", num_prompt=300)
        await stream.reaches(5)
        await other.reaches(5)
        await cluster["B"].client.collective_rpc_async("update")
        move = await cluster.migrate(stream)
        assert (move.phase, move.copied_bytes) == (MovePhase.MOVED, 0)
        assert "weights were changed 1 times here, 0 there" in move.tokens_alone
        await cluster["A"].client.collective_rpc_async("update")
        move = await cluster.migrate(other)
        assert (move.phase, move.tokens_alone) == (MovePhase.MOVED, "")
        assert move.copied_bytes
        return await cluster.verdict(stream)
