# SPDX-License-Identifier: Apache-2.0
"""Brings the KV cache of a request from an engine whose loop hangs: the shell of `llumlet.protocol.recovery.rescue`."""

from __future__ import annotations

import logging

from vllm.v1.request import Request

from llumlet.contract.bridge import epoch_message
from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import ClaimRequest, ClaimResponse, EndClaimRequest, Holder
from llumlet.process.tasks import Tasks
from llumlet.protocol.errors import MigrationError
from llumlet.protocol.ids import Epoch
from llumlet.protocol.recovery import rescue as on
from vllm_llumnix.engine.blocks.block_rows import NULL_ID, to_copy
from vllm_llumnix.engine.blocks.movers import SourceMemory, decode_memory
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import Reserved
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.mover.messages import BlockCopy

logger = logging.getLogger("vllm.llumnix")


class Rescues:
    """The adopting side of `Claim`. Llumlet thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._draining = Tasks()
        self._fetching: set[_Fetching] = set()

    async def fetch(self, request: Request, epoch: Epoch, holder: Holder) -> on.Rescue:
        """Reserve blocks and fill them. The machine, which says how that came out: FETCHED, and blocks are held;
        WITHOUT, and nothing is; DRAINING, and they are until the movers have stopped writing them.
        """
        delivered = list(request.output_token_ids)
        machine = on.Rescue(request.num_tokens, delivered, self._context.loop.port.block_size)
        fetching = _Fetching(self._context, self._draining, request, epoch, holder, machine)
        self._fetching.add(fetching)
        try:
            await fetching.run(on.RescueStarted())
        finally:
            self._fetching.discard(fetching)
        if machine.state is on.State.WITHOUT:
            logger.info("llumlet: request %s comes without its KV cache: %s", request.request_id, machine.detail)
        return machine

    def call_off(self) -> None:
        """The blocks that are held for them are void: no more is copied there."""
        for fetching in self._fetching:
            fetching.called_off = True
            self._draining.spawn(fetching.stop_copy())


class _Fetching:
    """A machine and the request that it works on."""

    def __init__(
        self,
        context: EngineContext,
        draining: Tasks,
        request: Request,
        epoch: Epoch,
        holder: Holder,
        machine: on.Rescue,
    ) -> None:
        self._context = context
        self._draining = draining
        self._request = request
        self._epoch = epoch
        self._holder = holder
        self._machine = machine
        self._claim = ClaimResponse()
        self._rows = context.loop.port.rows
        self._here = Reserved()
        self._memory: SourceMemory | None = None
        self._transport = ""
        self._job = 0
        self.called_off = False

    async def run(self, event: on.RescueEvent) -> None:
        events = [event]
        while events:
            for effect in self._machine.on(events.pop(0)):
                answer = await self._perform(effect)
                if answer is not None:
                    events.append(answer)

    async def stop_copy(self) -> None:
        await self._context.movers.stop(self._job)

    async def _quiesce(self) -> None:
        """The blocks are not given back while a mover may write them."""
        await self.stop_copy()
        await self.run(on.CopyQuiet())

    async def _perform(self, effect: on.RescueEffect) -> on.RescueEvent | None:
        match effect:
            case on.AskClaim(seconds=seconds):
                return await self._ask(seconds)
            case on.TakeRoom():
                return await self._take_room()
            case on.CopyBlocks():
                return await self._copy(effect)
            case on.StopCopy():
                self._draining.spawn(self._quiesce())
            case on.EndClaim(seconds=seconds):
                return await self._end(seconds)
            case on.FreeRoom():
                loop = self._context.loop
                await loop.call(loop.port.reservations.cancel, self._request)
        return None

    async def _ask(self, seconds: float) -> on.RescueEvent:
        request_id, holder = self._request.request_id, self._holder
        asked = ClaimRequest(request_id=request_id, epoch=epoch_message(self._epoch), incarnation=holder.incarnation)
        try:
            self._claim = claim = await self._client().claim(asked, deadline_s=seconds)
        except (LlumletCallFailed, MigrationError) as error:
            return on.ClaimFailed(str(error))
        num_rows = len(claim.block_ids) // self._rows.width if self._rows.width else 0
        return on.ClaimGranted(claim.computed_tokens, num_rows, claim.output_token_ids)

    async def _take_room(self) -> on.RescueEvent:
        context = self._context
        try:
            self._memory = memory = decode_memory(self._claim.source_memory)
            memory.require_alike(context.identity.facts, context.weight_version)
            memory.require_cache_alike(context.identity.facts, context.num_weight_changes)
            memory.require_reachable(context.config.reaches)
            self._transport = await context.movers.probe(memory)
            computed_tokens = self._machine.computed_tokens
            self._here = await context.loop.call_for_blocks(
                context.loop.reserve, self._request, False, not context.config.exact, computed_tokens
            )
            if not await context.loop.call(self._holder_has, computed_tokens):
                await context.loop.call(context.loop.port.reservations.cancel, self._request)
                return on.RoomRefused("a window of the holder's has left behind what the client has not received yet")
        except (MigrationError, TransportError) as error:
            return on.RoomRefused(str(error))
        return on.RoomTaken(self._here.num_hits)

    def _holder_has(self, computed_tokens: int) -> bool:
        """True if the holder has every block that is looked at behind so many tokens, but for hits. Loop thread."""
        from_row = self._here.num_hits
        needed = self._rows.blocks(self._request, computed_tokens, from_row)
        held = self._claim.block_ids[self._rows.width * from_row :]
        return not any(
            block.block_id != NULL_ID and there == NULL_ID for block, there in zip(needed, held, strict=False)
        )

    async def _copy(self, effect: on.CopyBlocks) -> on.RescueEvent:
        assert self._memory is not None
        if self.called_off:
            return on.CopyFailed("this engine was paused, or its weights have changed, meanwhile")
        width, movers = self._rows.width, self._context.movers
        blocks = slice(width * effect.from_block, width * effect.to_block)
        copied = to_copy(self._claim.block_ids[blocks], self._here.block_ids[blocks])
        self._job = movers.next_job()
        copy = BlockCopy(
            job=self._job,
            src_blocks=[there for there, _ in copied],
            dst_blocks=[here for _, here in copied],
            transport=self._transport,
            deadline_s=effect.seconds,
            final=True,
            tag="rescue",
        )
        try:
            return on.CopyDone(await movers.pull([copy], self._memory))
        except TransportError as error:
            return on.CopyFailed(str(error))

    def _client(self) -> LlumletClient:
        return self._context.peers.at(self._holder.address)

    async def _end(self, seconds: float) -> on.RescueEvent:
        asked = EndClaimRequest(claim_id=self._claim.claim_id)
        try:
            answer = await self._client().end_claim(asked, deadline_s=seconds)
        except (LlumletCallFailed, MigrationError):
            return on.ClaimSettled(intact=False)
        return on.ClaimSettled(intact=answer.intact)
