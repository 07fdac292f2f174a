# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a gateway process: the answer to each path, and the life of the process."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

import msgspec
from aiohttp import web

from llumlet.process import tls
from llumlet.process.addresses import is_loopback
from llumlet.process.secret_files import Bearer
from llumlet.process.tasks import cancel, keep_running
from llumsched.gateway.access_log import AccessLogger
from llumsched.gateway.api_keys import TENANT, ApiKeys, Exceeded, Limit
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.clients import Clients, ClientServer
from llumsched.gateway.config import Config
from llumsched.gateway.cors import Cors
from llumsched.gateway.errors import (
    CannotPass,
    Forbidden,
    GatewayError,
    MethodNotAllowed,
    NoInstance,
    Unauthorized,
    UnknownModel,
    UnknownPath,
    UnsupportedCoding,
)
from llumsched.gateway.exchange import Exchanges, failure
from llumsched.gateway.forwarded import authorization, keys_shown
from llumsched.gateway.gateway_metrics import Metrics
from llumsched.gateway.objectives import Tally
from llumsched.gateway.outliers import Limits
from llumsched.gateway.paths import Kind, find
from llumsched.gateway.placement import Placement, RoundRobin
from llumsched.gateway.refusals import Refusals
from llumsched.gateway.scheduled import COMPLAINT_TTL_S, Scheduled
from llumsched.gateway.scheduler_client import SchedulerClient
from llumsched.gateway.services import Services
from llumsched.gateway.stored import StoredResponses
from llumsched.gateway.tokens import TokenCounter
from llumsched.gateway.upstream import Access, Upstream, new_session
from llumsched.gateway.watch import Watch

_log = logging.getLogger(__name__)
_MODELS_S: Final = 3.0
"""Shortest time between two rounds that ask all instances for their models, for clients that want to know."""
_FIRST_MODELS_S: Final = 1.0
"""The same while no model is known."""
_OPEN: Final = frozenset({"/health", "/healthz", "/ping", "/ready"})
"""Paths that need no key."""
_UNKNOWN: Final = ""
_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}
_REFUSALS: Final = {Kind.REFUSED: Forbidden, Kind.CANNOT_PASS: CannotPass}
_NO_SECRETS: Final = (b"",)
_IDENTITY: Final = "identity"
_CODINGS: Final = {"Accept-Encoding": _IDENTITY}
_BACKLOG = 1024
_ATTAINMENT_S = 1.0
"""Shortest time between two reports of met objectives to schedulers."""
_ATTAINMENT_AGAIN_S = 10.0
"""Time after which an unchanged report is repeated, as a scheduler may be new."""
_AGAIN_S = 1.0
"""Time between two queries to instances that did not answer. They get no requests meanwhile."""
_LOOK_S = 0.25
"""Time between two checks of which instances are avoided."""


class Gateway:
    """`async with Gateway(config) as gateway`: serves at `gateway.port` until the block ends.

    Raises ValueError for a tokenizer or keys that cannot be loaded, OSError for an address or a certificate that cannot
    be used.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.port = 0
        self.metrics_port = 0
        self._operators_listener: asyncio.Server | None = None
        self._keys = ApiKeys(config.api_key_file) if config.api_key_file else None
        self._tls = tls.server_context(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
        self._tokens = TokenCounter(
            config.tokenizers,
            config.chat_template,
            cpu_s=config.count_timeout_s,
            num_processes=config.reader_processes,
        )

    async def __aenter__(self) -> Self:
        config = self.config
        listening = _listen(config.host, config.port, shared=config.workers > 1)
        try:
            await self._tokens.start()
        except ValueError:
            listening.close()
            raise
        engines_tls = tls.client_context(config.backend_ca_file) if config.asks_https else None
        self._session = new_session(config.connect_timeout_s, engines_tls)
        access = Access(Bearer(config.backend_api_key_file, "key of engines"), checks_clients=bool(config.api_key_file))
        self._passes_keys = access.passes_clients
        self.backends = Backends(
            config.backend_endpoints,
            self._session,
            Limits(config.max_ejected),
            access.headers,
            is_tls=config.backend_https,
            models=config.models,
        )
        self.metrics = Metrics(self.backends.listed)
        self.upstream = Upstream(config.connect_timeout_s, access, engines_tls)
        self._schedulers = None if config.is_local else SchedulerClient(config, self._session)
        self.placement = self._placement()
        self.access_log = AccessLogger(config.access_log, self.metrics.unlogged)
        self.services = Services(
            config,
            self.backends,
            self.placement,
            self.upstream,
            self.metrics,
            self._tokens,
            StoredResponses(
                self.backends,
                lambda: self._keys.secrets if self._keys else _NO_SECRETS,
                self._keys.reload if self._keys else None,
            ),
        )
        self.exchanges = Exchanges(self.services, self.access_log)
        self._refusals = Refusals(self.metrics, self.access_log)
        cors = Cors(self._decoded, config.allowed_origins)
        self._server = ClientServer(config, cors.answer, self._refusals, self._tls)
        watch = Watch(config, self.backends, self.upstream, Clients(config, self._server))
        keep = {"models": self._keep_models, "complaints": self._keep_complaining, "watch": watch.run}
        keep["attainment"] = self._keep_telling_attainment
        if self._schedulers is not None:
            keep["schedulers"] = self._schedulers.watch
        if self._keys is not None:
            keep["keys"] = self._keys.keep_reading
        if config.sse_keepalive_s:
            keep["keep-alive"] = self.exchanges.keep_alive
        if not config.full_mode and config.requests_report_duration_s:
            keep["reports"] = self._keep_reporting
        self._tasks = [asyncio.create_task(keep_running(name, run), name=name) for name, run in keep.items()]
        self._observe_load()
        self._operators = await self._listen_to_operators()
        self.port = listening.getsockname()[1]
        self._listener = await asyncio.get_running_loop().create_server(
            self._server.accepted, sock=listening, backlog=_BACKLOG
        )
        return self

    async def _listen_to_operators(self) -> ClientServer:
        config = self.config
        encrypts = bool(config.ssl_certfile) and not is_loopback(config.metrics_host)
        server = ClientServer(config, self._tell_operators, self._refusals, self._tls if encrypts else None)
        try:
            listening = _listen(config.metrics_host, config.metrics_port, shared=config.workers > 1)
            self._operators_listener = await asyncio.get_running_loop().create_server(server.accepted, sock=listening)
            self.metrics_port = listening.getsockname()[1]
        except OSError as error:
            where = f"{config.metrics_host}:{config.metrics_port}"
            _log.error("no metrics: %s: %s; see --metrics-port", where, error.strerror or error)
        return server

    def leave(self) -> None:
        """Makes /ready answer 503 and connections end with their answers. The gateway continues to serve."""
        self._server.is_leaving = True

    async def __aexit__(self, *_: object) -> None:
        """Stops accepting, waits a while for running requests, then ends them."""
        self._listener.close()
        if self._operators_listener is not None:
            self._operators_listener.close()
        await asyncio.sleep(0)  # what was accepted just now becomes a connection
        self._server.pre_shutdown()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.exchanges.idle.wait(), self.config.shutdown_timeout_s)
        await self._server.end_handshakes()
        await self._server.shutdown(1.0)
        await self._operators.end_handshakes()
        await self._operators.shutdown(1.0)
        await cancel(*self._tasks)
        await self.services.background.close()
        await self.placement.close()
        await self.backends.close()
        self.upstream.close()
        await self._session.close()
        await self._tokens.close()
        self.access_log.close()

    def _placement(self) -> Placement:
        if self._schedulers is None:
            return RoundRobin(self.backends)
        return Scheduled(self.config, self.backends, self._schedulers)

    async def _decoded(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Content-Encoding", _IDENTITY).lower() != _IDENTITY:
            error = UnsupportedCoding(
                "`Content-Encoding` is not supported: send the body uncompressed.", headers=_CODINGS
            )
            return self._refusals.answer(request, error)
        return await self._answer(request) if self._keys is None else await self._checked(request, self._keys)

    async def _checked(self, request: web.BaseRequest, keys: ApiKeys) -> web.StreamResponse:
        """The answer to a request that shows a known key and stays within its limits, or a refusal."""
        if request.path in _OPEN:
            return await self._answer(request)
        tenant = keys.whose(keys_shown(request.headers))
        if tenant is None:
            self.metrics.refused.labels(_UNKNOWN, Limit.KEY).inc()
            return self._refusals.answer(request, Unauthorized("Unauthorized", headers=_CHALLENGE))
        request[TENANT] = tenant
        try:
            with tenant.request():
                return await self._answer(request)
        except Exceeded as error:
            self.metrics.refused.labels(error.tenant, error.limit).inc()
            return self._refusals.answer(request, error, error.tenant)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        found = find(request.path)
        error: GatewayError | None = None
        if found is None:
            error = UnknownPath(f"The gateway does not know the path `{request.path[:256]}`.")
        elif request.method not in found.path.methods:
            allowed = ", ".join(found.path.methods)
            error = MethodNotAllowed(f"`{request.path}` takes {allowed}.", headers={"Allow": allowed})
        elif refusal := _REFUSALS.get(found.path.kind):
            error = refusal(f"`{request.path}` is not passed to engines: {found.path.why}.")
        if found is None or error is not None:
            assert error is not None
            tenant = request.get(TENANT)
            return self._refusals.answer(request, error, tenant.name if tenant else "")
        path = found.path
        if path.kind is Kind.OWN:
            return await _OWN.get(request.path, Gateway.model)(self, request)
        return await self.exchanges.run(request, found)

    async def _keep_models(self) -> None:
        while True:
            await self.placement.learn()
            await self.backends.refresh()
            due_s = time.monotonic() + self.config.models_refresh_s * random.uniform(0.8, 1.2)
            while (left_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, _AGAIN_S))
                await self.backends.ask_again()

    async def _keep_complaining(self) -> None:
        known: set[Backend] = set()
        told_s = -math.inf
        while True:
            avoided = self.backends.avoided()
            for backend in avoided.keys() - known:
                cause, why = avoided[backend].cause, avoided[backend].why
                self.metrics.ejections.labels(cause).inc()
                _log.warning("instance %s gets no new requests: %s: %s", backend, cause, why)
            if avoided.keys() != known or time.monotonic() - told_s > COMPLAINT_TTL_S / 3:
                known, told_s = set(avoided), time.monotonic()
                self.placement.complain(avoided)
            await asyncio.sleep(_LOOK_S)

    async def _keep_telling_attainment(self) -> None:
        known: Mapping[str, Tally] = {}
        told_s = -math.inf
        while True:
            attained = self.metrics.attained()
            if attained != known or time.monotonic() - told_s > _ATTAINMENT_AGAIN_S:
                known, told_s = attained, time.monotonic()
                self.placement.attained(attained)
            self._observe_load()
            await asyncio.sleep(_ATTAINMENT_S)

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(self.config.requests_report_duration_s)
            running = self.services.running.items()
            self.placement.report_running((placed, exchange.num_tokens) for exchange, placed in running)

    async def models(self, request: web.BaseRequest) -> web.StreamResponse:
        """The models of all instances."""
        cards = await self._cards(request)
        if not cards and len(self.backends):
            return failure(NoInstance("No instance answers.", retry_after_s=1), "")
        return _json(200, {"object": "list", "data": [cards[name] for name in sorted(cards)]})

    async def model(self, request: web.BaseRequest) -> web.StreamResponse:
        """The description of one model."""
        name = request.path.removeprefix("/v1/models/")
        if card := (await self._cards(request)).get(name):
            return _json(200, card)
        return self._refusals.answer(request, UnknownModel(f"The model `{name[:256]}` does not exist."))

    async def _cards(self, request: web.BaseRequest) -> dict[str, dict[str, Any]]:
        some_are_known = any(backend.models for backend in self.backends)
        if time.monotonic() - self.backends.refreshed_s > (_MODELS_S if some_are_known else _FIRST_MODELS_S):
            await self.placement.learn()
            await self.backends.refresh()
        key = authorization(request.headers) if self._passes_keys else ""
        return await self.backends.cards(key)

    async def health(self, request: web.BaseRequest) -> web.StreamResponse:
        return _text(200, "OK")

    async def _why_not_ready(self) -> str:
        reason = "no instance was asked yet"
        if self._server.is_leaving:
            reason = "shutting down"
        elif self.backends.refreshed_s > -math.inf:
            reason = await self.placement.refusal()
        return reason

    async def ready(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers if the gateway is ready. Only operators see the reason if it is not, since that names engines."""
        return _ready("not ready" if await self._why_not_ready() else "")

    def _observe_load(self) -> None:
        self.metrics.observe_load(self.services.num_in_flight, self.placement.num_waiting, len(self.backends.avoided()))

    async def _tell_operators(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request at the operators' port."""
        if request.method not in ("GET", "HEAD"):
            return self._refusals.answer(request, MethodNotAllowed("GET or HEAD.", headers={"Allow": "GET, HEAD"}))
        if request.path == "/metrics":
            self._observe_load()
            return web.Response(body=await self.metrics.rendered(), headers={"Content-Type": self.metrics.content_type})
        if request.path == "/ready":
            return _ready(await self._why_not_ready())
        if request.path in ("/health", "/healthz"):
            return await self.health(request)
        return self._refusals.answer(request, UnknownPath("This port serves /metrics, /ready and /health."))


_OWN: dict[str, Callable[[Gateway, web.BaseRequest], Awaitable[web.StreamResponse]]] = {
    "/v1/models": Gateway.models,
    "/v1/models/{model}": Gateway.model,
    "/healthz": Gateway.health,
    "/health": Gateway.health,
    "/ping": Gateway.health,
    "/ready": Gateway.ready,
}


def _text(status: int, text: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=text, headers=headers)


def _ready(reason: str) -> web.Response:
    return _text(503, reason + "\n", **{"Retry-After": "1"}) if reason else _text(200, "OK")


def _json(status: int, document: object) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")


def _listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound socket that does not listen yet. `shared`: other processes bind the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((host, port))
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    return listening
