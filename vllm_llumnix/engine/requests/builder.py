# SPDX-License-Identifier: Apache-2.0
"""Builds an arriving request off the engine's loop: checks, token history, compiled grammar. Llumlet thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from vllm.lora.request import LoRARequest

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.engine.requests.grammars import Grammars
from vllm_llumnix.engine.requests.prompts import Forms, check_tokens
from vllm_llumnix.engine.requests.request_state import Residence, build_request, settle_in
from vllm_llumnix.engine.vllm_types import Engine, Request
from vllm_llumnix.steps.step_record import StepRecord
from vllm_llumnix.wire.addresses import Reach
from vllm_llumnix.wire.request_wire import RequestState, decode_state

logger = logging.getLogger("vllm.llumnix")


class RequestBuilder:
    """Builds requests for one engine. Helper threads do what takes long; the request belongs to the caller until it is
    admitted.

    This is a front door: a wrong value that passes it would end every request of the engine.
    """

    def __init__(self, engine: Engine, reaches: Reach, adapters: Adapters, record: StepRecord) -> None:
        self._engine = engine
        self._reaches = reaches
        self._adapters = adapters
        self._vocab_size = engine.vllm_config.model_config.get_vocab_size()
        self._forms = Forms(engine)
        self._grammars = Grammars(engine.structured_output_manager, record)

    async def read(self, data: bytes) -> tuple[RequestState, Residence]:
        """Reads a request's state and makes its residence, with an origin that may be spoken to. Raises Refused."""
        state = await asyncio.to_thread(decode_state, data)
        if (problem := self._reaches.why_not_relay(state.origin)) is not None:
            raise Refused(Reason.ADDRESS_REFUSED, f"origin: {problem}")
        residence = Residence(
            origin=state.origin,
            external_request_id=state.external_request_id,
            reasoning_ended=state.reasoning_ended,
            name=state.name,
        )
        if (session := state.session) is not None:
            residence.num_parts, residence.num_earlier = session.num_parts, session.num_earlier
        return state, residence

    async def build(self, state: RequestState, residence: Residence, source: str, *, patience_s: float) -> Request:
        """The request with its history. `source`, `patience_s`: see `Grammars.compile`. Raises Refused."""
        with _as_refusals("a request that was to come here"):
            adapter = None
            if state.lora_name is not None:
                adapter = await self._adapters.resolve(state.lora_name, state.lora_digest)
            request: Request = await asyncio.to_thread(self._build, state, adapter)
            settle_in(request, residence)
            if request.use_structured_output:
                await self._grammars.compile(request, source, patience_s=patience_s)
                await asyncio.to_thread(self.advance_grammar, request, state.output_token_ids)
            return request

    def _build(self, state: RequestState, adapter: LoRARequest | None, *, is_part: bool = False) -> Request:
        return build_request(
            state,
            config=self._engine.vllm_config,
            tokenizer=self._grammars.tokenizer,
            block_hasher=self._engine.request_block_hasher,
            adapter=adapter,
            forms=self._forms,
            is_part=is_part,
        )

    async def build_part(self, data: bytes, request_id: str) -> Request:
        """The next part of the input of a request that is here. Raises Refused."""
        state = await asyncio.to_thread(decode_state, data)
        if state.request_id != request_id or state.session is not None or state.output_token_ids:
            raise Refused(Reason.INVALID_REQUEST, "this is no part of its input")
        with _as_refusals("a part of the input of a request"):
            part: Request = await asyncio.to_thread(self._build, state, None, is_part=True)
            return part

    def append(self, request: Request, token_ids: list[int]) -> None:
        """Add tokens the source has produced since; by one thread at a time. Raises Refused."""
        check_tokens(token_ids, self._vocab_size)
        if request.num_output_tokens + len(token_ids) >= request.max_tokens:
            raise Refused(Reason.INVALID_REQUEST, "the request has reached max_tokens")
        request.append_output_token_ids(token_ids)
        if request.use_structured_output:
            self.advance_grammar(request, token_ids)

    def advance_grammar(self, request: Request, token_ids: list[int]) -> None:
        """Raises Refused when the grammar does not accept what the source produced under it."""
        for token_id in token_ids:
            if not self._grammars.accepts(request, token_id):
                raise Refused(Reason.INVALID_REQUEST, f"the grammar does not accept token {token_id}")


@contextlib.contextmanager
def _as_refusals(what: str) -> Iterator[None]:
    """Whatever vLLM's checks stumble over, it is this request's fault and ends nothing else."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        logger.exception("llumlet: %s is refused", what)
        raise Refused(Reason.INVALID_REQUEST, f"{type(error).__name__}: {error}") from error
