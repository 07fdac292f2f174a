# SPDX-License-Identifier: Apache-2.0
"""Images and embeddings that an API server keeps of a prompt beside its tokens, so that the request can be started
again elsewhere.

vLLM's API server forgets an image after sending it to its engine. Here its processed form is kept while its stream
lives, up to `MAX_INPUT_BYTES` per request and `MAX_KEPT_BYTES` in all. An image that is not kept, or was not sent
because the engine has it from an earlier prompt, is lost with the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from vllm.utils import length_from_prompt_token_ids_or_embeds

from vllm_llumnix.wire.features_wire import MAX_INPUT_BYTES, is_plain, is_whole, num_bytes
from vllm_llumnix.wire.request_wire import EC_PARAMETERS, KV_PARAMETERS, may_be_lost

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

MAX_KEPT_BYTES: Final = 1 << 30


class Keeper(Protocol):
    """A stream with its request."""

    request: EngineCoreRequest


def room_for(request: EngineCoreRequest, keepers: Iterable[Keeper]) -> int:
    """Number of bytes that may be kept of `request`, beside what `keepers` keep."""
    if not request.mm_features and request.prompt_embeds is None:
        return 0
    others = (keeper.request for keeper in keepers)
    return MAX_KEPT_BYTES - sum(num_bytes(other.mm_features, other.prompt_embeds) for other in others)


def why_never(request: EngineCoreRequest, room: int) -> str:
    """Why this request can never be started again somewhere else; empty if it can. `room`: for its prompt."""
    if request.resumable:
        return "its input comes in parts"
    params = request.sampling_params
    extra = (params.extra_args if params is not None else None) or {}
    if extra.get(EC_PARAMETERS) or not may_be_lost(extra.get(KV_PARAMETERS)):
        return "it has parameters for this engine alone"
    return why_not_kept(request, room)


def why_not_kept(request: EngineCoreRequest, room: int) -> str:
    """Why its prompt cannot be given to another engine; empty if it can."""
    features, embeds = request.mm_features, request.prompt_embeds
    if not is_whole(features):
        return "an image of its prompt is in the cache of its first engine alone (see --mm-processor-cache-gb)"
    if not is_plain(features, embeds):
        return "images or the like of its prompt overlap, or do not lie in host memory"
    if num_bytes(features, embeds) > min(MAX_INPUT_BYTES, room):
        return "the images or embeddings of its prompt are too large to be kept for that"
    return ""


def without_inputs(request: EngineCoreRequest) -> EngineCoreRequest:
    """The part to keep of a request that cannot be started again."""
    return msgspec.structs.replace(request, mm_features=None, prompt_embeds=None)


def num_prompt_tokens(request: EngineCoreRequest) -> int:
    length: int = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    return length


def named_tokens(request: EngineCoreRequest, delivered: list[int]) -> list[int]:
    """As many tokens as blocks have names by them: up to the first image, and none of a prompt with embeddings."""
    if request.prompt_embeds is not None:
        return []
    tokens = [*(request.prompt_token_ids or ()), *delivered]
    return tokens[: request.mm_features[0].mm_position.offset] if request.mm_features else tokens
