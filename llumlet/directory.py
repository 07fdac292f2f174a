# SPDX-License-Identifier: Apache-2.0
"""Who else there is, asked of a cluster metadata store now and then, by instances that may need each other.

What is read is bounded whatever the size of the cluster: a thousand API servers ask every few seconds. A store of an
older version is read whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from llumlet.client import failure_of
from llumlet.credentials import Credentials
from llumlet.peers import MAX_PEERS, peer_of, takes_requests, usage
from llumlet.proto.llumlet_pb2_grpc import CmsStub
from llumlet.report_links import LinkLost
from llumlet.types import (
    Address,
    InstanceState,
    PeersRequest,
    PeersResponse,
    WatchRequest,
)

LOOK_S: Final = 3.0
MAX_INSTANCES: Final = 10_000
OLD_FOR_S: Final = 300.0
"""Time for which a store that does not know the question is not asked it again."""


class Directory(Protocol):
    """One store, and the connection to it, which is kept from one question to the next. Belongs to one event loop."""

    async def peers(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        """Instances that could take the requests of `own_ids`; `digest` is that of the last answer, or empty. Raises
        LinkLost, and DecodeError for what is no answer."""
        ...

    async def close(self) -> None: ...


class CmsDirectory:
    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._deadline_s = deadline_s
        self._clock = clock
        self._channel: aio.Channel | None = None
        self._old_until_s = float("-inf")

    async def peers(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        if self._channel is None:
            self._channel = self._credentials.channel(self._address)
        stub, metadata = CmsStub(self._channel), self._credentials.call_metadata
        try:
            if self._clock() >= self._old_until_s:
                try:
                    request = PeersRequest(instance_ids=own_ids, compatibility_digest=digest, number=MAX_PEERS)
                    return await stub.Peers(request, metadata=metadata, timeout=self._deadline_s)
                except aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                        raise
                    self._old_until_s = self._clock() + OLD_FOR_S
            call = stub.Watch(WatchRequest(), metadata=metadata, timeout=self._deadline_s)
            try:
                return peers_among(await _first_part(call), own_ids, digest)
            finally:
                call.cancel()
        except aio.AioRpcError as error:
            raise LinkLost(failure_of(error, str(self._address)).detail) from error

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)


async def _first_part(call: Any) -> list[InstanceState]:
    """All that a watcher is told at the beginning."""
    found: dict[str, InstanceState] = {}
    async for change in call:
        if change.complete or len(found) == MAX_INSTANCES:
            break
        if change.left:
            found.pop(change.left, None)
        else:
            found[change.instance.metadata.instance_id] = change.instance
    return list(found.values())


def peers_among(states: Iterable[InstanceState], own_ids: Sequence[str], digest: str) -> PeersResponse:
    """What a store would answer that knows these states and has to answer for itself."""
    states = list(states)
    digest = next((one.metadata.compatibility_digest for one in states if one.metadata.instance_id in own_ids), digest)
    others = [
        state
        for state in states
        if takes_requests(state.status)
        and state.metadata.instance_id not in own_ids
        and (not digest or state.metadata.compatibility_digest == digest)
    ]
    others.sort(key=lambda state: usage(state.status))
    peers = [peer_of(state.metadata, state.status) for state in others[:MAX_PEERS]]
    return PeersResponse(peers=peers, compatibility_digest=digest)
