# SPDX-License-Identifier: Apache-2.0
"""Requests whose owner is lost, started again here by their origin. Bypass thread only.

The origin sends the request with the tokens its client has received, under an epoch that nobody else has. From there it
is an ordinary request of this engine: queued, its prompt and output prefilled in one go, its sampler where it was. If
the former owner hangs where its KV cache can still be read, the cache is brought here, and one token is computed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from llumlet.types import AdoptRequest, AdoptResponse
from vllm_llumnix.engine.arrivals import Arrivals
from vllm_llumnix.engine.builder import RequestBuilder
from vllm_llumnix.engine.kvconn import KVConnection
from vllm_llumnix.engine.relay import Relay
from vllm_llumnix.engine.rescue import Fetched, Rescue
from vllm_llumnix.errors import Reason, Refused
from vllm_llumnix.ids import Epoch

if TYPE_CHECKING:
    from vllm_llumnix.engine.bypass import Bypass
    from vllm_llumnix.engine.departures import Departures


class Adoptions:
    """Carries out `Adopt`."""

    def __init__(
        self,
        bypass: Bypass,
        kvconn: KVConnection,
        relay: Relay,
        builder: RequestBuilder,
        arrivals: Arrivals,
        departures: Departures,
        rescue: Rescue,
        abort_here: Callable[[list[str]], Awaitable[None]],
    ) -> None:
        self._bypass = bypass
        self._kvconn = kvconn
        self._relay = relay
        self._builder = builder
        self._arrivals = arrivals
        self._departures = departures
        self._rescue = rescue
        self._abort_here = abort_here

    async def adopt(self, asked: AdoptRequest) -> AdoptResponse:
        """Returns when the scheduler has the request. Raises Refused.

        Refused with HANDOVER_OPEN while a former life of the request is here: it is ended, and another attempt, under
        another epoch, finds it gone.
        """
        identity, engine = self._bypass.identity, self._bypass.engine
        if identity.unsupported is not None:
            raise Refused(Reason.NOT_PORTABLE, identity.unsupported)
        if asked.compatibility_digest != identity.digest:
            raise Refused(Reason.INCOMPATIBLE_ENGINE, "model, weights, vLLM version or settings differ")
        if not self._bypass.takes_requests:
            raise Refused(Reason.SHUTTING_DOWN, "this engine is shutting down")
        request, residence = await self._builder.build(asked.request_state)
        request_id = request.request_id
        await self._arrivals.give_way(request_id)
        if request_id in engine.scheduler.requests:
            await self._abort_here([request_id])
            raise Refused(Reason.HANDOVER_OPEN, "a former life of the request was still here; it is ended now")
        epoch = Epoch(asked.epoch.term, asked.epoch.hop)
        request.client_index = self._relay.client_index(residence.origin)
        fetched = None
        if asked.HasField("holder"):
            fetched = await self._rescue.fetch(request, epoch, asked.holder)
        residence.epoch, residence.last_hop = epoch, epoch.hop
        residence.base = residence.next_index = request.num_output_tokens
        self._relay.welcome(request_id, residence)
        try:
            await self._kvconn.call(self._add_on_loop, request, fetched)
        except Refused:
            self._relay.farewell(request_id)
            raise
        self._departures.came_back(request_id)
        answer = AdoptResponse(instance_id=identity.instance, incarnation=identity.incarnation)
        self._bypass.num_adopted += 1
        answer.recomputed_tokens = request.num_tokens - 1
        if fetched is not None:
            self._bypass.num_rescued += 1
            answer.copied_bytes = fetched.copied_bytes
            answer.recomputed_tokens -= fetched.computed_tokens
        return answer

    def _add_on_loop(self, request: Request, fetched: Fetched | None) -> None:
        if fetched is not None:
            try:
                self._kvconn.port.admit(request, fetched.computed_tokens)
            except Refused:
                self._kvconn.port.cancel_reservation(request)
                raise
            return
        scheduler = self._bypass.engine.scheduler
        if request.request_id in scheduler.requests or self._kvconn.port.is_reserved(request.request_id):
            raise Refused(Reason.HANDOVER_OPEN, "the request is here already, or on its way")
        self._kvconn.load_adapter(request)
        request.status = RequestStatus.WAITING
        scheduler.add_request(request)
