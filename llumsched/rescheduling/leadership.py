# SPDX-License-Identifier: Apache-2.0
"""Leader election among reschedulers by a lease in their Redis.

The leader renews the lease every second; standbys ask as often, and one gets it when it expires or is returned. A
leader measures its lease on its own clock from before each request, so it stops planning before the server admits
another one. Each new leader has a higher term, which llumlets compare (`contract.servicer`): late orders of a former
leader are refused.

A server may lose its memory, or be replaced by a replica without the latest writes (Sentinels). So two may lead for a
while, and the later one must have the higher term whatever a server remembers. Terms are at least the server's time in
microseconds. All tell the server the highest term they know, and a leader with a lower one gets a new one. Each adds a
random number, so that servers with equal memory do not give the same term twice. A leader whose orders are refused for
the term of an unknown leader takes new terms until it has a higher one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from llumlet.contract.cms.redis_reports import Layout
from llumlet.process.redis_client import checked_name, connect, follow_master, reason_of
from llumlet.process.tasks import end, keep_running

_log = logging.getLogger(__name__)
LEASE_S: Final = 3.0
RENEW_S: Final = 1.0
_MOST_DRAWN: Final = 2**16
"""Largest random addition to a term, in microseconds: far less than the promotion of a replica takes."""

_TAKE: Final = """
local holder = redis.call('GET', KEYS[1]) or ARGV[1]
local highest = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[4]))
local term = 0
if holder == ARGV[1] then
  term = tonumber(ARGV[3])
  if term == 0 or term < highest then
    local now = redis.call('TIME')
    term = math.max(highest + 1, now[1] * 1000000 + now[2]) + tonumber(ARGV[5])
    highest = term
  end
  redis.call('SET', KEYS[1], holder, 'PX', ARGV[2])
end
redis.call('SET', KEYS[2], string.format('%.0f', highest))
return {term, holder, highest}
"""
"""Takes or renews the lease. ARGV: who asks, milliseconds, its term if it leads, the highest known term, its random
addition. Numbers are doubles, exact up to 2**53: as microseconds, the year 2255."""
_GIVE_BACK: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""


class _Answer(NamedTuple):
    term: int
    """The new term; 0 if another one leads."""
    holder: str
    highest: int
    """The highest term that the server knows."""


class Lease:
    """A lease, on the loop that calls `start`. `name`: this process's, for people. Raises ValueError for an invalid
    URL."""

    def __init__(self, url: str, name: str = "") -> None:
        self._url, self._layout = url, Layout.of(url)
        self._server = checked_name(url)
        self._me = f"{name or socket.gethostname()}/{os.getpid()}/{os.urandom(4).hex()}"
        self._term = 0
        self._highest = 0
        self._until_s = 0.0
        self._holder = ""
        self._problem = ""
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def term(self) -> int:
        """The term of this process; 0 while it does not lead."""
        return self._term if time.monotonic() < self._until_s else 0

    @property
    def reason(self) -> str:
        """The reason why it does not lead, for people."""
        if self._problem:
            return f"{self._server} does not say who leads: {self._problem}"
        leader = self._holder.rpartition("/")[0]
        return f"{leader} leads" if leader else f"{self._server} has not said who leads"

    def refused(self, term: int) -> None:
        """Gives up a term whose orders a llumlet refused: the llumlet knows a higher one of a leader that no server
        remembers. The next term is higher by the time that has passed."""
        if term == self._term:
            self._term = 0

    async def start(self) -> None:
        self._client = connect(self._url)
        self._take = self._client.register_script(_TAKE)
        self._task = asyncio.create_task(keep_running("the rescheduler's lease", self._keep))

    async def close(self) -> None:
        """Returns the lease, so that a standby need not wait."""
        if self._task is not None:
            await end(self._task)
        if self._client is None:
            return
        if self.term:
            self._until_s = 0.0
            with contextlib.suppress(RedisError, OSError):
                async with asyncio.timeout(LEASE_S):
                    await self._client.register_script(_GIVE_BACK)([self._layout.lease], [self._me])
        await self._client.aclose()

    async def _keep(self) -> None:
        while True:
            asked_s = time.monotonic()
            try:
                answer = await self._ask()
            except (RedisError, OSError) as error:
                self._failed(reason_of(error))
            else:
                self._problem = ""
                self._learn(answer, asked_s)
            await asyncio.sleep(RENEW_S)

    async def _ask(self) -> _Answer:
        drawn = random.randrange(_MOST_DRAWN)
        arguments = [self._me, int(LEASE_S * 1e3), self.term, self._highest, drawn]
        async with asyncio.timeout(LEASE_S):
            await follow_master(self._client)
            term, holder, highest = await self._take([self._layout.lease, self._layout.term], arguments)
        return _Answer(int(term), holder.decode() if isinstance(holder, bytes) else str(holder), int(highest))

    def _failed(self, why: str) -> None:
        level = logging.DEBUG if why == self._problem else logging.WARNING
        _log.log(level, "the lease at %s cannot be asked for: %s", self._server, why)
        self._problem = why

    def _learn(self, answer: _Answer, asked_s: float) -> None:
        led, self._holder, self._highest = self.term, answer.holder, max(self._highest, answer.highest)
        self._term, self._until_s = answer.term, asked_s + LEASE_S if answer.term else 0.0
        if self.term and self.term != led:
            _log.info("this rescheduler leads from now on (term %d)", self._term)
        elif led and not self.term:
            _log.warning("this rescheduler leads no more: %s", self.reason)
