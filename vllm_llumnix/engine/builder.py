# SPDX-License-Identifier: Apache-2.0
"""Builds an arriving request off the engine's loop: checks, token history, compiled grammar."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from vllm.v1.request import Request

from vllm_llumnix.engine.request_state import Residence, build_request, settle_in
from vllm_llumnix.errors import Reason, Refused
from vllm_llumnix.request_wire import decode_state

GRAMMAR_SECONDS = 20.0
_POLL_SECONDS = 0.002


class RequestBuilder:
    """One per engine. `build` runs in a thread of its own; the request belongs to the caller until it is admitted."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._grammars = engine.structured_output_manager
        self._serialise_grammar_init()

    async def build(self, state: bytes) -> tuple[Request, Residence]:
        """The request with its history, and its residence here. Raises Refused."""
        return await asyncio.to_thread(self._build, state)

    def _build(self, data: bytes) -> tuple[Request, Residence]:
        state = decode_state(data)
        if state.lora_name is not None:
            raise Refused(Reason.LORA_NOT_AVAILABLE, f"adapter {state.lora_name!r} is not loaded here")
        model = self._engine.vllm_config.model_config
        request = build_request(
            state,
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            block_hasher=self._engine.request_block_hasher,
        )
        residence = Residence(
            origin=state.origin,
            external_request_id=state.external_request_id,
            reasoning_ended=state.reasoning_ended,
        )
        settle_in(request, residence)
        if request.use_structured_output:
            self._compile_grammar(request)
            self.advance_grammar(request, state.output_token_ids)
        return request, residence

    def append(self, request: Request, token_ids: list[int]) -> None:
        """Add tokens the source has produced since; by one thread at a time."""
        request.append_output_token_ids(token_ids)
        if request.use_structured_output:
            self.advance_grammar(request, token_ids)

    def advance_grammar(self, request: Request, token_ids: list[int]) -> None:
        """Raises Refused when the grammar does not accept what the source produced under it."""
        for token_id in token_ids:
            if not self._grammars.accept_tokens(request, [token_id]):
                raise Refused(Reason.INVALID_REQUEST, f"the grammar does not accept token {token_id}")

    def _compile_grammar(self, request: Request) -> None:
        self._grammars.grammar_init(request)
        structured = request.structured_output_request
        deadline = time.monotonic() + GRAMMAR_SECONDS
        while not structured.is_grammar_ready:
            if time.monotonic() > deadline:
                raise Refused(Reason.DEADLINE, f"the grammar was not compiled within {GRAMMAR_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        if isinstance(structured.grammar, Exception):
            raise Refused(Reason.INVALID_REQUEST, f"grammar: {structured.grammar}")

    def _serialise_grammar_init(self) -> None:
        """vLLM initialises grammars on its input thread only, and creates the backend there at the first use."""
        lock = threading.Lock()
        stock = self._grammars.grammar_init

        def grammar_init(request: Request) -> None:
            with lock:
                stock(request)

        self._grammars.grammar_init = grammar_init
