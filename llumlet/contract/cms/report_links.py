# SPDX-License-Identifier: Apache-2.0
"""The ways from an instance to a cluster metadata store: a gRPC stream, and Redis.

A link is used by one task, one exchange at a time. What goes wrong is raised as `LinkLost`; after that, and after
`close`, it can be opened again. Opening a connection is left to `open`: making a link needs no event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, cast

from grpc import aio

from llumlet.contract.channels import open_channel
from llumlet.contract.client import failure_of
from llumlet.contract.proto.llumlet_pb2_grpc import CmsStub
from llumlet.contract.types import InstanceMetadata, InstanceReport, InstanceStatus, ReportTaken
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials

LEAST_INTERVAL_S: Final = 0.005
DESCRIBE_EVERY_S: Final = 5.0
"""Time after which a gRPC link repeats the metadata; the answer sets the pace of statuses."""
EOF: Any = aio.EOF  # type: ignore[attr-defined]  # the stubs leave it out


class LinkLost(Exception):
    """The store cannot be reached, or refused; the text says why."""


class Link(Protocol):
    name: str
    """The store's name for logs: without a password."""
    min_interval_s: float
    """Least time between pushes of an instance whose load changes all the time; the first after a pause goes at
    once."""

    async def open(self, metadata: InstanceMetadata, ended: Callable[[], None]) -> None:
        """Connects and sends the metadata. Returns when the store has taken it. `ended` is called if the store is seen
        to end the connection, so that the next push would raise."""
        ...

    async def push(self, status: InstanceStatus, metadata: Callable[[], InstanceMetadata]) -> None:
        """Returns when the store has taken the status. `metadata` is for stores in which it does not last."""
        ...

    async def describe(self, metadata: InstanceMetadata) -> None:
        """Tell the store that the metadata is another one than at `open`. Returns when the store has taken it."""
        ...

    async def leave(self) -> None:
        """Tell the store that the instance is gone."""
        ...

    def abort(self, why: str) -> None:
        """End the exchange in progress; it raises `LinkLost`."""
        ...

    async def close(self) -> None:
        """Close the connection, without a word to the store."""
        ...


class Abortable:
    """An exchange that another task may end. The task that waits is cancelled: gRPC's own `cancel` does not wake who
    waits for a connection that does not come about."""

    def __init__(self) -> None:
        self._aborted = ""
        self._waiting: asyncio.Task[Any] | None = None

    def abort(self, why: str) -> None:
        if self._waiting is not None and not self._aborted:
            self._aborted = why
            self._waiting.cancel()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        self._aborted, self._waiting = "", asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            # Ours alone, unless the task is to end as well.
            if self._aborted and self._waiting is not None and self._waiting.uncancel() == 0:
                raise LinkLost(self._aborted) from None
            raise
        finally:
            self._waiting = None


class GrpcLink(Abortable):
    """`Cms.Report` of a scheduler process.

    Metadata and the good-bye are answered. A status is not: an answer to each would double the work of both ends, and
    that the store keeps up is known already. It opens a window of a few hundred bytes, and HTTP/2's flow control lets
    a write end only when the window has room again, that is, when what was sent before has been read.

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
        """The store's last words in a call that is over."""
        return await self._call.details() or f"the stream has ended ({(await self._call.code()).name})"
