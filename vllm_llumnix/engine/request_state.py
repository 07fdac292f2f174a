# SPDX-License-Identifier: Apache-2.0
"""What travels of a request: how it was asked, what it has produced, and which engines can take it.

The destination checks what arrives like a front door does: a peer's word that a token id exists or a length fits is not
taken.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from vllm_llumnix.errors import Reason, Refused
from vllm_llumnix.ids import HOME, Epoch
from vllm_llumnix.request_wire import RequestState, encode, encode_params

_MOVABLE = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.RUNNING})
"""Queued with nothing missing but room, or in the batch; prefill and decode are treated alike."""
_params_decoder = msgspec.msgpack.Decoder(SamplingParams)


@dataclasses.dataclass(slots=True)
class Residence:
    """What this engine remembers of a request beyond vLLM's `Request`; it hangs on the request and dies with it.

    `base` and `next_index` count output tokens; they matter once the request has moved, when its outputs go through
    the relay with an index.
    """

    origin: str | None
    external_request_id: str
    reasoning_ended: bool | None
    epoch: Epoch = HOME
    base: int = 0
    next_index: int = 0
    last_hop: int = 0
    handover_open: bool = False
    repeat: list[int] = dataclasses.field(default_factory=list)
    """Last tokens before `base`, sent again with the first output from here: the former owner's last outputs may have
    died with it, and the origin's gate cuts off what it has. Not possible with logprobs, which do not travel."""

    def claim_next_epoch(self) -> Epoch:
        """The epoch for the next attempt to hand the request over; never the same twice."""
        self.last_hop += 1
        return Epoch(self.epoch.term, self.last_hop)


REPEATED_TOKENS = 64


def repeat_from(request: Request) -> list[int]:
    """What the request's new engine repeats."""
    if request.sampling_params.num_logprobs is not None:
        return []
    return list(request.output_token_ids[-REPEATED_TOKENS:])


def residence_of(request: Request) -> Residence | None:
    return getattr(request, "llumlet_residence", None)


def settle_in(request: Request, residence: Residence) -> None:
    request.llumlet_residence = residence


def residence_from(request: EngineCoreRequest) -> Residence:
    return Residence(
        origin=request.queue_server_address,
        external_request_id=request.external_req_id or request.request_id,
        reasoning_ended=request.reasoning_ended,
    )


def encode_state(request: Request, residence: Residence) -> bytes:
    """The request as it is now. Loop thread only."""
    params = request.sampling_params
    structured = request.structured_output_request
    return encode(
        RequestState(
            request_id=request.request_id,
            external_request_id=residence.external_request_id,
            origin=residence.origin or "",
            prompt_token_ids=list(request.prompt_token_ids),
            output_token_ids=list(request.output_token_ids),
            sampling_params=encode_params(params),
            arrival_time=request.arrival_time,
            priority=request.priority,
            lora_name=request.lora_request.lora_name if request.lora_request else None,
            cache_salt=request.cache_salt,
            trace_headers=dict(request.trace_headers) if request.trace_headers else None,
            session_id=request.session_id,
            structured_backend=params.structured_outputs._backend if params.structured_outputs else None,
            reasoning_ended=structured.reasoning_ended if structured else residence.reasoning_ended,
            num_preemptions=request.num_preemptions,
        )
    )


def build_request(state: RequestState, *, vocab_size: int, max_model_len: int, block_hasher: Any) -> Request:
    """vLLM's `Request` with its history, not yet known to any scheduler. Safe off the engine's loop.

    Raises Refused(invalid_request) for what the engine could not run.
    """
    tokens = state.prompt_token_ids + state.output_token_ids
    if not state.prompt_token_ids:
        raise Refused(Reason.INVALID_REQUEST, "no prompt")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise Refused(Reason.INVALID_REQUEST, f"token id outside [0, {vocab_size})")
    try:
        params = _params_decoder.decode(state.sampling_params)
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
        raise Refused(Reason.INVALID_REQUEST, f"sampling parameters: {error}") from error
    if params.max_tokens is None or params.max_tokens < 1:
        raise Refused(Reason.INVALID_REQUEST, "max_tokens is not set")
    if len(state.prompt_token_ids) + params.max_tokens > max_model_len:
        raise Refused(
            Reason.INCOMPATIBLE_ENGINE,
            f"prompt and max_tokens need {len(state.prompt_token_ids) + params.max_tokens} positions, "
            f"this engine has {max_model_len}",
        )
    if len(state.output_token_ids) >= params.max_tokens:
        raise Refused(Reason.INVALID_REQUEST, "the request has reached max_tokens")
    if params.structured_outputs is not None:
        params.structured_outputs._backend = state.structured_backend
    request = Request(
        request_id=state.request_id,
        prompt_token_ids=state.prompt_token_ids,
        sampling_params=params,
        pooling_params=None,
        arrival_time=state.arrival_time,
        priority=state.priority,
        cache_salt=state.cache_salt,
        trace_headers=state.trace_headers,
        session_id=state.session_id,
        block_hasher=block_hasher,
        reasoning_ended=state.reasoning_ended,
    )
    request.append_output_token_ids(state.output_token_ids)
    # The front-end had its prefill statistics from the engine that did the prefill.
    request.prefill_stats = None
    request.num_preemptions = state.num_preemptions
    return request


def why_not_portable(request: Request, *, model_runner_v2: bool, device: str, spec_decode: bool) -> str | None:
    """Why this request cannot be moved so that it goes on exactly; None if it can."""
    params = request.sampling_params
    if params is None:
        return "pooling requests are not moved"
    residence = residence_of(request)
    if residence is None or residence.origin is None:
        return "its API server has no relay (it was not started with --enable-llumlet)"
    extra_args = params.extra_args or {}
    seeded = params.seed is not None and params.temperature > 0
    reasons = (
        (request.resumable, "streaming input"),
        (bool(request.mm_features), "multimodal input"),
        (request.prompt_embeds is not None or request.prompt_token_ids is None, "prompt embeddings"),
        (request.lora_request is not None, "LoRA adapter"),
        (bool(request.kv_transfer_params or request.ec_transfer_params), "KV transfer parameters"),
        (bool(extra_args), "extra arguments for custom logits processors"),
        (params.thinking_token_budget is not None and not model_runner_v2, "a thinking token budget"),
        (params.trace_decode_token_ids is not None, "trace replay"),
        (params.repetition_detection is not None, "repetition detection"),
        (bool(params.watermarking), "watermarking"),
        (seeded and spec_decode and not model_runner_v2, "a seed with speculative decoding"),
        (seeded and not model_runner_v2 and device != "cpu", "a seed on the V1 GPU runner"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def why_not_now(request: Request) -> tuple[Reason, str] | None:
    """Why this request cannot be moved at this moment; None if it can. Loop thread only."""
    if request.is_finished():
        return Reason.REQUEST_FINISHED, "the request has finished"
    if request.status not in _MOVABLE:
        return Reason.NOT_STARTED, f"the request is {request.status.name.lower()}"
    if request.num_stale_output_tokens:
        return Reason.REQUEST_PREEMPTED, "it was preempted with a step in flight"
    if request.status == RequestStatus.WAITING and request.num_computed_tokens:
        return Reason.NOT_STARTED, "it has arrived with its KV cache and has not been scheduled yet"
    if not request.num_output_tokens and _wants_prompt_logprobs(request.sampling_params):
        return Reason.PREFILL_RUNNING, "the log probabilities of its prompt are not complete"
    return None


def _wants_prompt_logprobs(params: SamplingParams) -> bool:
    return params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None


def digest_of(facts: dict[str, Any]) -> str:
    """A short name for everything two engines must agree on before KV bytes can change hands."""
    return hashlib.sha256(msgspec.json.encode(sorted(facts.items()))).hexdigest()[:16]
