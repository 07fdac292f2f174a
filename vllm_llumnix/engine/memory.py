# SPDX-License-Identifier: Apache-2.0
"""The KV memory of a whole engine, and copying a request's blocks between two of them: rank r to rank r."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec
import zmq.asyncio

from vllm_llumnix.errors import Reason, Refused, TransferFailed
from vllm_llumnix.kv.client import MoverClient
from vllm_llumnix.kv.messages import MoverInfo, PeerMemory
from vllm_llumnix.kv.settings import UNLIMITED, Limit
from vllm_llumnix.migration import wire


class SourceMemory(msgspec.Struct, frozen=True):
    """What Reserve carries: who offers its memory, what it must have in common with us, and where the bytes are.

    `capability` is the migration's: blocks are granted under it, where they are not simply read. `weight_version` is
    vLLM's name of the weights that are loaded at this moment: they can be exchanged while an engine runs.
    """

    digest: str
    ranks: list[PeerMemory]
    capability: bytes = b""
    weight_version: str = ""

    def require_same(self, digest: str, weight_version: str) -> None:
        """Raises Refused(incompatible_engine) unless the bytes mean the same in the engine that is described."""
        if self.digest != digest:
            raise Refused(
                Reason.INCOMPATIBLE_ENGINE,
                "model, weights, vLLM version, KV layout, data types or parallel sizes differ",
            )
        if self.weight_version != weight_version:
            raise Refused(
                Reason.INCOMPATIBLE_ENGINE,
                f"the weights are of version {self.weight_version!r} at the source, {weight_version!r} here",
            )


_decoder = msgspec.msgpack.Decoder(SourceMemory)


def encode_memory(digest: str, movers: Sequence[MoverInfo], capability: bytes = b"", weight_version: str = "") -> bytes:
    return msgspec.msgpack.encode(SourceMemory(digest, [mover.memory for mover in movers], capability, weight_version))


def decode_memory(data: bytes) -> SourceMemory:
    """Raises Refused(invalid_request)."""
    try:
        return _decoder.decode(data)
    except wire.MALFORMED as error:
        raise Refused(Reason.INVALID_REQUEST, f"memory descriptor: {error}") from error


class Movers:
    """The movers of this engine's workers, driven together."""

    def __init__(
        self,
        infos: Sequence[MoverInfo],
        transports: Sequence[str],
        limit: Limit = UNLIMITED,
        limit_here: Limit = UNLIMITED,
    ) -> None:
        """transports: those to be used, in order of preference. `limit` is that of all workers together, for peers on
        other hosts; `limit_here` for those on ours."""
        self._context = zmq.asyncio.Context()
        self._clients = [MoverClient(info, self._context) for info in infos]
        self._transports = transports
        self._limit, self._limit_here = (each.of_one_in(max(1, len(infos))) for each in (limit, limit_here))
        self._host = infos[0].memory.boot_id if infos else ""
        self._jobs = itertools.count(1)

    def next_job(self) -> int:
        """A number by which `pull` and `stop` know one copy."""
        return next(self._jobs)

    async def probe(self, peer: SourceMemory) -> str:
        """The first transport with which every rank reaches its peer. Raises Refused(transport_unavailable), with what
        is in the way of each."""
        if len(peer.ranks) != len(self._clients):
            raise Refused(
                Reason.INCOMPATIBLE_ENGINE, f"{len(peer.ranks)} workers at the source, {len(self._clients)} here"
            )
        obstacles: list[str] = []
        for transport in self._transports:
            found = await asyncio.gather(
                *(client.probe(memory, transport) for client, memory in zip(self._clients, peer.ranks, strict=True))
            )
            if not any(found):
                return transport
            obstacles += [f"{transport}, rank {rank}: {why}" for rank, why in enumerate(found) if why is not None]
        raise Refused(Reason.TRANSPORT_UNAVAILABLE, "; ".join(obstacles))

    async def pull(
        self,
        job: int,
        peer: SourceMemory,
        src_blocks: list[int],
        dst_blocks: list[int],
        *,
        transport: str,
        deadline_s: float,
        final: bool,
        tag: str,
    ) -> int:
        """Copy blocks on every rank; returns the bytes copied. Raises TransferFailed, and then movers may still be
        writing: `stop` says when they no longer are."""
        reports = await asyncio.gather(
            *(
                client.pull(
                    job,
                    memory,
                    src_blocks,
                    dst_blocks,
                    transport=transport,
                    capability=peer.capability,
                    deadline_s=deadline_s,
                    limit=self._limit_here if memory.boot_id == self._host else self._limit,
                    link="here" if memory.boot_id == self._host else "remote",
                    final=final,
                    tag=tag,
                )
                for client, memory in zip(self._clients, peer.ranks, strict=True)
            )
        )
        for report in reports:
            if report.error is not None:
                raise TransferFailed(report.error)
        return sum(report.bytes for report in reports)

    async def stop(self, job: int) -> None:
        """Returns when no mover writes for this job any more. Raises TransferFailed if one does not answer."""
        await asyncio.gather(*(client.stop(job) for client in self._clients))

    async def grant(self, capability: bytes, blocks: list[int]) -> None:
        """Every worker may send its part of these blocks to who shows the capability. Raises TransferFailed."""
        await asyncio.gather(*(client.grant(capability, blocks) for client in self._clients))

    async def revoke(self, capability: bytes) -> None:
        """Returns when no worker sends anything under it any more. Raises TransferFailed if one does not answer."""
        await asyncio.gather(*(client.revoke(capability) for client in self._clients))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._context.destroy(linger=0)
