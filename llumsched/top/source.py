# SPDX-License-Identifier: Apache-2.0
"""The data of `llumnix top`: instances from the CMS, moves from the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

import aiohttp

from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.tasks import cancel
from llumsched.cms.store import open_store
from llumsched.scheduler_access import IN_CLEAR, SchedulerAccess
from llumsched.summary import summary

POLL_S: Final = 0.5
CALL_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Glance:
    """A snapshot: `instances` by id as in `llumsched.summary`, with `age_s`; `moves` as the rescheduler records them,
    oldest first, or None without a scheduler to ask."""

    connected: bool
    age_s: float
    instances: list[dict[str, Any]]
    moves: list[dict[str, Any]] | None
    problems: tuple[str, ...] = field(default=())
    """Sources that cannot be reached now, a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        return {"at_s": time.time()} | asdict(self)


class Source:
    """Reads the sources inside `async with`. Unreachable sources are reported and tried again."""

    def __init__(
        self,
        cms: str,
        scheduler: Address | None = None,
        credentials: Credentials = NONE,
        access: SchedulerAccess = IN_CLEAR,
    ) -> None:
        """Raises ValueError if `cms` is not the URL of a store."""
        self._store = open_store(cms, credentials)
        self._cms = cms
        self._scheduler = scheduler
        self._access = access
        self._moves: list[dict[str, Any]] = []
        self._moves_problem = ""
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._store.start()
        if self._scheduler is not None:
            self._task = asyncio.create_task(self._poll(self._scheduler), name="top")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await cancel(self._task)
        await self._store.close()

    async def first(self, timeout_s: float) -> None:
        """Waits until both have answered, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._store.complete.wait()
                if self._scheduler is not None:
                    await self._asked.wait()

    def snapshot(self) -> Glance:
        view, now_s = self._store.view, time.monotonic()
        instances = []
        for name in sorted(view):
            shown = summary(view[name])
            del shown["received_s"]
            instances.append(shown | {"age_s": view[name].age_s(now_s)})
        problems = [] if view.connected else [f"the CMS {self._cms} is not reached{self._why()}"]
        problems += [self._moves_problem] if self._moves_problem else []
        moves = self._moves if self._scheduler is not None else None
        return Glance(view.connected, view.age_s, instances, moves, tuple(problems))

    def _why(self) -> str:
        return f": {self._store.problem}" if self._store.problem else ""

    async def _poll(self, scheduler: Address) -> None:
        url = self._access.url(scheduler, "/debug/rescheduling")
        async with self._access.session(CALL_S) as session:
            while True:
                try:
                    async with session.get(url, headers=self._access.headers) as answer:
                        answer.raise_for_status()
                        self._moves = _moves(await answer.json())
                        self._moves_problem = ""
                except aiohttp.ClientResponseError as error:
                    why = "no rescheduler runs in it" if error.status == 404 else f"it answers {error.status}"
                    self._moves_problem = f"no moves from the scheduler {scheduler}: {why}"
                except aiohttp.ClientConnectorError as error:
                    self._moves_problem = f"no moves from the scheduler {scheduler}: {error.strerror}"
                except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
                    self._moves_problem = f"no moves from the scheduler {scheduler}: {error or type(error).__name__}"
                self._asked.set()
                await asyncio.sleep(POLL_S)


def _moves(document: Any) -> list[dict[str, Any]]:
    moves = document.get("moves") if isinstance(document, dict) else None
    return [move for move in moves or [] if isinstance(move, dict)]
