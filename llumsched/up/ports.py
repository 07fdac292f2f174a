# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports for servers that need theirs before they listen."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from typing import Final

_CHOICE: Final = range(20_000, 30_000)
"""Ports outside Linux's range for connections and automatic ports (32768-60999). A server may listen a minute after its
port was chosen, and nobody else gets the port meanwhile."""

_random: Final = random.SystemRandom()
"""A generator that nobody can seed, so that processes with equal seeds, such as tests, choose different ports."""
_MOST_KEPT: Final = 200
_kept: Final[dict[int, int]] = {}
"""Ports given recently, with the descriptor that keeps each for this process: they look free until their servers
listen."""


def free_ports(count: int) -> list[int]:
    """TCP ports of loopback that are free now and were not given recently on this machine."""
    found: list[int] = []
    while len(found) < count:
        port = _random.choice(_CHOICE)
        if port not in _kept and _keep(port):
            with socket.socket() as listener, contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
    while len(_kept) > max(_MOST_KEPT, count):
        os.close(_kept.pop(next(iter(_kept))))
    return found


def _keep(port: int) -> bool:
    """True if this process acquires the port: a machine-wide name that the kernel releases when the process ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        try:
            name.bind(f"\0vllm-llumnix-port-{port}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            # Not Linux, which alone has such names: the port is kept within this process.
        _kept[port] = name.detach()
    return True


def free_port() -> int:
    return free_ports(1)[0]


def is_free(host: str, port: int) -> bool:
    """True if a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # As servers do: a connection of an earlier one that is not quite over is no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True
