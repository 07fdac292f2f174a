# SPDX-License-Identifier: Apache-2.0
"""The prompt of a request that arrives, checked: tokens, images and the like, embeddings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.config import VllmConfig

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.requests.features import Forms, num_rows
from vllm_llumnix.wire.features_wire import Embeddings, mask_of, tensor_of
from vllm_llumnix.wire.request_wire import RequestState


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """As vLLM's `Request` takes it. Without `token_ids` it is `embeds` alone; with both, `is_token` says for each
    position which of them counts."""

    length: int
    token_ids: list[int] | None
    features: list[Any]
    embeds: torch.Tensor | None = None
    is_token: list[bool] | None = None


def prompt_of(state: RequestState, forms: Forms, config: VllmConfig) -> Prompt:
    """Raises Refused(invalid_request) for what no engine could run, and for what this one could not with another
    reason."""
    token_ids, embeddings, vocab_size = state.prompt_token_ids, state.embeddings, config.model_config.get_vocab_size()
    length = len(token_ids)
    if embeddings is not None and not token_ids:
        length = next(iter(embeddings.rows.shape), 0)
    if not length:
        raise Refused(Reason.INVALID_REQUEST, "no prompt")
    features = forms.build(state.features, embeddings, length)
    prompt = Prompt(length, token_ids, features)
    if embeddings is not None:
        prompt = _embedded(token_ids, embeddings, features, length, config)
    looked_up = [*(prompt.is_token or [True] * length)]
    # The token of an image may be none of the model's, if this engine's own processor writes it, too.
    strange = forms.strange_ids(state.features)
    for feature in state.features if strange else ():
        for at in range(feature.offset, feature.offset + feature.length):
            looked_up[at] = looked_up[at] and token_ids[at] not in strange
    check_tokens(
        [token_id for token_id, is_one in zip(prompt.token_ids or (), looked_up, strict=False) if is_one], vocab_size
    )
    return prompt


def _embedded(
    token_ids: list[int], embeddings: Embeddings, features: list[Any], length: int, config: VllmConfig
) -> Prompt:
    """A prompt with embeddings. Tokens in whose place there is one may be none of the model's: vLLM's front-end writes
    one of the tokenizer's there. Nothing may come of them, and vLLM ignores the first number that is no token."""
    model = config.model_config
    if not model.enable_prompt_embeds:
        raise Refused(Reason.INCOMPATIBLE_ENGINE, "this engine takes no prompt embeddings (--enable-prompt-embeds)")
    embeds = tensor_of(embeddings.rows)
    if num_rows(embeds, model) != length or bool(token_ids) != (embeddings.is_token is not None):
        raise Refused(Reason.INVALID_REQUEST, f"{len(embeds)} embeddings for {length} positions")
    if embeddings.is_token is None:
        return Prompt(length, None, features, embeds)
    is_token = mask_of(embeddings.is_token, length).tolist()
    nothing = model.get_vocab_size()
    known = [
        token_id if is_one or 0 <= token_id < nothing else nothing
        for token_id, is_one in zip(token_ids, is_token, strict=True)
    ]
    return Prompt(length, known, features, embeds, is_token)


def check_tokens(token_ids: list[int], vocab_size: int) -> None:
    """Raises Refused(invalid_request) for ids that the model does not have."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise Refused(Reason.INVALID_REQUEST, f"token id outside [0, {vocab_size})")
