# SPDX-License-Identifier: Apache-2.0
"""The scheduler's HTTP API, seen from the gateway: one of several schedulers is asked, the next one if it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec

from llumlet.types import Address
from llumsched.gateway.config import Config
from llumsched.gateway.errors import UnknownModel

_log = logging.getLogger(__name__)
_AWAY_S: Final = 1.0
"""After a failure the scheduler is left alone for so long; then one request tries it again."""
_RELEASE_TRIES: Final = 3
_RELEASE_PAUSE_S: Final = 0.5
_MOST_RELEASES: Final = 10_000
_CLIENT_TIMEOUT_S: Final = 3.0
_NOT_FOUND: Final = "endpoint not found"


class _Metadata(msgspec.Struct):
    ip: str = ""
    api_server_port: int = 0


class _Instance(msgspec.Struct):
    metadata: _Metadata


class _View(msgspec.Struct):
    """What is read of `/debug/view`."""

    instances: dict[str, _Instance] = {}


_VIEW = msgspec.json.Decoder(_View)


class SchedulerAway(Exception):
    """No scheduler gave an answer that can be used."""


class NoEndpoint(Exception):
    """The scheduler has no instance that would take the request now."""


class NotScheduled(Exception):
    """The scheduler is there and does not place this one: it knows no instance at all, or none that the prompt fits.
    An engine will say what is wrong.
    """


class SchedulerClient:
    def __init__(self, config: Config, session: aiohttp.ClientSession) -> None:
        self._endpoints = config.scheduler_endpoints
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        if config.service_token:
            self._headers["Authorization"] = config.service_token
        self._timeout = aiohttp.ClientTimeout(total=config.schedule_timeout_s)
        self._current = 0
        self._away_until_s = 0.0
        self._releases: deque[bytes] = deque(maxlen=_MOST_RELEASES)
        self._releasing: asyncio.Task[None] | None = None
        self.is_away = False

    @property
    def address(self) -> Address:
        return self._endpoints[self._current]

    async def schedule(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The scheduling result. Raises SchedulerAway, NoEndpoint, NotScheduled, UnknownModel."""
        now_s = time.monotonic()
        if self.is_away and now_s < self._away_until_s:
            raise SchedulerAway("The scheduler did not answer lately.")
        self._away_until_s = now_s + _AWAY_S  # if it is away, one request at a time finds out
        body = msgspec.json.encode(request)
        reason: Exception | None = None
        for _ in self._endpoints:
            try:
                status, text = await self._post("/schedule", body, self._timeout)
                result = self._result(status, text)
            except (aiohttp.ClientError, TimeoutError, OSError, SchedulerAway) as error:
                reason = error
                self._current = (self._current + 1) % len(self._endpoints)
                continue
            if self.is_away:
                _log.warning("the scheduler %s is back", self.address)
                self.is_away = False
            return result
        if not self.is_away:
            _log.warning(
                "the scheduler is away (%s); requests go round the instances known", str(reason) or "no answer in time"
            )
            self.is_away = True
        raise SchedulerAway(str(reason))

    def _result(self, status: int, text: bytes) -> list[dict[str, Any]]:
        if status == 429:
            self.is_away = False
            raise NoEndpoint(text.decode(errors="replace"))
        if status == 404 and _NOT_FOUND in text.decode(errors="replace"):
            self.is_away = False
            raise UnknownModel("No instance serves that model.")
        said = f"{self.address} answered {status}: {text[:200].decode(errors='replace')}"
        if status == 400:
            self.is_away = False
            raise NotScheduled(said)
        if status != 200:
            raise SchedulerAway(said)
        try:
            result: list[dict[str, Any]] = msgspec.json.decode(text)["scheduling_result"]
            if result and all(instance["endpoint"]["host"] and instance["endpoint"]["port"] for instance in result):
                return result
        except (msgspec.DecodeError, KeyError, TypeError):
            pass
        raise SchedulerAway(f"{self.address} answered without an endpoint")

    async def instances(self) -> list[Address]:
        """The API servers of all instances that the scheduler knows; none if it does not say."""
        try:
            url = f"http://{self.address}/debug/view"
            limit = aiohttp.ClientTimeout(total=_CLIENT_TIMEOUT_S)
            async with self._session.get(url, headers=self._headers, timeout=limit) as answer:
                view = _VIEW.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return []
        found = (instance.metadata for instance in view.instances.values())
        return [Address(one.ip, one.api_server_port) for one in found if one.ip and one.api_server_port]

    def release(self, request: dict[str, Any]) -> None:
        """Told in the background, in order, three times at most."""
        self._releases.append(msgspec.json.encode(request))
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release())

    async def report(self, reports: Sequence[dict[str, Any]]) -> None:
        """Lost if the scheduler is away: the next one tells it again."""
        try:
            timeout = aiohttp.ClientTimeout(total=_CLIENT_TIMEOUT_S)
            await self._post("/report", msgspec.json.encode(reports), timeout)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.debug("a report was lost: %s", error)

    async def close(self) -> None:
        """Waits for the releases under way, if the scheduler is there."""
        if self._releasing is None:
            return
        if self.is_away:
            self._releasing.cancel()
        await asyncio.wait([self._releasing], timeout=_CLIENT_TIMEOUT_S)
        self._releasing.cancel()
        await asyncio.gather(self._releasing, return_exceptions=True)

    async def _release(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_CLIENT_TIMEOUT_S)
        while self._releases:
            body = self._releases.popleft()
            for last in range(_RELEASE_TRIES):
                try:
                    await self._post("/release", body, timeout)
                    break
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    if last == _RELEASE_TRIES - 1:
                        _log.debug("a release was lost: %s", error)
                    else:
                        await asyncio.sleep(_RELEASE_PAUSE_S)

    async def _post(self, path: str, body: bytes, limit: aiohttp.ClientTimeout) -> tuple[int, bytes]:
        url = f"http://{self.address}{path}"
        async with self._session.post(url, data=body, headers=self._headers, timeout=limit) as answer:
            return answer.status, await answer.read()
