# SPDX-License-Identifier: Apache-2.0
"""Brings the KV cache of a request from an engine whose loop hangs, into an engine that adopts the request.

The request's ownership is not at stake here: its origin has barred the former owner before it asked anybody to go on.
All that can be lost is the KV cache, and then the request is computed again from its tokens.
"""

from __future__ import annotations

import dataclasses
import logging

from vllm.v1.request import Request

from llumlet.bridge import epoch_message
from llumlet.client import LlumletClient
from llumlet.errors import LlumletCallFailed
from llumlet.protocol.errors import MigrationError, Reason, Refused
from llumlet.protocol.ids import Epoch
from llumlet.types import Address, ClaimRequest, ClaimResponse, EndClaimRequest, Holder
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.memory import SourceMemory, decode_memory
from vllm_llumnix.engine.shell import Tasks
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.messages import BlockCopy

logger = logging.getLogger("vllm.llumnix")

CLAIM_SECONDS = 1.0
"""For an answer of the holder's llumlet. A process whose interpreter is stuck does not answer at all."""
PULL_SECONDS = 2.5


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """A reservation that holds KV of the request's first `computed_tokens` tokens."""

    computed_tokens: int
    copied_bytes: int


class _Abandoned(Exception):
    """A copy that did not end; movers may still be writing."""


class Rescue:
    """The adopting side of `Claim`. Llumlet thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._loop = context.loop
        self._tasks = Tasks()

    async def fetch(self, request: Request, epoch: Epoch, holder: Holder) -> Fetched | None:
        """Reserve blocks and fill them. None when the holder's KV cannot be had; then nothing is held.

        Raises Refused(transfer_failed) when blocks are held until the movers have stopped writing them.
        """
        request_id = request.request_id
        try:
            client = self._context.peers.at(Address.parse(holder.address))
            claim = await client.claim(
                ClaimRequest(
                    request_id=request_id,
                    epoch=epoch_message(epoch),
                    incarnation=holder.incarnation,
                ),
                deadline_s=CLAIM_SECONDS,
            )
            try:
                fetched = await self._fill(request, claim)
            finally:
                intact = await _end(client, claim.claim_id)
        except _Abandoned as error:
            raise Refused(Reason.TRANSFER_FAILED, str(error)) from error
        except (LlumletCallFailed, MigrationError, TransportError) as error:
            logger.info("llumlet: request %s comes without its KV cache: %s", request_id, error)
            return None
        if intact:
            return fetched
        logger.info("llumlet: %s could not keep the KV cache of request %s", holder.instance_id, request_id)
        await self._loop.call(self._loop.port.reservations.cancel, request)
        return None

    async def _fill(self, request: Request, claim: ClaimResponse) -> Fetched:
        computed = self._usable(request, claim)
        memory = decode_memory(claim.source_memory)
        memory.require_same(self._context.identity.digest, self._context.weight_version)
        memory.require_reachable(self._context.config.reaches)
        transport = await self._context.movers.probe(memory)
        block_size = self._loop.port.block_size
        hits, block_ids = await self._loop.call_for_blocks(
            self._loop.reserve, request, False, not self._context.config.exact
        )
        last = -(-computed // block_size)
        copied = await self._pull(request, memory, list(claim.block_ids[hits:last]), block_ids[hits:last], transport)
        return Fetched(max(computed, hits * block_size), copied)

    def _usable(self, request: Request, claim: ClaimResponse) -> int:
        """Of how many tokens the holder has the KV cache; of `request`'s last token it is computed here."""
        delivered = list(request.output_token_ids)
        if list(claim.output_token_ids[: len(delivered)]) != delivered:
            raise Refused(Reason.INVALID_REQUEST, "the holder's tokens are not those that the client has received")
        computed = int(min(claim.computed_tokens, request.num_tokens - 1))
        if not 0 < computed <= len(claim.block_ids) * self._loop.port.block_size:
            raise Refused(Reason.INVALID_REQUEST, f"{computed} tokens in {len(claim.block_ids)} blocks")
        return computed

    async def _pull(
        self, request: Request, memory: SourceMemory, source: list[int], destination: list[int], transport: str
    ) -> int:
        if not destination:
            return 0
        job = self._context.movers.next_job()
        copy = BlockCopy(
            job=job,
            src_blocks=source,
            dst_blocks=destination,
            transport=transport,
            deadline_s=PULL_SECONDS,
            final=True,
            tag="rescue",
        )
        try:
            return await self._context.movers.pull(copy, memory)
        except TransportError as error:
            self._tasks.spawn(self._give_up(request, job))
            raise _Abandoned(str(error)) from error

    async def _give_up(self, request: Request, job: int) -> None:
        """The blocks are not given back while a mover may write them."""
        await self._context.movers.stop(job)
        await self._loop.call(self._loop.port.reservations.cancel, request)


async def _end(client: LlumletClient, claim_id: str) -> bool:
    """Whether what was read under the claim is right."""
    try:
        return (await client.end_claim(EndClaimRequest(claim_id=claim_id), deadline_s=CLAIM_SECONDS)).intact
    except LlumletCallFailed:
        return False
