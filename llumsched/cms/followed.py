# SPDX-License-Identifier: Apache-2.0
"""A store in another process. While it is unreachable the view stays, ages, and the connection is retried."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from typing import Final

from llumlet.contract.cms.links import LinkLost
from llumlet.process.tasks import end
from llumsched.cluster.view import View

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 2.0


class FollowedStore(ABC):
    """Implements `store.Store`. `name` of the source, for logs."""

    def __init__(self, name: str) -> None:
        self.view = View()
        self.view.connected = False
        self.problem = "not connected yet"
        self.complete = asyncio.Event()
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._retry_s = FIRST_RETRY_S

    @abstractmethod
    async def _follow(self) -> None:
        """Connects, calls `_reached`, and feeds the view until the source is lost. Raises LinkLost then."""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep_following(), name=f"follow {self._name}")

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)
        self.view.connected = False

    async def _keep_following(self) -> None:
        while True:
            try:
                await self._follow()
            except LinkLost as loss:
                self._lost(str(loss))
            except Exception as error:  # noqa: BLE001 - whatever it is: a view that nobody feeds must not look alive
                self._lost(f"{type(error).__name__}: {error}", error)
            await asyncio.sleep(self._retry_s * random.uniform(0.5, 1.5))
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _reached(self) -> None:
        self.view.connected, self.problem, self._retry_s = True, "", FIRST_RETRY_S
        self.view.heard_s = time.monotonic()
        logger.info("Following the CMS at %s", self._name)

    def _lost(self, why: str, fault: Exception | None = None) -> None:
        """Notes the loss. `fault`: an error of this process rather than of the connection."""
        first = self.view.connected or self.problem != why
        self.view.connected, self.problem = False, why
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "The CMS at %s is lost: %s", self._name, why, exc_info=fault)
