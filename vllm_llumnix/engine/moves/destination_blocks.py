# SPDX-License-Identifier: Apache-2.0
"""The blocks of a request that may come: where they are at its source and here, and how they are copied. Llumlet
thread only. They are counted in rows, see `block_rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llumlet.protocol.effects import Pull
from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.blocks.block_rows import BlockRows
from vllm_llumnix.engine.blocks.movers import SourceMemory, decode_memory
from vllm_llumnix.engine.blocks.reblocking import Pairing, rows_between
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import Reserved
from vllm_llumnix.errors import TransportError
from vllm_llumnix.kv.memory.layout import WHOLE, Cuts, OfStates, cuts_behind
from vllm_llumnix.kv.mover.messages import BlockCopy


class DestinationBlocks:
    """`here` is its reservation; `transport` is empty if none was chosen."""

    def __init__(self, context: EngineContext, rows: BlockRows) -> None:
        self.here = Reserved()
        self.transport = ""
        self._context = context
        self._rows = rows
        self._pairing: Pairing | None = None
        """None until it is known that blocks here can be filled from those there."""
        self._memory: SourceMemory | None = None
        self._at_source: dict[int, Sequence[int]] = {}
        """Rows of block ids of the source."""
        self._states_at_source: Mapping[Cuts, Mapping[int, int]] = {}
        """Blocks of the source with the latest states, by what of them is copied and by their place among the states.
        """
        self._jobs: dict[int, int] = {}
        """The machine numbers its jobs from 1, the movers' are those of all moves."""

    @property
    def count(self) -> int:
        """Number of blocks that are held here. Any thread."""
        return self.here.num_blocks

    def come_from(self, source_memory: bytes, row_tokens: int) -> None:
        """Blocks of which rows of `row_tokens` tokens are there. Raises Refused unless what was computed there goes on
        here."""
        ours = self._context.loop.port.rows
        if rows_between(ours, row_tokens) is not None:
            self._pairing = Pairing(ours, self._rows, row_tokens)
        self._memory = decode_memory(source_memory)
        self._memory.require_alike(self._context.identity.facts, self._context.weight_version)

    @property
    def pairs(self) -> bool:
        """True if both sides count in the same rows."""
        return self._pairing is not None

    async def choose_transport(self, *, may_stay: bool) -> str:
        """Why there is none, if the blocks `may_stay` where they are. Raises Refused, TransportError if not."""
        context, memory = self._context, self._memory
        assert memory is not None
        if (reason := context.identity.kv_unsupported) is not None:
            return f"at the destination: {reason}"
        memory.require_reachable(context.config.reaches)
        try:
            memory.require_cache_alike(
                context.identity.facts, context.num_weight_changes, of_any_block_size=self._pairing is not None
            )
            self.transport = await context.movers.probe(memory, self._pairing.cuts if self._pairing else WHOLE)
        except (Refused, TransportError) as error:
            if may_stay:
                return str(error)
            raise
        return ""

    def find_at_source(self, from_row: int, to_row: int, block_ids: Sequence[int]) -> None:
        """The source says where rows are. Raises Refused unless it says so of each block."""
        width = self._pairing.their_width if self._pairing is not None else 0
        if len(block_ids) != width * (to_row - from_row):
            detail = f"{len(block_ids)} block ids for rows {from_row} to {to_row}, of {width} blocks each"
            raise Refused(Reason.INVALID_REQUEST, detail)
        for row in range(from_row, to_row):
            at = width * (row - from_row)
            self._at_source[row] = block_ids[at : at + width]

    def find_states_at_source(self, block_ids: Sequence[int], num_accepted: int, accepted_ids: Sequence[int]) -> None:
        """The source says where the latest states are: behind so many accepted drafts, recurrent ones have blocks of
        their own, and rings have what they have. Raises Refused unless it says so of each."""
        rows = self._context.loop.port.rows
        if len(block_ids) != rows.num_states or len(accepted_ids) != (rows.num_states if num_accepted else 0):
            problem = f"{len(block_ids)} states and {len(accepted_ids)} behind drafts, of {rows.num_states}"
            raise Refused(Reason.INVALID_REQUEST, problem)
        if num_accepted > rows.num_drafts:
            raise Refused(Reason.INVALID_REQUEST, f"{num_accepted} drafts accepted of {rows.num_drafts}")
        self._states_at_source = {WHOLE: dict(enumerate(block_ids))}
        if num_accepted:
            assert self._memory is not None

            ring_places = rows.ring_places

            def some(ids: Sequence[int], *, rings: bool) -> dict[int, int]:
                return {place: block for place, block in enumerate(ids) if (place in ring_places) is rings}

            kinds = sorted({part.is_of for rank in self._memory.ranks for part in rank.layout.states})
            places: dict[OfStates, Sequence[int]] = {"inputs": block_ids, "recurrent": accepted_ids}
            self._states_at_source = {WHOLE: some(block_ids, rings=True)} | {
                cuts_behind(num_accepted, kind): some(places[kind], rings=False) for kind in kinds
            }

    async def pull(self, wanted: Pull, *, final: bool, deadline_s: float) -> int:
        """Copy the rows that the machine says, and with the last of them the latest states; returns the bytes of all
        ranks. What a window has left behind, at the source or here, is not copied: nobody looks at it any
        more, and `Reservations.admit` keeps it out of the prefix cache.

        Raises Refused(invalid_request) if the source has not said where they are, and TransportError: then `stop` says
        when nothing is written any more.
        """
        assert self._memory is not None
        if self._pairing is None:
            raise Refused(Reason.INVALID_REQUEST, "its blocks cannot be copied into those here, and it was told so")
        rows, width = range(wanted.from_block, wanted.to_block), self._pairing.our_width
        if not self._at_source.keys() >= set(rows):
            detail = f"the source did not say where blocks {wanted.from_block} to {wanted.to_block} are"
            raise Refused(Reason.INVALID_REQUEST, detail)
        here = self.here.block_ids[width * rows.start : width * rows.stop]
        copied = dict(self._pairing.pairs([self._at_source[row] for row in rows], here))
        for cuts, states in self._states_at_source.items() if final else ():
            pairs = [(at_source, self.here.state_ids[place]) for place, at_source in states.items()]
            copied[cuts] = [*copied.get(cuts, []), *pairs]
        copies = [
            BlockCopy(
                job=self._job(wanted.job),
                src_blocks=[at_source for at_source, _ in pairs],
                dst_blocks=[here for _, here in pairs],
                cuts=cuts,
                transport=self.transport,
                deadline_s=deadline_s,
                final=final,
                tag=f"from {wanted.from_block}",
            )
            for cuts, pairs in copied.items()
            if pairs
        ]
        return await self._context.movers.pull(copies, self._memory) if copies else 0

    async def stop(self, job: int) -> None:
        """Returns when nothing is written for this job any more, however long it takes."""
        await self._context.movers.stop(self._job(job))

    def shed(self) -> None:
        """Lets go of everything: nothing of it is needed any more."""
        self._memory = None
        self.here, self._at_source, self._states_at_source = Reserved(), {}, {}

    def _job(self, job: int) -> int:
        if job not in self._jobs:
            self._jobs[job] = self._context.movers.next_job()
        return self._jobs[job]
