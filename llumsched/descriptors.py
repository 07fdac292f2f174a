# SPDX-License-Identifier: Apache-2.0
"""File descriptors of this process: their limit, and errors for want of them."""

from __future__ import annotations

import errno
import resource
from typing import Final

_NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)
_PER_REQUEST: Final = 2
"""Descriptors per request: the client's connection and the engine's."""
_OTHERS: Final = 256
"""Descriptors of idle connections, logs, schedulers."""


def raise_limit() -> int:
    """Raises the soft limit to the hard one. Returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def shortage(limit: int, num_requests: int) -> str:
    """Advice if `num_requests` at once need more than `limit` descriptors; "" otherwise."""
    needed = _PER_REQUEST * num_requests + _OTHERS
    if needed <= limit or limit == resource.RLIM_INFINITY:
        return ""
    return (
        f"{limit} open files are allowed, and --max-requests {num_requests} may need {needed}: raise the hard limit "
        f"(LimitNOFILE= of systemd, ulimit -Hn), or take --max-requests {max(1, (limit - _OTHERS) // _PER_REQUEST)}"
    )


def none_left(error: BaseException | None) -> bool:
    """True if a connection failed for want of a descriptor, which says nothing about the other side."""
    return isinstance(error, OSError) and error.errno in _NONE_LEFT
