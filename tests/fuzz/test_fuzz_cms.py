# SPDX-License-Identifier: Apache-2.0
"""The CMS against reports nobody should send: a refusal, nothing left behind, and an honest instance still gets in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llumlet.contract.types import InstanceMetadata, InstanceReport, InstanceStatus, WatchRequest
from llumsched.cms.embedded import EmbeddedStore
from llumsim.live import SimulatedCluster
from tests.fuzz.hostile import anything, filled, worsened
from tests.llumlet.fake_agent import until

METADATA = InstanceReport(
    metadata=InstanceMetadata(
        instance_id="a", incarnation="1", ip="127.0.0.1", instance_type="neutral", llumlet_port=7001, utc_create=5.0
    )
)
STATUS = InstanceReport(
    status=InstanceStatus(instance_id="a", incarnation="1", timestamp_ms=1, update_id=1, waiting_requests=["x"])
)
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    # Of the former life of an id that has a newer one; and of a life that has begun another stream.
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    # gRPC's own word, when the store ends the call while more is being sent.
    grpc.StatusCode.INTERNAL,
}
NOT_A_MESSAGE = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
"""gRPC's own answers, before our code runs; UNKNOWN would be an exception of ours as well."""
thorough = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Harness:
    """A store and a loop that runs only while something is sent to it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.store = EmbeddedStore()
        runner.run(self.store.start())
        self.channel: aio.Channel = runner.run(self._open())

    async def _open(self) -> aio.Channel:
        return aio.insecure_channel(str(self.store.address))

    def send(self, method: str, *messages: bytes) -> grpc.StatusCode:
        return self._runner.run(self._send(method, messages))

    async def _send(self, method: str, messages: tuple[bytes, ...]) -> grpc.StatusCode:
        """Until the store ends the call, or has read everything."""
        if method == "Report":
            call: Any = self.channel.stream_stream("/llumlet.Cms/Report")(timeout=5)
            try:
                for message in messages:
                    await call.write(message)
                await call.done_writing()
                async for _ in call:
                    pass
            except (aio.AioRpcError, asyncio.InvalidStateError):
                pass  # ended by the store; its status follows
        else:
            call = self.channel.unary_stream("/llumlet.Cms/Watch")(messages[0], timeout=0.2)
        return await call.code()

    def check(self) -> None:
        """An honest instance is seen, and gone when it leaves; what was lied about goes in its own time."""

        async def live() -> None:
            async with SimulatedCluster(1, str(self.store.address), prefix="honest-"):
                await until(lambda: "honest-0" in self.store.view and self.store.view["honest-0"].status is not None)
            await until(lambda: "honest-0" not in self.store.view)

        self._runner.run(live())

    def close(self) -> None:
        self._runner.run(self.channel.close())
        self._runner.run(self.store.close())


@pytest.fixture
def harness() -> Iterator[Harness]:
    with asyncio.Runner() as runner:
        harness = Harness(runner)
        try:
            harness.check()
            yield harness
            harness.check()
        finally:
            harness.close()


@thorough
@given(first=anything(METADATA.SerializeToString()), second=anything(STATUS.SerializeToString()))
def test_bytes(harness: Harness, first: bytes, second: bytes) -> None:
    code = harness.send("Report", first, second)
    try:
        InstanceReport.FromString(first)
    except DecodeError:
        assert code in NOT_A_MESSAGE
    else:
        assert code in REFUSALS | NOT_A_MESSAGE | {grpc.StatusCode.OK}


reports = st.one_of(filled(InstanceReport), worsened(METADATA), worsened(STATUS))


@thorough
@given(st.lists(reports, min_size=1, max_size=3), st.booleans())
def test_values(harness: Harness, messages: list[InstanceReport], introduced: bool) -> None:
    """Well-formed reports with hostile values are refused, or legal; nothing else."""
    sent = [METADATA, *messages] if introduced else messages
    assert harness.send("Report", *(message.SerializeToString() for message in sent)) in REFUSALS | {grpc.StatusCode.OK}


@settings(parent=thorough, max_examples=20)
@given(anything(WatchRequest().SerializeToString()))
def test_watch(harness: Harness, data: bytes) -> None:
    """It goes on until its caller leaves."""
    assert harness.send("Watch", data) in NOT_A_MESSAGE | {grpc.StatusCode.DEADLINE_EXCEEDED}
