# SPDX-License-Identifier: Apache-2.0
"""Which of the addresses that stand in messages this process may connect to.

Destinations, origins and owners are named by others. With TLS and a token every address may be tried: whoever is there
has to prove that it belongs to the cluster before it hears anything. Without, only this host is reached, so that nobody
can use an engine to reach others.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from llumlet.process.addresses import Address
from vllm_llumnix.wire.relay_address import RelayAddress

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
