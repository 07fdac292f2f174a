# SPDX-License-Identifier: Apache-2.0
"""TCP ports for servers that are told theirs before they listen."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque
from typing import Final

_CHOICE: Final = range(20_000, 30_000)
"""Ports outside the range from which Linux takes ports for connections and for listeners that ask for any
(32768-60999): a server listens up to a minute after its port was chosen, and nobody else gets the port meanwhile."""

_random: Final = random.SystemRandom()
"""Not the one that anybody may seed: processes that did alike, as tests do, would choose the same ports."""
_given: Final[deque[int]] = deque(maxlen=1000)
"""Ports that were given lately. They look free until their servers listen."""


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that are free now, and that this process was not given before."""
    found: list[int] = []
    while len(found) < count:
        port = _random.choice(_CHOICE)
        if port in _given:
            continue
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found.append(port)
            _given.append(port)
    return found


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
