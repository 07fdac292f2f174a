# SPDX-License-Identifier: Apache-2.0
"""The KV memory of a whole engine, and copying a request's blocks between two of them, worker to worker."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
import zmq.asyncio

from llumlet.protocol import wire
from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.compatibility.identity import EngineFacts
from vllm_llumnix.errors import TransferFailed
from vllm_llumnix.kv.memory.layout import WHOLE, BlockLayout, Cut, Cuts, OfHeads
from vllm_llumnix.kv.mover.messages import BlockCopy, MoverInfo, PeerMemory, Pull
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.settings import UNLIMITED, Limit
from vllm_llumnix.wire.addresses import Reach

logger = logging.getLogger("vllm.llumnix")

ASK_SECONDS = 1.0
"""Seconds between two questions to a mover that does not answer whether it is quiet; less at first, because its
connection ends a little before its thread."""
SILENT_SECONDS = 30.0
"""After which such a mover counts as lost, although its blocks are still kept: else every move would add to them."""


class SourceMemory(msgspec.Struct, frozen=True):
    """Memory of a source, as Reserve carries it: the owner, the facts that it must share with us, and the place of the
    bytes.

    `capability`: the migration's, under which blocks are granted unless they are simply read. `weight_version`: vLLM's
    name of the present weights, which can change while an engine runs. `num_weight_changes`: `Pauses.num_changes`; 0
    from a peer that does not send it.
    """

    facts: EngineFacts
    ranks: list[PeerMemory]
    capability: bytes = b""
    weight_version: str = ""
    num_weight_changes: int = 0

    def require_reachable(self, reach: Reach) -> None:
        """Raises Refused(address_refused): nobody makes us connect to where peers do not live."""
        for rank in self.ranks:
            for address in filter(None, (rank.tcp, rank.mooncake)):
                if (problem := reach.why_not_llumlet(address)) is not None:
                    raise Refused(Reason.ADDRESS_REFUSED, problem)

    def require_alike(self, facts: EngineFacts, weight_version: str) -> None:
        """Raises Refused(incompatible_engine, other_weights) unless a request that was computed there goes on in the
        engine that is described."""
        if (difference := facts.why_not_tokens(self.facts)) is not None:
            raise Refused(Reason.INCOMPATIBLE_ENGINE, difference)
        require_weights(self.weight_version, weight_version)

    def require_cache_alike(
        self, facts: EngineFacts, num_weight_changes: int, *, of_any_block_size: bool = False
    ) -> None:
        """Raises Refused(incompatible_engine, other_weights) unless the bytes mean the same in the engine that is
        described. `of_any_block_size`: parts of blocks can be copied."""
        if (difference := facts.why_not_cache(self.facts, of_any_block_size=of_any_block_size)) is not None:
            raise Refused(Reason.INCOMPATIBLE_ENGINE, f"the KV cache stays behind: {difference}")
        if self.num_weight_changes != num_weight_changes:
            problem = f"weights were changed {num_weight_changes} times here, {self.num_weight_changes} there"
            raise Refused(Reason.OTHER_WEIGHTS, f"the KV cache stays behind: {problem}")


def require_weights(theirs: str, ours: str) -> None:
    """Raises Refused(other_weights) unless a request that was computed with `theirs` goes on here as it would there."""
    if theirs != ours:
        raise Refused(Reason.OTHER_WEIGHTS, f"the weights are of version {ours!r} here, and not {theirs!r}")


_decoder = msgspec.msgpack.Decoder(SourceMemory)


def decode_memory(data: bytes) -> SourceMemory:
    """Raises Refused(invalid_request)."""
    try:
        return _decoder.decode(data)
    except wire.MALFORMED as error:
        raise Refused(Reason.INVALID_REQUEST, f"memory descriptor: {error}") from error


class Route(NamedTuple):
    """A worker of a source from which one of ours reads, and what of its pages goes to what of ours."""

    memory: PeerMemory
    cuts: Cuts = WHOLE


def routes(ours: Sequence[BlockLayout], theirs: Sequence[PeerMemory]) -> list[list[Route]]:
    """Whence each of our workers reads: rank r from rank r where there are as many; else each has a part of the KV
    heads, in the order of ranks, and reads from all that have any of its own. Where the order of a page's dimensions is
    another, vector by vector.

    Raises Refused(incompatible_engine) where that is not so, or heads cannot be told apart. What passes has pages of as
    many tokens as ours, so that cutting them is no more work for us than cutting ours.
    """
    orders = {layout.interior for layout in ours} | {memory.layout.interior for memory in theirs}
    if len(ours) == len(theirs) and len(orders) == 1:
        return [[Route(memory)] for memory in theirs]
    of: OfHeads = "heads" if len(orders) == 1 else "vectors"
    shapes = {(it.heads * len(ours), it.tokens) for it in ours}
    shapes |= {(it.layout.heads * len(theirs), it.layout.tokens) for it in theirs}
    fewer, more = sorted((len(ours), len(theirs)))
    have_vectors = all(layout.has_vectors for layout in (*ours, *(memory.layout for memory in theirs)))
    if len(shapes) != 1 or (0, 0) in shapes or fewer == 0 or more % fewer or not (of == "heads" or have_vectors):
        detail = f"{len(theirs)} workers at the source, {len(ours)} here, and their heads are not cut alike"
        raise Refused(Reason.INCOMPATIBLE_ENGINE, detail)
    each = more // fewer
    if len(ours) == more:
        parts = [Cuts(source=Cut(part, each, of), destination=Cut(0, 1, of)) for part in range(each)]
        return [[Route(theirs[rank // each], parts[rank % each])] for rank in range(more)]
    parts = [Cuts(source=Cut(0, 1, of), destination=Cut(part, each, of)) for part in range(each)]
    return [[Route(theirs[rank * each + part], parts[part]) for part in range(each)] for rank in range(fewer)]


def _both(of_heads: Cuts, of_tokens: Cuts) -> Cuts:
    """Raises Refused(incompatible_engine)."""
    if WHOLE not in (of_heads, of_tokens):
        detail = "engines of another number of workers, or order of a page, and of another block size"
        raise Refused(Reason.INCOMPATIBLE_ENGINE, detail)
    return of_tokens if of_heads == WHOLE else of_heads


class MoveGrant:
    """Blocks of ours that may be sent to one peer, who shows the capability."""

    def __init__(self, movers: Movers) -> None:
        self.capability = secrets.token_bytes(CAPABILITY_BYTES)
        self.has_blocks = False
        self._movers = movers

    async def add(self, blocks: list[int]) -> None:
        """Raises TransferFailed; then some workers may send them."""
        self.has_blocks = True
        await self._movers.grant(self.capability, blocks)

    async def revoke(self) -> None:
        """Returns when none of them is sent any more, however long it takes."""
        await self._movers.revoke(self.capability)


class Movers:
    """The movers of this engine's workers, driven together."""

    def __init__(
        self,
        infos: Sequence[MoverInfo],
        transports: Sequence[str],
        limit: Limit = UNLIMITED,
        limit_here: Limit = UNLIMITED,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """transports: those to be used, in order of preference. `limit` is that of all workers together, for peers on
        other hosts; `limit_here` for those on ours. `on_lost` is told why a mover is not to be counted on any more."""
        self._context = zmq.asyncio.Context()
        self._clients = [MoverClient(info, self._context, on_lost) for info in infos]
        self._on_lost = on_lost
        self._transports = transports
        self._limit, self._limit_here = (each.of_one_in(max(1, len(infos))) for each in (limit, limit_here))
        self._host = infos[0].memory.boot_id if infos else ""
        self._jobs = itertools.count(1)
        self._memories = [info.memory for info in infos]
        self._running: set[int] = set()
        """Jobs of which further parts may begin."""

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers and ranks."""
        return sum(memory.layout.bytes_per_block for memory in self._memories)

    def offer(self, facts: EngineFacts, capability: bytes, weight_version: str, num_weight_changes: int) -> bytes:
        """The place where the KV cache of all ranks lies, for `decode_memory`. See `SourceMemory`."""
        return msgspec.msgpack.encode(
            SourceMemory(facts, self._memories, capability, weight_version, num_weight_changes)
        )

    def next_job(self) -> int:
        """A number by which `pull` and `stop` know one copy."""
        return next(self._jobs)

    async def probe(self, peer: SourceMemory, cuts: Cuts = WHOLE) -> str:
        """The first transport with which every rank reaches its peers, of whose blocks such parts are copied. Raises
        Refused(transport_unavailable), with what is in the way of each, Refused(incompatible_engine) for workers that
        have other parts of the heads."""
        routes = [
            (client, route) for client, its in zip(self._clients, self._routes(peer), strict=True) for route in its
        ]
        obstacles: list[str] = []
        for transport in self._transports:
            found = await asyncio.gather(
                *(client.probe(it.memory, transport, _both(it.cuts, cuts)) for client, it in routes)
            )
            if not any(found):
                return transport
            obstacles += [
                f"{transport}, rank {client.info.rank}: {why}"
                for (client, _), why in zip(routes, found, strict=True)
                if why is not None
            ]
        raise Refused(Reason.TRANSPORT_UNAVAILABLE, "; ".join(obstacles))

    def _routes(self, peer: SourceMemory) -> list[list[Route]]:
        return routes([memory.layout for memory in self._memories], peer.ranks)

    async def pull(self, copies: Sequence[BlockCopy], source: SourceMemory) -> int:
        """Copy blocks on every rank; returns the bytes copied, of all of them together. The copies are parts of one
        job. Raises TransferFailed, and then movers may still be writing: `stop` says when they no longer are."""
        pulls = [
            [self._part_of(copy, route, source.capability) for route in its for copy in copies]
            for its in self._routes(source)
        ]
        (job,) = {copy.job for copy in copies}
        self._running.add(job)
        try:
            copied = await asyncio.gather(*map(self._pull_one_by_one, self._clients, pulls))
        finally:
            self._running.discard(job)
        return sum(copied)

    async def _pull_one_by_one(self, client: MoverClient, pulls: Sequence[Pull]) -> int:
        """The parts of one rank, which its mover knows by the same job."""
        num_bytes = 0
        for pull in pulls:
            # Asked right before the command is on its way: what `stop` says then comes behind it.
            if pull.job not in self._running:
                raise TransferFailed("stopped")
            report = await client.pull(pull)
            if report.error is not None:
                raise TransferFailed(report.error)
            num_bytes += report.bytes
        return num_bytes

    def _part_of(self, copy: BlockCopy, route: Route, capability: bytes) -> Pull:
        here = route.memory.boot_id == self._host
        return Pull(
            **msgspec.structs.asdict(copy) | {"cuts": _both(route.cuts, copy.cuts)},
            peer=route.memory,
            capability=capability,
            limit=self._limit_here if here else self._limit,
            link="here" if here else "remote",
        )

    async def stop(self, job: int) -> None:
        """Returns when no mover writes for this job any more, however long it takes: blocks that may still be written
        are nobody's."""
        self._running.discard(job)
        await self._until_quiet(lambda client: client.stop(job))

    async def grant(self, capability: bytes, blocks: list[int]) -> None:
        """Every worker may send its part of these blocks to who shows the capability. Raises TransferFailed."""
        await asyncio.gather(*(client.grant(capability, blocks) for client in self._clients))

    async def revoke(self, capability: bytes) -> None:
        """Returns when no worker sends anything under it any more, however long it takes: blocks that are being sent
        stay what they are."""
        await self._until_quiet(lambda client: client.revoke(capability))

    async def _until_quiet(self, ask: Callable[[MoverClient], Awaitable[None]]) -> None:
        await asyncio.gather(*(self._ask_until_quiet(client, ask) for client in self._clients))

    async def _ask_until_quiet(self, client: MoverClient, ask: Callable[[MoverClient], Awaitable[None]]) -> None:
        """A mover that lives answers or will; of one that has ended the kernel knows. See `kv.mover.mover_client`."""
        began, pause, told = time.monotonic(), ASK_SECONDS / 32, False
        while True:
            try:
                return await ask(client)
            except TransferFailed as error:
                if not told:
                    told = True
                    logger.warning("blocks are kept until a mover says, or the kernel, that it is quiet: %s", error)
                if time.monotonic() - began > SILENT_SECONDS:
                    self._on_lost(f"a mover does not say that it is quiet: {error}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, ASK_SECONDS)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._context.destroy(linger=0)
