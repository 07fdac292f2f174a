# SPDX-License-Identifier: Apache-2.0
"""State of a request as it travels: its parameters, its output, and the engines that can take it.

The destination checks it like a front door, and does not trust a peer about token ids and lengths.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Final

import msgspec
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.wire import MALFORMED
from vllm_llumnix.engine.requests.prompts import Forms, check_tokens, prompt_of
from vllm_llumnix.engine.vllm_types import Request, Scheduler
from vllm_llumnix.wire.request_wire import CONNECTOR_ARGS, RequestState, SessionState, state_from

_MOVABLE = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.RUNNING})
"""Queued with nothing missing but room, or in the batch; prefill and decode are treated alike."""
BETWEEN_PARTS = RequestStatus.WAITING_FOR_STREAMING_REQ
"""The status of a request whose input comes in parts, when the last one is answered and the next has not come."""
_params_decoder = msgspec.msgpack.Decoder(SamplingParams)
_STRUCTURED_OUTPUTS: Final = {field.name for field in dataclasses.fields(StructuredOutputsParams)}


@dataclasses.dataclass(slots=True)
class Residence:
    """Notes of this engine on a request of a request beyond vLLM's `Request`; it hangs on the request and dies with it.

    `base` and `next_index` count output tokens, over all answers if the input comes in parts; they matter once the
    request has moved and its outputs go through the relay with an index.
    """

    origin: str | None
    external_request_id: str
    reasoning_ended: bool | None
    epoch: Epoch = HOME
    base: int = 0
    next_index: int = 0
    last_hop: int = 0
    handover_open: bool = False
    admitting: bool = False
    """True while its admission may still be revoked: the origin does not hear yet that the request is here."""
    num_parts: int = 0
    """Parts of its input that have come, if it comes in parts (`sessions`); else 0."""
    num_earlier: int = 0
    """Output tokens of answers before the present one."""
    name: str = ""
    """The `X-Request-Id` with which it came."""
    repeat: list[int] = dataclasses.field(default_factory=list)
    """Last tokens before `base`, sent again with the first output from here: the former owner's last outputs may have
    died with it, and the origin's gate cuts off what it has. Not possible with logprobs, which do not travel."""

    def claim_next_epoch(self) -> Epoch:
        """The epoch for the next attempt to hand the request over; never the same twice."""
        self.last_hop += 1
        return Epoch(self.epoch.term, self.last_hop)


REPEATED_TOKENS = 64


def repeat_from(request: Request) -> list[int]:
    """Tokens that the request's new engine repeats. None for an answer to a part of an input: its end cannot be
    repeated."""
    if request.sampling_params.num_logprobs is not None or request.resumable:
        return []
    return list(request.output_token_ids[-REPEATED_TOKENS:])


def residence_of(request: Request) -> Residence | None:
    return getattr(request, "llumlet_residence", None)


def first_holding(scheduler: Scheduler) -> Request | None:
    """First request that waits for a turn with its KV cache in place. Requests that wait for more input, in the same
    queue, are skipped."""
    queue = scheduler.kv_holding_waiting
    if len(queue) <= scheduler.num_waiting_for_streaming_input:
        return None
    return next((request for request in queue if request.status != BETWEEN_PARTS), None)


def settle_in(request: Request, residence: Residence) -> None:
    request.llumlet_residence = residence


def residence_from(request: EngineCoreRequest, name: str) -> Residence:
    return Residence(
        origin=request.queue_server_address,
        external_request_id=request.external_req_id or request.request_id,
        reasoning_ended=request.reasoning_ended,
        num_parts=int(request.resumable),
        name=name,
    )


def state_of(request: Request, residence: Residence, max_model_len: int) -> RequestState:
    """The request as it is now, without the digest of its adapter. Loop thread only."""
    structured = request.structured_output_request
    return state_from(
        request,
        external_request_id=residence.external_request_id,
        name=residence.name,
        origin=residence.origin or "",
        output_token_ids=list(request.output_token_ids),
        reasoning_ended=structured.reasoning_ended if structured else residence.reasoning_ended,
        num_preemptions=request.num_preemptions,
        session=SessionState(residence.num_parts, residence.num_earlier, max_model_len) if request.resumable else None,
    )


def build_request(
    state: RequestState,
    *,
    config: VllmConfig,
    tokenizer: Any,
    block_hasher: Any,
    adapter: LoRARequest | None,
    forms: Forms,
    is_part: bool = False,
) -> Request:
    """vLLM's `Request` with its history, not yet known to any scheduler. Safe off the engine's loop.

    `adapter` is this engine's own of the name that the state has; its path is part of the blocks' hashes. `forms`: of
    this engine's images. `is_part`: the next part of an input, of a request that is here.

    Raises Refused(invalid_request) for what no engine could run, and for what this one could not with another reason.
    """
    max_model_len = config.model_config.max_model_len
    is_in_parts = is_part or state.session is not None
    if not state.request_id:
        raise Refused(Reason.INVALID_REQUEST, "no request id")
    prompt = prompt_of(state, forms, config)
    check_tokens(state.output_token_ids, config.model_config.get_vocab_size())
    params = decode_params(state, config, tokenizer)
    if params.max_tokens is None or params.max_tokens < 1:
        raise Refused(Reason.INVALID_REQUEST, "max_tokens is not set")
    if not is_in_parts and len(state.output_token_ids) >= params.max_tokens:
        raise Refused(Reason.INVALID_REQUEST, "the request has reached max_tokens")
    if (positions := _positions_of(state, prompt.length, params.max_tokens, is_in_parts)) > max_model_len:
        detail = f"prompt and max_tokens need {positions} positions, this engine has {max_model_len}"
        raise Refused(Reason.REQUEST_TOO_LONG, detail)
    request: Request = VllmRequest(
        request_id=state.request_id,
        prompt_token_ids=prompt.token_ids,
        prompt_embeds=prompt.embeds,
        prompt_is_token_ids=prompt.is_token,
        mm_features=prompt.features,
        sampling_params=params,
        pooling_params=None,
        arrival_time=state.arrival_time,
        priority=state.priority,
        lora_request=adapter,
        cache_salt=state.cache_salt,
        trace_headers=state.trace_headers,
        session_id=state.session_id,
        block_hasher=block_hasher,
        reasoning_ended=state.reasoning_ended,
        resumable=is_in_parts,
    )
    request.append_output_token_ids(state.output_token_ids)
    # The front-end had its prefill statistics from the engine that did the prefill.
    request.prefill_stats = None
    request.num_preemptions = state.num_preemptions
    return request


def _positions_of(state: RequestState, prompt_length: int, max_tokens: int, is_in_parts: bool) -> int:
    """Number of positions that the request may need. vLLM lets a part of an input ask for more than there is beside the
    parts before it, and ends the answer where its longest request does."""
    if state.session is not None:
        return max(state.session.max_tokens, prompt_length + len(state.output_token_ids))
    return prompt_length if is_in_parts else prompt_length + max_tokens


def decode_params(state: RequestState, config: VllmConfig, tokenizer: Any) -> SamplingParams:
    """The sampling parameters, checked by vLLM's own front door for this engine, and where that looks away, by us.

    Raises Refused.
    """
    try:
        _check_known(msgspec.msgpack.decode(state.sampling_params, type=dict[str, Any]))
        params = _params_decoder.decode(state.sampling_params)
        # Chosen anew by `verify`: nobody else picks this engine's grammar backend.
        if params.structured_outputs is not None:
            params.structured_outputs._backend = None
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)
    except (*MALFORMED, ValueError) as error:
        raise Refused(Reason.INVALID_REQUEST, f"sampling parameters: {error}") from error
    if params.structured_outputs is not None and params.structured_outputs._backend != state.structured_backend:
        raise Refused(
            Reason.INCOMPATIBLE_ENGINE,
            f"grammars are for {state.structured_backend}, here they are for {params.structured_outputs._backend}",
        )
    # Fields that the front door fills in itself and does not look at again.
    derived = [*params._all_stop_token_ids, *itertools.chain(*(params._bad_words_token_ids or ()))]
    check_tokens(derived, config.model_config.get_vocab_size())
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise Refused(Reason.INVALID_REQUEST, "the seed is not a 64-bit integer")
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        raise Refused(Reason.INVALID_REQUEST, "prompt logprobs, which do not travel")
    _check_extra_args(params.extra_args or {})
    if params.trace_decode_token_ids is not None:
        check_tokens(params.trace_decode_token_ids, config.model_config.get_vocab_size())
        if not config.model_config.enable_trace_replay:
            raise Refused(Reason.INCOMPATIBLE_ENGINE, "traces are replayed with --enable-trace-replay")
    return params


def _check_known(told: dict[str, Any]) -> None:
    """Raises Refused(incompatible_engine) for parameters of another release of vLLM: decoders pass over them. Those at
    their defaults are not told, or nothing is said in them."""
    unknown = told.keys() - set(SamplingParams.__struct_fields__)
    if isinstance(grammar := told.get("structured_outputs"), dict):
        unknown |= {name for name, value in grammar.items() if value and name not in _STRUCTURED_OUTPUTS}
    if unknown:
        raise Refused(Reason.INCOMPATIBLE_ENGINE, f"sampling parameters that are not known here: {sorted(unknown)}")


def _check_extra_args(extra: dict[str, Any]) -> None:
    """Raises Refused(invalid_request) for what no client can have sent in JSON, and for what does not travel."""
    if extra.keys() & {*CONNECTOR_ARGS}:
        raise Refused(Reason.INVALID_REQUEST, "parameters of a KV or encoder-cache transfer, which do not travel")
    pending: list[Any] = [extra]
    while pending:
        match pending.pop():
            case dict(entries):
                pending += [*entries, *entries.values()]
            case list(items):
                pending += items
            case str() | int() | float() | None:
                pass
            case other:
                raise Refused(Reason.INVALID_REQUEST, f"extra arguments with a {type(other).__name__}")


def why_not_now(request: Request) -> tuple[Reason, str] | None:
    """Why this request cannot be moved at this moment; None if it can. Loop thread only."""
    if request.is_finished():
        return Reason.REQUEST_FINISHED, "the request has finished"
    if request.resumable and request.status != BETWEEN_PARTS:
        return Reason.PREFILL_RUNNING, "a part of its input is being answered; it moves between two"
    if request.status not in _MOVABLE and request.status != BETWEEN_PARTS:
        return Reason.NOT_STARTED, f"the request is {request.status.name.lower()}"
    if request.num_stale_output_tokens:
        return Reason.REQUEST_PREEMPTED, "it was preempted with a step in flight"
    if request.status == RequestStatus.WAITING and request.num_computed_tokens:
        return Reason.NOT_STARTED, "it has arrived with its KV cache and has not been scheduled yet"
    if not request.num_output_tokens and _wants_prompt_logprobs(request.sampling_params):
        return Reason.PREFILL_RUNNING, "the log probabilities of its prompt are not complete"
    if request.replay_start and request.is_prefill_chunk and request.num_computed_tokens:
        return Reason.PREFILL_RUNNING, "the window behind a cached prefix is being computed again"
    return None


def _wants_prompt_logprobs(params: SamplingParams) -> bool:
    return params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
