# SPDX-License-Identifier: Apache-2.0
"""Opens cluster metadata stores by address: an embedded one (HOST:PORT), or a Redis (redis://…)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

from grpc import aio

from llumlet.contract.channels import RenewedChannel, open_channel
from llumlet.contract.client import failure_of
from llumlet.contract.cms.links import LOOK_S, Abortable, Directory, Link, LinkLost
from llumlet.contract.cms.peers import MAX_PEERS
from llumlet.contract.proto.llumlet_pb2_grpc import CmsStub
from llumlet.contract.types import (
    InstanceMetadata,
    InstanceReport,
    InstanceStatus,
    PeersRequest,
    PeersResponse,
    ReportTaken,
)
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.redis_url import REDIS_SCHEMES

LEAST_INTERVAL_S: Final = 0.005
DESCRIBE_EVERY_S: Final = 5.0
"""Time after which a gRPC link repeats the metadata: the answer says how far apart statuses are to be now."""
EOF: Any = aio.EOF  # type: ignore[attr-defined]  # the stubs leave it out


class GrpcLink(Abortable):
    """`Cms.Report` of a scheduler process.

    Metadata and `leave` are answered. A status is not, as that would double the work of both ends. Flow control shows
    that the store keeps up: it opens a window of a few hundred bytes, and a write ends when earlier ones were read.

    The store paces its instances: `min_interval_s` is what the last answer asked for, at least `LEAST_INTERVAL_S`.
    """

    def __init__(self, address: Address, credentials: Credentials) -> None:
        super().__init__()
        self.name = str(address)
        self.min_interval_s = LEAST_INTERVAL_S
        self._described_s = 0.0
        self._address = address
        self._credentials = credentials
        self._channel: aio.Channel | None = None
        self._call: Any = None

    async def open(self, metadata: InstanceMetadata, ended: Callable[[], None]) -> None:
        self._channel = open_channel(self._address, self._credentials)
        self._call = cast(Any, CmsStub(self._channel).Report)(metadata=self._credentials.call_metadata)
        self._call.add_done_callback(lambda _: ended())
        await self.describe(metadata)

    async def push(self, status: InstanceStatus, metadata: Callable[[], InstanceMetadata]) -> None:
        if time.monotonic() - self._described_s > DESCRIBE_EVERY_S:
            await self.describe(metadata())
        await self._send(InstanceReport(status=status))

    async def describe(self, metadata: InstanceMetadata) -> None:
        taken = await self._ask(InstanceReport(metadata=metadata))
        self.min_interval_s = max(LEAST_INTERVAL_S, taken.min_interval_s)
        self._described_s = time.monotonic()

    async def leave(self) -> None:
        await self._ask(InstanceReport(leaving=True))

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close(None)
        self._call = self._channel = None

    async def _ask(self, report: InstanceReport) -> ReportTaken:
        await self._send(report)
        taken: ReportTaken = await self._guarded(self._call.read())
        if taken is EOF:
            raise LinkLost(await self._ending())
        return taken

    async def _send(self, report: InstanceReport) -> None:
        await self._guarded(self._call.write(report))

    async def _guarded(self, exchange: Awaitable[Any]) -> Any:
        try:
            with self._exchange():
                return await exchange
        except aio.AioRpcError as error:
            raise LinkLost(failure_of(error, self.name).detail) from error
        except asyncio.InvalidStateError as error:  # gRPC's for a call that is over
            raise LinkLost(await self._ending()) from error

    async def _ending(self) -> str:
        """The last words of the store on a call that is over."""
        return await self._call.details() or f"the stream has ended ({(await self._call.code()).name})"


class CmsDirectory:
    def __init__(self, address: Address, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._channel = RenewedChannel(credentials, address)

    async def peers(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        request = PeersRequest(instance_ids=own_ids, compatibility_digest=digest, number=MAX_PEERS)
        metadata = self._credentials.call_metadata
        try:
            return await CmsStub(self._channel.get()).Peers(request, metadata=metadata, timeout=LOOK_S)
        except aio.AioRpcError as error:
            raise LinkLost(failure_of(error, str(self._address)).detail) from error

    async def close(self) -> None:
        await self._channel.close()


def open_link(store: str, credentials: Credentials) -> Link:
    """A link to the store that is named. Raises ValueError."""
    if store.startswith(REDIS_SCHEMES):
        # Imports redis-py only where it is used.
        from llumlet.contract.cms.redis_reports import RedisLink

        return RedisLink(store)
    if "://" in store:
        raise ValueError(f"{store!r} is neither HOST:PORT nor a redis:// URL")
    return GrpcLink(Address.parse(store), credentials)


def open_directory(store: str, credentials: Credentials = NONE) -> Directory:
    """A directory at the store that is named. Raises ValueError."""
    if store.startswith(REDIS_SCHEMES):
        from llumlet.contract.cms.redis_reports import RedisDirectory

        return RedisDirectory(store)
    return CmsDirectory(Address.parse(store), credentials)
