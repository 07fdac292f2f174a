# SPDX-License-Identifier: Apache-2.0
"""The parts of the scheduler process, put together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from llumlet.credentials import NONE, Credentials
from llumlet.protocol.infer_type import InferType
from llumlet.tasks import keep_running
from llumlet.types import Address
from llumsched.cluster.providers import all_request_providers
from llumsched.cluster.providers.account import Account
from llumsched.cluster.providers.lrs import RealtimeState
from llumsched.cluster.table import Table
from llumsched.cluster.view import View
from llumsched.cms.store import Store, open_store
from llumsched.dispatch.dispatcher import Dispatcher, Ledger
from llumsched.dispatch.warmth import QUIET_S
from llumsched.policy.document import Mode, Policy
from llumsched.rescheduling.config import Config as ReschedulingConfig
from llumsched.rescheduling.http import add_debug_route
from llumsched.rescheduling.rescheduler import Rescheduler, lease_of
from llumsched.scheduler import events
from llumsched.scheduler.access import ServiceTokens
from llumsched.scheduler.api import Api
from llumsched.scheduler.backends import Backends
from llumsched.tls import server_context

_EXPIRE_S: Final = 0.5
_STOP_S: Final = 2.0

# What differs from Llumnix, and why: docs/defaults.md
HOST: Final = "127.0.0.1"
PORT: Final = 8002
CMS: Final = "listen://127.0.0.1:8003"


@dataclass(frozen=True)
class SchedulerConfig:
    policy: Policy
    host: str = HOST
    port: int = PORT
    """0 takes a free one."""
    cms: str = CMS
    """Full mode: of `llumsched.cms.store.open_store`."""
    account_staleness_s: float = 10.0
    account: bool = True
    """Off, and requests on their way count nothing."""
    backend_endpoints: Mapping[Address, InferType] = field(default_factory=dict)
    """Lite mode."""
    backend_api_key: str = field(default="", repr=False)
    """Lite mode: what the engines want to be asked with."""
    gateway_ttl_s: float = 30.0
    state_ttl_s: float = 600.0
    warms_up_s: float = QUIET_S
    """Full mode: how long no instance must have come before requests are placed."""
    rescheduling: ReschedulingConfig | None = None
    """Full mode, in this process."""
    credentials: Credentials = field(default=NONE, repr=False)
    insecure: bool = False
    service_token_file: str = ""
    ssl_certfile: str = ""
    """Of the HTTP service; empty: in clear."""
    ssl_keyfile: str = ""
    """Empty: whoever reaches the HTTP service may ask it."""


@dataclass(frozen=True)
class RunningScheduler:
    host: str
    port: int
    view: View
    dispatcher: Dispatcher
    rescheduler: Rescheduler | None
    store: Store
    _stack: AsyncExitStack

    async def close(self) -> None:
        await self._stack.aclose()


async def serve(config: SchedulerConfig) -> RunningScheduler:
    """Started; ends with `close`. Raises OSError if a port cannot be had, ValueError for a CMS that is none."""
    async with AsyncExitStack() as stack:
        store: Store
        if config.policy.mode is Mode.LITE:
            store = Backends(config.backend_endpoints, api_key=config.backend_api_key)
        else:
            store = open_store(config.cms, config.credentials, insecure=config.insecure)
        stack.push_async_callback(store.close)
        await store.start()
        registry = CollectorRegistry()
        ledger = _ledger(config, store.view)
        warms_up_s = 0.0 if config.policy.mode is Mode.LITE else config.warms_up_s
        dispatcher = Dispatcher(
            store.view,
            config.policy,
            ledger,
            time.monotonic,
            warms_up_s=warms_up_s,
            providers=all_request_providers(),
        )
        stack.callback(dispatcher.close)
        _keep(stack, asyncio.create_task(keep_running("expiry", partial(_expire, ledger))))
        rescheduler = await _reschedule(stack, config, store.view, dispatcher.table, registry)
        app = Api(dispatcher, registry).application()
        events.add_routes(app, store.view, rescheduler)
        if rescheduler is not None:
            add_debug_route(app, rescheduler.records)
        if config.service_token_file:
            app.middlewares.insert(0, ServiceTokens(config.service_token_file).guard)
        port = await _listen(stack, app, config)
        return RunningScheduler(config.host, port, store.view, dispatcher, rescheduler, store, stack.pop_all())
    raise AssertionError("the stack swallows nothing")


def _ledger(config: SchedulerConfig, view: View) -> Ledger:
    if config.policy.mode is Mode.LITE:
        return RealtimeState(time.monotonic, view, gateway_ttl_s=config.gateway_ttl_s, state_ttl_s=config.state_ttl_s)
    staleness_s = config.account_staleness_s if config.account else 0.0
    return Account(time.monotonic, staleness_s, is_blind=lambda: not view.connected)


async def _reschedule(
    stack: AsyncExitStack, config: SchedulerConfig, view: View, table: Table, registry: CollectorRegistry
) -> Rescheduler | None:
    if config.rescheduling is None:
        return None
    lease = lease_of(config.cms)
    if lease is not None:
        stack.push_async_callback(lease.close)
        await lease.start()
    rescheduler = Rescheduler(view, config.rescheduling, config.credentials, registry, table=table, lease=lease)
    stack.push_async_callback(rescheduler.close)
    _keep(stack, asyncio.create_task(rescheduler.run()))
    return rescheduler


async def _listen(stack: AsyncExitStack, app: web.Application, config: SchedulerConfig) -> int:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    tls = server_context(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
    site = web.TCPSite(runner, config.host, config.port, ssl_context=tls)
    await site.start()
    port: int = runner.addresses[0][1]
    return port


async def _expire(ledger: Ledger) -> None:
    while True:
        await asyncio.sleep(_EXPIRE_S)
        ledger.expire()


def _keep(stack: AsyncExitStack, task: asyncio.Task[None]) -> None:
    async def stop() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(stop)
