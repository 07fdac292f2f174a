# SPDX-License-Identifier: Apache-2.0
"""Requests whose input comes in parts (vLLM's streaming input), which go elsewhere between two parts.

When a part is answered and the next has not come, such a request stands still: its KV cache is here, no step works on
it. vLLM hands the next part to its scheduler as a request of the same id. Here that is held while the request is on its
way out, and dropped when it has left: its origin sends it again, to whoever says how many parts it has.
Loop thread only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from vllm.v1.request import RequestStatus

from llumlet.protocol.ids import HOME, Epoch
from vllm_llumnix.engine.requests.request_state import BETWEEN_PARTS, residence_of
from vllm_llumnix.engine.vllm_types import Request, Scheduler
from vllm_llumnix.seams import ENGINE

MAX_LEFT: Final = 4096
"""Requests that are remembered to have left. What is still on its way for one of them when it leaves comes soon."""


class Sessions:
    """Input sessions of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held: dict[str, list[Request]] = {}
        """Parts that have come for requests which are on their way out."""
        self._left: OrderedDict[str, None] = OrderedDict()
        self._add = scheduler.add_request
        ENGINE.wrap(scheduler, "Scheduler.add_request", self._take)

    def hold(self, request: Request) -> None:
        """It is on its way out: what comes for it waits."""
        self._held.setdefault(request.request_id, [])

    def go_on(self, request: Request) -> None:
        """It does not leave, and has what has come meanwhile."""
        for part in self._held.pop(request.request_id, ()):
            self._give(request, part)

    def ended(self, request: Request) -> None:
        """It has ended on its way out: nobody waits for an answer."""
        self._held.pop(request.request_id, None)

    def left(self, request: Request) -> None:
        self._held.pop(request.request_id, None)
        self._left[request.request_id] = None
        if len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)

    def come(self, request: Request) -> None:
        """It has arrived, with its KV cache in place: it stands here as it stood there."""
        scheduler = self._scheduler
        self._left.pop(request.request_id, None)
        request.streaming_queue = deque()
        request.status = BETWEEN_PARTS
        scheduler.num_waiting_for_streaming_input += 1
        scheduler.deferred_waiting.add(request)
        scheduler.kv_holding_waiting.add_request(request)

    def take_part(self, request_id: str, epoch: Epoch, number: int, part: Request | None) -> None:
        """The part of that number has come by relay for a request that is here under `epoch`; None: there is no more
        input. Any other than the next one is dropped."""
        session = self._scheduler.requests.get(request_id)
        residence = residence_of(session) if session is not None else None
        if session is None or residence is None or not session.resumable or residence.epoch != epoch:
            return
        if number != residence.num_parts + len(self._held.get(request_id, ())):
            return
        if part is not None:
            self._give(session, part)
        elif request_id not in self._held:
            self._end(session)

    def _take(self, request: Request) -> None:
        """Takes what vLLM gives its scheduler: a request, or a part of one. Parts of a request that has been elsewhere
        come by relay alone: one that still comes on vLLM's own path is sent again there."""
        request_id = request.request_id
        session = self._scheduler.requests.get(request_id)
        if session is None:
            if request_id not in self._left:
                self._add(request)
            return
        residence = residence_of(session)
        if residence is None or residence.epoch == HOME:
            self._give(session, request)

    def _give(self, session: Request, part: Request) -> None:
        held = self._held.get(session.request_id)
        if held is not None:
            held.append(part)
            return
        if part.resumable and (residence := residence_of(session)) is not None:
            residence.num_parts += 1
        self._add(part)

    def _end(self, session: Request) -> None:
        """As vLLM ends one of which no more input comes."""
        if session.status == BETWEEN_PARTS:
            self._scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
        elif None not in session.streaming_queue:
            session.streaming_queue.append(None)
