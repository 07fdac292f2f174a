# SPDX-License-Identifier: Apache-2.0
"""Hosts and ports. Standard library only, as parsers need them."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple


class Address(NamedTuple):
    """A host, and the port at which something listens there."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address that `HOST:PORT` or `[IPV6]:PORT` names. Raises ValueError that says what is wrong."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not host:
            raise ValueError(f"{text!r} is not HOST:PORT")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{text!r}: write an IPv6 address as [ADDRESS]:PORT")
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r}: the port must be a number from 1 to 65535")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Tells whether all addresses of `host` are loopback; False for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
