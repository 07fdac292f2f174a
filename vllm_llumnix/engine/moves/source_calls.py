# SPDX-License-Identifier: Apache-2.0
"""Calls of a move's source, to the destination and to the request's origin, and the machine's events that their answers
become. Llumlet thread only."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from llumlet.contract.bridge import reason_number, reason_of
from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletError
from llumlet.contract.types import (
    CommitRequest,
    CommitResponse,
    CopyRoundRequest,
    CopyRoundResponse,
    Handover,
    ReserveRequest,
    ReserveResponse,
    SettleRequest,
    SettleResponse,
)
from llumlet.process.addresses import Address
from llumlet.protocol import events as on
from llumlet.protocol import wire
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Call
from llumlet.protocol.ids import Epoch
from llumlet.protocol.move.plan import Plan
from vllm_llumnix.engine.requests.request_state import Residence
from vllm_llumnix.engine.service.relay_sender import OriginUnreachable, Relay
from vllm_llumnix.engine.vllm_types import Request

logger = logging.getLogger("vllm.llumnix")

A = TypeVar("A")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The peer's llumlet to which a request goes."""

    instance: str
    address: Address
    client: LlumletClient


class HandoverCalls:
    """Calls about one hand-over, numbered. `feed` gives the machine an event; a call that is refused or not answered
    returns None, and the machine has been told. `handover` names the move; `deadline_s` is that of calls in which no
    bytes move."""

    def __init__(
        self, to: Target, handover: Handover, plan: Plan, deadline_s: float, feed: Callable[[on.Event], None]
    ) -> None:
        self._client = to.client
        self._handover = handover
        self._feed = feed
        self._deadline_s = deadline_s
        # The machine's own, where it has one: a call that ends sooner would decide what is the machine's to decide.
        self._deadlines = {
            Call.RESERVE: plan.reserve_s,
            Call.ROUND: plan.round_s,
            # An answer counts also after the deadline of the state in which it was asked for.
            Call.COMMIT: plan.round_s + plan.commit_s,
        }

    @property
    def destination_incarnation(self) -> str:
        """Empty until it has answered Reserve."""
        return self._handover.dst_incarnation

    async def reserve(self, message: ReserveRequest) -> ReserveResponse | None:
        answer = await self._ask(Call.RESERVE, self._client.reserve, message)
        if answer is not None:
            self._handover.dst_incarnation = answer.dst_incarnation
        return answer

    async def copy_round(self, message: CopyRoundRequest) -> CopyRoundResponse | None:
        return await self._ask(Call.ROUND, self._client.copy_round, message)

    async def commit(self, message: CommitRequest) -> CommitResponse | None:
        return await self._ask(Call.COMMIT, self._client.commit, message)

    async def settle(self, call: Call) -> None:
        """Withdraw, Query or Abort: tells the machine what the destination has decided, if it has."""
        methods = {
            Call.WITHDRAW: self._client.withdraw,
            Call.QUERY: self._client.query,
            Call.ABORT: self._client.abort_handover,
        }
        answer = await self._ask(call, methods[call], SettleRequest())
        if answer is not None:
            self._feed(decided(answer))

    async def cancel(self, reason: Reason | None) -> None:
        await self._say(self._client.cancel, reason)

    async def close(self) -> None:
        await self._say(self._client.close_handover, None)

    async def _say(self, method: Callable[..., Awaitable[SettleResponse]], reason: Reason | None) -> None:
        """Said once; no answer changes anything for us."""
        message = self._numbered(SettleRequest(reason=reason_number(reason)))
        try:
            await method(message, deadline_s=self._deadline_s)
        except LlumletCallFailed as error:
            logger.info("move %s: %s", self._handover.migration_id, error)

    async def _ask(self, call: Call, method: Callable[..., Awaitable[A]], message: Any) -> A | None:
        deadline_s = self._deadlines.get(call, self._deadline_s)
        try:
            return await method(self._numbered(message), deadline_s=deadline_s)
        except LlumletError as error:
            reason = reason_of(error.reason)
            if call is Call.RESERVE:
                self._feed(on.ReserveRefused(reason, error.detail))
            elif call is Call.ROUND:
                self._feed(on.RoundFailed(message.round, reason, error.detail))
            else:
                self._feed(on.PeerUnreachable(call, str(error)))
        except LlumletCallFailed as error:
            self._feed(on.PeerUnreachable(call, str(error)))
        return None

    def _numbered(self, message: Any) -> Any:
        self._handover.step += 1
        message.handover.CopyFrom(self._handover)
        return message


def decided(answer: CommitResponse | SettleResponse) -> on.Event:
    """Event that the destination's answer becomes."""
    match answer.state:
        case Handover.COMMITTED:
            return on.Committed(answer.dst_incarnation)
        case Handover.BARRED:
            return on.Barred(reason_of(answer.reason), answer.dst_incarnation, answer.detail)
        case Handover.PENDING:
            return on.Unsettled()
    return on.Forgotten()


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
        """Asks the origin whether `epoch` has started, and returns its answer as an event."""
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
