# SPDX-License-Identifier: Apache-2.0
"""Requests whose input comes in parts, vLLM's streaming input: each part is an `EngineCoreRequest` of the same id, and
so is the end of the input, which is not `resumable` any more. In an API server; on its event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from llumlet.protocol import wire
from llumlet.protocol.origin.inputs import SendPart
from llumlet.protocol.origin.origin import Origin
from vllm_llumnix.frontend.calls import state_of
from vllm_llumnix.frontend.kept_inputs import why_not_kept
from vllm_llumnix.frontend.relay_socket import RelaySocket
from vllm_llumnix.wire.features_wire import MAX_INPUT_BYTES
from vllm_llumnix.wire.request_wire import encode

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest


MAX_PART_BYTES: Final = wire.MAX_MESSAGE_BYTES - (1 << 16)


class InputSessions:
    """Input sessions of one vLLM client. `open_stream` opens that of a first part in `core`; `carry_out` does what that
    asks for. `unlearn` is told of each image that has come: vLLM sends its engine one that has been shown before by its
    name alone, and a later part may have to go to an engine that does not know it."""

    def __init__(
        self,
        core: Origin,
        open_stream: Callable[[EngineCoreRequest], object],
        carry_out: Callable[[], None],
        unlearn: Callable[[str], None],
    ) -> None:
        self._core = core
        self._open_stream = open_stream
        self._carry_out = carry_out
        self._unlearn = unlearn
        self._open: set[str] = set()
        """Requests of which more input may come; the stream may have ended before."""

    def has_part(self, request: EngineCoreRequest) -> bool:
        """True if this is a part of a session, the first one included, or its end."""
        return request.resumable or request.request_id in self._open

    def take(self, request: EngineCoreRequest) -> bool:
        """Returns whether the part has to go to the home engine, on vLLM's own path; nobody wants that of a stream
        which has ended."""
        core, request_id = self._core, request.request_id
        for image in request.mm_features or ():
            self._unlearn(image.mm_hash or image.identifier)
        if request_id not in self._open:
            self._open.add(request_id)
            self._open_stream(request)
        elif not request.resumable:
            self._open.discard(request_id)
        stream = core.streams.get(request_id)
        if stream is None:
            return False
        goes_home = core.add_input(stream, request) if request.resumable else core.end_input(stream, time.monotonic())
        self._carry_out()
        return goes_home

    def close(self, request_ids: Iterable[str]) -> None:
        """Their clients have left."""
        self._open.difference_update(request_ids)


def send_part(relay: RelaySocket, effect: SendPart) -> str | None:
    """To the engine that has the request. Returns why it cannot be sent there at all."""
    stream, part, state = effect.stream, effect.part, None
    if part is not None:
        if why := why_not_kept(part, MAX_INPUT_BYTES):
            return why
        state = encode(state_of(part, [], relay.address, None))
        if len(state) > MAX_PART_BYTES:
            return f"a part of its input has {len(state)} bytes"
    relay.send(effect.identity, wire.InputPart(stream.request_id, stream.epoch, effect.number, state))
    return None
