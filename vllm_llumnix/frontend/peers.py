# SPDX-License-Identifier: Apache-2.0
"""Other instances that may take this one's requests: the configured ones, and some that the CMS knows.

The CMS is asked every few seconds, so that what it said last is there when it, or this instance's own engine, is not.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from google.protobuf.message import DecodeError

from llumlet.contract.cms.links import Directory, LinkLost
from llumlet.contract.cms.stores import open_directory
from llumlet.contract.types import PeersResponse
from llumlet.process.credentials import Credentials
from llumlet.process.redis_url import split_stores
from vllm_llumnix.wire.addresses import Reach

logger = logging.getLogger("vllm.llumnix")

REFRESH_SECONDS = 5.0
"""Between two questions, spread by a fifth both ways: API servers that were started together ask one after another."""


class Peers:
    """The peers of one API server process, on its event loop. `own_ids` are those of its own engines."""

    def __init__(
        self, named: Sequence[str], cms: str, own_ids: Sequence[str], credentials: Credentials, reach: Reach
    ) -> None:
        self._named = tuple(named)
        self._stores = split_stores(cms)
        self._own_ids = tuple(own_ids)
        self._credentials = credentials
        self._reach = reach
        self._digest = ""
        """The compatibility digest of our engines, by the last answer."""
        self._known: tuple[str, ...] = ()
        self.room: dict[str, int] = {}
        """Room at those that the CMS knows: tokens of KV cache that nothing is waiting for, by address of the
        llumlet."""
        self._asking: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the CMS did not answer when it was last asked."""

    @property
    def expected(self) -> bool:
        """True if there may be any, now or later."""
        return bool(self._named or self._stores)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of their llumlets, named ones first, then the freest first."""
        return tuple(dict.fromkeys(self._named + self._known))

    def keep_fresh(self) -> None:
        """See to it that the CMS is asked from now on. Returns at once."""
        if self._stores and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._keep_asking(), name="llumnix-peers")

    def cancel(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _keep_asking(self) -> None:
        async with AsyncExitStack() as stack:
            directories = []
            for store in self._stores:
                directory = open_directory(store, self._credentials)
                stack.push_async_callback(directory.close)
                directories.append(directory)
            while True:
                await self._ask(directories)
                await asyncio.sleep(REFRESH_SECONDS * random.uniform(0.8, 1.2))

    async def _ask(self, directories: Sequence[Directory]) -> None:
        problems = []
        for directory in directories:
            try:
                self._learn(await directory.peers(self._own_ids, self._digest))
                self.problem = ""
                return
            except (LinkLost, DecodeError, ValueError) as error:
                problems.append(str(error))
        if (problem := "; ".join(problems)) != self.problem:
            logger.warning("llumlet: the CMS does not say who could take our requests: %s", problem)
            self.problem = problem

    def _learn(self, answer: PeersResponse) -> None:
        self._digest = answer.compatibility_digest
        peers = {
            peer.address: peer.room_tokens
            for peer in answer.peers
            if peer.instance_id not in self._own_ids and self._reach.why_not_llumlet(peer.address) is None
        }
        self._known, self.room = tuple(peers), peers
