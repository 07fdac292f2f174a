# SPDX-License-Identifier: Apache-2.0
"""Looks after an origin's streams several times a second, and asks whether the process of a silent engine is gone."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from typing import Protocol

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletUnreachable, NotALlumlet
from llumlet.process.credentials import Credentials

logger = logging.getLogger("vllm.llumnix")

LOOK_SECONDS = 0.25


class Watched(Protocol):
    def look(self) -> None: ...

    def catch_up(self, due: float) -> bool: ...


class Standstills:
    """Times in which this process stood still, stopped by somebody or starved. What others have said meanwhile lies in
    its sockets, and timers are due before it is read: by them alone everybody would be dead."""

    def __init__(self) -> None:
        self._counted = 0.0

    def since(self, due: float) -> float:
        """Seconds for which it stood still, if it only now comes to what was `due`; each is counted once. All times are
        of the monotonic clock."""
        now = time.monotonic()
        late = now - max(due, self._counted)
        if late <= LOOK_SECONDS:
            return 0.0
        self._counted = now
        return late


async def watch(reference: weakref.ref[Watched]) -> None:
    """Look after the streams for as long as there are any to look after; a time later if this process has stood still,
    for what came meanwhile is to be heard first."""
    waits = False
    while True:
        due = time.monotonic() + LOOK_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
        watched = reference()
        if watched is None:
            return
        try:
            # Not twice in a row: one that is late each time would never look.
            waits = watched.catch_up(due) and not waits
            if not waits:
                watched.look()
        except Exception:
            # Outermost: the next look may find what this one stumbled over gone.
            logger.exception("llumlet: looking after the streams failed")
        del watched


GONE_SECONDS = 1.0
GONE_PAUSE_SECONDS = 0.05


async def is_gone(address: str, credentials: Credentials) -> bool:
    """Returns True if nobody listens any more where a silent engine's llumlet did: then nobody has to wait for it.

    An ending process closes its connections one by one, its listening port among them. So if it breaks a connection
    off, it is asked again for a while, each time by a new connection: a kept one says nothing about the port.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        client = LlumletClient(address, credentials=credentials)
        try:
            await client.get_instance_metadata(deadline_s=left)
        except LlumletUnreachable as error:
            if error.nobody_listens or isinstance(error, NotALlumlet):
                return True
        except LlumletCallFailed:
            return False
        else:
            return False
        finally:
            await client.close()
        await asyncio.sleep(GONE_PAUSE_SECONDS)
    return False
