# SPDX-License-Identifier: Apache-2.0
"""A mover's thread ends alone, and its engine goes on: no block is lost, and no KV cache is entrusted to it again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from llumlet.contract.types import Mode, MovePhase, Reason
from tests.shells.cells import company, goes_on
from tests.shells.circumstances import before_copies, hanging, recorded
from tests.shells.cluster import Cluster, Instance, Stream, cluster_of, retold, until
from tests.shells.marks import MARKS
from tests.support.failures import failure

pytestmark = [
    *MARKS,
    # With `sys.exit`, which passes for no error that a mover could survive.
    pytest.mark.filterwarnings("ignore:Exception in thread llumnix-mover:pytest.PytestUnhandledThreadExceptionWarning"),
]


def end_mover(instance: Instance) -> None:
    """At its next turn."""
    mover = instance.engine.model_executor.mover.mover
    mover._turn = sys.exit
    os.eventfd_write(mover._wake, 1)


async def goes_with_its_tokens(cluster: Cluster, stream: Stream, source: str, destination: str, lost: str) -> None:
    """A move, as of an engine that is known to carry no KV cache: `lost` says so in its status."""
    status = await cluster.llumlet(lost).get_instance_status()
    assert "has gone" in status.kv_unsupported
    move = await cluster.migrate(stream, source, destination)
    assert (move.phase, move.mode) == (MovePhase.MOVED, Mode.RECOMPUTE), move.detail
    assert move.tokens_alone.endswith(status.kv_unsupported)


@failure("the mover's thread of the destination ends alone", "copying", "stayed; later ones go with their tokens alone")
@pytest.mark.parametrize("final", [False, True], ids=["round", "commit"])
@retold
async def test_destination_survives_a_dead_mover(final: bool, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        with before_copies(cluster["B"], sys.exit):
            move = await cluster.migrate(stream, method=Mode.BLOCKING if final else Mode.LIVE)
        assert (move.phase, move.reason) == (MovePhase.STAYED, Reason.TRANSFER_FAILED), move.detail
        await until(
            lambda: not cluster["B"].engine.kvconn.port.reservations._reserved, lambda: "; ".join(cluster["B"].held)
        )
        await goes_with_its_tokens(cluster, stream, "A", "B", lost="B")
        return await cluster.verdict(stream)


@failure("the mover's thread of the source ends alone", "copying over TCP", "stayed; later ones go with their tokens")
@retold
async def test_source_survives_a_dead_mover(model_dir: Path) -> list[str]:
    """Its block server has threads of its own, and pins are held until they are known to send nothing."""
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        grants = cluster["A"].engine.model_executor.mover.mover.grants
        with (
            mock.patch.object(cluster["B"].engine.agent.context.movers, "_transports", ("tcp",)),
            mock.patch.object(grants, "allow", side_effect=lambda *_: end_mover(cluster["A"])),
        ):
            move = await cluster.migrate(stream)
        assert (move.phase, move.reason) == (MovePhase.STAYED, Reason.TRANSFER_FAILED), move.detail
        await until(lambda: not cluster["A"].engine.kvconn.port._pins, lambda: "; ".join(cluster["A"].held))
        await goes_with_its_tokens(cluster, stream, "A", "B", lost="A")
        return await cluster.verdict(stream)


@failure("the mover's thread of the engine that goes on ends alone", "rescue", "computed again")
@retold
async def test_rescuer_survives_a_dead_mover(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, "AB") as cluster:
        stream = await company(cluster)
        calls = recorded(cluster, "Adopt")
        with before_copies(cluster["B"], sys.exit), hanging(cluster["A"]):
            assert await goes_on(cluster, stream) == "computed again"
        # A stream's first attempt fails with the mover, and its second does without the KV cache.
        assert all(call.HasField("holder") is (call.epoch.term == 1) for call in calls)
        assert {call.epoch.term for call in calls} >= {1, 2}
        assert "has gone" in (await cluster.llumlet("B").get_instance_status()).kv_unsupported
        return await cluster.verdict(stream)


@failure("the mover's thread ends alone", "not moving", "a claim is refused; the engine takes and gives tokens alone")
@retold
async def test_idle_engine_survives_a_dead_mover(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        stream = await company(cluster)
        end_mover(cluster["A"])
        identity = cluster["A"].engine.agent.context.identity
        await until(lambda: identity.kv_unsupported is not None, lambda: "nobody notices")
        await goes_with_its_tokens(cluster, stream, "A", "B", lost="A")
        await stream.reaches(len(stream.tokens) + 10)
        await goes_with_its_tokens(cluster, stream, "B", "A", lost="A")
        return await cluster.verdict(stream)
