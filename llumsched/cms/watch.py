# SPDX-License-Identifier: Apache-2.0
"""The embedded CMS of another scheduler process, watched: for commands, and for schedulers beside the first.

Who falls silent is found out at the other end; here an instance leaves when that end says so. A lost connection is
made anew; what is told at its begin replaces what was known.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any, Final, cast

from grpc import aio

from llumlet.client import failure_of
from llumlet.credentials import NONE, Credentials
from llumlet.proto.llumlet_pb2_grpc import CmsStub
from llumlet.tasks import end
from llumlet.types import Address, ViewChange, WatchRequest
from llumsched.cluster.view import View

logger = logging.getLogger(__name__)

SILENCE_S: Final = 5.0
"""Time without a change or a beat after which the connection is given up."""
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 2.0
_CHECK_S: Final = 0.5


class WatchStore:
    """A CMS that is watched. `problem` says why its process cannot be reached, while `view.connected` is false."""

    def __init__(self, address: Address, credentials: Credentials = NONE) -> None:
        self.view = View()
        self.view.connected = False
        self.problem = "not connected yet"
        self.complete = asyncio.Event()
        """Set when everything that the other end knew has been read once."""
        self._address = address
        self._credentials = credentials
        self._task: asyncio.Task[None] | None = None
        self._call: Any = None
        self._heard_s = 0.0
        self._retry_s = FIRST_RETRY_S

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep_watching(), name=f"watch {self._address}")

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)

    async def _keep_watching(self) -> None:
        checker = asyncio.create_task(self._check(), name=f"watch {self._address} for silence")
        try:
            while True:
                try:
                    await self._watch()
                    self._lost("the stream has ended")
                except aio.AioRpcError as error:
                    self._lost(failure_of(error, str(self._address)).detail)
                except asyncio.CancelledError:
                    if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                        raise
                    self._lost(f"nothing was heard for {SILENCE_S:g} s")
                except Exception as error:  # noqa: BLE001 - whatever it is: a view that nobody feeds must not look alive
                    self._lost(f"{type(error).__name__}: {error}", error)
                await asyncio.sleep(self._retry_s * random.uniform(0.5, 1.5))
                self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        finally:
            self.view.connected = False
            await end(checker)

    async def _watch(self) -> None:
        channel = self._credentials.channel(self._address)
        missing: set[str] | None = set(self.view)
        self._heard_s = time.monotonic()
        try:
            self._call = CmsStub(channel).Watch(WatchRequest(), metadata=self._credentials.call_metadata)
            async for change in self._call:
                self._heard_s = self.view.heard_s = time.monotonic()
                if not self.view.connected:
                    self.view.connected, self.problem, self._retry_s = True, "", FIRST_RETRY_S
                    logger.info("Watching the CMS at %s", self._address)
                missing = self._apply(change, missing)
        finally:
            self._call = None
            await channel.close(None)

    def _apply(self, change: ViewChange, missing: set[str] | None) -> set[str] | None:
        """Applies a change. `missing`: who was known and has not been told of here yet; None after the first part."""
        match change.WhichOneof("change"):
            case "instance":
                state = change.instance
                self.view.put_metadata(state.metadata)
                if state.HasField("status"):
                    self.view.put_status(state.status, state.age_s)
                if missing is not None:
                    missing.discard(state.metadata.instance_id)
            case "left" if change.fell_silent:
                self.view.lose(change.left)
            case "left":
                self.view.remove(change.left)
            case "complete":
                for instance_id in missing or ():
                    self.view.remove(instance_id)
                missing = None
                self.complete.set()
        return missing

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            if self._call is not None and time.monotonic() - self._heard_s > SILENCE_S:
                self._call.cancel()

    def _lost(self, why: str, fault: Exception | None = None) -> None:
        """Notes the loss. `fault`: an error of this process, not of the connection."""
        first = self.view.connected or self.problem != why
        self.view.connected, self.problem = False, why
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "The CMS at %s is lost: %s", self._address, why, exc_info=fault)
