# SPDX-License-Identifier: Apache-2.0
"""Which of several reschedulers plans: one at a time, by a lease in the Redis that they share.

Who holds the lease renews it every second; the others ask as often, and one of them has it as soon as it has run out,
or was given back. A holder counts its time from before it asked, by its own clock: it stops planning before the server
lets another one begin. Each new holder gets a higher term, which llumlets compare (`llumlet.terms`): what a holder
ordered before it was stopped, and says when it goes on, is refused. Terms begin at the server's time, so that they also
rise when it has lost its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from llumlet.redis_client import checked_name, connect, follow_master
from llumlet.tasks import keep_running

_log = logging.getLogger(__name__)
LEASE_S: Final = 3.0
RENEW_S: Final = 1.0
_KEY: Final = "llumnix:rescheduler"
_TERM_KEY: Final = "llumnix:rescheduler_term"

_TAKE: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return {0, holder}
end
if not holder then
  local now = redis.call('TIME')
  local last = tonumber(redis.call('GET', KEYS[2]) or '0')
  local term = math.max(last + 1, now[1] * 1000 + math.floor(now[2] / 1000))
  redis.call('SET', KEYS[2], string.format('%d', term))
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {tonumber(redis.call('GET', KEYS[2])), ARGV[1]}
"""
_GIVE_BACK: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""


class _Answer(NamedTuple):
    term: int
    """0: another one has it."""
    holder: str


class Lease:
    """On the event loop that calls `start`. `name`: of this process, for people. Raises ValueError for a bad URL."""

    def __init__(self, url: str, name: str = "") -> None:
        self._url = url
        self._server = checked_name(url)
        self._me = f"{name or socket.gethostname()}/{os.getpid()}/{os.urandom(4).hex()}"
        self._term = 0
        self._until_s = 0.0
        self._holder = ""
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def term(self) -> int:
        """0 while this one does not lead."""
        return self._term if time.monotonic() < self._until_s else 0

    @property
    def reason(self) -> str:
        """Why it does not lead, when it does not; for people."""
        leader = self._holder.rpartition("/")[0]
        return f"{leader} leads" if leader else f"{self._server} has not said who leads"

    async def start(self) -> None:
        self._client = connect(self._url)
        self._take = self._client.register_script(_TAKE)
        self._task = asyncio.create_task(keep_running("the rescheduler's lease", self._keep))

    async def close(self) -> None:
        """Gives it back, so that another one need not wait."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._client is None:
            return
        if self.term:
            self._until_s = 0.0
            with contextlib.suppress(RedisError, OSError):
                await self._client.register_script(_GIVE_BACK)([_KEY], [self._me])
        await self._client.aclose()

    async def _keep(self) -> None:
        while True:
            asked_s = time.monotonic()
            try:
                answer = await self._ask()
            except (RedisError, OSError) as error:
                _log.debug("the lease at %s cannot be asked for: %s", self._server, error)
            else:
                self._learn(answer, asked_s)
            await asyncio.sleep(RENEW_S)

    async def _ask(self) -> _Answer:
        async with asyncio.timeout(LEASE_S):
            await follow_master(self._client)
            term, holder = await self._take([_KEY, _TERM_KEY], [self._me, int(LEASE_S * 1e3)])
        return _Answer(int(term), holder.decode() if isinstance(holder, bytes) else str(holder))

    def _learn(self, answer: _Answer, asked_s: float) -> None:
        led, self._holder = self.term, answer.holder
        self._term, self._until_s = answer.term, asked_s + LEASE_S if answer.term else 0.0
        if self.term and not led:
            _log.info("this rescheduler leads from now on (term %d)", self._term)
        elif led and not self.term:
            _log.warning("this rescheduler leads no more: %s", self.reason)
