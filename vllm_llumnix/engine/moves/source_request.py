# SPDX-License-Identifier: Apache-2.0
"""The request of a move out of this engine, on the engine's loop: looked at, pinned, frozen, released."""

from __future__ import annotations

from collections.abc import Callable

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.compatibility.way import has_kv, why_request_not_portable
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.engine.engine_port import EnginePort, Frontier, FrozenRequest, Pin, WatchedRequest
from vllm_llumnix.engine.requests.request_state import Residence, state_of
from vllm_llumnix.engine.vllm_types import Request
from vllm_llumnix.wire.request_wire import RequestState


class SourceRequest(WatchedRequest):
    """The request of one move. Loop thread, but for what others may read: `frozen`, `num_pinned_blocks`.

    `on_frozen` and `on_end` are called on the llumlet's thread: when the request is frozen and no step works on it, and
    when it ends before it could leave, with the way of its end. `insists`: further input waits for the move; otherwise
    the request stays for it.
    """

    def __init__(
        self,
        context: EngineContext,
        request: Request,
        residence: Residence,
        insists: bool,
        on_frozen: Callable[[FrozenRequest], None],
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(request)
        self.residence = residence
        self._context = context
        self._loop: EnginePort = context.loop
        self._port = self._loop.port
        self._on_frozen = on_frozen
        self._on_end = on_end
        self.num_known_tokens = 0
        """Output tokens that the destination has been told of. From the first state on, the llumlet's thread counts."""
        self.computed_tokens = 0
        """Tokens whose KV was final when it was first looked at."""
        self.queued = False
        """True if it had computed nothing then."""
        self.rows = self._port.rows
        """Rows that this move counts in. Written by the llumlet's thread, before it has anything pinned."""
        self._insists = insists
        self._num_parts = residence.num_parts
        """Parts of its input when it was first looked at."""
        self._with_kv = True
        self._pins: list[Pin] = []

    @property
    def num_pinned_blocks(self) -> int:
        return sum(len(pin.blocks) for pin in self._pins)

    def first_state(self) -> RequestState:
        """The request as it is; from now on it is watched. Raises Refused."""
        if self.request.resumable:
            if (problem := self._port.why_not_now(self.request)) is not None:
                raise Refused(*problem)
            self._num_parts = self.residence.num_parts
            if self._insists:
                self._port.sessions.hold(self.request)
        self._loop.watch(self)
        self.num_known_tokens = self.request.num_output_tokens
        self.queued = not self.request.num_computed_tokens
        self.computed_tokens = self.request.num_computed_tokens - self.request.num_in_flight_tokens
        return state_of(self.request, self.residence, self._port.max_model_len)

    def pin(self, from_block: int) -> Frontier:
        """Raises Refused, see `SchedulerPort.frontier`."""
        self._require_no_more_input()
        frontier = self._port.frontier(self.request, from_block, self.num_known_tokens, self.rows)
        self._pins.append(frontier.pin)
        return frontier

    def freeze(self, with_kv: bool, stays_with_kv: str) -> None:
        """Raises Refused. `with_kv`: its blocks are to be copied. `stays_with_kv`: why it stays if it has any; empty if
        it may leave them."""
        if (problem := self._port.why_not_now(self.request)) is not None:
            raise Refused(*problem)
        self._require_no_more_input()
        if (why := why_request_not_portable(self.request, self._context.identity)) is not None:
            raise Refused(Reason.NOT_PORTABLE, why)
        if stays_with_kv and has_kv(self.request):
            raise Refused(Reason.NOT_PORTABLE, f"it began meanwhile: {stays_with_kv}")
        self._with_kv = with_kv
        self._loop.freeze(self)

    def on_drained(self) -> bool:
        frozen = self._port.drained(self.request, self.num_known_tokens, with_kv=self._with_kv, rows=self.rows)
        if frozen is None:
            return False
        self._pins.append(frozen.pin)
        self._loop.thread.post(self._on_frozen, frozen)
        return True

    def on_gone(self, kind: str) -> None:
        self._loop.thread.post(self._on_end, kind)

    def unfreeze(self, client_index: int, is_in_doubt: bool) -> None:
        """Has it go on here, with its outputs for that client. `is_in_doubt`: the destination has not said that it does
        not take the request; it is told later that it may not, and until then it may read the blocks, and publish what
        it makes of them. So states, which the next step would change, are left as they are. Where workers do not know
        the latest state any more, the request is computed again as well."""
        self._loop.unwatch(self.request.request_id)
        if not self.request.is_finished():
            self.request.client_index = client_index
            self._port.unfreeze(self.request)
            if self._port.rows.num_states and (is_in_doubt or self._port.loses_states_by_waiting):
                self._port.start_over(self.request)

    def release(self) -> None:
        """Forgets it: it is somebody else's now."""
        if self.request.resumable:
            self._port.sessions.left(self.request)
        self._loop.unwatch(self.request.request_id)
        self._port.release(self.request)

    def _require_no_more_input(self) -> None:
        """Raises Refused if a part of its input has come: then what the destination was told is not true any more."""
        if self.residence.num_parts != self._num_parts:
            raise Refused(Reason.PREFILL_RUNNING, "a part of its input has come meanwhile")

    def stop_freezing(self) -> None:
        self.freezing = False

    def unpin(self) -> None:
        for pin in self._pins:
            self._port.unpin(pin)
        self._pins.clear()
