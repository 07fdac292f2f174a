# SPDX-License-Identifier: Apache-2.0
"""Engines that do not report (lite mode): a static list of API servers that are asked for their models periodically.

An engine that answers is in the view with its models, and schedulable. After two unanswered questions it is not
schedulable, and after `_TRIES` it leaves the view. The log has the reason.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process import tls
from llumlet.process.addresses import Address
from llumlet.process.tasks import cancel
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.view import View
from llumsched.contract import decode
from llumsched.endpoints import Endpoint

_log = logging.getLogger(__name__)
_TRIES: Final = 3
_MISSES: Final = 2
"""Unanswered questions in a row after which an engine is not schedulable."""
_MOST_BYTES: Final = 8 << 20
"""Largest answer: some ten thousand models and adapters."""

API_KEY_VARIABLE: Final = "VLLM_API_KEY"
"""Variable with the engines' key, as for `vllm serve`."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(slots=True)
class _Backend:
    endpoint: Endpoint
    infer_type: InferType
    num_lives: int = 0
    num_failures: int = _TRIES
    num_answers: int = 0
    problem: str = ""
    """The reason why it is not in the view."""

    @property
    def instance_id(self) -> str:
        """The address, with the path, as several engines may share an address."""
        return f"{self.endpoint.address}{self.endpoint.base}"


class StaticEngines:
    """Feeds a view, as a store does. `endpoints`: the infer type of each engine. `api_key`: "" if they want none."""

    def __init__(
        self,
        endpoints: Mapping[Endpoint | Address, InferType],
        *,
        api_key: str = "",
        ca_file: str = "",
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
    ) -> None:
        self.view = View()
        self.problem = ""
        self.complete = asyncio.Event()
        self._backends = [
            _Backend(one if isinstance(one, Endpoint) else Endpoint(one), infer_type)
            for one, infer_type in endpoints.items()
        ]
        has_tls = any(backend.endpoint.is_tls for backend in self._backends)
        self._tls = tls.client_context(ca_file) if has_tls else None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Waits for one round of answers, so that running engines are known when requests come."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        await asyncio.gather(*(self._ask(self._session, backend) for backend in self._backends))
        self.complete.set()
        self._tasks = [asyncio.create_task(self._keep_asking(self._session, backend)) for backend in self._backends]

    async def close(self) -> None:
        await cancel(*self._tasks)
        if self._session is not None:
            await self._session.close()

    async def _keep_asking(self, session: aiohttp.ClientSession, backend: _Backend) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._ask(session, backend)

    async def _ask(self, session: aiohttp.ClientSession, backend: _Backend) -> None:
        try:
            models = await _models(session, backend.endpoint, self._tls)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._failed(backend, f"does not answer: {str(error) or type(error).__name__}")
        except ValueError as error:
            self._failed(backend, str(error))
        else:
            self._answered(backend, models)

    def _answered(self, backend: _Backend, models: list[_Model]) -> None:
        if backend.num_failures >= _TRIES:
            backend.num_lives += 1
            _log.info("engine %s serves %s", backend.instance_id, ", ".join(model.id for model in models))
        backend.num_failures, backend.problem = 0, ""
        self.view.put_metadata(
            InstanceMetadata(
                instance_id=backend.instance_id,
                incarnation=str(backend.num_lives),
                instance_type=backend.infer_type,
                ip=backend.endpoint.address.host,
                api_server_port=backend.endpoint.address.port,
                model=models[0].id,
                served_models=[model.id for model in models],
                max_model_len=max((model.max_model_len or 0 for model in models), default=0),
            )
        )
        self._say(backend, schedulable=True)

    def _failed(self, backend: _Backend, why: str) -> None:
        backend.num_failures += 1
        if backend.num_failures < _TRIES:
            self._say(backend, schedulable=backend.num_failures < _MISSES)
            return
        if backend.problem != why:
            backend.problem = why
            _log.warning("engine %s gets no requests: it %s", backend.instance_id, why)
        self.view.remove(backend.instance_id)

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


async def _models(session: aiohttp.ClientSession, endpoint: Endpoint, context: ssl.SSLContext | None) -> list[_Model]:
    """The models that an engine serves, at least one. Raises ValueError for any other answer."""
    async with session.get(endpoint.url("/v1/models"), ssl=context or True) as answer:
        if answer.status in (401, 403):
            raise ValueError(f"wants its --api-key for /v1/models: set {API_KEY_VARIABLE} for the scheduler too")
        if answer.status != 200:
            raise ValueError(f"answers /v1/models with status {answer.status}")
        body = await _read(answer.content)
    try:
        models = decode(body, _Models).data
    except ValueError as error:
        raise ValueError(f"answers /v1/models with what is no list of models: {error}") from error
    if not models:
        raise ValueError("serves no model")
    return models


async def _read(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > _MOST_BYTES:
            raise ValueError(f"answers /v1/models with more than {_MOST_BYTES >> 20} MiB")
    return bytes(body)
