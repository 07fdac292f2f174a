# SPDX-License-Identifier: Apache-2.0
"""Requests whose owner is lost, started again here by their origin. Llumlet thread only.

The origin sends the request with the tokens its client has received, under an epoch that nobody else has. From there it
is an ordinary request of this engine: queued, its prompt and output prefilled in one go, its sampler where it was. If
the former owner hangs where its KV cache can still be read, the cache is brought here, and one token is computed.

An attempt that is accepted shows in the heartbeats to its origin from then on, before the request is built: the origin
sees that somebody is at it, and can call it off as it can call off any request, by id and epoch. What was called off
does not reach the scheduler.
"""

from __future__ import annotations

import asyncio

from vllm.v1.request import Request, RequestStatus

from llumlet.bridge import epoch_of
from llumlet.protocol.errors import Reason, Refused
from llumlet.types import AdoptRequest, AdoptResponse
from vllm_llumnix.engine.arrivals import Arrivals
from vllm_llumnix.engine.builder import RequestBuilder
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.grammars import GRAMMAR_SECONDS
from vllm_llumnix.engine.memory import require_weights
from vllm_llumnix.engine.request_state import Residence, residence_of
from vllm_llumnix.engine.rescue import Fetched, Rescue

MAX_ADOPTING = 32
"""Attempts at a time: four API servers' (`frontend.placement.IN_FLIGHT`), or more when other engines take some."""


class Adoptions:
    """Carries out `Adopt`."""

    def __init__(
        self,
        context: EngineContext,
        builder: RequestBuilder,
        arrivals: Arrivals,
        rescue: Rescue,
    ) -> None:
        self.num_adopted = 0
        """Requests of lost owners that went on here."""
        self.num_rescued = 0
        """Of these, the ones that brought their KV cache."""
        self._context = context
        self._loop = context.loop
        self._relay = context.relay
        self._builder = builder
        self._arrivals = arrivals
        self._rescue = rescue
        self._num_adopting = 0
        self._preparing: dict[str, Residence] = {}
        """Attempts that the scheduler has not been given yet, by request."""

    async def adopt(self, asked: AdoptRequest, given_up: asyncio.Event) -> AdoptResponse:
        """Returns when the scheduler has the request. Raises Refused.

        Refused with HANDOVER_OPEN while another life of the request is here. A former one is ended, and another
        attempt, under another epoch, finds it gone; a later one, or this one if the call came twice, goes on. Refused
        with BARRED if the origin has called it off meanwhile, or `given_up` is set: nobody waits for the answer.
        """
        identity = self._context.identity
        if identity.unsupported is not None:
            raise Refused(Reason.NOT_PORTABLE, identity.unsupported)
        if asked.compatibility_digest != identity.digest:
            raise Refused(Reason.INCOMPATIBLE_ENGINE, "model, weights, vLLM version or settings differ")
        if asked.weight_version:
            require_weights(asked.weight_version, self._context.weight_version)
        if not self._loop.takes_requests:
            raise Refused(Reason.SHUTTING_DOWN, "this engine is shutting down")
        if self._num_adopting >= MAX_ADOPTING:
            raise Refused(Reason.DESTINATION_BUSY, f"{self._num_adopting} requests are being started again here")
        self._num_adopting += 1
        try:
            return await self._adopt(asked, given_up)
        finally:
            self._num_adopting -= 1

    async def _adopt(self, asked: AdoptRequest, given_up: asyncio.Event) -> AdoptResponse:
        state, residence = await self._builder.read(asked.request_state)
        request_id, epoch = state.request_id, epoch_of(asked.epoch)
        residence.epoch, residence.last_hop = epoch, epoch.hop
        residence.base = residence.next_index = len(state.output_token_ids)
        await self._make_way(request_id, residence)
        self._preparing[request_id] = residence
        request = fetched = None
        try:
            client_index = self._relay.client_index(state.origin)
            self._relay.welcome(request_id, residence)
            request = await self._builder.build(state, residence, state.origin, patience_s=GRAMMAR_SECONDS)
            request.client_index = client_index
            if asked.trial_tokens:
                self._loop.trials.open(request, asked.trial_tokens)
            if asked.HasField("holder") and self._context.identity.kv_unsupported is None:
                fetched = await self._rescue.fetch(request, epoch, asked.holder)
            if given_up.is_set() or self._relay.residence_of(request_id) is not residence:
                raise Refused(Reason.BARRED, "its origin has given this attempt up")
            # From here on whoever ends the request finds it in the scheduler: the loop does what it is asked in order.
            added = self._loop.call(self._add_on_loop, request, fetched)
            self._done_preparing(request_id, residence)
            await added
        except BaseException:
            self._done_preparing(request_id, residence)
            self._relay.farewell(request_id, residence)
            # A caller that does not wait any more changes nothing for a request that is here.
            if request is not None and self._context.engine.scheduler.requests.get(request_id) is not request:
                self._loop.trials.close(request)
            if fetched is not None:
                await self._loop.call(self._loop.port.reservations.cancel, request)
            raise
        self._context.forwarding.came_back(request_id)
        return self._answer(request, fetched)

    async def _make_way(self, request_id: str, residence: Residence) -> None:
        """Raises Refused unless this is the only life of the request here, and the latest attempt to begin one."""
        await self._arrivals.give_way(request_id)
        ended = await self._loop.call_behind_outputs(self._make_way_on_loop, request_id, residence)
        if ended is not None:
            self._relay.farewell(request_id, ended)
            raise Refused(Reason.HANDOVER_OPEN, "a former life of the request was still here; it is ended now")
        present = self._preparing.get(request_id)
        if present is not None:
            _require_former(present, residence)
            self._relay.farewell(request_id, present)

    def _done_preparing(self, request_id: str, residence: Residence) -> None:
        if self._preparing.get(request_id) is residence:
            del self._preparing[request_id]

    def _answer(self, request: Request, fetched: Fetched | None) -> AdoptResponse:
        identity = self._context.identity
        answer = AdoptResponse(instance_id=identity.instance, incarnation=identity.incarnation)
        self.num_adopted += 1
        answer.recomputed_tokens = request.num_tokens - 1
        if fetched is not None:
            self.num_rescued += 1
            answer.copied_bytes = fetched.copied_bytes
            answer.recomputed_tokens -= fetched.computed_tokens
        return answer

    def _make_way_on_loop(self, request_id: str, residence: Residence) -> Residence | None:
        """End a former life of the request, and say which. Raises Refused if it is none that `residence` replaces."""
        engine = self._context.engine
        request = engine.scheduler.requests.get(request_id)
        if request is None:
            self._loop.require_out_of_flight(request_id)
            return None
        present = residence_of(request)
        _require_former(present, residence)
        self._loop.note_aborted([request_id])
        engine.abort_requests([request_id])
        return present

    def _add_on_loop(self, request: Request, fetched: Fetched | None) -> None:
        if fetched is not None:
            self._loop.admit(request, fetched.computed_tokens)
            return
        scheduler = self._context.engine.scheduler
        if request.request_id in scheduler.requests or request.request_id in self._loop.port.reservations:
            raise Refused(Reason.HANDOVER_OPEN, "the request is here already, or on its way")
        self._loop.load_adapter(request)
        request.status = RequestStatus.WAITING
        scheduler.add_request(request)
        self._loop.wake_group()


def _require_former(present: Residence | None, residence: Residence) -> None:
    """Raises Refused(handover_open) unless `present` is a life of the same request that `residence` comes after."""
    if present is None or present.origin != residence.origin:
        raise Refused(Reason.HANDOVER_OPEN, "a request of another API server has this id")
    if present.epoch >= residence.epoch:
        raise Refused(Reason.HANDOVER_OPEN, f"the request is here under epoch {present.epoch}")
