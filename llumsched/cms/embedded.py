# SPDX-License-Identifier: Apache-2.0
"""The CMS inside a scheduler process: instances report to it over gRPC, and others may watch it.

An instance has one stream; a new one of the same life ends the old one. It is read no faster than its allowance, so
that a flooding instance blocks its own connection. Loopback only, unless there are complete credentials.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final
from weakref import WeakSet

import grpc
from grpc import aio

from llumlet.contract import types
from llumlet.contract.cms.stores import EOF
from llumlet.contract.proto.llumlet_pb2_grpc import CmsServicer, add_CmsServicer_to_server
from llumlet.contract.server import bind, new_server
from llumlet.contract.servicer import tell
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.tasks import cancel
from llumsched.cluster.view import View
from llumsched.cms.allowance import TimeAllowance
from llumsched.cms.intake import MAX_INSTANCES, PATIENCE, Intake, Patience, ReportRefused
from llumsched.cms.peers import PeerLists
from llumsched.cms.validation import MAX_ID_CHARACTERS, MAX_REPORT_BYTES
from llumsched.cms.watchers import ViewWatcher

logger = logging.getLogger(__name__)
Context = aio.ServicerContext[Any, Any]

MAX_WATCHERS: Final = 64
FIRST_REPORT_S: Final = 5.0
"""Longest time from a stream's begin to its metadata."""
_STOP_S: Final = 0.2
MOST_STATUSES_PER_S: Final = 1750.0
"""Statuses of all instances together, and what watchers are told of them: a quarter of a core."""
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REPORT_BYTES),
    # A stream has room for a status or two that were not read yet: that is what tells a reporter to wait. A window that
    # grows with the bandwidth would let it queue megabytes of old news.
    ("grpc.http2.lookahead_bytes", 512),
    ("grpc.http2.bdp_probe", 0),
]


class EmbeddedStore:
    """Listens at `host:port` after `start`; port 0 picks a free one, which `address` tells.

    Raises ValueError for a host that is not loopback unless the credentials are complete or `insecure`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        credentials: Credentials = NONE,
        insecure: bool = False,
        patience: Patience = PATIENCE,
    ) -> None:
        self.view = View()
        self.problem = ""
        self.complete = asyncio.Event()
        self.address = Address(host, port)
        self._credentials = credentials
        self._insecure = insecure
        self._intake = Intake(self.view, patience)
        self._server: aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._servicer: _Servicer | None = None

    async def start(self) -> None:
        server = new_server(
            self.address.host, self._credentials, self._insecure, _OPTIONS, max_calls=MAX_INSTANCES + 2 * MAX_WATCHERS
        )
        self._servicer = _Servicer(self.view, self._intake)
        add_CmsServicer_to_server(self._servicer, server)
        self.address = bind(server, self.address.host, self.address.port, self._credentials)
        await server.start()
        self._server = server
        self.complete.set()
        self._sweeper = asyncio.create_task(self._intake.keep_sweeping(), name="CMS sweeps")
        logger.info("The CMS listens at %s", self.address)

    async def close(self) -> None:
        if self._sweeper is not None:
            await cancel(self._sweeper)
        if self._server is not None:
            await self._server.stop(_STOP_S)
            self._server = None


class _Servicer(CmsServicer):
    def __init__(self, view: View, intake: Intake) -> None:
        self._view = view
        self._intake = intake
        self._streams: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._replaced: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._refused: dict[tuple[str, str], str] = {}
        """Faults that were logged once, by an instance's life, or by a host that sent no id."""
        self._watchers = 0
        self._peers = PeerLists(view)

    async def Report(self, reports: object, context: Context) -> None:
        who = context.peer().rpartition(":")[0], ""
        try:
            metadata = await self._first(context)
            who = metadata.instance_id[:MAX_ID_CHARACTERS], metadata.incarnation[:MAX_ID_CHARACTERS]
            await self._report(metadata, context)
        except ReportRefused as refusal:
            self._refuse(who, str(refusal))
            code = grpc.StatusCode.FAILED_PRECONDITION if refusal.hopeless else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(code, str(refusal)[:1000])
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or me not in self._replaced:
                raise
            # gRPC ends a call whose handler was cancelled only if its client did it.
            me.uncancel()
            await context.abort(grpc.StatusCode.ABORTED, "the instance has begun another stream")

    def _refuse(self, who: tuple[str, str], why: str) -> None:
        """Logs a refusal once, as a reporter retries while its instance lives."""
        if self._refused.get(who) != why and len(self._refused) < MAX_INSTANCES:
            self._refused[who] = why
            logger.warning("A report of %r is refused: %s", who[0], why)

    async def _first(self, context: Context) -> types.InstanceMetadata:
        try:
            async with asyncio.timeout(FIRST_REPORT_S):
                first: types.InstanceReport = await context.read()
        except TimeoutError:
            raise ReportRefused("the metadata did not come") from None
        if first is EOF or first.WhichOneof("report") != "metadata":
            raise ReportRefused("the first report must be the metadata")
        return first.metadata

    async def _report(self, metadata: types.InstanceMetadata, context: Context) -> None:
        self._intake.metadata(metadata)
        life = metadata.instance_id, metadata.incarnation
        me = asyncio.current_task()
        assert me is not None
        former = self._streams.get(life)
        if former is not None:
            self._replaced.add(former)
            former.cancel()
        self._streams[life] = me
        try:
            await tell(context, self._taken())
            await self._follow(context, *life)
        finally:
            if self._streams.get(life) is me:
                del self._streams[life]
                self._intake.cut(*life)

    def _taken(self) -> types.ReportTaken:
        num_times = 1 + self._watchers
        return types.ReportTaken(min_interval_s=num_times * len(self._view) / MOST_STATUSES_PER_S)

    async def _follow(self, context: Context, instance_id: str, incarnation: str) -> None:
        allowance = TimeAllowance()
        while (report := await context.read()) is not EOF:
            match report.WhichOneof("report"):
                case "status":
                    self._take(report.status, instance_id, incarnation)
                case "metadata":
                    if (report.metadata.instance_id, report.metadata.incarnation) != (instance_id, incarnation):
                        raise ReportRefused("a stream is of one life of one instance")
                    self._intake.metadata(report.metadata)
                    await tell(context, self._taken())
                case "leaving":
                    self._intake.left(instance_id, incarnation)
                    await tell(context, self._taken())
                case _:
                    raise ReportRefused("a report is empty")
            wait_s = allowance.spend(report)
            if wait_s > 0:
                await asyncio.sleep(wait_s)

    def _take(self, status: types.InstanceStatus, instance_id: str, incarnation: str) -> None:
        if self._intake.status(status, instance_id, incarnation):
            self._refused.pop((instance_id, incarnation), None)
            return
        if not self._intake.lives(instance_id, incarnation):
            # Silent for too long, left, or replaced: who lives begins anew with its metadata.
            raise ReportRefused("this life of the instance is not known any more: begin with the metadata")

    async def Peers(self, request: types.PeersRequest, context: Context) -> types.PeersResponse:
        return self._peers.answer(request)

    async def Watch(self, request: types.WatchRequest, context: Context) -> None:
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch already")
        self._watchers += 1
        try:
            async with ViewWatcher(self._view) as watcher:
                while True:
                    change: types.ViewChange = await watcher.next()
                    await tell(context, change)
        except OverflowError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            self._watchers -= 1
