# SPDX-License-Identifier: Apache-2.0
"""A simulated instance: a modelled one on a real clock, with its llumlet, its reports, and the harm that a test can do
to it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from llumlet.contract.cms.reporter import Reporter
from llumlet.contract.server import RunningServer, serve
from llumlet.contract.types import Health, InstanceMetadata, InstanceStatus
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.tasks import end
from llumsim import PS
from llumsim.clock import RealClock
from llumsim.engine.instance import ModelledInstance, described
from llumsim.engine.requests import EngineRequest
from llumsim.engine.step_model import Hardware, engine_model
from llumsim.live.agent import MAX_MOVES, SimulatedAgent
from llumsim.live.api import SimulatedApi
from llumsim.live.world import SimulatedRequest, World
from llumsim.moves.outgoing import MoveWatcher

_TOKENS_PS: Final = PS // 10
"""Time until new tokens alone are reported, as in production."""
_HUNG_S: Final = 2.0
"""Standstill in a step after which an instance reports itself hung."""


class SimulatedInstance(ModelledInstance):
    """An instance that listens on loopback from `start` on, and reports to `cms` if that is not empty.

    `metadata_fields` replace what the metadata would hold. With `api`, it serves an OpenAI API, too (`api_address`).
    It moves requests to others of the same `world`.

    To make it fail: `agent.refusals` (method name to reason), `agent.delays` (method name to seconds), `hang`, `kill`,
    `slow_down`; with an API, `refuse` and `cut_off`.
    """

    clock: RealClock

    def __init__(
        self,
        instance_id: str,
        cms: str = "",
        *,
        model: Hardware | None = None,
        credentials: Credentials = NONE,
        api: bool = False,
        world: World | None = None,
        **metadata_fields: Any,
    ) -> None:
        model = model or engine_model()
        own = {
            "instance_id": instance_id,
            "unit_id": instance_id,
            "incarnation": uuid.uuid4().hex,
            "ip": "127.0.0.1",
            "node_id": "simulated-node",
            "utc_create": time.time(),
            "version": "simulated",
        }
        self._world = world or World()
        watcher = _Watcher(self._world)
        super().__init__(RealClock(), model, described(model, max_moves=MAX_MOVES, **(own | metadata_fields)), watcher)
        self.agent = SimulatedAgent(self, self._world, lambda: self.status, self._leave, credentials)
        watcher.departures = self.agent.llumlet.departures
        self._world.llumlets[instance_id] = self.agent.llumlet
        self.api_address: Address | None = None
        self._api: SimulatedApi | None = None
        if api:
            self._api = SimulatedApi(model.name, self._submit, self._world.abort, lambda: self.is_schedulable)
        self._cms = cms
        self._credentials = credentials
        self._server: RunningServer | None = None
        self._reporter: Reporter | None = None
        self._reports: asyncio.Task[None] | None = None
        self._hung_s: float | None = None
        """Start of the hang."""
        self._times_slower = 1.0
        self._reported_ps = 0

    @property
    def address(self) -> Address:
        """Address of the llumlet."""
        assert self._server is not None, "not started"
        return self._server.address

    @property
    def incarnation(self) -> str:
        return self.metadata.incarnation

    @property
    def status(self) -> InstanceStatus:
        now_ps = self.clock.now_ps
        self.engine.advance(now_ps)
        status = self.status_at(now_ps)
        status.timestamp_ms = int(time.time() * 1e3)
        if self._hung_s is not None and self.engine.end_ps is not None:
            age_s = time.monotonic() - self._hung_s
            status.loop_age_ms = age_s * 1e3
            status.health = Health.HUNG if age_s > _HUNG_S else Health.OK
        return status

    async def start(self) -> None:
        self._server = await serve(self.agent, credentials=self._credentials)
        self.metadata.llumlet_port = self._server.port
        if self._api is not None:
            self.api_address = await self._api.start()
            self.metadata.api_server_port = self.metadata.api_server_port or self.api_address.port
        if self._cms:
            self._reporter = Reporter(self._cms, self._described, lambda: self.status, self._credentials)
            self._reports = asyncio.create_task(self._reporter.run(), name=f"reports of {self.id}")

    async def stop(self) -> None:
        """End as after SIGTERM: leave the CMS in order. Requests end with `abort`."""
        await self._leave()
        await self._end("abort")

    async def kill(self) -> None:
        """End as after SIGKILL: connections break without a word. Requests end with `error`."""
        await self._end("error")

    def hang(self) -> None:
        """Stop the engine's loop, and with it all moves. The llumlet goes on and reports the hang."""
        self._hung_s = time.monotonic()
        self._set_speed()

    def resume(self) -> None:
        self._hung_s = None
        self._set_speed()

    def slow_down(self, times: float) -> None:
        """Make steps take `times` times as long from now on; 1 restores the speed."""
        self._times_slower = times
        self._set_speed()

    def _set_speed(self) -> None:
        self.clock.set_speed(0.0 if self._hung_s is not None else 1 / self._times_slower)
        self.tell()

    def refuse(self, status: int) -> None:
        """Answer every request to its API with this status from now on; 0 answers normally."""
        assert self._api is not None
        self._api.status = status

    async def cut_off(self) -> None:
        """Close its API and break the streams. The engine goes on, and the CMS hears from it."""
        assert self._api is not None
        await self._api.stop()

    async def reconnect(self) -> None:
        """Open its API at another port and report it to the CMS."""
        assert self._api is not None
        self.api_address = await self._api.start()
        self.metadata.api_server_port = self.api_address.port
        self._metadata_changed()

    def serve(self, *models: str) -> None:
        """Serve these models from now on, as when an adapter was loaded at run time."""
        self.metadata.served_models[:] = models
        self._metadata_changed()

    def submit(
        self, prompt: int | Sequence[int], max_tokens: int = 16, *, request_id: str = "", external_id: str = ""
    ) -> SimulatedRequest:
        """Start a request with this prompt, or with one of that many tokens. Raises ValueError if the KV cache cannot
        hold it."""
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
        config = self.engine.config
        if len(tokens) + max_tokens > min(config.max_model_len, config.num_blocks * config.block_size):
            raise ValueError(f"{len(tokens)} + {max_tokens} tokens do not fit into the KV cache")
        external_id = external_id or request_id or f"cmpl-{uuid.uuid4().hex[:12]}"
        request_id = request_id or f"{external_id}-{uuid.uuid4().hex[:8]}"
        now_ps = self.clock.now_ps
        added = EngineRequest(request_id, len(tokens), max_tokens, arrived_ps=now_ps, external_id=external_id)
        request = self._world.requests[request_id] = SimulatedRequest(tokens, added, self.id)
        self.add(added, now_ps)
        return request

    def _submit(self, prompt: Sequence[int], max_tokens: int, client_id: str) -> SimulatedRequest:
        return self.submit(prompt, max_tokens, external_id=client_id)

    def tell(self) -> None:
        """Report its load, as after a change."""
        self.changed(self.clock.now_ps)

    def changed(self, now_ps: int) -> None:
        """Note a change of load and report it to the CMS."""
        super().changed(now_ps)
        self._reported_ps = now_ps
        if self._reporter is not None:
            self._reporter.changed()
        self._tell_clients(now_ps)

    def woken(self, now_ps: int) -> None:
        """Handle the end of a step. Clients get their tokens; the CMS hears of a step like the one before only now and
        then."""
        end_ps = self.engine.end_ps
        self.engine.advance(now_ps)
        if self.engine.end_ps != end_ps or now_ps - self._reported_ps >= _TOKENS_PS:
            self.changed(now_ps)
        else:
            self._tell_clients(now_ps)
            self.wait(now_ps)

    def next_wake(self, now_ps: int) -> int | None:
        return self.engine.next_end_after(now_ps)

    def _tell_clients(self, now_ps: int) -> None:
        self.engine.settle(now_ps)
        for request in self.engine.requests:
            client = self._world.requests.get(request.id)
            if client is not None:
                client.told(self.engine.num_tokens(request) - request.num_prompt)

    def _described(self) -> InstanceMetadata:
        described = InstanceMetadata()
        described.CopyFrom(self.metadata)
        return described

    def _metadata_changed(self) -> None:
        if self._reporter is not None:
            self._reporter.metadata_changed()

    async def _leave(self) -> None:
        if self._reporter is not None:
            await self._reporter.leave()

    async def _end(self, reason: str) -> None:
        self.end()
        self.clock.close()
        if self._reports is not None:
            await end(self._reports)
        self._reporter = self._reports = None
        if self._api is not None:
            await self._api.stop()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        self._world.lost(self, reason)


class _Watcher(MoveWatcher):
    """A watcher that ends requests. Clients get tokens in `_tell_clients`; gaps are not measured."""

    def __init__(self, world: World) -> None:
        self._world = world

    def finished(self, request: EngineRequest, now_ps: int) -> None:
        super().finished(request, now_ps)
        self._world.finished(request)
