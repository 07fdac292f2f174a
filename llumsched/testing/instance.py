# SPDX-License-Identifier: Apache-2.0
"""One simulated instance: its engine model, its llumlet, its reports; and what a test can do to it."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

from llumlet.credentials import NONE, Credentials
from llumlet.reporter import Reporter
from llumlet.server import RunningServer, serve
from llumlet.tasks import end
from llumlet.types import Address, InstanceMetadata, InstanceStatus
from llumsched.testing.agent import SimulatedAgent
from llumsched.testing.api import SimulatedApi
from llumsched.testing.engine import EngineModel, SimulatedEngine, SimulatedRequest


class SimulatedInstance:
    """An instance that listens on loopback from `start` on, and reports to `cms` if that is not empty.

    `metadata_fields` replace what the metadata would hold. Not started, an instance can be loaded with `submit` all
    the same; its engine stands still. With `api`, it serves an OpenAI API, too (`api_address`).

    To make it fail: `agent.refusals` (method name to reason), `agent.delays` (method name to seconds), `hang`, `kill`,
    `slow_down`; with an API, `refuse` and `cut_off`.
    """

    def __init__(
        self,
        instance_id: str,
        cms: str = "",
        *,
        model: EngineModel | None = None,
        credentials: Credentials = NONE,
        api: bool = False,
        **metadata_fields: Any,
    ) -> None:
        self.id = instance_id
        self.incarnation = uuid.uuid4().hex
        self._model = model or EngineModel()
        self.engine = SimulatedEngine(self._model, self._changed)
        self.agent = SimulatedAgent(self.id, self.incarnation, self.engine, self._drained, credentials)
        self.agent.metadata_fields = metadata_fields
        self.requests: dict[str, SimulatedRequest] = {}
        """Requests submitted here, wherever they run: this is their origin."""
        self.api_address: Address | None = None
        self._api: SimulatedApi | None = None
        if api:
            self._api = SimulatedApi("simulated", self._submit, self.agent.end_request, lambda: self.agent.schedulable)
        self._cms = cms
        self._credentials = credentials
        self._server: RunningServer | None = None
        self._reporter: Reporter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> Address:
        """Address of the llumlet."""
        assert self._server is not None, "not started"
        return self._server.address

    @property
    def metadata(self) -> InstanceMetadata:
        return self.agent.metadata()

    @property
    def status(self) -> InstanceStatus:
        return self.agent.status()

    async def start(self) -> None:
        self._server = await serve(self.agent, credentials=self._credentials)
        self.agent.port = self._server.port
        if self._api is not None:
            self.api_address = await self._api.start()
            self.agent.metadata_fields.setdefault("api_server_port", self.api_address.port)
        self._tasks.append(asyncio.create_task(self.engine.run(), name=f"engine of {self.id}"))
        if self._cms:
            self._reporter = Reporter(self._cms, self.agent.metadata, self.agent.status, self._credentials)
            self._tasks.append(asyncio.create_task(self._reporter.run(), name=f"reports of {self.id}"))

    async def stop(self) -> None:
        """Ends as after SIGTERM: it says good-bye to the CMS. Its requests end with `abort`."""
        if self._reporter is not None:
            await self._reporter.leave()
        await self._end("abort")

    async def kill(self) -> None:
        """Ends as after SIGKILL: connections break, nobody is told. Its requests end with `error`."""
        await self._end("error")

    def hang(self) -> None:
        """Stops the engine's loop; its llumlet lives, and says so."""
        self.engine.goes_on.clear()
        self.engine.note_change()

    def resume(self) -> None:
        self.engine.goes_on.set()
        self.engine.note_change()

    def slow_down(self, times: float) -> None:
        """Makes steps take so many times as long from now on; 1: as they did at first."""
        self.engine.model = dataclasses.replace(self._model, speed=self._model.speed / times)

    def refuse(self, status: int) -> None:
        """Answers every request of its API with this status from now on; 0: as usual."""
        assert self._api is not None
        self._api.status = status

    async def cut_off(self) -> None:
        """Takes its API off the network, and breaks streams. The engine goes on; the CMS hears of it."""
        assert self._api is not None
        await self._api.stop()

    async def reconnect(self) -> None:
        """Opens its API at another port, which the CMS is told."""
        assert self._api is not None
        self.api_address = await self._api.start()
        self.agent.metadata_fields["api_server_port"] = self.api_address.port
        if self._reporter is not None:
            self._reporter.metadata_changed()

    def serve(self, *models: str) -> None:
        """Serves these models from now on, as when an adapter was loaded at run time."""
        self.agent.metadata_fields["served_models"] = models
        if self._reporter is not None:
            self._reporter.metadata_changed()

    def submit(
        self, prompt: int | Sequence[int], max_tokens: int = 16, *, request_id: str = "", external_id: str = ""
    ) -> SimulatedRequest:
        """A request with that prompt, or one of so many tokens. Raises ValueError if the KV cache cannot hold it."""
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
        if self.engine.blocks_of(len(tokens) + max_tokens) > self.engine.model.num_blocks:
            raise ValueError(f"{len(tokens)} + {max_tokens} tokens do not fit into the KV cache")
        external_id = external_id or request_id or f"cmpl-{uuid.uuid4().hex[:12]}"
        request = SimulatedRequest(request_id or f"{external_id}-{uuid.uuid4().hex[:8]}", tokens, max_tokens)
        request.external_id, request.owner = external_id, self.id
        self.agent.remember(request)
        self.requests[request.request_id] = request
        self.engine.add(request)
        return request

    def _submit(self, prompt: Sequence[int], max_tokens: int, client_id: str) -> SimulatedRequest:
        return self.submit(prompt, max_tokens, external_id=client_id)

    def _changed(self) -> None:
        if self._reporter is not None:
            self._reporter.changed()

    async def _drained(self) -> None:
        if self._reporter is not None:
            await self._reporter.leave()

    async def _end(self, reason: str) -> None:
        await end(*self._tasks)
        self._tasks.clear()
        self._reporter = None
        if self._api is not None:
            await self._api.stop()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        for request in self.engine.requests:
            request.end(reason)
