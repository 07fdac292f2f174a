# SPDX-License-Identifier: Apache-2.0
"""The blocks of a request that may come: where they are at its source and here, and how they are copied. Llumlet
thread only."""

from __future__ import annotations

from collections.abc import Sequence

from llumlet.protocol.effects import Pull
from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.memory import SourceMemory, decode_memory
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.messages import BlockCopy


class ArrivingBlocks:
    """`block_ids` are those of its reservation here, by index in the request; `transport` is empty if none was
    chosen."""

    def __init__(self, context: EngineContext) -> None:
        self.block_ids: list[int] = []
        self.transport = ""
        self._context = context
        self._memory: SourceMemory | None = None
        self._at_source: dict[int, int] = {}
        """Block ids of the source, by index in the request."""
        self._jobs: dict[int, int] = {}
        """The machine numbers its jobs from 1, the movers' are those of all moves."""

    @property
    def count(self) -> int:
        """Number of blocks that are held here. Any thread."""
        return len(self.block_ids)

    def come_from(self, source_memory: bytes) -> None:
        """Raises Refused unless the bytes there mean the same here."""
        self._memory = decode_memory(source_memory)
        self._memory.require_same(self._context.identity.digest, self._context.weight_version)

    async def choose_transport(self, *, may_stay: bool) -> str:
        """Why there is none, if the blocks `may_stay` where they are. Raises Refused, TransportError if not."""
        context, memory = self._context, self._memory
        assert memory is not None
        if (reason := context.identity.kv_unsupported) is not None:
            return f"at the destination: {reason}"
        memory.require_reachable(context.config.reaches)
        try:
            self.transport = await context.movers.probe(memory)
        except (Refused, TransportError) as error:
            if may_stay:
                return str(error)
            raise
        return ""

    def find_at_source(self, from_block: int, block_ids: Sequence[int]) -> None:
        """The source says where blocks are, from index `from_block` on."""
        self._at_source.update(enumerate(block_ids, from_block))

    async def pull(self, wanted: Pull, *, final: bool, deadline_s: float) -> int:
        """Copy the blocks that the machine says; returns the bytes of all ranks. Raises Refused(invalid_request) if the
        source has not said where they are, and TransportError: then `stop` says when nothing is written any more."""
        assert self._memory is not None
        indices = range(wanted.from_block, wanted.to_block)
        if not self._at_source.keys() >= set(indices):
            detail = f"the source did not say where blocks {wanted.from_block} to {wanted.to_block} are"
            raise Refused(Reason.INVALID_REQUEST, detail)
        copy = BlockCopy(
            job=self._job(wanted.job),
            src_blocks=[self._at_source[index] for index in indices],
            dst_blocks=self.block_ids[wanted.from_block : wanted.to_block],
            transport=self.transport,
            deadline_s=deadline_s,
            final=final,
            tag=f"from {wanted.from_block}",
        )
        return await self._context.movers.pull(copy, self._memory)

    async def stop(self, job: int) -> None:
        """Returns when nothing is written for this job any more, however long it takes."""
        await self._context.movers.stop(self._job(job))

    def shed(self) -> None:
        """Lets go of everything: nothing of it is needed any more."""
        self._memory = None
        self.block_ids, self._at_source = [], {}

    def _job(self, job: int) -> int:
        if job not in self._jobs:
            self._jobs[job] = self._context.movers.next_job()
        return self._jobs[job]
