# SPDX-License-Identifier: Apache-2.0
"""Whether an address is this machine's own. Standard library only, as parsers ask."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether all addresses of `host` are loopback; False for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
