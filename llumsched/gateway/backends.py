# SPDX-License-Identifier: Apache-2.0
"""The API servers that the gateway knows: the models they serve, and their recent failures."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from yarl import URL

from llumlet.process.addresses import Address
from llumlet.process.tasks import cancel
from llumsched import descriptors
from llumsched.causes import Cause
from llumsched.endpoints import Endpoint
from llumsched.gateway.outliers import Ejection, Limits, Outliers, Pace
from llumsched.model_memory import ModelMemory

_ASK_TIMEOUT_S = 3.0
_MISSES = 2
"""Unanswered questions in a row after which a healthy instance counts as down."""
_UNFINISHED = frozenset(("queued", "in_progress"))
_ASKED_AT_ONCE = 64
"""Largest number of model queries at a time: a thousand connections in one burst would hold up all streams."""
_FORGOTTEN_S = 300.0
"""Seconds after which an instance that only the scheduler named, and that has not answered since, is forgotten."""
_DOUBTED_S = 1.0
"""Shortest time between two probes of an instance that may be at fault."""
_COUNTERS = re.compile(rb"^vllm:(?:prompt_tokens_total|generation_tokens_total|kv_cache_usage_perc)\b.*", re.MULTILINE)
_UNCOUNTED_PATIENCE = 3
"""Factor on the patience with engines whose work cannot be counted."""


class Backend:
    """An API server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address = endpoint.address
        self.models: dict[str, dict[str, Any]] | None = None
        """The model cards by name; None until the instance has answered."""
        self.last_token_s = time.monotonic()
        """When its engine core was last seen to work, on any connection."""
        self.is_down = False
        """True if it hangs, or did not answer the query of its models."""
        self.is_stalled = False
        """True if no token comes although its API server is healthy; ends with the next token."""
        self.answered_s = self.last_token_s
        """When it last told its models."""
        self.num_missed = 0
        """Model queries in a row that it did not answer."""
        self.has_answered = False
        self.doubted_s = -float("inf")
        """When it was last probed for being at fault."""
        self._urls: dict[str, URL] = {}

    def url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.endpoint.url(path))
        return url

    def learn(self, model: str) -> None:
        """Adds a model that the scheduler reports for it."""
        if self.models is not None:
            self.models.setdefault(model, {"id": model, "object": "model"})

    def serves(self, model: str) -> bool:
        """True if it serves the model, or if its models are not known yet."""
        return not model or self.models is None or model in self.models

    def max_model_len(self, model: str) -> int | None:
        """The limit of prompt and output together in tokens, from its model card."""
        limit = ((self.models or {}).get(model) or {}).get("max_model_len")
        return limit if isinstance(limit, int) else None

    def __repr__(self) -> str:
        return f"{self.address}{self.endpoint.base}"


class Backends:
    """All API servers, by address. `refresh` keeps what they serve up to date."""

    def __init__(
        self,
        configured: Collection[Endpoint | Address],
        session: aiohttp.ClientSession,
        limits: Limits,
        headers: Mapping[str, str],
        *,
        is_tls: bool = False,
        models: Collection[str] = (),
    ) -> None:
        """`headers`: for the gateway's own requests to engines. `is_tls`: for engines of which only the address is
        known. `models`: names that are known before an instance serves them."""
        self.names = ModelMemory(time.monotonic, models)
        self.outliers: Outliers[Backend] = Outliers(limits, self.__len__, time.monotonic)
        self.pace: Pace[Backend] = Pace(time.monotonic)
        self._session = session
        self._asked_for_clients = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._headers = headers
        self._is_tls = is_tls
        self._all: dict[Endpoint, Backend] = {}
        self._by_address: dict[Address, Backend] = {}
        self._in_turn: OrderedDict[Backend, None] = OrderedDict()
        """All instances, least recently used first. Gateways begin with different ones."""
        for one in configured:
            self._add(one if isinstance(one, Endpoint) else Endpoint(one, is_tls))
        self._configured = frozenset(self._all)
        self._asked: asyncio.Task[None] | None = None
        self._dying: dict[Backend, asyncio.Task[bool]] = {}
        self._doubted: dict[Backend, asyncio.Task[None]] = {}
        self._accused: Counter[Backend] = Counter()
        """Number of failed requests per instance for which the fault is still open."""
        self.refreshed_s = -float("inf")

    def at(self, address: Address) -> Backend:
        """The instance at this address; the first one if several share it."""
        return self._by_address.get(address) or self._add(Endpoint(address, self._is_tls))

    def _add(self, endpoint: Endpoint) -> Backend:
        backend = self._all[endpoint] = Backend(endpoint)
        self._by_address.setdefault(endpoint.address, backend)
        self._in_turn[backend] = None
        if random.random() < 1 / len(self._all):
            self._in_turn.move_to_end(backend, last=False)
        return backend

    def __iter__(self) -> Iterator[Backend]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def avoids(self, backend: Backend) -> bool:
        """True if the instance gets requests only when there is no other."""
        return backend.is_down or backend.is_stalled or self.outliers.is_out(backend)

    def avoided(self) -> dict[Backend, Ejection]:
        """The instances that are avoided, and why."""
        found = dict(self.outliers.ejected)
        for backend in self._all.values():
            if backend.is_stalled:
                found[backend] = Ejection(Cause.HANG, "its engine core hangs", backend.last_token_s)
            elif backend.is_down:
                found[backend] = Ejection(Cause.UNREACHABLE, "it does not answer", backend.answered_s)
        return found

    def any_in_use(self, model: str) -> bool:
        return any(backend.serves(model) and not self.avoids(backend) for backend in self._all.values())

    def listed(self, model: str) -> bool:
        """True if an instance is known to serve the model."""
        return any(model in (backend.models or ()) for backend in self._all.values())

    def knows(self, model: str) -> bool:
        """True if the model is served, was served recently, or is expected."""
        return model in self.names or self.listed(model)

    @property
    def has_several_models(self) -> bool:
        """True if instances serve different models. The first model of each counts; the others are its adapters."""
        return len({next(iter(backend.models)) for backend in self._all.values() if backend.models}) > 1

    def max_model_len(self, model: str) -> int:
        """The limit of prompt and output together in tokens; 0 if no instance tells it."""
        return max((backend.max_model_len(model) or 0 for backend in self._all.values()), default=0)

    async def has_unfinished(self, instance: str, response_id: str) -> bool:
        """True if an instance is still making this response. Raises the errors of the request."""
        for backend in self._all.values():
            if str(backend) == instance:
                timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
                url = URL(backend.endpoint.url(f"/v1/responses/{response_id}"))
                async with self._session.get(url, headers=self._headers, timeout=timeout) as answer:
                    return answer.status == 200 and (await answer.json()).get("status") in _UNFINISHED
        return False

    def next_for(
        self, model: str, excluded: Collection[Backend] = (), shunned: Collection[Backend] = ()
    ) -> Backend | None:
        """The next instance in turn that serves the model: never an excluded one, a shunned one only if there is no
        other, and avoided ones last."""
        chosen = reserve = last = None
        for backend in self._in_turn:
            if backend in excluded or not backend.serves(model):
                continue
            if self.avoids(backend):
                last = last or backend
            elif backend in shunned:
                reserve = reserve or backend
            else:
                chosen = backend
                break
        chosen = chosen or reserve or last
        if chosen is not None:
            self._in_turn.move_to_end(chosen)
        return chosen

    async def refresh(self) -> None:
        """Asks all instances for their models, once for all callers."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._refresh())
        await asyncio.shield(self._asked)

    async def ask_again(self) -> None:
        """Asks the instances again that did not answer: an engine is known before its API server listens."""
        await self._ask_all([backend for backend in self if backend.is_down or backend.num_missed])

    async def close(self) -> None:
        await cancel(
            *self._dying.values(), *self._doubted.values(), *([self._asked] if self._asked is not None else [])
        )

    async def _refresh(self) -> None:
        await self._ask_all(list(self))
        self.refreshed_s = time.monotonic()

    async def _ask_all(self, backends: Collection[Backend]) -> None:
        places = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def ask(backend: Backend) -> None:
            async with places:
                await self._ask(backend)

        await asyncio.gather(*map(ask, backends))

    async def cards(self, authorization: str) -> dict[str, dict[str, Any]]:
        """The model cards of all instances, each model once. The client's key is passed to instances that want one."""

        async def ask(backend: Backend) -> dict[str, dict[str, Any]]:
            if backend.models is None and authorization and not backend.is_down:
                with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
                    async with self._asked_for_clients:
                        return await self._cards(backend, {"Authorization": authorization}) or {}
            return backend.models or {}

        merged: dict[str, dict[str, Any]] = {}
        for cards in await asyncio.gather(*map(ask, self)):
            merged = cards | merged
        return merged

    async def _cards(self, backend: Backend, headers: Mapping[str, str]) -> dict[str, dict[str, Any]] | None:
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        async with self._session.get(backend.url("/v1/models"), headers=headers, timeout=timeout) as answer:
            if answer.status in (401, 403):
                return None
            answer.raise_for_status()
            document = await answer.json(content_type=None)
        return {card["id"]: card for card in document["data"]}

    async def _ask(self, backend: Backend) -> None:
        try:
            backend.models = await self._cards(backend, self._headers)
            backend.is_down, backend.num_missed, backend.has_answered = False, 0, True
            backend.answered_s = time.monotonic()
            for model in backend.models or ():
                self.names.served(model)
            if backend.is_stalled and backend.models:
                backend.is_stalled = await self._generates(backend, _ASK_TIMEOUT_S) is not True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if descriptors.none_left(error):
                return
            backend.num_missed += 1
            is_refused = isinstance(error, aiohttp.ClientConnectorError)
            if not is_refused and backend.has_answered and backend.num_missed < _MISSES:
                return  # it may be busy for a moment, and so may be the gateway
            backend.is_down = True
            if backend.endpoint not in self._configured and time.monotonic() - backend.answered_s > _FORGOTTEN_S:
                self._forget(backend)
        except (ValueError, KeyError, TypeError):
            backend.models = None

    def _forget(self, backend: Backend) -> None:
        del self._all[backend.endpoint], self._in_turn[backend]
        if self._by_address.get(backend.address) is backend:
            del self._by_address[backend.address]
        self.outliers.forget(backend)
        self.pace.forget(backend)
        del self._accused[backend]

    async def try_ejected(self, backend: Backend) -> None:
        """Has an ejected instance compute one token; if it can, it gets requests again. A refusal passes, since it may
        be for want of a key, unless the instance was ejected for refusing."""
        ejection, status = self.outliers.ejected.get(backend), 500
        try:
            status = await self._status_of_one_token(backend, _ASK_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if descriptors.none_left(error):
                self.outliers.asked(backend, takes=None)
                return
        refuses = ejection is not None and ejection.cause is Cause.REFUSALS
        has_no_completions = status == 404 and bool(backend.models)
        takes = status in (200, 401, 403) or has_no_completions if refuses else status < 500
        self.outliers.asked(backend, takes=takes)

    def accuse(self, backend: Backend) -> None:
        """Notes that a living instance failed a request. Its fault is proven if another instance takes the request;
        after several failures it is probed without waiting for that."""
        self._accused[backend] += 1
        if self._accused[backend] > 1:
            self.doubt(backend)

    def settled(self, backend: Backend, *, is_proven: bool) -> None:
        """Closes the question of whose fault one of these requests was."""
        if self._accused[backend] > 1:
            self._accused[backend] -= 1
        else:
            del self._accused[backend]  # it may be forgotten already
        if not is_proven:
            self.doubt(backend)

    def doubt(self, backend: Backend) -> None:
        """Has an instance that may be at fault compute a token, and ejects it if it cannot."""
        now_s = time.monotonic()
        if backend in self._doubted or self.avoids(backend) or now_s - backend.doubted_s < _DOUBTED_S:
            return
        backend.doubted_s = now_s
        task = self._doubted[backend] = asyncio.create_task(self._try_doubted(backend))
        task.add_done_callback(lambda _: self._doubted.pop(backend, None))

    async def _try_doubted(self, backend: Backend) -> None:
        try:
            status = await self._status_of_one_token(backend, _ASK_TIMEOUT_S)
            why = f"it answered {status} to a request for one token"
        except TimeoutError:
            return  # its queue may be long
        except (aiohttp.ClientError, OSError) as error:
            if descriptors.none_left(error):
                return
            status, why = 500, "it broke off the answer to a request for one token"
        if status >= 500:
            self.outliers.broken(backend, why)

    async def stands_still(self, backend: Backend, limit_s: float, *, if_uncounted: bool = True) -> bool:
        """True if an engine core does nothing for `limit_s`. If it does not count its work, this takes three times as
        long, and only `if_uncounted`.

        The probe is a request for one token. An answer proves that the engine works; without one the engine's counters
        decide, since the request may wait in its queue.
        """
        before = await self._counters(backend, limit_s)
        started_s = time.monotonic()
        generates = await self._generates(backend, limit_s if before else _UNCOUNTED_PATIENCE * limit_s)
        if generates is None:
            await asyncio.sleep(limit_s)  # it will say the same if it is asked again at once
        elif generates:
            backend.last_token_s = time.monotonic()
        if generates is not False or backend.last_token_s > started_s:
            return False
        return (bool(before) or if_uncounted) and before == await self._counters(backend, limit_s)

    async def _counters(self, backend: Backend, limit_s: float) -> list[bytes]:
        """The counters of the engine core's work; empty with `--disable-log-stats`, or if the engine is not vLLM."""
        try:
            timeout = aiohttp.ClientTimeout(total=min(limit_s, _ASK_TIMEOUT_S))
            async with self._session.get(backend.url("/metrics"), timeout=timeout) as answer:
                return _COUNTERS.findall(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError):
            return []

    async def _generates(self, backend: Backend, limit_s: float) -> bool | None:
        """True if a request for one token is answered within `limit_s`; None if it is refused."""
        try:
            return await self._status_of_one_token(backend, limit_s) == 200 or None
        except TimeoutError:
            return False
        except (aiohttp.ClientError, OSError):
            return None

    async def _status_of_one_token(self, backend: Backend, limit_s: float) -> int:
        body: dict[str, Any] = {"prompt": [0], "max_tokens": 1}
        if backend.models:
            body["model"] = next(iter(backend.models))
        timeout = aiohttp.ClientTimeout(total=limit_s)
        async with self._session.post(
            backend.url("/v1/completions"), json=body, headers=self._headers, timeout=timeout
        ) as answer:
            await answer.read()
            return answer.status

    async def has_died(self, backend: Backend) -> bool:
        """True if an instance that just failed a request has gone. Asked once for all its requests."""
        asking = self._dying.get(backend)
        if asking is None:
            asking = self._dying[backend] = asyncio.create_task(self.is_healthy(backend, _ASK_TIMEOUT_S))
            asking.add_done_callback(lambda _: self._dying.pop(backend, None))
        return not await asyncio.shield(asking)

    async def is_healthy(self, backend: Backend, timeout_s: float) -> bool:
        """True if the API server says that it is healthy. If nobody listens there, the instance is marked as down."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(backend.url("/health"), timeout=timeout) as answer:
                await answer.read()
                return answer.status < 500
        except aiohttp.ClientConnectorError as error:
            if descriptors.none_left(error):
                return True
            why = os.strerror(error.errno) if error.errno else str(error)
            self.outliers.failed(backend, Cause.UNREACHABLE, f"{backend.address} cannot be reached: {why}")
            return False
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
