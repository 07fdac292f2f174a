# SPDX-License-Identifier: Apache-2.0
"""Which of several reschedulers plans: one at a time, by a lease in the Redis that they share.

Who holds the lease renews it every second; the others ask as often, and one of them has it as soon as it has run out,
or was given back. A holder counts its time from before it asked, by its own clock: it stops planning before the server
lets another one begin. Each new holder gets a higher term, which llumlets compare (`contract.servicer`): what a holder
ordered before it was stopped, and says when it goes on, is refused.

A server may lose its memory, and one that takes its place may lack the last lease and the last terms: Sentinels promote
a replica, which gets writes a moment after they were answered. So two may lead for a while, and the one that came later
must have the higher term whatever a server remembers. Terms are at least the server's time, in microseconds. Everybody
tells the server the highest one it has heard of, and a holder whose own is lower gets a new one. Servers with the same
memory must not give two holders the same term: each adds a number that it draws. And a holder whose orders are refused,
for the term of a leader that nobody who is left has heard of, takes new ones until it has a higher one.
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

from llumlet.contract.cms.redis_layout import Layout
from llumlet.process.redis_client import checked_name, connect, follow_master, reason_of
from llumlet.process.tasks import end, keep_running

_log = logging.getLogger(__name__)
LEASE_S: Final = 3.0
RENEW_S: Final = 1.0
_MOST_DRAWN: Final = 2**16
"""Limit of what a holder draws for its term, in microseconds: far less than it takes to promote a replica."""

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
"""Takes or renews the lease. ARGV: who asks, for how many milliseconds, its term if it leads, the highest that it has
heard of, what it has drawn. Numbers are doubles: exact up to 2**53, which as microseconds is the year 2255."""
_GIVE_BACK: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""


class _Answer(NamedTuple):
    term: int
    """The term that was given; 0: another one has it."""
    holder: str
    highest: int
    """Highest of the terms that the server knows."""


class Lease:
    """A lease, on the loop that calls `start`. `name`: this process's, for people. Raises ValueError for a bad URL."""

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
        """The term of this one; 0 while it does not lead."""
        return self._term if time.monotonic() < self._until_s else 0

    @property
    def reason(self) -> str:
        """Why this one does not lead, when it does not; for people."""
        if self._problem:
            return f"{self._server} does not say who leads: {self._problem}"
        leader = self._holder.rpartition("/")[0]
        return f"{leader} leads" if leader else f"{self._server} has not said who leads"

    def refused(self, term: int) -> None:
        """Gives up a term of orders that a llumlet refused: it knows a higher one, of a leader whom no server
        remembers. The next term is nearer to it by the time that has passed."""
        if term == self._term:
            self._term = 0

    async def start(self) -> None:
        self._client = connect(self._url)
        self._take = self._client.register_script(_TAKE)
        self._task = asyncio.create_task(keep_running("the rescheduler's lease", self._keep))

    async def close(self) -> None:
        """Gives the lease back, so that another one need not wait."""
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
