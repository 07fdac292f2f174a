# SPDX-License-Identifier: Apache-2.0
"""Engines that report nothing (lite mode): a static list of API servers, asked again and again what they serve.

One that answers is in the view with its models, and schedulable; one that stops answering stays for a moment, not
schedulable, and leaves it after `_TRIES` questions without an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from llumlet.types import Address, InstanceMetadata, InstanceStatus
from llumsched.cms.view import View

_log = logging.getLogger(__name__)
_TRIES: Final = 3
_MOST_BYTES: Final = 1 << 20


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(slots=True)
class _Backend:
    address: Address
    num_lives: int = 0
    num_failures: int = _TRIES
    num_answers: int = 0

    @property
    def instance_id(self) -> str:
        return str(self.address)


class Backends:
    """Feeds a view, as a store does."""

    def __init__(self, endpoints: Iterable[Address], *, interval_s: float = 1.0, timeout_s: float = 2.0) -> None:
        self.view = View()
        self.problem = ""
        self.complete = asyncio.Event()
        self._backends = [_Backend(address) for address in dict.fromkeys(endpoints)]
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Waits for one round of answers, so that whoever is up is known when requests come."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        await asyncio.gather(*(self._ask(self._session, backend) for backend in self._backends))
        self.complete.set()
        self._tasks = [asyncio.create_task(self._keep_asking(self._session, backend)) for backend in self._backends]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _keep_asking(self, session: aiohttp.ClientSession, backend: _Backend) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._ask(session, backend)

    async def _ask(self, session: aiohttp.ClientSession, backend: _Backend) -> None:
        models = None
        with suppress(aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            async with session.get(f"http://{backend.address}/v1/models") as answer:
                if answer.status == 200:
                    models = msgspec.json.decode(await answer.content.read(_MOST_BYTES), type=_Models)
        if models is not None and models.data:
            self._answered(backend, models.data)
        else:
            self._silent(backend)

    def _answered(self, backend: _Backend, models: list[_Model]) -> None:
        if backend.num_failures >= _TRIES:
            backend.num_lives += 1
            _log.info("engine %s serves %s", backend.address, ", ".join(model.id for model in models))
        backend.num_failures = 0
        self.view.put_metadata(
            InstanceMetadata(
                instance_id=backend.instance_id,
                incarnation=str(backend.num_lives),
                instance_type="neutral",
                ip=backend.address.host,
                api_server_port=backend.address.port,
                model=models[0].id,
                served_models=[model.id for model in models],
                max_model_len=max((model.max_model_len or 0 for model in models), default=0),
            )
        )
        self._say(backend, schedulable=True)

    def _silent(self, backend: _Backend) -> None:
        backend.num_failures += 1
        if backend.num_failures == _TRIES:
            _log.warning("engine %s does not answer", backend.address)
            self.view.remove(backend.instance_id)
        elif backend.num_failures < _TRIES:
            self._say(backend, schedulable=False)

    def _say(self, backend: _Backend, *, schedulable: bool) -> None:
        backend.num_answers += 1
        self.view.put_status(
            InstanceStatus(
                instance_id=backend.instance_id,
                incarnation=str(backend.num_lives),
                update_id=backend.num_answers,
                timestamp_ms=int(time.time() * 1e3),
                schedulable=schedulable,
            )
        )
