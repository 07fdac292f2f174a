# SPDX-License-Identifier: Apache-2.0
"""Asks a cluster metadata store for other instances, periodically.

The size of an answer is bounded, as a thousand API servers ask every few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from grpc import aio

from llumlet.contract.channels import RenewedChannel
from llumlet.contract.client import failure_of
from llumlet.contract.cms.peers import MAX_PEERS
from llumlet.contract.cms.report_links import LinkLost
from llumlet.contract.proto.llumlet_pb2_grpc import CmsStub
from llumlet.contract.types import PeersRequest, PeersResponse
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials

LOOK_S: Final = 3.0
"""Time for an answer."""


class Directory(Protocol):
    """One store, and the connection to it, which is kept from one question to the next. Belongs to one event loop."""

    async def peers(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        """Instances that could take the requests of `own_ids`; `digest`: that of the last answer, or "". Raises
        LinkLost, and DecodeError for an invalid answer."""
        ...

    async def close(self) -> None: ...


class CmsDirectory:
    def __init__(self, address: Address, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._channel = RenewedChannel(credentials, address)

    async def peers(self, own_ids: Sequence[str], digest: str) -> PeersResponse:
        request = PeersRequest(instance_ids=own_ids, compatibility_digest=digest, number=MAX_PEERS)
        metadata = self._credentials.call_metadata
        try:
            return await CmsStub(self._channel.get()).Peers(request, metadata=metadata, timeout=LOOK_S)
        except aio.AioRpcError as error:
            raise LinkLost(failure_of(error, str(self._address)).detail) from error

    async def close(self) -> None:
        await self._channel.close()
