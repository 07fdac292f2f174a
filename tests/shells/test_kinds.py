# SPDX-License-Identifier: Apache-2.0
"""Engines whose KV cache cannot be carried: their requests go on with their tokens alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shells.cells import company, goes_on
from tests.shells.circumstances import hanging
from tests.shells.cluster import cluster_of, retold, until
from tests.shells.marks import MARKS

pytestmark = MARKS

both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
SEVERAL_GROUPS = "not exactly one KV cache group"


@both
@retold
async def test_a_dead_hybrid(asynchronous: bool, model_dir: Path) -> list[str]:
    """Nothing of its KV cache is needed."""
    async with cluster_of(model_dir, asynchronous=asynchronous, hybrid=True) as cluster:
        stream = await company(cluster)
        status = await cluster.llumlet("A").get_instance_status()
        assert status.kv_unsupported == SEVERAL_GROUPS
        await cluster["A"].die()
        await until(lambda: bool(stream.at.client._replay.replayed), lambda: "not replayed")
        return await cluster.verdict(stream)


@retold
async def test_a_hanging_hybrid(model_dir: Path) -> list[str]:
    """Its KV cache is not asked for, although it could be read."""
    async with cluster_of(model_dir, hybrid=True) as cluster:
        stream = await company(cluster)
        with hanging(cluster["A"]):
            assert await goes_on(cluster, stream) == "computed again"
        assert not cluster.network.seen["Claim"]
        return await cluster.verdict(stream)


@retold
async def test_found_out_later(model_dir: Path) -> list[str]:
    """What kept its KV cache until now does so no more: a claim is refused, and the request computed again."""
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        bypass = cluster["A"].engine.kvconn.bypass
        before = await cluster.llumlet("A").get_instance_status()
        bypass.post(bypass.stop_carrying_kv, "its mover is lost")
        bypass.post(bypass.stop_carrying_kv, "the first reason counts")
        status = await cluster.llumlet("A").get_instance_status()
        assert (before.kv_unsupported, status.kv_unsupported) == ("", "its mover is lost")
        with hanging(cluster["A"]):
            assert await goes_on(cluster, stream) == "computed again"
        assert cluster.network.seen["Claim"]
        return await cluster.verdict(stream)
