# SPDX-License-Identifier: Apache-2.0
"""The ids of a request at client, gateway, scheduler and engine."""

from __future__ import annotations

import os
import re

_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=-]{0,127}", re.ASCII)
"""Ids without white space, slash and `+`, for logs, URLs and other tools."""


def chosen(*wishes: object) -> str:
    """The first valid wish, or a new id."""
    for wish in wishes:
        if isinstance(wish, str) and _SANE.fullmatch(wish):
            return wish
    return os.urandom(16).hex()


class RequestIds:
    """Gives each request in flight its own id. A client's id that is in use gets a suffix upstream."""

    def __init__(self) -> None:
        self._in_flight: set[str] = set()

    def take(self, *wishes: object) -> tuple[str, str]:
        """The id for the client, `chosen` from the wishes, and the id for scheduler and engine."""
        own = shown = chosen(*wishes)
        while own in self._in_flight:
            own = f"{shown}-{os.urandom(4).hex()}"
        self._in_flight.add(own)
        return shown, own

    def give_back(self, own: str) -> None:
        self._in_flight.discard(own)

    def __len__(self) -> int:
        return len(self._in_flight)
