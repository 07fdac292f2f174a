# SPDX-License-Identifier: Apache-2.0
"""Addresses of this machine, of relays, and of those peers to which this process may connect.

Destinations, origins and owners are named by others. With TLS and a token every address may be tried: the peer has to
prove that it belongs to the cluster before it hears anything. Without them only this host is reached, so that nobody
can use an engine to reach others.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from llumlet.process.addresses import Address

MAX_HOST_CHARACTERS = 253
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Reach:
    """`anywhere`: with complete credentials, or on a network that the operator trusts. `keys`: with a token, when an
    origin's address must have its key, and without when it must not."""

    anywhere: bool
    keys: bool = False

    def why_not(self, host: str) -> str | None:
        """Why `host`, a name or an IP address without brackets, may not be connected to; None if it may."""
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            # No other name is resolved: what it means can change between the question and its use.
            loopback = host == "localhost"
            if len(host) > MAX_HOST_CHARACTERS or not _HOST_NAME.fullmatch(host):
                return f"{host[:MAX_HOST_CHARACTERS]!r} is not a host"
        if loopback or self.anywhere:
            return None
        return f"{host} is not a loopback address, and instances can only prove who they are with TLS and a token"

    def why_not_llumlet(self, address: str) -> str | None:
        """Why a llumlet's HOST:PORT is not connected to; None if it may be."""
        try:
            return self.why_not(Address.parse(address).host)
        except ValueError as error:
            return str(error)

    def why_not_relay(self, address: str) -> str | None:
        """Why the relay of an API server is not connected to: tcp://IP:PORT, and its key. ZMQ knows other transports,
        and source addresses."""
        try:
            parsed = RelayAddress.parse(address)
        except ValueError as error:
            return str(error)
        if bool(parsed.key) is not self.keys:
            has, wants = ("no key", "a token") if self.keys else ("a key", "no token")
            return f"that relay has {has}, and this engine has {wants}: all have the same --llumlet-token-file, or none"
        scheme, _, rest = parsed.endpoint.partition("://")
        try:
            host = Address.parse(rest).host
            ipaddress.ip_address(host)
        except ValueError:
            host = ""
        if scheme != "tcp" or not host or rest != str(Address.parse(rest)):
            return f"{address[:MAX_HOST_CHARACTERS]!r} is not tcp://IP:PORT"
        return self.why_not(host)


_KEY_MARK: Final = "#"


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """The address at which an origin listens: `tcp://IP:PORT`, and `#` and 64 hexadecimal digits if it has a key."""

    endpoint: str
    key: bytes = b""
    """32 bytes, or empty."""

    @classmethod
    def parse(cls, text: str) -> RelayAddress:
        """Raises ValueError for a key that is none. The endpoint is taken as it is."""
        endpoint, mark, digits = text.partition(_KEY_MARK)
        key = bytes.fromhex(digits) if len(digits) == 64 and digits.isalnum() else b""
        if mark and not key:
            raise ValueError("the relay's key is not 64 hexadecimal digits")
        return cls(endpoint, key)

    def __str__(self) -> str:
        return f"{self.endpoint}{_KEY_MARK}{self.key.hex()}" if self.key else self.endpoint


def reachable_host(host: str) -> str:
    """`host`, or an address of this machine if `host` is a wildcard such as 0.0.0.0."""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host
    if not wildcard:
        return host
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def connect(where: str, timeout_s: float) -> socket.socket:
    """A connection to HOST:PORT, an IPv6 address in brackets. Raises OSError, or ValueError for what is no address."""
    parts = urlsplit(f"//{where}")
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{where!r} is not HOST:PORT")
    return socket.create_connection((parts.hostname, parts.port), timeout_s)


def host_of(where: str) -> str:
    """The host of HOST:PORT, without the brackets of an IPv6 address."""
    return urlsplit(f"//{where}").hostname or ""


def with_port(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface. Raises ValueError."""
    import psutil

    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise ValueError(f"there is no network interface {name!r}; there are {', '.join(sorted(interfaces))}")
    for address in interfaces[name]:
        if address.family is socket.AF_INET:
            return str(address.address)
    raise ValueError(f"network interface {name!r} has no IPv4 address")
