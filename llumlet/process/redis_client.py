# SPDX-License-Identifier: Apache-2.0
"""Clients of a Redis: of one server, or of the master that Sentinels name.

With Sentinels, connections go to the present master and end when that is gone or answers as a replica. `follow_master`
leaves one that was replaced and still answers.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any, Final

from redis import asyncio as redis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.credentials import CredentialProvider
from redis.exceptions import AskError, ClusterCrossSlotError, ClusterDownError, RedisError

from llumlet.process.redis_url import Login, RedisUrl
from llumlet.process.secret_files import Watched, read_secret

_log = logging.getLogger(__name__)
SOCKET_TIMEOUT_S: Final = 2.0
SENTINEL_TIMEOUT_S: Final = 1.0
"""Time limit for each Sentinel, short as several are asked in turn."""
NO_CLUSTER: Final = (
    "it is a Redis Cluster, where keys that are read together lie on different servers: use a single Redis, or "
    "Sentinels for one that may fail (redis+sentinel://HOST:PORT,HOST:PORT/SERVICE)"
)
_OF_A_CLUSTER: Final = (ClusterCrossSlotError, ClusterDownError, AskError)  # AskError: MOVED, too
_CLIENT_OF_A_SENTINEL: Final = re.compile(r"<redis\.\S*\(<.*?\)>\)>\)> - ")
"""The beginning of the library's errors: it shows the client of a Sentinel, with all its options."""


def connect(url: str) -> Any:
    """A client that gives up after `SOCKET_TIMEOUT_S` and does not retry. Raises ValueError for an invalid URL; does
    not connect yet."""
    where = RedisUrl.parse(url)
    options = _timeouts(SOCKET_TIMEOUT_S) | _login(where.login)
    if not where.service:
        return _renewing(redis.Redis.from_url(where.server, **options))
    given = {name: value for name, value in parse_url(where.server).items() if name not in _OF_ONE_SERVER}
    tls = {"ssl": where.tls} | {name: value for name, value in given.items() if name.startswith("ssl_")}
    of_sentinels = _timeouts(SENTINEL_TIMEOUT_S) | tls
    if where.sentinel_login != Login():
        # Never by word: the library's errors may show how its clients of Sentinels are configured.
        of_sentinels["credential_provider"] = _LoginProvider(where.sentinel_login)
    sentinel = Sentinel(where.hosts, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    for client in sentinel.sentinels:
        _renewing(client)
    return _renewing(sentinel.master_for(where.service, redis_class=_MasterClient, **(options | given | tls)))


def _renewing(client: Any) -> Any:
    """Makes the client's TLS connections read their files again after changes; redis-py reads them once."""
    pool = client.connection_pool
    if issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = type("RenewedConnection", (_Renewed, pool.connection_class), {})
    return client


class _Renewed(SSLConnection):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        tls = self.ssl_context
        self._files = Watched(*filter(None, (tls.certfile, tls.keyfile, tls.ca_certs)))

    def _connection_arguments(self) -> Mapping[str, Any]:
        former = self.ssl_context.context
        if self._files.has_changed():
            self.ssl_context.context = None
        try:
            return super()._connection_arguments()
        except OSError as error:
            if former is None:
                raise
            _log.error("the certificates for Redis stay as they were: %s", error)
            self.ssl_context.context = former
            return super()._connection_arguments()


def checked_name(url: str) -> str:
    """The name of `url` for people. Raises ValueError with all faults, including those of password files."""
    where = RedisUrl.parse(url)
    faults: list[str] = []
    for option, login in (("password_file", where.login), ("sentinel_password_file", where.sentinel_login)):
        try:
            if login.password_file:
                read_secret(login.password_file)
        except ValueError as error:
            faults.append(f"{option} {error}")
    try:
        connection = connect(url).connection_pool.make_connection()
    except (TypeError, ValueError, RedisError) as error:
        faults.append(f"{where.name} has an option that redis-py refuses: {error}")
    else:
        faults += _tls_faults(where, getattr(connection, "ssl_context", None))
    if faults:
        raise ValueError("; ".join(faults))
    return where.name


def _tls_faults(where: RedisUrl, context: Any) -> list[str]:
    """Faults of options that redis-py would read at the first connection only. `context`: redis-py's; None without
    TLS."""
    if context is None:
        return []
    given = {name: value for name, value in parse_url(where.server).items() if name.startswith("ssl_")}
    faults = []
    for name in _FILES & given.keys():
        try:
            with open(str(given[name]), "rb"):
                pass
        except OSError as error:
            faults.append(f"{name} {given[name]}: {error.strerror}")
    if faults:
        return sorted(faults)
    try:
        context.get()
    except (OSError, ValueError, TypeError, RedisError) as error:
        return [f"{where.name} has TLS options that do not work ({', '.join(sorted(given))}): {error}"]
    return []


async def follow_master(client: Any) -> bool:
    """True if the Sentinels name a new master; idle connections are then closed, and the next command goes to it. False
    without Sentinels, and if none answers within `SENTINEL_TIMEOUT_S`."""
    pool: Any = client.connection_pool
    before = pool.master_address if isinstance(client, _MasterClient) else None
    if before is None:
        return False
    try:
        async with asyncio.timeout(SENTINEL_TIMEOUT_S):
            return bool(await pool.get_master_address() != before)
    except (RedisError, OSError):
        return False


def reason_of(error: Exception) -> str:
    """The error in words."""
    if isinstance(error, _OF_A_CLUSTER):
        return NO_CLUSTER
    if isinstance(error, MasterNotFoundError):
        return _CLIENT_OF_A_SENTINEL.sub("", str(error))
    return str(error) or type(error).__name__


class _MasterClient(redis.Redis):
    """Also closes the connections to the Sentinels."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for each in pool.sentinel_manager.sentinels:
            await each.aclose()


class _LoginProvider(CredentialProvider):
    """Reads the password file for each connection, so that changes apply to the next one."""

    def __init__(self, login: Login) -> None:
        self._login = login

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._login.password
        if file := self._login.password_file:
            try:
                password = read_secret(file).decode(errors="replace").strip()
            except ValueError as error:
                raise PermissionError(f"password_file {error}") from None
        return (self._login.username, password) if self._login.username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _timeouts(seconds: float) -> dict[str, Any]:
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": None}


def _login(login: Login) -> dict[str, Any]:
    if login.password_file:
        return {"credential_provider": _LoginProvider(login)}
    return {name: value for name in ("username", "password") if (value := getattr(login, name))}


_FILES: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_OF_ONE_SERVER: Final = frozenset({"host", "port", "connection_class"})
