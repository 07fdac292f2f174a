# SPDX-License-Identifier: Apache-2.0
"""The prompt of a request that arrives, checked: tokens, images and the like, embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from vllm.config import VllmConfig

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.features import Forms, num_rows
from vllm_llumnix.features_wire import mask_of, tensor_of
from vllm_llumnix.request_wire import RequestState


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
    token_ids, vocab_size = state.prompt_token_ids, config.model_config.get_vocab_size()
    embeddings = state.embeddings
    num_prompt = len(token_ids)
    if embeddings is not None and not num_prompt:
        num_prompt = next(iter(embeddings.rows.shape), 0)
    if not num_prompt:
        raise Refused(Reason.INVALID_REQUEST, "no prompt")
    features = forms.build(state.features, embeddings, num_prompt)
    places = [range(it.offset, it.offset + it.length) for it in state.features]
    _check_prompt(token_ids, vocab_size, places, forms.strange_ids(state.features))
    if embeddings is None:
        return Prompt(num_prompt, token_ids, features)
    if not config.model_config.enable_prompt_embeds:
        raise Refused(Reason.INCOMPATIBLE_ENGINE, "this engine takes no prompt embeddings (--enable-prompt-embeds)")
    embeds = tensor_of(embeddings.rows)
    if num_rows(embeds, config.model_config) != num_prompt or bool(token_ids) != (embeddings.is_token is not None):
        raise Refused(Reason.INVALID_REQUEST, f"{len(embeds)} embeddings for {num_prompt} positions")
    if embeddings.is_token is None:
        return Prompt(num_prompt, None, features, embeds)
    return Prompt(num_prompt, token_ids, features, embeds, mask_of(embeddings.is_token, num_prompt).tolist())


def _check_prompt(token_ids: list[int], vocab_size: int, places: list[range], strange: Collection[int]) -> None:
    """Token ids that stand for an image may be none of the model's, if this engine's processor writes them, too."""
    if strange:
        stand_ins = {at for place in places for at in place if token_ids[at] in strange}
        token_ids = [token_id for at, token_id in enumerate(token_ids) if at not in stand_ins]
    check_tokens(token_ids, vocab_size)


def check_tokens(token_ids: list[int], vocab_size: int) -> None:
    """Raises Refused(invalid_request) for ids that the model does not have."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise Refused(Reason.INVALID_REQUEST, f"token id outside [0, {vocab_size})")
