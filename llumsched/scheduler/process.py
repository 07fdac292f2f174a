# SPDX-License-Identifier: Apache-2.0
"""The parts of the scheduler process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from llumlet.process import kinds
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.kinds import MARK, SWITCH, Faulty, Kind
from llumlet.process.secret_files import read_secret
from llumlet.process.settings import Group
from llumlet.process.tasks import cancel, keep_running
from llumlet.process.tls import checked_ca_file, server_context
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers import HIT_COLUMN, all_request_providers
from llumsched.cluster.providers.account import Account
from llumsched.cluster.providers.ledger import Ledger
from llumsched.cluster.providers.lrs import RealtimeState
from llumsched.cluster.view import View
from llumsched.cms.store import Store, open_store
from llumsched.contract import CMS_PORT, SCHEDULER_PORT
from llumsched.dispatch.dispatcher import Dispatcher, Knowledge
from llumsched.dispatch.warmth import QUIET_S
from llumsched.endpoints import Endpoint
from llumsched.foresight.moved_on import Forecast
from llumsched.latency.profile import Profile, read_llumnix, read_profile
from llumsched.policy.document import Mode, Policy
from llumsched.prefix.hits import PrefixHits
from llumsched.prefix.index import USUAL_BLOCKS, PrefixIndex
from llumsched.prefix.watches import CacheWatches
from llumsched.rescheduling.http import add_debug_routes
from llumsched.rescheduling.planning.draft import caches_unknown
from llumsched.rescheduling.rescheduler import Rescheduler, lease_of
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.scaling.scaling_config import ScalingConfig
from llumsched.scheduler import scale_advice as scaling
from llumsched.scheduler import web_page as events
from llumsched.scheduler.api import Api
from llumsched.scheduler.overview import Overview
from llumsched.scheduler.static_engines import API_KEY_VARIABLE, StaticEngines
from llumsched.scheduler_access import ServiceTokens, read_tokens

_EXPIRE_S: Final = 0.5
_STOP_S: Final = 2.0

# What differs from Llumnix, and why: docs/reference/defaults.md
HOST: Final = "127.0.0.1"
PORT: Final = SCHEDULER_PORT
CMS: Final = f"listen://{HOST}:{CMS_PORT}"


_TIME: Final = kinds.seconds(above=0)
_process = Group("process")
_cms = Group("CMS", mode=Mode.FULL)
_instances = Group("instances")
_dispatch = Group("dispatch")


def _endpoints(value: str) -> dict[Endpoint | Address, InferType]:
    found: dict[Endpoint | Address, InferType] = {}
    faults = []
    for part in filter(None, map(str.strip, value.split(","))):
        text, _, kind = part.partition("=")
        try:
            endpoint, infer_type = Endpoint.parse(text), kinds.one_of(InferType).read(kind or InferType.NEUTRAL)
        except ValueError as error:
            faults.append(str(error))
            continue
        where = endpoint if endpoint.is_tls or endpoint.base else endpoint.address
        if found.setdefault(where, infer_type) != infer_type:
            faults.append(f"{text}: both {found[where]} and {infer_type}")
    if faults:
        raise Faulty(faults)
    return found


def _profiles(value: str) -> tuple[Profile, ...]:
    return tuple(read_profile(path) for path in filter(None, map(str.strip, value.split(","))))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    policy: Policy
    host: str = _process.setting(HOST, kinds.text("HOST"), "address to listen on", common=True)
    port: int = _process.setting(PORT, kinds.port(), "port to listen on; 0 picks a free port", common=True)
    cms: str = _cms.setting(
        CMS,
        kinds.text("URL"),
        "store of the instances: listen://HOST:PORT serves one here; redis://… and "
        "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE use a Redis; HOST:PORT uses that of another process",
        common=True,
    )
    service_token_file: str = _process.setting(
        "",
        kinds.file(read_tokens),
        'JSON file with the tokens accepted over HTTP, by role: {"gateway": […], "reader": […], "operator": […]}; '
        "empty accepts everybody",
        common=True,
    )
    ssl_certfile: str = _process.setting(
        "", kinds.text("FILE"), "certificate for HTTPS (PEM); empty serves plain HTTP", common=True
    )
    ssl_keyfile: str = _process.setting("", kinds.file(read_secret), "private key of --ssl-certfile (PEM)", common=True)
    insecure: bool = _process.setting(False, MARK, "allow listening beyond this machine without tokens or TLS")
    backend_endpoints: Mapping[Endpoint | Address, InferType] = _instances.setting(
        {},
        Kind(_endpoints, "HOST:PORT[=TYPE],…"),
        f"API servers of engines, as HOST:PORT or http(s)://HOST:PORT/PATH, and their TYPE ({', '.join(InferType)}); "
        f"their --api-key is read from the variable {API_KEY_VARIABLE}",
        flag="--llm-backend-endpoints",
        mode=Mode.LITE,
    )
    backend_ca_file: str = _instances.setting(
        "",
        kinds.file(checked_ca_file),
        "certificates of the authorities trusted for engines (PEM); empty trusts the system's",
        mode=Mode.LITE,
    )
    backend_api_key: str = field(default="", repr=False)
    """The key of the engines in lite mode."""
    models: tuple[str, ...] = _dispatch.setting(
        (),
        kinds.several(kinds.text("NAME"), "NAME,…"),
        "models that are known before an instance serves them: requests for them wait and then get 503, instead of "
        "404 at once",
    )
    account: bool = _dispatch.setting(
        True,
        SWITCH,
        "count requests that were dispatched and are in no status yet",
        flag="--enable-instance-status-local-account",
        mode=Mode.FULL,
    )
    forward_status: bool = _dispatch.setting(
        False,
        SWITCH,
        "decide on an estimate of the present state, made from the last status and the step times of each instance",
        flag="--forward-status",
        mode=Mode.FULL,
    )
    account_staleness_s: float = _dispatch.setting(
        10.0,
        _TIME,
        "seconds after which a dispatched request that no status shows is no longer counted",
        flag="--request-local-account-staleness-seconds",
        mode=Mode.FULL,
    )
    step_profiles: Sequence[Profile] = _dispatch.setting(
        (),
        Kind(_profiles, "FILE,…"),
        "files with measured step times of engines, for predictions before any step was seen (`llumnix profile` "
        "writes them)",
        mode=Mode.FULL,
    )
    ttft_profile: str = _dispatch.setting(
        "",
        kinds.text("FILE"),
        "file with times to first token in Llumnix's format, like --step-profiles",
        flag="--ttft-profiling-data-path",
        mode=Mode.FULL,
    )
    tpot_profile: str = _dispatch.setting(
        "",
        kinds.text("FILE"),
        "file with times between two tokens in Llumnix's format, like --step-profiles",
        flag="--tpot-profiling-data-path",
        mode=Mode.FULL,
    )
    cache_aware: bool = _dispatch.setting(
        False,
        SWITCH,
        "follow what prefix caches hold under every policy; false does so only under policies that read it",
        flag="--enable-cache-aware-scheduling",
    )
    cache_index_blocks: int = _dispatch.setting(
        USUAL_BLOCKS,
        kinds.integer(at_least=1),
        "largest number of distinct prefix-cache blocks to follow; each takes 16 bytes",
    )
    cache_sent_blocks: int = _dispatch.setting(
        8192,
        kinds.integer(at_least=2),
        "number of blocks of 16 tokens, the latest sent to it, that an engine's prefix cache is assumed to hold",
        mode=Mode.LITE,
    )
    warms_up_s: float = _dispatch.setting(
        QUIET_S,
        kinds.seconds(),
        "place requests after a start once no new instance has appeared for this many seconds; 0 places them at once",
        flag="--warm-up-seconds",
        mode=Mode.FULL,
    )
    gateway_ttl_s: float = _dispatch.setting(
        30.0,
        _TIME,
        "seconds without a report after which the requests of a gateway are no longer counted",
        mode=Mode.LITE,
    )
    state_ttl_s: float = _dispatch.setting(
        600.0,
        _TIME,
        "seconds without a report after which a request is no longer counted",
        flag="--request-state-ttl-seconds",
        mode=Mode.LITE,
    )
    rescheduling: ReschedulingConfig | None = None
    """The rescheduler in this process, in full mode."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    credentials: Credentials = field(default=NONE, repr=False)

    @property
    def knows_caches(self) -> bool:
        """True if it follows what prefix caches hold."""
        return self.cache_aware or HIT_COLUMN in self.policy.reads


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
    """A scheduler that runs until `close`. Raises OSError for a port in use, ValueError for an invalid CMS."""
    async with AsyncExitStack() as stack:
        store: Store
        if config.policy.mode is Mode.LITE:
            store = StaticEngines(
                config.backend_endpoints, api_key=config.backend_api_key, ca_file=config.backend_ca_file
            )
        else:
            store = open_store(
                config.cms, config.credentials, insecure=config.insecure, silent_s=config.policy.staleness_s
            )
        stack.push_async_callback(store.close)
        await store.start()
        registry = CollectorRegistry()
        ledger = _ledger(config, store.view)
        dispatcher = Dispatcher(
            store.view,
            config.policy,
            ledger,
            time.monotonic,
            knowledge=_knowledge(config),
        )
        stack.callback(dispatcher.close)
        hits = dispatcher.hits
        if hits is not None and config.policy.mode is Mode.FULL:
            watches = CacheWatches(hits, config.credentials)
            stack.push_async_callback(watches.close)
            stack.callback(store.view.observe(watches))
        stack.push_async_callback(cancel, asyncio.create_task(keep_running("expiry", partial(_expire, ledger))))
        rescheduler = await _reschedule(stack, config, store.view, dispatcher, registry)
        api, scales = Api(dispatcher, registry), _scale(stack, config.scaling, dispatcher, registry)
        app = api.application()
        overview = Overview(dispatcher, api.attainment, api.cached, scales)
        events.add_routes(app, store.view, rescheduler.records if rescheduler is not None else None, overview)
        if rescheduler is not None:
            add_debug_routes(app, rescheduler)
        scaling.add_route(app, scales)
        if config.service_token_file:
            app.middlewares.insert(0, ServiceTokens(config.service_token_file).guard)
        port = await _listen(stack, app, config)
        return RunningScheduler(config.host, port, store.view, dispatcher, rescheduler, store, stack.pop_all())
    raise AssertionError("the stack swallows nothing")


def _knowledge(config: SchedulerConfig) -> Knowledge:
    looks_ahead = config.forward_status or (config.rescheduling is not None and config.rescheduling.forward_status)
    return Knowledge(
        profiles_of(config),
        _hits(config),
        all_request_providers(),
        config.models,
        warms_up_s=0.0 if config.policy.mode is Mode.LITE else config.warms_up_s,
        forecast=Forecast(time.monotonic) if looks_ahead else None,
        forward=config.forward_status,
    )


def _hits(config: SchedulerConfig) -> PrefixHits | None:
    """The contents of prefix caches; None if nothing reads them."""
    if not config.knows_caches:
        return None
    sent_blocks = config.cache_sent_blocks if config.policy.mode is Mode.LITE else 0
    return PrefixHits(PrefixIndex(config.cache_index_blocks), sent_blocks=sent_blocks)


def profiles_of(config: SchedulerConfig) -> list[Profile]:
    """The step profiles that were given. Raises ValueError if the files do not fit each other."""
    llumnix = [path for path in (config.ttft_profile, config.tpot_profile) if path]
    return [*config.step_profiles, *([read_llumnix(llumnix)] if llumnix else [])]


def _ledger(config: SchedulerConfig, view: View) -> Ledger[Any]:
    if config.policy.mode is Mode.LITE:
        return RealtimeState(time.monotonic, view, gateway_ttl_s=config.gateway_ttl_s, state_ttl_s=config.state_ttl_s)
    staleness_s = config.account_staleness_s if config.account else 0.0
    return Account(time.monotonic, staleness_s, is_blind=lambda: not view.connected)


async def _reschedule(
    stack: AsyncExitStack, config: SchedulerConfig, view: View, dispatcher: Dispatcher, registry: CollectorRegistry
) -> Rescheduler | None:
    if config.rescheduling is None:
        return None
    lease = lease_of(config.cms)
    stack.push_async_callback(lease.close)
    await lease.start()
    rescheduler = Rescheduler(
        view,
        config.rescheduling,
        config.credentials,
        registry,
        table=dispatcher.table,
        lease=lease,
        shares=dispatcher.hits.shares if dispatcher.hits is not None else caches_unknown,
    )
    stack.push_async_callback(rescheduler.close)
    stack.push_async_callback(cancel, asyncio.create_task(rescheduler.run()))
    return rescheduler


def _scale(
    stack: AsyncExitStack, config: ScalingConfig, dispatcher: Dispatcher, registry: CollectorRegistry
) -> scaling.Scaling | None:
    if config.bounds is None:
        return None
    made = scaling.Scaling(config, config.bounds, dispatcher.view, dispatcher.table, registry)
    stack.push_async_callback(cancel, asyncio.create_task(keep_running("scaling", made.run)))
    return made


async def _listen(stack: AsyncExitStack, app: web.Application, config: SchedulerConfig) -> int:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    tls = server_context(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
    site = web.TCPSite(runner, config.host, config.port, ssl_context=tls)
    await site.start()
    port: int = runner.addresses[0][1]
    return port


async def _expire(ledger: Ledger[Any]) -> None:
    while True:
        await asyncio.sleep(_EXPIRE_S)
        ledger.expire()
