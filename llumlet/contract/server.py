# SPDX-License-Identifier: Apache-2.0
"""Serves an agent over gRPC, with server reflection and the standard health service.

A caller can move and abort requests. Addresses other than loopback are therefore served only with complete credentials
(mutual TLS and a token), unless the caller says that the network is trusted. All services are behind TLS;
all but health, which orchestrators ask without secrets, are behind the tokens. `MAY_CALL` says which role opens what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from llumlet.contract.agent import Agent
from llumlet.contract.errors import LlumletError
from llumlet.contract.proto import llumlet_pb2
from llumlet.contract.servicer import DetachedCalls, add_services, refuse
from llumlet.contract.types import MAX_MESSAGE_BYTES, Reason
from llumlet.process.addresses import Address, is_loopback
from llumlet.process.credentials import NONE, Credentials, Tls
from llumlet.process.tokens import ALL, Role

MAX_CONCURRENT_CALLS = 1024
"""Calls at a time; gRPC itself answers more with RESOURCE_EXHAUSTED, before a message is read."""

SERVICES = tuple(llumlet_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("Llumlet", "Peer"))

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise a second server could bind the same port, and each would get some of the calls.
    ("grpc.so_reuseport", 0),
]

_PEERS: Final = frozenset({Role.PEER})
_OPERATORS: Final = frozenset({Role.OPERATOR})
_LOOKERS: Final = frozenset({Role.OPERATOR, Role.READER})

MAY_CALL: Final[Mapping[str, frozenset[Role]]] = {
    # MigrateIn has the destination ask the source.
    "/llumlet.Llumlet/Migrate": _PEERS | _OPERATORS,
    "/llumlet.Llumlet/MigrateIn": _OPERATORS,
    # An origin calls off a request that it has started anew elsewhere.
    "/llumlet.Llumlet/Abort": _PEERS | _OPERATORS,
    "/llumlet.Llumlet/AbortMigrateIn": _OPERATORS,
    "/llumlet.Llumlet/Drain": _OPERATORS,
    "/llumlet.Llumlet/GetInstanceStatus": ALL,
    "/llumlet.Llumlet/GetInstanceMetadata": ALL,
    "/llumlet.Llumlet/ListRequests": _LOOKERS,
    "/llumlet.Llumlet/WatchCache": _LOOKERS,
    "/llumlet.Cms/Report": _PEERS,
    "/llumlet.Cms/Watch": _LOOKERS,
    "/llumlet.Cms/Peers": ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ALL,
}
"""Roles by gRPC's name of the method. A method that is missing here, the service `Peer` apart, is refused to every
single role."""


def may_call(method: str, roles: frozenset[Role]) -> bool:
    """True if a token of these roles, at least one, opens `method`. A token of all roles opens everything."""
    if method.startswith("/llumlet.Peer/"):
        return Role.PEER in roles
    return roles == ALL or bool(roles & MAY_CALL.get(method, frozenset()))


@dataclass(frozen=True)
class RunningServer:
    """A server that listens at `address`. Its methods belong to the event loop that started it.

    `async with` stops it in the end, if nobody has.
    """

    address: Address
    _server: aio.Server
    _health: Any
    """grpc_health's asynchronous servicer, which its type stubs leave out."""
    _calls: DetachedCalls

    @property
    def port(self) -> int:
        return self.address.port

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer of the health service. Calls are answered either way."""
        state = health_pb2.HealthCheckResponse
        for service in ("", *SERVICES):
            await self._health.set(service, state.SERVING if serving else state.NOT_SERVING)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Give the calls in progress, moves among them, `grace_s` seconds; cancel the rest."""
        await self._health.enter_graceful_shutdown()
        # No new calls from here on; the margin lets the cancelled ones answer SHUTTING_DOWN.
        stopping = asyncio.create_task(self._server.stop(grace_s + 0.5))
        await self._calls.stop(grace_s)
        await stopping


async def serve(
    agent: Agent,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    credentials: Credentials = NONE,
    insecure: bool = False,
) -> RunningServer:
    """Start serving `agent` on the running event loop; port 0 takes a free one.

    Raises ValueError for a host that is not loopback unless the credentials are complete or `insecure`, and OSError if
    the port cannot be had.
    """
    server = new_server(host, credentials, insecure)
    return await start(agent, server, bind(server, host, port, credentials))


async def start(agent: Agent, server: aio.Server, address: Address) -> RunningServer:
    """Has `server`, bound to `address`, answer for `agent`, for callers that need the address first."""
    calls = add_services(agent, server)
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    running = RunningServer(address, server, health_servicer, calls)
    await running.set_serving(True)
    await server.start()
    return running


def new_server(
    host: str,
    credentials: Credentials,
    insecure: bool,
    options: Sequence[tuple[str, int]] = (),
    *,
    max_calls: int = MAX_CONCURRENT_CALLS,
) -> aio.Server:
    """A server without services, guarded by `credentials`. `options` add to, or replace, the usual ones.

    Raises ValueError for a host that is not loopback unless the credentials are complete or `insecure`.
    """
    if not (insecure or credentials.complete or is_loopback(host)):
        raise ValueError(
            f"{host} is not a loopback address, and whoever reaches a llumlet or a CMS there could move and abort "
            "requests: it needs TLS and a token (--llumlet-tls-cert, --llumlet-tls-key, --llumlet-tls-ca and "
            "--llumlet-token-file), or else --insecure."
        )
    interceptors = [_TokenRequired(credentials)] if credentials.token_file else []
    merged = list((dict(_OPTIONS) | dict(options)).items())
    return aio.server(interceptors=interceptors, options=merged, maximum_concurrent_rpcs=max_calls)


def bind(server: aio.Server, host: str, port: int, credentials: Credentials) -> Address:
    """The address at which `server` will listen. Raises OSError if the port cannot be had."""
    wanted = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return Address(host, _listen(server, wanted, credentials))
    except RuntimeError as error:
        raise OSError(
            f"the llumlet cannot listen at {wanted}: {error} A port that is to be free at every start lies outside "
            "net.ipv4.ip_local_port_range, from which the system takes ports for connections."
        ) from error


def _listen(server: aio.Server, address: str, credentials: Credentials) -> int:
    """Adds a port to `server` and returns its number. Raises RuntimeError if it cannot be had.

    Each handshake asks for the credential files as they are then; connections that are open go on."""
    known = credentials.tls
    if known is None:
        return server.add_insecure_port(address)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        if (now := credentials.tls) is known or now is None:
            return None
        known = now
        return _configuration_of(now)

    renewed = grpc.dynamic_ssl_server_credentials(
        _configuration_of(known),
        changed,  # type: ignore[arg-type]  # the stubs forget that None keeps what there is
        require_client_authentication=True,
    )
    return server.add_secure_port(address, renewed)


def _configuration_of(tls: Tls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], root_certificates=tls.authority)


class _TokenRequired(aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Answers calls without a token, or with one of another role, itself; their messages are not even read."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._stranger = grpc.stream_stream_rpc_method_handler(_refuse_stranger)
        self._other_role = grpc.stream_stream_rpc_method_handler(_refuse_role)

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        if method.startswith(f"/{health.SERVICE_NAME}/"):
            return await continuation(handler_call_details)
        roles = self._credentials.roles(handler_call_details.invocation_metadata)
        if not roles:
            return self._stranger
        return await continuation(handler_call_details) if may_call(method, roles) else self._other_role


async def _refuse_stranger(messages: object, context: aio.ServicerContext[Any, Any]) -> None:
    await refuse(context, LlumletError(Reason.UNAUTHENTICATED, "this llumlet wants its token (--llumlet-token-file)"))


async def _refuse_role(messages: object, context: aio.ServicerContext[Any, Any]) -> None:
    await refuse(context, LlumletError(Reason.ROLE_REFUSED, "not for the role of this token"))
