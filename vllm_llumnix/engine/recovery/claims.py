# SPDX-License-Identifier: Apache-2.0
"""Requests taken from this engine while its loop is stuck in a model step, with their KV cache.

The shell of `protocol.recovery.claim`. Claims are made by the llumlet's thread, under a lock that the loop takes on its
way out of the model, before vLLM does anything with what the model computed:

    loop     model_begins() ........ stuck ........ model_ended(): pins, ends silently
    llumlet           take(): blocks    [reads]    end(): intact?
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading

from vllm.v1.request import RequestStatus

from llumlet.protocol.effects import ClearTimer
from llumlet.protocol.errors import Refused
from llumlet.protocol.events import TimerFired
from llumlet.protocol.ids import Epoch
from llumlet.protocol.recovery import claim as on
from llumlet.protocol.recovery.claim import LEASE, Claim, ClaimEvent
from vllm_llumnix.engine.blocks.block_rows import ids_of
from vllm_llumnix.engine.engine_port import Pin
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.requests.request_state import residence_of
from vllm_llumnix.engine.vllm_types import Request

logger = logging.getLogger("vllm.llumnix")

LEASE_SECONDS = on.LEASE_SECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """KV of the first `computed_tokens` tokens is final, in these blocks."""

    claim_id: str
    computed_tokens: int
    block_ids: list[int]
    output_token_ids: list[int]


@dataclasses.dataclass(eq=False, slots=True)
class _Held:
    """A request of which there is a claim."""

    request: Request
    epoch: Epoch
    """Under which it goes on."""
    machine: Claim
    answer: Claimed
    pin: Pin | None = None
    lease: asyncio.TimerHandle | None = None


class Claims:
    """All claims on the requests of one engine."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._port = loop.port
        self._lock = threading.Lock()
        self._in_model = False
        self._waiting: list[_Held] = []
        """Made in the present step; the loop knows nothing of them yet."""
        self._claims: dict[str, _Held] = {}
        """Claims by id, from `take` to `end`. Llumlet thread."""
        self._numbers = itertools.count(1)

    # Loop thread

    def model_begins(self) -> None:
        """The batch is scheduled: nothing changes before `model_ended`."""
        self._in_model = True

    def model_ended(self) -> None:
        """Before anything is done with what the model computed."""
        if not self._in_model:
            return
        ended: list[Request] = []
        with self._lock:
            self._in_model = False
            waiting, self._waiting = self._waiting, []
            for held in waiting:
                for effect in held.machine.on(on.LoopWoke()):
                    match effect:
                        case on.KeepBlocks():
                            held.pin = self._port.pin_all(held.request)
                        case on.EndSilently():
                            ended.append(held.request)
        for request in ended:
            logger.warning("llumlet: request %s went on elsewhere meanwhile", request.request_id)
            self._loop.note_aborted([request.request_id])
            self._port.release(request)

    # Llumlet thread

    def take(self, request_id: str, epoch: Epoch) -> Claimed:
        """The request is over here; its blocks are kept until `end`, or for `LEASE_SECONDS`.

        Again, under the same epoch, it is the same claim. Raises Refused when the loop is not in a model step, or the
        request's state cannot be relied upon.
        """
        with self._lock:
            if not self._in_model:
                return _granted(Claim(), on.ClaimRequested(epoch=epoch, in_model=False))
            request = self._port.find(request_id)
            claims = [held for held in self._waiting if held.request is request]
            asked = self._asked(request, epoch, claimed=bool(claims))
            for held in claims:
                if held.epoch == epoch and held.machine.state is on.State.STANDING:
                    return _granted(held.machine, asked, held.answer)
            machine, answer = Claim(LEASE_SECONDS), self._answer(request)
            _granted(machine, asked, answer)
            held = _Held(request, epoch, machine, answer)
            self._waiting.append(held)
        self._claims[answer.claim_id] = held
        held.lease = asyncio.get_running_loop().call_later(LEASE_SECONDS, self._expire, answer.claim_id)
        return answer

    def end(self, claim_id: str) -> bool:
        """The blocks are not read any more. Returns whether they were the request's until now."""
        held = self._claims.pop(claim_id, None)
        return held is not None and self._settle(held, on.ClaimEnded())

    def call_off(self) -> None:
        """End all claims. A peer that still reads such blocks gets `intact=False` and recomputes."""
        for claim_id in list(self._claims):
            self.end(claim_id)

    def _expire(self, claim_id: str) -> None:
        self._settle(self._claims.pop(claim_id), TimerFired(LEASE))

    def _settle(self, held: _Held, event: ClaimEvent) -> bool:
        intact = False
        with self._lock:
            effects = held.machine.on(event)
        for effect in effects:
            match effect:
                case on.AnswerEnd():
                    intact = effect.intact
                case on.GiveBack():
                    assert held.pin is not None
                    self._loop.call(self._port.unpin, held.pin)
                case ClearTimer():
                    assert held.lease is not None
                    held.lease.cancel()
        self._loop.audit_when_idle()
        return intact

    def _asked(self, request: Request, epoch: Epoch, claimed: bool) -> on.ClaimRequested:
        residence = residence_of(request)
        return on.ClaimRequested(
            epoch=epoch,
            in_model=True,
            problem=self._port.why_not_now(request),
            present=residence.epoch if residence is not None else None,
            # A step that hangs may have changed a state, and may yet.
            has_cache=request.status == RequestStatus.RUNNING
            and bool(request.num_output_tokens)
            and not self._port.rows.num_states,
            claimed=claimed,
        )

    def _answer(self, request: Request) -> Claimed:
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        return Claimed(
            claim_id=f"{request.request_id}#{next(self._numbers)}",
            computed_tokens=computed,
            block_ids=ids_of(self._port.rows.blocks(request, computed)),
            output_token_ids=list(request.output_token_ids),
        )


def _granted(machine: Claim, asked: on.ClaimRequested, answer: Claimed | None = None) -> Claimed:
    """The answer, if the machine grants the claim. Raises Refused."""
    for effect in machine.on(asked):
        if isinstance(effect, on.RefuseClaim):
            raise Refused(effect.reason, effect.detail)
    assert answer is not None
    return answer
