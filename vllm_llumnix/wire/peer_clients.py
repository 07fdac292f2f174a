# SPDX-License-Identifier: Apache-2.0
"""Connections to other llumlets: every call that this process makes to one begins here, but for `frontend.deaths`."""

from __future__ import annotations

from collections import OrderedDict

from llumlet.contract.bridge import reason_number
from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.protocol.errors import Reason
from vllm_llumnix.wire.addresses import Reach

MAX_CLIENTS = 256
"""Llumlets to which a client is kept at a time."""


class PeerClients:
    """A client for each llumlet, kept from one call to the next. On one event loop, which need not run yet."""

    def __init__(self, credentials: Credentials, reach: Reach) -> None:
        self._credentials = credentials
        self._reach = reach
        self._clients: OrderedDict[Address, LlumletClient] = OrderedDict()

    def at(self, address: str | Address) -> LlumletClient:
        """The client of the llumlet at `address` (HOST:PORT). Raises LlumletError(address_refused) if it is not to be
        called, ValueError for an address that is none."""
        address = address if isinstance(address, Address) else Address.parse(address)
        client = self._clients.get(address)
        if client is None:
            if (problem := self._reach.why_not(address.host)) is not None:
                raise LlumletError(reason_number(Reason.ADDRESS_REFUSED), problem, str(address))
            client = self._clients[address] = LlumletClient(address, credentials=self._credentials)
            if len(self._clients) > MAX_CLIENTS:
                # Dropped, not closed: somebody may still use the one that was asked for longest ago.
                self._clients.popitem(last=False)
        self._clients.move_to_end(address)
        return client

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
