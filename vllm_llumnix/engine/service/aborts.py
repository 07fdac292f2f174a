# SPDX-License-Identifier: Apache-2.0
"""Ends of requests that are asked for from outside: by operators, by origins, by our own front-end. Llumlet thread."""

from __future__ import annotations

import contextlib

from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import AbortRequest, AbortResponse
from llumlet.process.addresses import Address
from llumlet.process.tasks import Tasks
from llumlet.protocol.ids import Epoch
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.requests.request_state import residence_of


class Aborts:
    """Ends requests here, and sends aborts after those that have left."""

    def __init__(self, context: EngineContext) -> None:
        self._loop = context.loop
        self._relay = context.relay
        self._forwarding = context.forwarding
        self._peers = context.peers
        self._tasks = Tasks()

    async def abort(self, request: AbortRequest) -> AbortResponse:
        """Ends requests for an operator, another engine or an origin, wherever they are by now."""
        response = AbortResponse()
        here = []
        for request_id in request.request_ids:
            # One that has just left may still be in the scheduler: the loop has not let go of it yet.
            owner = self._forwarding.owner_of(request_id)
            if owner is not None:
                response.results.add(request_id=request_id, outcome=AbortResponse.FORWARDED, owner_address=str(owner))
            elif request_id in self._loop.engine.scheduler.requests:
                here.append(request_id)
                response.results.add(request_id=request_id, outcome=AbortResponse.ABORTED)
            else:
                response.results.add(request_id=request_id, outcome=AbortResponse.NOT_FOUND)
        self.forward([rid for rid in request.request_ids if rid not in here])
        if here:
            await self._end(here)
        return response

    def forward(self, request_ids: list[str]) -> None:
        """Send aborts after requests that have left. The origin repeats itself to whoever reports such a request, so
        none of these messages has to arrive."""
        by_owner: dict[Address, list[str]] = {}
        for request_id in request_ids:
            owner = self._forwarding.owner_of(request_id)
            if owner is not None:
                by_owner.setdefault(owner, []).append(request_id)
        for owner, ids in by_owner.items():
            self._tasks.spawn(self._abort_at(owner, ids))

    def dismiss(self, origin: str, requests: list[tuple[str, Epoch]]) -> None:
        """`origin` wants nothing more of these requests under these epochs. Those of others are not its to end."""
        stale = [request_id for request_id, epoch in requests if self._belongs(request_id, origin, epoch)]
        if stale:
            self.end_soon(stale)

    def end_soon(self, request_ids: list[str]) -> None:
        self._tasks.spawn(self._end(request_ids))

    def _belongs(self, request_id: str, origin: str, epoch: Epoch) -> bool:
        """True if this engine runs the request under `epoch`, for `origin`."""
        request = self._loop.engine.scheduler.requests.get(request_id)
        residence = residence_of(request) if request is not None else None
        if residence is None:
            residence = self._relay.residence_of(request_id)
        return residence is not None and (residence.origin, residence.epoch) == (origin, epoch)

    async def _end(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._relay.farewell(request_id)
        self._loop.note_aborted(request_ids)
        await self._loop.call(self._loop.engine.abort_requests, request_ids)

    async def _abort_at(self, owner: Address, request_ids: list[str]) -> None:
        with contextlib.suppress(LlumletCallFailed):
            await self._peers.at(owner).abort(AbortRequest(request_ids=request_ids))
