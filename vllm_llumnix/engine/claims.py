# SPDX-License-Identifier: Apache-2.0
"""Requests taken from this engine while its loop is stuck in a model step, with their KV cache.

While the model computes, the loop waits for it and changes nothing of its scheduler: another thread may read a
request's block table there, and nobody frees its blocks. That ends the moment the step returns. So a claim is made
under a lock which the loop takes on its way out of the model, and before anything else the loop pins the blocks of all
claims and ends their requests without a word: they live elsewhere by then, under an epoch of their own.

    loop     model_begins() ........ stuck ........ model_ended(): pins, ends silently
    llumlet           take(): blocks    [reads]    end(): intact?

The step that is stuck may still write the KV of the last token: that position lies behind `computed_tokens`, and
whoever claims the request computes it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading

from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import Epoch
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.request_state import residence_of, why_not_now
from vllm_llumnix.engine.scheduler_port import Pin

logger = logging.getLogger("vllm.llumnix")

LEASE_SECONDS = 10.0
"""Blocks of a claim are kept for so long if nobody ends it. A rescue has to be done in less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """KV of the first `computed_tokens` tokens is final, in these blocks."""

    claim_id: str
    computed_tokens: int
    block_ids: list[int]
    output_token_ids: list[int]


@dataclasses.dataclass(eq=False, slots=True)
class _Claim:
    request: Request
    epoch: Epoch
    """Under which the request goes on."""
    answer: Claimed
    over: bool = False
    """Nobody reads the blocks any more; the loop still has to end the request."""
    pin: Pin | None = None
    lease: asyncio.TimerHandle | None = None


class Claims:
    """All claims on the requests of one engine."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._port = loop.port
        self._lock = threading.Lock()
        self._in_model = False
        self._waiting: list[_Claim] = []
        """Made in the present step; the loop knows nothing of them yet."""
        self._claims: dict[str, _Claim] = {}
        """By id, from `take` to `end`. Llumlet thread."""
        self._numbers = itertools.count(1)

    # Loop thread

    def model_begins(self) -> None:
        """The batch is scheduled: nothing changes before `model_ended`."""
        self._in_model = True

    def model_ended(self) -> None:
        """Before anything is done with what the model computed."""
        if not self._in_model:
            return
        with self._lock:
            self._in_model = False
            claims, self._waiting = self._waiting, []
            for claim in claims:
                if not claim.over:
                    claim.pin = self._port.pin_all(claim.request)
        for claim in claims:
            logger.warning("llumlet: request %s went on elsewhere meanwhile", claim.request.request_id)
            self._loop.note_aborted([claim.request.request_id])
            self._port.release(claim.request)

    # Llumlet thread

    def take(self, request_id: str, epoch: Epoch) -> Claimed:
        """The request is over here; its blocks are kept until `end`, or for `LEASE_SECONDS`.

        Again, under the same epoch, it is the same claim: a call may come twice, and the second one first.
        Raises Refused when the loop is not in a model step, or the request's state cannot be relied upon.
        """
        with self._lock:
            if not self._in_model:
                raise Refused(Reason.SOURCE_BUSY, "its loop is not in a model step")
            for claim in self._waiting:
                if claim.request.request_id == request_id and claim.epoch == epoch and not claim.over:
                    return claim.answer
            request = self._find(request_id, epoch)
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            claimed = Claimed(
                claim_id=f"{request_id}#{next(self._numbers)}",
                computed_tokens=computed,
                block_ids=self._port.block_ids(request)[: -(-computed // self._port.block_size)],
                output_token_ids=list(request.output_token_ids),
            )
            claim = _Claim(request, epoch, claimed)
            self._waiting.append(claim)
        self._claims[claimed.claim_id] = claim
        claim.lease = asyncio.get_running_loop().call_later(LEASE_SECONDS, self.end, claimed.claim_id)
        return claimed

    def end(self, claim_id: str) -> bool:
        """The blocks are not read any more. Returns whether they were the request's until now."""
        claim = self._claims.pop(claim_id, None)
        if claim is None:
            return False
        assert claim.lease is not None
        claim.lease.cancel()
        with self._lock:
            claim.over = True
        if claim.pin is not None:
            self._loop.call(self._port.unpin, claim.pin)
        self._loop.audit_when_idle()
        return True

    def _find(self, request_id: str, epoch: Epoch) -> Request:
        request = self._port.find(request_id)
        if (problem := why_not_now(request)) is not None:
            raise Refused(*problem)
        residence = residence_of(request)
        if residence is None or residence.epoch.term >= epoch.term:
            raise Refused(Reason.BARRED, f"the request is here under another epoch than one before {epoch}")
        if request.status != RequestStatus.RUNNING or not request.num_output_tokens:
            raise Refused(Reason.NOT_STARTED, "it has no KV cache, or not all of its prompt's")
        if any(claim.request is request for claim in self._waiting):
            raise Refused(Reason.ALREADY_MIGRATING, "it is claimed already")
        return request
