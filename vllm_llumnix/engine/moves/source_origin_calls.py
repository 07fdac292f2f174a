# SPDX-License-Identifier: Apache-2.0
"""What the source of one move has to do with the origin of its request. Llumlet thread only."""

from __future__ import annotations

from llumlet.protocol import events as on
from llumlet.protocol import wire
from llumlet.protocol.events import Call
from llumlet.protocol.ids import Epoch
from vllm_llumnix.engine.moves.source_calls import Target
from vllm_llumnix.engine.requests.request_state import Residence
from vllm_llumnix.engine.service.relay_sender import OriginUnreachable, Relay
from vllm_llumnix.engine.vllm_types import Request


class OriginCalls:
    """`deadline_s`: seconds for an answer of the origin."""

    def __init__(self, relay: Relay, request: Request, residence: Residence, deadline_s: float) -> None:
        self._relay = relay
        self._request = request
        self._residence = residence
        self._origin = residence.origin or ""
        self._deadline_s = deadline_s

    def hand_over(self, epoch: Epoch, to: Target, incarnation: str) -> None:
        """The request is no longer ours. The origin watches the next owner from now on."""
        request_id = self._request.request_id
        self._relay.farewell(request_id)
        next_owner = wire.HandedOver(request_id, epoch, to.instance, incarnation, str(to.address))
        self._relay.hand_over(self._origin, next_owner)

    async def fence(self, epoch: Epoch) -> on.Event:
        """What the origin answers to the question whether `epoch` has started."""
        try:
            answer = await self._relay.fence(self._origin, self._request.request_id, epoch, self._deadline_s)
        except OriginUnreachable as error:
            return on.PeerUnreachable(Call.FENCE, f"the API server at {error} does not answer")
        if answer.finished:
            return on.OriginFinished()
        return on.FenceStarted() if answer.raised is None else on.FenceRaised(answer.raised)

    def client_index(self, epoch: Epoch | None) -> int:
        """The client index with which the request goes on here; under a raised epoch its outputs go through the relay
        from now on."""
        if epoch is None or not self._origin:
            return int(self._request.client_index)
        residence = self._residence
        residence.epoch, residence.last_hop = epoch, epoch.hop
        residence.base = residence.next_index = residence.num_earlier + self._request.num_output_tokens
        self._relay.welcome(self._request.request_id, residence)
        return self._relay.client_index(self._origin)
