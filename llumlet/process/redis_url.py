# SPDX-License-Identifier: Apache-2.0
"""The URL of a Redis: of one server, or of those that Sentinels look after.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&…]
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT],…/SERVICE[/DB][?OPTION=VALUE&…]

With `rediss` in place of `redis` everything goes over TLS, the Sentinels as well. redis-py has no form for Sentinels;
this is the one of Prefect, RedisVL, LangChain and the package redis-sentinel-url. USER and PASSWORD are those of the
Redis servers, `sentinel_username` and `sentinel_password` those of the Sentinels. `password_file` and
`sentinel_password_file` name files that hold a password, for who wants it on no command line. All other options are
redis-py's (`ssl_ca_certs`, …). `cluster` names one of several clusters that share a database (`redis_reports`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from llumlet.process.addresses import Address

REDIS_SCHEMES: Final = ("redis://", "rediss://", "redis+sentinel://", "rediss+sentinel://")
REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_PARTS: Final = re.compile(r"(rediss?)(\+sentinel)?://([^/?#]*)(/[^?#]*)?(?:\?([^#]*))?.*", re.DOTALL)
_OF_SENTINELS: Final = frozenset({"sentinel_username", "sentinel_password", "sentinel_password_file"})
_OURS: Final = _OF_SENTINELS | {"password_file", "cluster"}
_CLUSTER: Final = re.compile(r"[A-Za-z0-9.-]{1,64}")
_STORE: Final = re.compile(r"\s*rediss?\+sentinel://[^/]*/[^,]*|[^,]+")
_UNQUOTED: Final = "is not one: no HOST:PORT (a password's '/', '?' and '#' must be %-encoded)"


@dataclass(frozen=True, slots=True)
class Login:
    """A user; one without a name is the default user. `password_file` stands in place of `password`."""

    username: str = ""
    password: str = ""
    password_file: str = ""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    name: str
    """The URL for people: without users, passwords and options."""
    hosts: tuple[Address, ...]
    """Addresses of the server, or of the Sentinels."""
    service: str
    """The Sentinels' name for their servers; "" without Sentinels."""
    tls: bool
    login: Login
    sentinel_login: Login
    cluster: str
    """Name of one of several clusters that share the database; empty: it has but one."""
    database: int
    server: str
    """The URL for redis-py's parser, for connections to a server: without a login and the options above; with Sentinels
    the host is meaningless."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """The parts of a URL. Raises ValueError with every fault, in words that show no password."""
        match = _PARTS.fullmatch(url)
        if match is None:
            raise ValueError("the URL is neither a redis:// nor a redis+sentinel:// URL")
        scheme, of_sentinels, authority, path, query = (match[number] or "" for number in range(1, 6))
        title = f"the {scheme}{of_sentinels}:// URL"
        user, _, places = authority.rpartition("@")
        given = dict(parse_qsl(query, keep_blank_values=True))
        options = {name: value for name, value in given.items() if name not in _OURS}
        username, _, password = (unquote(part) for part in user.partition(":"))
        login = Login(username, password, given.get("password_file", ""))
        sentinel_login = Login(
            given.get("sentinel_username", ""),
            given.get("sentinel_password", ""),
            given.get("sentinel_password_file", ""),
        )
        faults = [
            f"{title} has both {prefix}password and {prefix}password_file"
            for prefix, one in (("", login), ("sentinel_", sentinel_login))
            if one.password and one.password_file
        ]
        hosts: tuple[Address, ...] = ()
        service, db = "", path.strip("/")
        try:
            if "@" in path:
                raise ValueError(_UNQUOTED)
            hosts = _hosts(places, SENTINEL_PORT if of_sentinels else REDIS_PORT)
        except ValueError as error:
            faults.append(f"{title} {error}")
        if of_sentinels:
            service, _, db = (unquote(part) for part in db.partition("/"))
            if not service:
                faults.append(f"{title} names no service: {scheme}+sentinel://HOST:PORT,HOST:PORT/SERVICE")
        else:
            if len(hosts) > 1:
                faults.append(f"{title} names several servers, which are for redis+sentinel://…/SERVICE")
            faults += [f"{title} has no use for {name}" for name in sorted(_OF_SENTINELS & given.keys())]
        if db and "@" not in path and not (db.isascii() and db.isdecimal()):
            faults.append(f"{title} names a database that is no number")
        cluster = given.get("cluster", "")
        if "cluster" in given and not _CLUSTER.fullmatch(cluster):
            faults.append(f"{title} has a cluster that is not 1 to 64 letters, digits, dots and dashes")
        if faults:
            raise ValueError("; ".join(faults))
        return cls(
            name=f"{scheme}{of_sentinels}://{','.join(map(str, hosts))}" + (f"/{service}" if service else ""),
            hosts=hosts,
            service=service,
            tls=scheme == "rediss",
            login=login,
            sentinel_login=sentinel_login,
            cluster=cluster,
            database=int(number) if (number := db or options.get("db", "")).isdecimal() else 0,
            server=f"{scheme}://{hosts[0]}/{db}?{urlencode(options)}",
        )


def redis_name(url: str) -> str:
    """The URL for people: without users, passwords and options. Raises ValueError for an invalid URL."""
    return RedisUrl.parse(url).name


def split_stores(text: str) -> list[str]:
    """The named stores, without repetitions. Commas before the service of a `redis+sentinel://` URL do not separate
    stores."""
    return list(dict.fromkeys(filter(None, map(str.strip, _STORE.findall(text)))))


def _hosts(places: str, port: int) -> tuple[Address, ...]:
    """Addresses of `HOST[:PORT],…` with the default `port`. Raises ValueError, which quotes none of them."""
    found = []
    for place in places.split(","):
        try:
            parts = urlsplit(f"//{place}")
            found.append(Address(unquote(parts.hostname or ""), port if parts.port is None else parts.port))
        except ValueError:
            # Its words would show what stands there, which may be half of a password.
            raise ValueError(_UNQUOTED) from None
    if not all(host for host, _ in found):
        raise ValueError("names no host")
    return tuple(found)
