# SPDX-License-Identifier: Apache-2.0
"""Requests whose owner is lost, started again here by their origin: the shell of `llumlet.protocol.recovery.adoption`.

Once the scheduler has it, it is an ordinary request of this engine: queued, its prompt and output prefilled in one go,
its sampler where it was. If the former owner hangs where its KV cache can still be read, the cache is brought here, and
one token is computed. Llumlet thread only, but for what is done on the loop.
"""

from __future__ import annotations

import asyncio

from vllm.v1.request import Request, RequestStatus

from llumlet.contract.bridge import epoch_of
from llumlet.contract.types import AdoptRequest, AdoptResponse
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.recovery import adoption as on
from llumlet.protocol.recovery import rescue
from llumlet.protocol.recovery.adoption import MAX_ADOPTING, Adoption, require_former
from llumlet.protocol.recovery.rescue import Rescue
from vllm_llumnix.engine.blocks.movers import require_weights
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.moves.destination_moves import DestinationMoves
from vllm_llumnix.engine.queue.turns import queue_in_turn
from vllm_llumnix.engine.recovery.rescue import Rescues
from vllm_llumnix.engine.requests.builder import RequestBuilder
from vllm_llumnix.engine.requests.grammars import GRAMMAR_SECONDS
from vllm_llumnix.engine.requests.request_state import Residence, residence_of
from vllm_llumnix.wire.request_wire import RequestState


class Adoptions:
    """Carries out `Adopt`."""

    def __init__(
        self, context: EngineContext, builder: RequestBuilder, arrivals: DestinationMoves, rescues: Rescues
    ) -> None:
        self.num_adopted = 0
        """Requests of lost owners that went on here."""
        self.num_rescued = 0
        """Requests among these that brought their KV cache."""
        self.context = context
        self.loop = context.loop
        self.relay = context.relay
        self.builder = builder
        self.rescues = rescues
        self._arrivals = arrivals
        self._num_adopting = 0
        self._preparing: dict[str, Residence] = {}
        """Attempts that the scheduler has not been given yet, by request."""

    async def adopt(self, asked: AdoptRequest, given_up: asyncio.Event) -> AdoptResponse:
        """Returns when the scheduler has the request. `given_up`: nobody waits for the answer.

        Raises Refused, with HANDOVER_OPEN while another life of the request is here, with BARRED if the origin has
        called the attempt off meanwhile.
        """
        identity = self.context.identity
        if identity.unsupported is not None:
            raise Refused(Reason.NOT_PORTABLE, identity.unsupported)
        if asked.compatibility_digest != identity.facts.digest:
            raise Refused(Reason.INCOMPATIBLE_ENGINE, "model, weights, vLLM version or settings differ")
        if asked.weight_version:
            require_weights(asked.weight_version, self.context.weight_version)
        if not self.loop.takes_requests:
            raise Refused(Reason.SHUTTING_DOWN, "this engine is shutting down")
        if self._num_adopting >= MAX_ADOPTING:
            raise Refused(Reason.DESTINATION_BUSY, f"{self._num_adopting} requests are being started again here")
        self._num_adopting += 1
        try:
            state, residence = await self.builder.read(asked.request_state)
            if state.session is not None:
                raise Refused(Reason.INVALID_REQUEST, "its input comes in parts: it goes with its KV cache")
            residence.epoch = epoch_of(asked.epoch)
            residence.last_hop = residence.epoch.hop
            residence.base = residence.next_index = len(state.output_token_ids)
            attempt = _Attempt(self, asked, state, residence, given_up)
            await attempt.run()
        finally:
            self._num_adopting -= 1
        self.context.forwarding.came_back(state.request_id)
        return self._answer(attempt)

    async def make_way(self, request_id: str, residence: Residence) -> on.AdoptionEvent:
        """Returns True if this is the only life of the request here. Raises Refused unless it is the latest one."""
        await self._arrivals.give_way(request_id)
        ended = await self.loop.call_behind_outputs(self._make_way_on_loop, request_id, residence)
        if ended is not None:
            self.relay.farewell(request_id, ended)
            return on.FormerLifeEnded()
        present = self._preparing.get(request_id)
        if present is not None:
            require_former(present, residence)
            self.relay.farewell(request_id, present)
        self._preparing[request_id] = residence
        return on.WayMade()

    def done_preparing(self, request_id: str, residence: Residence) -> None:
        if self._preparing.get(request_id) is residence:
            del self._preparing[request_id]

    def add_on_loop(self, request: Request, fetched: Rescue | None) -> None:
        if fetched is not None:
            self.loop.admit(request, fetched.computed_tokens)
            return
        scheduler = self.context.engine.scheduler
        if request.request_id in scheduler.requests or request.request_id in self.loop.port.reservations:
            raise Refused(Reason.HANDOVER_OPEN, "the request is here already, or on its way")
        self.loop.load_adapter(request)
        request.status = RequestStatus.WAITING
        self.loop.port.connectors.as_new(request)
        scheduler.add_request(request)
        scheduler.waiting.remove_requests([request])  # from its end, where new ones go
        queue_in_turn(scheduler, request)
        self.loop.wake_group()

    def _answer(self, attempt: _Attempt) -> AdoptResponse:
        assert attempt.request is not None
        identity, fetched = self.context.identity, attempt.fetched
        answer = AdoptResponse(instance_id=identity.instance, incarnation=identity.incarnation)
        self.num_adopted += 1
        answer.recomputed_tokens = attempt.request.num_tokens - 1
        if fetched is not None:
            self.num_rescued += 1
            answer.copied_bytes = fetched.copied_bytes
            answer.recomputed_tokens -= fetched.computed_tokens
        return answer

    def _make_way_on_loop(self, request_id: str, residence: Residence) -> Residence | None:
        """End a former life of the request, and say which. Raises Refused if it is none that `residence` replaces."""
        engine = self.context.engine
        request = engine.scheduler.requests.get(request_id)
        if request is None:
            self.loop.require_out_of_flight(request_id)
            return None
        present = residence_of(request)
        require_former(present, residence)
        self.loop.note_aborted([request_id])
        engine.abort_requests([request_id])
        return present


class _Attempt:
    """A machine and the request that it works on."""

    def __init__(
        self,
        adoptions: Adoptions,
        asked: AdoptRequest,
        state: RequestState,
        residence: Residence,
        given_up: asyncio.Event,
    ) -> None:
        self._adoptions = adoptions
        self._asked = asked
        self._state = state
        self._residence = residence
        self._given_up = given_up
        may_fetch = asked.HasField("holder") and adoptions.context.identity.kv_unsupported is None
        self._machine = Adoption(may_fetch)
        self.request: Request | None = None
        self.fetched: Rescue | None = None

    async def run(self) -> None:
        """Returns when the scheduler has the request. Raises Refused."""
        try:
            await self._feed(on.AdoptRequested())
        except BaseException:
            self._leave()
            if self.fetched is not None and not self._machine.over:
                await self._perform(on.FreeCache())
            raise

    async def _feed(self, event: on.AdoptionEvent) -> None:
        events = [event]
        while events:
            for effect in self._machine.on(events.pop(0)):
                try:
                    answer = await self._perform(effect)
                except Refused as error:
                    if self._machine.over:
                        raise
                    answer = on.AttemptFailed(error.reason, error.detail)
                if self._is_called_off:
                    self._machine.on(on.CalledOff())
                if answer is not None:
                    events.append(answer)

    async def _perform(self, effect: on.AdoptionEffect) -> on.AdoptionEvent | None:
        adoptions, request_id = self._adoptions, self._state.request_id
        match effect:
            case on.MakeWay():
                return await adoptions.make_way(request_id, self._residence)
            case on.BuildRequest():
                await self._build()
                return on.RequestBuilt()
            case on.FetchCache():
                return await self._fetch()
            case on.AddRequest():
                # From here on whoever ends the request finds it in the scheduler.
                added = adoptions.loop.call(adoptions.add_on_loop, self.request, self.fetched)
                adoptions.done_preparing(request_id, self._residence)
                await added
                return on.RequestAdded()
            case on.FreeCache():
                await adoptions.loop.call(adoptions.loop.port.reservations.cancel, self.request)
            case on.RefuseAdopt(reason=reason, detail=detail):
                raise Refused(reason, detail)
        return None

    async def _build(self) -> None:
        adoptions, state, residence = self._adoptions, self._state, self._residence
        client_index = adoptions.relay.client_index(state.origin)
        adoptions.relay.welcome(state.request_id, residence)
        request = await adoptions.builder.build(state, residence, state.origin, patience_s=GRAMMAR_SECONDS)
        request.client_index = client_index
        self.request = request
        if self._asked.trial_tokens:
            adoptions.loop.trials.open(request, self._asked.trial_tokens)

    async def _fetch(self) -> on.AdoptionEvent:
        assert self.request is not None
        epoch, holder = self._residence.epoch, self._asked.holder
        fetched = await self._adoptions.rescues.fetch(self.request, epoch, holder)
        match fetched.state:
            case rescue.State.FETCHED:
                self.fetched = fetched
                return on.CacheFetched()
            case rescue.State.WITHOUT:
                return on.CacheLost()
            case _:
                return on.AttemptFailed(Reason.TRANSFER_FAILED, fetched.detail)

    @property
    def _is_called_off(self) -> bool:
        """True if nobody waits for it, or its origin, or a later attempt, has ended it."""
        if self._given_up.is_set():
            return True
        building = self._machine.state in (on.State.BUILDING, on.State.FETCHING)
        return building and self._adoptions.relay.residence_of(self._state.request_id) is not self._residence

    def _leave(self) -> None:
        adoptions, request, request_id = self._adoptions, self.request, self._state.request_id
        adoptions.done_preparing(request_id, self._residence)
        adoptions.relay.farewell(request_id, self._residence)
        # A caller that does not wait any more changes nothing for a request that is here.
        if request is not None and adoptions.context.engine.scheduler.requests.get(request_id) is not request:
            adoptions.loop.trials.close(request)
