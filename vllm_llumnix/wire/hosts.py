# SPDX-License-Identifier: Apache-2.0
"""The addresses of this machine that others are told."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit


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
