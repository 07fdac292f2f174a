# SPDX-License-Identifier: Apache-2.0
"""TCP ports for servers that are told theirs before they listen."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from typing import Final

_CHOICE: Final = range(20_000, 30_000)
"""Ports outside the range from which Linux takes ports for connections and for listeners that ask for any
(32768-60999): a server listens up to a minute after its port was chosen, and nobody else gets the port meanwhile."""

_random: Final = random.SystemRandom()
"""Not the one that anybody may seed: processes that did alike, as tests do, would choose the same ports."""
_MOST_KEPT: Final = 200
_kept: Final[dict[int, int]] = {}
"""Ports that were given lately, each with the descriptor that keeps it for this process: they look free until their
servers listen."""


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that are free now, and that nobody on this machine was given lately."""
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
    """Whether this process now is the one that may give it away: one name in the whole machine (as far as it shares
    its ports), that the kernel forgets when the process ends."""
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
    """One of `free_ports`."""
    return free_ports(1)[0]


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # As servers do: a connection of an earlier one that is not quite over is no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True
