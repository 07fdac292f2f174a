# SPDX-License-Identifier: Apache-2.0
"""A cluster metadata store as instances use it: a `Link` on which one reports, and a `Directory` of the others.

What goes wrong is raised as `LinkLost`. Making a link or a directory needs no event loop and connects to nothing; after
an error, and after `close`, both can be used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from llumlet.contract.types import InstanceMetadata, InstanceStatus, PeersResponse

LOOK_S: Final = 3.0
"""Time for the answer of a directory."""


class LinkLost(Exception):
    """The store cannot be reached, or refused; the text says why."""


class Link(Protocol):
    """The way to one store. Used by one task, one exchange at a time."""

    name: str
    """The store's name for logs: without a password."""
    min_interval_s: float
    """Least time between pushes of an instance whose load changes all the time; the first after a pause goes at
    once."""

    async def open(self, metadata: InstanceMetadata, ended: Callable[[], None]) -> None:
        """Connects and introduces the instance. Returns when the store has taken the metadata. `ended` is called if the
        store is seen to end the connection: the next push would raise."""
        ...

    async def push(self, status: InstanceStatus, metadata: Callable[[], InstanceMetadata]) -> None:
        """Returns when the store has taken the status. `metadata` is for stores in which metadata expires."""
        ...

    async def describe(self, metadata: InstanceMetadata) -> None:
        """Replaces the metadata. Returns when the store has taken it."""
        ...

    async def leave(self) -> None:
        """Tells the store that the instance ends."""
        ...

    def abort(self, why: str) -> None:
        """Ends the exchange in progress; it raises `LinkLost`."""
        ...

    async def close(self) -> None:
        """Closes the connection and tells the store nothing."""
        ...


class Abortable:
    """An exchange that another task may end. It cancels the waiting task: gRPC's own `cancel` does not wake a task that
    waits for a connection."""

    def __init__(self) -> None:
        self._aborted = ""
        self._waiting: asyncio.Task[Any] | None = None

    def abort(self, why: str) -> None:
        if self._waiting is not None and not self._aborted:
            self._aborted = why
            self._waiting.cancel()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        self._aborted, self._waiting = "", asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            # Only `abort` cancelled the task, unless others did as well.
            if self._aborted and self._waiting is not None and self._waiting.uncancel() == 0:
                raise LinkLost(self._aborted) from None
            raise
        finally:
            self._waiting = None


class Directory(Protocol):
    """A store that is asked now and then for other instances. It reads a bounded amount whatever the size of the
    cluster, as a thousand API servers ask every few seconds. Belongs to one event loop."""

    async def peers(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        """Instances that could take the requests of `own_ids`; `digest` is that of the last answer, or empty. Raises
        LinkLost, or DecodeError for a malformed answer."""
        ...

    async def close(self) -> None: ...
