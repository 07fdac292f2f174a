# SPDX-License-Identifier: Apache-2.0
"""A request as it travels to another engine, from its engine or from its origin: a narrow struct of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from vllm.sampling_params import SamplingParams

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.wire import MALFORMED
from vllm_llumnix.wire.features_wire import Embeddings, Feature, embeddings_from, features_from

_NAME: Final = "x-request-id"
MAX_STATE_BYTES = 64 << 20


class SessionState(msgspec.Struct, frozen=True):
    """State of a request whose input comes in parts, between two of them. Its prompt is all that was said before the
    last answer, and its output is that answer, all of it."""

    num_parts: Annotated[int, Meta(ge=1)]
    """Parts that have come."""
    num_earlier: Annotated[int, Meta(ge=0)]
    """Output tokens of the answers before the last."""
    max_tokens: Annotated[int, Meta(ge=1)]
    """As long as it may get: its engine's `max_model_len`."""


class RequestState(msgspec.Struct, frozen=True):
    """A request as its destination needs it. Token ids are those known at Reserve; Commit brings the rest."""

    request_id: str
    external_request_id: str
    origin: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: msgspec.Raw
    arrival_time: float
    priority: int = 0
    lora_name: str | None = None
    lora_digest: str | None = None
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    session_id: str | None = None
    structured_backend: str | None = None
    reasoning_ended: bool | None = None
    num_preemptions: int = 0
    features: list[Feature] = []
    """Images and the like, in the order of the prompt."""
    embeddings: Embeddings | None = None
    """Embeddings of the prompt, in place of tokens (there are none then) or of some of them."""
    session: SessionState | None = None
    name: str = ""
    """The `X-Request-Id` with which it came; empty: none."""


def with_name(headers: Mapping[str, str] | None, name: str) -> Mapping[str, str] | None:
    """The trace headers with which vLLM takes a request's name to its engine, for want of another field that every
    engine request has."""
    return {**(headers or {}), _NAME: name} if name else headers


def without_name(headers: Mapping[str, str] | None) -> tuple[str, dict[str, str] | None]:
    """The name, and the trace headers without it: the engine returns them with each token."""
    rest = dict(headers or {})
    return rest.pop(_NAME, ""), rest or None


def state_from(request: Any, **rest: Any) -> RequestState:
    """The state of vLLM's `Request` or `EngineCoreRequest`: what both say alike, and `rest`, the fields for which only
    the caller knows where to look."""
    params, adapter = request.sampling_params, request.lora_request
    embeddings = embeddings_from(request.prompt_embeds, request.prompt_is_token_ids)
    return RequestState(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids or ()),
        features=features_from(request.mm_features),
        embeddings=embeddings,
        sampling_params=encode_params(params),
        arrival_time=request.arrival_time,
        priority=request.priority,
        lora_name=adapter.lora_name if adapter else None,
        cache_salt=request.cache_salt,
        trace_headers=without_name(request.trace_headers)[1],
        session_id=request.session_id,
        structured_backend=params.structured_outputs._backend if params.structured_outputs else None,
        **rest,
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestState)


def encode(state: RequestState) -> bytes:
    return _encoder.encode(state)


KV_PARAMETERS, EC_PARAMETERS = CONNECTOR_ARGS = "kv_transfer_params", "ec_transfer_params"
"""Where vLLM keeps among the extra arguments of a request what KV and encoder-cache connectors are told of it."""


def encode_params(params: SamplingParams) -> msgspec.Raw:
    """Sampling parameters without what only the prefill answers, and what one engine alone was told: of where blocks
    lie, or features."""
    params = params.clone()
    params.prompt_logprobs = None
    params.prompt_logprob_token_ids = None
    if params.extra_args is not None:
        params.extra_args = {name: value for name, value in params.extra_args.items() if name not in CONNECTOR_ARGS}
    return msgspec.Raw(_encoder.encode(params))


def fetched_from_here(kv_parameters: object) -> bool:
    """True if another engine is to fetch the KV cache of a request with these parameters."""
    return isinstance(kv_parameters, dict) and bool(kv_parameters.get("do_remote_decode"))


def may_be_lost(kv_parameters: object) -> bool:
    """True if a request goes on without these parameters. They may say that another engine has computed its prompt:
    when that has been fetched, or is lost, they have nothing more to say."""
    if not kv_parameters:
        return True
    known = isinstance(kv_parameters, dict) and "do_remote_prefill" in kv_parameters
    return known and not fetched_from_here(kv_parameters)


def decode_state(data: bytes) -> RequestState:
    """Raises Refused(invalid_request) for anything that is not a `RequestState`."""
    if len(data) > MAX_STATE_BYTES:
        raise Refused(Reason.INVALID_REQUEST, f"request state of {len(data)} bytes, at most {MAX_STATE_BYTES}")
    try:
        return _decoder.decode(data)
    except MALFORMED as error:
        raise Refused(Reason.INVALID_REQUEST, str(error)) from error
