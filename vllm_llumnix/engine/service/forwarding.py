# SPDX-License-Identifier: Apache-2.0
"""The places where requests that have left this engine are now. Llumlet thread only."""

from __future__ import annotations

from collections import OrderedDict

from llumlet.process.addresses import Address

ENTRIES = 65_536
"""Requests that are remembered, those that left last: to send late aborts after them."""


class Forwarding:
    """The llumlet to which each request has gone from here, by the request's id."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, Address] = OrderedDict()

    def remember(self, request_id: str, address: Address) -> None:
        self._left[request_id] = address
        self._left.move_to_end(request_id)
        if len(self._left) > ENTRIES:
            self._left.popitem(last=False)

    def came_back(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def owner_of(self, request_id: str) -> Address | None:
        """The instance that a request went to; None for one that has not left, or is forgotten."""
        return self._left.get(request_id)
