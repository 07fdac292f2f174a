# SPDX-License-Identifier: Apache-2.0
"""Admission of an arrived request to this engine's scheduler, unless it is revoked first."""

from __future__ import annotations

import threading

from llumlet.protocol.effects import Admit
from llumlet.protocol.errors import MigrationError, Reason, Refused
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import EnginePort
from vllm_llumnix.engine.requests.request_state import Residence, repeat_from
from vllm_llumnix.engine.vllm_types import Request


class Admission:
    """The admission of one request: the loop begins it, or it is revoked, whichever comes first."""

    def __init__(self, context: EngineContext) -> None:
        self._loop: EnginePort = context.loop
        self._relay = context.relay
        self._forwarding = context.forwarding
        self._lock = threading.Lock()
        self._decided = False

    def revoke(self) -> bool:
        """Revokes the admission. Returns True if that was in time: then the request is not admitted. Any thread."""
        return self._decide()

    async def run(self, request: Request, residence: Residence, under: Admit, cached_tokens: int) -> None:
        """Returns when the scheduler has the request. `cached_tokens`: its leading tokens of which the prefix cache
        here held the KV.

        Raises Refused, and then nothing of it is here.
        """
        assert residence.origin is not None
        # Of a prompt that the source has begun, the prefix cache here may hold more: nothing writes shared blocks.
        computed_tokens = max(under.computed_tokens, cached_tokens) if under.computed_tokens else 0
        residence.epoch, residence.last_hop = under.epoch, under.epoch.hop
        residence.base = residence.next_index = residence.num_earlier + under.base
        residence.repeat = repeat_from(request)
        residence.handover_open = residence.admitting = True
        try:
            request.client_index = self._relay.client_index(residence.origin)
            self._relay.welcome(request.request_id, residence)
            await self._loop.call(self._admit, request, computed_tokens)
        except MigrationError:
            self._relay.farewell(request.request_id, residence)
            raise
        residence.admitting = False
        self._forwarding.came_back(request.request_id)
        if residence.num_parts:
            # What has come for it meanwhile was dropped, and is sent to who has it.
            self._relay.beat(residence.origin)

    def _admit(self, request: Request, computed_tokens: int) -> None:
        """Loop thread."""
        if not self._decide():
            raise Refused(Reason.BARRED, "revoked")
        self._loop.admit(request, computed_tokens)

    def _decide(self) -> bool:
        """True for the first caller only."""
        with self._lock:
            first, self._decided = not self._decided, True
            return first
