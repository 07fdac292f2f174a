# SPDX-License-Identifier: Apache-2.0
"""The gateway's client for the HTTP API of several schedulers: one is asked, and the next one if it fails.

Schedulers know nothing of each other, so reports of a request go to the scheduler that placed it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import ssl
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import aiohttp

from llumlet.process.addresses import Address
from llumlet.process.secret_files import Bearer
from llumlet.process.tasks import cancel
from llumlet.process.tls import client_context
from llumsched.contract import (
    MODEL_AWAY,
    MODEL_NEEDED,
    NOT_IN_TIME,
    Attaining,
    Complaining,
    Instances,
    LLMInstance,
    Placing,
    Report,
    SchedulingRequest,
    decode,
    encode,
)
from llumsched.endpoints import Endpoint
from llumsched.gateway.config import Config
from llumsched.gateway.errors import InvalidRequest, UnknownModel

_log = logging.getLogger(__name__)
_AWAY_S: Final = 1.0
"""Shortest time for which a scheduler that failed a request is not asked."""
_ASK_AGAIN_S: Final = 3.0
"""Time after a failed request after which one request asks a scheduler again that answers only probes."""
_PROBE_S: Final = 0.3
"""Time between two probes of each scheduler."""
_PROBE_LIMIT_S: Final = 0.6
_MOST_SILENT: Final = 2
"""Unanswered probes in a row after which a scheduler counts as hung; this process may have stood still during one."""
_RELEASE_TRIES: Final = 3
_RELEASE_PAUSE_S: Final = 0.5
_RELEASES_AT_ONCE: Final = 256
_MOST_RELEASES: Final = 100_000
"""Largest number of releases that wait to be sent, some 30 MB. Schedulers forget unreleased requests in time."""
_CLIENT_TIMEOUT_S: Final = 3.0
_LATE_S: Final = 30.0
"""Time for which an abandoned request for a place may still be answered."""
_MOST_ABANDONED: Final = 1000
_SHORT: Final = aiohttp.ClientTimeout(total=_CLIENT_TIMEOUT_S)
_READY_S: Final = 1.0
_MOST_WHY_CHARACTERS: Final = 500
_NOT_FOUND: Final = "endpoint not found"
_WARMING: Final = b"warming"


class SchedulerAway(Exception):
    """Raised if no scheduler gave a usable answer."""


class SchedulerWarming(Exception):
    """Raised while the scheduler does not know enough of the cluster yet."""


class NoEndpoint(Exception):
    """Raised if no instance would take the request now."""


class NotInTime(NoEndpoint):
    """Raised if the request would miss its objectives and may not wait."""


class ModelAway(NoEndpoint):
    """Raised if no instance serves a known model now."""


class NotScheduled(Exception):
    """Raised if the scheduler does not place this request: it knows no instance, or the prompt fits none. The engine's
    answer will give the reason."""


@dataclass(frozen=True, slots=True)
class SchedulerAnswer:
    """The place that a scheduler chose for a request."""

    scheduler: Address
    request: SchedulingRequest
    result: list[LLMInstance]
    """Instances, at least one."""


class SchedulerClient:
    def __init__(self, config: Config, session: aiohttp.ClientSession) -> None:
        headers: Mapping[str, str] = Bearer(config.service_token_file, "service token")
        if config.service_token:
            headers = {"Authorization": config.service_token}
        self._timeout_s = config.schedule_timeout_s
        tls = client_context(config.scheduler_ca_file) if config.scheduler_ca_file else None
        self._schedulers = {
            address: _Scheduler(address, session, headers, tls) for address in config.scheduler_endpoints
        }
        self._in_turn = list(self._schedulers.values())
        self._current = random.randrange(len(self._in_turn)) if self._in_turn else 0
        """Index of the scheduler that answered last. Gateways begin with different ones."""
        self.is_away = False
        """True if no scheduler answered."""
        self._abandoned: set[asyncio.Task[tuple[int, bytes]]] = set()
        """Requests for a place that nobody waits for any more."""
        self._refusal: str | None = None
        self._refusal_s = -float("inf")

    async def schedule(self, request: SchedulingRequest) -> SchedulerAnswer:
        """Asks for a place. Raises SchedulerAway, SchedulerWarming, NoEndpoint, NotScheduled, UnknownModel,
        InvalidRequest."""
        body = encode(request)
        reason: Exception | None = None
        warming: SchedulerWarming | None = None
        first = self._current
        for offset in range(len(self._in_turn)):
            number = (first + offset) % len(self._in_turn)
            scheduler = self._in_turn[number]
            if not (scheduler.answers or scheduler.takes_trial()):
                continue
            try:
                result = _result(scheduler.address, *await self._ask(scheduler, request, body))
            except (aiohttp.ClientError, TimeoutError, OSError, SchedulerAway) as error:
                reason = error
                scheduler.failed()
            except SchedulerWarming as error:
                warming = error
            except (NoEndpoint, NotScheduled, UnknownModel, InvalidRequest):
                self._answered(number)
                raise
            else:
                self._answered(number)
                return SchedulerAnswer(scheduler.address, request, result)
        if warming is not None:
            self.is_away = False
            raise warming
        why = "it did not answer lately" if reason is None else str(reason) or "no answer in time"
        if not self.is_away:
            _log.warning("no scheduler answers (%s); requests go to the known instances in turn", why)
            self.is_away = True
        raise SchedulerAway(why)

    async def watch(self) -> None:
        """Probes all schedulers for ever, so that requests need not find out that one hangs or has returned."""
        while True:
            await asyncio.gather(*(scheduler.probe() for scheduler in self._in_turn))
            await asyncio.sleep(_PROBE_S)

    async def _ask(self, scheduler: _Scheduler, request: SchedulingRequest, body: bytes) -> tuple[int, bytes]:
        """Asks one scheduler. If the answer comes too late, or after the client has left, its place is released."""
        limit = aiohttp.ClientTimeout(total=self._timeout_s + _LATE_S, sock_connect=self._timeout_s)
        asking = asyncio.create_task(scheduler.post("/schedule", body, limit))
        try:
            async with asyncio.timeout(self._timeout_s) as waiting:
                with scheduler.waited_for(waiting):
                    return await asyncio.shield(asking)
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, TimeoutError) and (scheduler.answers or scheduler.unanswered is not None):
                scheduler.unanswered = asking
            self._abandon(asking, scheduler.address, request)
            raise

    def _abandon(self, asking: asyncio.Task[tuple[int, bytes]], scheduler: Address, request: SchedulingRequest) -> None:
        if len(self._abandoned) >= _MOST_ABANDONED:
            asking.cancel()
            return
        self._abandoned.add(asking)
        asking.add_done_callback(lambda _: self._release_late(asking, scheduler, request))

    def _release_late(
        self, asking: asyncio.Task[tuple[int, bytes]], scheduler: Address, request: SchedulingRequest
    ) -> None:
        self._abandoned.discard(asking)
        if asking.cancelled() or asking.exception() is not None:
            return
        with suppress(SchedulerAway, SchedulerWarming, NoEndpoint, NotScheduled, UnknownModel, InvalidRequest):
            self.release(SchedulerAnswer(scheduler, request, _result(scheduler, *asking.result())))

    def _answered(self, number: int) -> None:
        if self.is_away or number != self._current:
            _log.warning("the scheduler %s places requests now", self._in_turn[number].address)
        self._current, self.is_away = number, False
        self._in_turn[number].answered()

    async def instances(self) -> list[Address]:
        """The API servers of all instances that the scheduler knows; empty if it does not tell."""
        try:
            async with self._in_turn[self._current].get("/instances") as answer:
                known = decode(await answer.read(), Instances).instances
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return []
        return [one.endpoint.address for one in known if one.endpoint]

    async def refusal(self) -> str | None:
        """The reason why the scheduler would place nothing now, up to a second old; "" if it would. None if it does not
        tell or is warming up, when requests go round the known instances."""
        now_s = time.monotonic()
        if now_s - self._refusal_s > _READY_S:
            self._refusal_s = now_s
            try:
                async with self._in_turn[self._current].get("/ready") as answer:
                    text = (await answer.text(errors="replace"))[:_MOST_WHY_CHARACTERS]
                    why = None if text.startswith(_WARMING.decode()) else f"the scheduler says: {text}"
                    self._refusal = {200: "", 503: why}.get(answer.status)
            except (aiohttp.ClientError, TimeoutError, OSError):
                self._refusal = None
        return self._refusal

    def release(self, placed: SchedulerAnswer) -> None:
        """Reports in the background, in order, with at most three attempts. Drops unsent reports of the request."""
        request = placed.request
        self._schedulers[placed.scheduler].release(
            SchedulingRequest(
                id=request.id, model=request.model, gateway_id=request.gateway_id, scheduling_result=placed.result
            )
        )

    def report(self, scheduler: Address, reports: Iterable[Report]) -> None:
        """Reports in the background, the newest state of each request only. Reports are lost if the scheduler is away;
        the next one repeats the state."""
        self._schedulers[scheduler].report(reports)

    def tell(self, path: str, newest: Complaining | Attaining) -> None:
        """Tells all schedulers in the background, the newest message of each path only."""
        body = encode(newest)
        for scheduler in self._in_turn:
            scheduler.tell(path, body)

    async def close(self) -> None:
        """Sends the remaining releases for a few seconds."""
        if self._abandoned:
            _, late = await asyncio.wait(self._abandoned, timeout=_CLIENT_TIMEOUT_S)
            await cancel(*late)
        await asyncio.gather(*(scheduler.close() for scheduler in self._in_turn))


class _Scheduler:
    """A scheduler. Messages to it are sent one after another and arrive in order."""

    def __init__(
        self, address: Address, session: aiohttp.ClientSession, headers: Mapping[str, str], tls: ssl.SSLContext | None
    ) -> None:
        self.address = address
        self._endpoint = Endpoint(address, is_tls=tls is not None)
        self._headers = headers
        self._request = functools.partial(session.request, ssl=tls or True)
        self._reports: dict[str, dict[str, Report]] = {}
        """The newest report of each kind, by request."""
        self._releases: deque[bytes] = deque()
        self._num_dropped = 0
        self._newest: dict[str, bytes] = {}
        """The newest unsent message, by path."""
        self._telling: asyncio.Task[None] | None = None
        self.answers = True
        """True if requests ask it, by the last probe and the last request."""
        self.unanswered: asyncio.Task[tuple[int, bytes]] | None = None
        """The pending `/schedule` call that timed out although probes are answered. Until it ends, one request every
        `_ASK_AGAIN_S` asks again, as only one connection may be dead."""
        self._takes_trial = False
        self._ask_again_s = -math.inf
        self._left_alone_until_s = -math.inf
        self._num_silent = 0
        self._limits: set[asyncio.Timeout] = set()
        """Time limits of the requests that wait for it."""

    def failed(self) -> None:
        """Notes that it failed a request."""
        self.answers, now_s = False, time.monotonic()
        self._left_alone_until_s, self._ask_again_s = now_s + _AWAY_S, now_s + _ASK_AGAIN_S

    def answered(self) -> None:
        """Notes that it answered a request."""
        self.answers, self.unanswered, self._takes_trial = True, None, False

    def takes_trial(self) -> bool:
        """True, once, if a request should find out whether it answers again."""
        takes, self._takes_trial = self._takes_trial, False
        if takes:
            self._ask_again_s = time.monotonic() + _ASK_AGAIN_S
        return takes

    @contextmanager
    def waited_for(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Ends the time limit as soon as a probe shows that the scheduler hangs."""
        self._limits.add(limit)
        try:
            yield
        finally:
            self._limits.discard(limit)

    async def probe(self) -> None:
        try:
            async with asyncio.timeout(_PROBE_LIMIT_S), self.get("/healthz") as answer:
                await answer.read()
        except TimeoutError:
            self._num_silent += 1
            if self._num_silent >= _MOST_SILENT:
                self._gone()
        except (aiohttp.ClientError, OSError):
            self._gone()
        else:
            self._num_silent, now_s = 0, time.monotonic()
            if self.unanswered is not None and self.unanswered.done():
                self.unanswered = None
            self.answers = self.answers or (now_s >= self._left_alone_until_s and self.unanswered is None)
            self._takes_trial = self.unanswered is not None and now_s >= self._ask_again_s

    def _gone(self) -> None:
        self.answers = self._takes_trial = False
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def post(self, path: str, body: bytes, limit: aiohttp.ClientTimeout) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **self._headers}
        async with self._request("POST", self._endpoint.url(path), data=body, headers=headers, timeout=limit) as answer:
            return answer.status, await answer.read()

    def get(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._request("GET", self._endpoint.url(path), headers=self._headers, timeout=_SHORT)

    def report(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self._reports.setdefault(report.id, {})[report.kind] = report
        self._tell()

    def release(self, request: SchedulingRequest) -> None:
        self._reports.pop(request.id, None)
        if len(self._releases) < _MOST_RELEASES:
            self._releases.append(encode(request))
        else:
            self._num_dropped += 1
        self._tell()

    def tell(self, path: str, body: bytes) -> None:
        self._newest[path] = body
        self._tell()

    async def close(self) -> None:
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=_CLIENT_TIMEOUT_S)
            await cancel(self._telling)

    def _tell(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_all())

    async def _tell_all(self) -> None:
        while self._newest or self._reports or self._releases:
            if self._newest:
                path, body = self._newest.popitem()
                await self._say(path, body)
            if self._reports:
                reports, self._reports = self._reports, {}
                newest = [report for kinds in reports.values() for report in kinds.values()]
                await self._say("/report", encode(newest))
            if self._releases:
                batch = [self._releases.popleft() for _ in range(min(len(self._releases), _RELEASES_AT_ONCE))]
                await self._release_surely(batch[0] if len(batch) == 1 else b"[" + b",".join(batch) + b"]")
        if self._num_dropped:
            _log.warning(
                "%s was not told of %d ended requests: too many reports were waiting", self.address, self._num_dropped
            )
            self._num_dropped = 0

    async def _say(self, path: str, body: bytes) -> None:
        """Sends once, without a retry: the state is sent again."""
        try:
            await self.post(path, body, _SHORT)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.debug("%s was not told: %s", path, error)

    async def _release_surely(self, body: bytes) -> None:
        for pause_s in (_RELEASE_PAUSE_S,) * (_RELEASE_TRIES - 1) + (0.0,):
            if await self._release(body):
                return
            await asyncio.sleep(pause_s)

    async def _release(self, body: bytes) -> bool:
        try:
            status, text = await self.post("/release", body, _SHORT)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.debug("a release did not reach %s: %s", self.address, error)
            return False
        if status != 200:
            _log.debug("%s answered a release with %d: %s", self.address, status, text[:200])
        return status == 200


def _result(scheduler: Address, status: int, text: bytes) -> list[LLMInstance]:
    """Reads the place from an answer. Raises SchedulerAway, SchedulerWarming, NoEndpoint, NotScheduled, UnknownModel,
    InvalidRequest."""
    if status == 503 and text.startswith(_WARMING):
        raise SchedulerWarming(text.decode(errors="replace"))
    if status == 429:
        said = text.decode(errors="replace")
        kinds = {NOT_IN_TIME: NotInTime, MODEL_AWAY: ModelAway}
        raise next((kind for begins, kind in kinds.items() if said.startswith(begins)), NoEndpoint)(said)
    if status == 404 and _NOT_FOUND in text.decode(errors="replace"):
        raise UnknownModel("No instance serves that model.")
    said = f"{scheduler} answered {status}: {text[:200].decode(errors='replace')}"
    if status == 400 and text.startswith(MODEL_NEEDED.encode()):
        raise InvalidRequest("`model` is needed: several models are served here.")
    if status == 400:
        raise NotScheduled(said)
    if status != 200:
        raise SchedulerAway(said)
    with suppress(ValueError):
        result = decode(text, Placing).scheduling_result
        if result and all(instance.endpoint for instance in result):
            return result
    raise SchedulerAway(f"{scheduler} answered without an endpoint")
