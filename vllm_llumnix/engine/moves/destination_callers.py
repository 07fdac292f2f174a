# SPDX-License-Identifier: Apache-2.0
"""Peers that wait for the answers of one move. Llumlet thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any

from llumlet.contract.bridge import HANDOVERS, reason_number
from llumlet.contract.types import SettleResponse
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import Settlement


class Callers:
    """Callers who wait, by what they have asked for: the same call twice gets one answer."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[asyncio.Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, asked: Hashable) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asked, []).append(answer)
        return answer

    def give_up(self, asked: Hashable, answer: asyncio.Future[Any]) -> None:
        """Whoever waited for `answer` does not any more."""
        self._waiting[asked].remove(answer)

    def answer(self, asked: Hashable, answer: Any) -> None:
        """An exception is raised where they wait."""
        for waiting in self._waiting.pop(asked, ()):
            if waiting.done():
                continue
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)


def settle_response(state: Settlement, reason: Reason | None, incarnation: str) -> SettleResponse:
    """What became of a hand-over, by the machine or by what is known without one."""
    return SettleResponse(state=HANDOVERS[state], reason=reason_number(reason), dst_incarnation=incarnation)
