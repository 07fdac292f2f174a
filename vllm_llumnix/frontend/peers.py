# SPDX-License-Identifier: Apache-2.0
"""Which other instances may take this one's requests: those that were named, and those that the CMS knows.

The CMS is asked every few seconds, so that what it said last is there when it, or this instance's own engine, is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from llumlet.credentials import Credentials
from llumlet.directory import look_up
from llumlet.report_links import LinkLost
from llumlet.types import Address, InstanceState, InstanceStatus
from vllm_llumnix.reach import Reach

logger = logging.getLogger("vllm.llumnix")

REFRESH_SECONDS = 5.0
MAX_PEERS = 64
"""The freest of them."""
LEAST_ROOM = 0.05
"""Of its KV cache: what counts as room in an engine that is full, which others can be, too."""


class Peers:
    """Of one API server process, on its event loop. `own` are the ids of its own engines."""

    def __init__(
        self,
        named: Sequence[str],
        cms: str,
        own: Callable[[str], bool],
        credentials: Credentials,
        reach: Reach,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._named = tuple(named)
        self._stores = [store.strip() for store in cms.split(",")] if cms else []
        self._own = own
        self._credentials = credentials
        self._reach = reach
        self._clock = clock
        self._known: tuple[str, ...] = ()
        self.room: dict[str, int] = {}
        """Of those that the CMS knows: tokens of KV cache that nothing is waiting for, by address of the llumlet."""
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the CMS did not answer when it was last asked."""

    @property
    def expected(self) -> bool:
        """Whether there may be any, now or later."""
        return bool(self._named or self._stores)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of their llumlets, named ones first, then the freest first."""
        return tuple(dict.fromkeys(self._named + self._known))

    def keep_fresh(self) -> None:
        """Ask the CMS if it was not asked lately. Returns at once."""
        if not self._stores or self._asking is not None or self._clock() - self._asked_at < REFRESH_SECONDS:
            return
        self._asked_at = self._clock()
        self._asking = asyncio.get_running_loop().create_task(self._ask(), name="llumnix-peers")

    def cancel(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        problems = []
        try:
            for store in self._stores:
                try:
                    self._learn(await look_up(store, self._credentials))
                    self.problem = ""
                    return
                except (LinkLost, DecodeError, ValueError) as error:
                    problems.append(str(error))
            if (problem := "; ".join(problems)) != self.problem:
                logger.warning("llumlet: the CMS does not say who could take our requests: %s", problem)
                self.problem = problem
        finally:
            self._asking = None

    def _learn(self, states: list[InstanceState]) -> None:
        """Of those that take requests and can exchange them with ours."""
        digests = {state.metadata.compatibility_digest for state in states if self._own(state.metadata.instance_id)}
        others = [
            state
            for state in states
            if not self._own(state.metadata.instance_id)
            and state.status.schedulable
            and (not digests or state.metadata.compatibility_digest in digests)
        ]
        others.sort(key=lambda state: state.status.num_used_gpu_tokens / max(1, state.status.num_total_gpu_tokens))
        by_address = {str(Address(state.metadata.ip, state.metadata.llumlet_port)): state.status for state in others}
        known = [where for where in by_address if self._reach.why_not_llumlet(where) is None][:MAX_PEERS]
        self._known = tuple(known)
        self.room = {where: _room_of(by_address[where]) for where in known}


def _room_of(status: InstanceStatus) -> int:
    total = status.num_total_gpu_tokens
    taken = status.num_used_gpu_tokens + status.num_uncomputed_tokens_all_waiting_prefills
    return max(total - taken, int(total * LEAST_ROOM))
