# SPDX-License-Identifier: Apache-2.0
"""Prompts of arriving requests, checked: tokens, images and the like, embeddings.

A wrong field of an image would be noticed in the encoder, in a batch with others, and that ends the engine. So what
arrives is compared with what this engine's own processor makes of an item: the same fields, types and dimensions, put
together with others' in the same way. A grid (`..._grid_thw`) has to fit the pixels and the places in the prompt; where
nothing varies, the number of embeddings has to be the processor's. Only the model knows what else it makes of an
item's shape.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.vllm_types import Engine
from vllm_llumnix.wire.features_wire import (
    MAX_INPUT_BYTES,
    Embeddings,
    Feature,
    Value,
    mask_of,
    num_bytes_of,
    tensor_of,
)
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


EMBEDDED = "prompt_embeds"
"""vLLM's modality for parts of a prompt that are given as embeddings beside images: no processor knows it."""
GRID = "_grid_thw"
"""Suffix of the field with the number of an image's patches: in time, in height, in width."""


def why_features_stay(engine: Engine) -> str | None:
    """Why prompts of this engine stay that have images or the like; None if they can be carried."""
    config = engine.vllm_config
    if (multimodal := config.model_config.multimodal_config) is None:
        return None
    if multimodal.is_multimodal_pruning_enabled():
        return "the positions of pruned videos are known to the worker alone"
    if config.ec_transfer_config is not None:
        return "an encoder-cache connector has what the images became"
    if config.ec_manager_config.encoder_cache_manager_cls is not None:
        return "its encoder cache has a manager of its own (--ec-manager-config)"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """An item as this engine's processor makes it. `strange_ids`: token ids of the item's places that the model's
    embeddings do not have: vLLM never looks them up."""

    fields: Mapping[str, MultiModalFieldElem]
    num_embeds: int
    strange_ids: frozenset[int] = frozenset()


class Forms:
    """Forms of the items of each modality at this engine. Any thread; the first item of a modality takes as long as its
    largest takes the processor."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._config = engine.vllm_config.model_config
        self._known: dict[str, Form | None] = {}
        self._lock = threading.Lock()

    def build(self, features: list[Feature], embeddings: Embeddings | None, num_prompt: int) -> list[Any]:
        """vLLM's features. Raises Refused(invalid_request) for what this engine's processor would not make."""
        if num_bytes_of(features, embeddings) > MAX_INPUT_BYTES:
            raise Refused(Reason.INVALID_REQUEST, f"images and embeddings of more than {MAX_INPUT_BYTES} bytes")
        specs, end = [], 0
        for feature in features:
            if feature.offset < end or feature.offset + feature.length > num_prompt:
                place = f"[{feature.offset}, {feature.offset + feature.length})"
                raise Refused(Reason.INVALID_REQUEST, f"an {feature.modality} at {place}: outside, or in another one")
            end = feature.offset + feature.length
            specs.append(self._spec(feature))
        return specs

    def strange_ids(self, features: list[Feature]) -> frozenset[int]:
        return frozenset().union(*(self._form(feature.modality).strange_ids for feature in features))

    def _spec(self, feature: Feature) -> MultiModalFeatureSpec:
        is_embed = None if feature.is_embed is None else mask_of(feature.is_embed, feature.length)
        place = PlaceholderRange(feature.offset, feature.length, is_embed)
        num_embeds, most = place.get_num_embeds(), self._engine.scheduler.encoder_cache_manager.cache_size
        if not 1 <= num_embeds <= most:
            why = f"an {feature.modality} of {num_embeds} embeddings; this engine's encoder cache has room for {most}"
            raise Refused(Reason.INCOMPATIBLE_ENGINE, why)
        form = self._form(feature.modality)
        if feature.fields.keys() != form.fields.keys():
            raise Refused(Reason.INVALID_REQUEST, f"an {feature.modality} of {', '.join(sorted(feature.fields))[:200]}")
        item = MultiModalKwargsItem(
            {name: _element(name, feature.fields[name], like) for name, like in form.fields.items()}
        )
        self._check(feature, item, num_embeds, form)
        return MultiModalFeatureSpec(item, feature.modality, feature.identifier, place, feature.mm_hash)

    def _check(self, feature: Feature, item: MultiModalKwargsItem, num_embeds: int, form: Form) -> None:
        expected = _by_grid(item, form, self._config.hf_config) if feature.modality == "image" else None
        if expected is None and _is_like(item, form):
            expected = form.num_embeds
        if feature.modality == EMBEDDED:
            expected = num_rows(item["embedding"].data, self._config)
        if expected is not None and num_embeds != expected:
            raise Refused(Reason.INVALID_REQUEST, f"an {feature.modality} of {expected} embeddings for {num_embeds}")

    def _form(self, modality: str) -> Form:
        """Raises Refused."""
        with self._lock:
            if modality not in self._known:
                self._known[modality] = self._ask_processor(modality)
            form = self._known[modality]
        if form is None:
            raise Refused(Reason.INCOMPATIBLE_ENGINE, f"this engine's prompts have no {modality[:100]}")
        return form

    def _ask_processor(self, modality: str) -> Form | None:
        if modality == EMBEDDED and self._config.enable_prompt_embeds:
            rows = torch.zeros(1, self._config.get_inputs_embeds_size(), dtype=self._config.dtype)
            field = MultiModalSharedField(batch_size=1)
            return Form({"embedding": MultiModalFieldElem(rows, field)}, 1)
        if not self._config.is_multimodal_model:
            return None
        processor = MULTIMODAL_REGISTRY.create_processor(self._config)
        if not processor.info.allowed_mm_limits.get(modality):
            return None
        made = processor.get_dummy_mm_inputs({modality: 1})
        places = made["mm_placeholders"][modality]
        vocab_size = self._config.get_vocab_size()
        strange = frozenset(token_id for token_id in made["prompt_token_ids"] if token_id >= vocab_size)
        return Form(made["mm_kwargs"].require_data()[modality][0], places[0].get_num_embeds(), strange)


def _element(name: str, value: Value, like: MultiModalFieldElem) -> MultiModalFieldElem:
    """Raises Refused unless `value` is of the kind that the processor makes."""
    data = [tensor_of(part) for part in value] if isinstance(value, list) else value
    data = data if isinstance(data, list | int | float) else tensor_of(data)
    if type(data) is not type(like.data) or _kinds(data) > _kinds(like.data):
        raise Refused(Reason.INVALID_REQUEST, f"{name} is of another type than here")
    field: BaseMultiModalField = like.field
    return MultiModalFieldElem(data, field)


def _kinds(data: Any) -> set[tuple[torch.dtype, int]]:
    tensors = data if isinstance(data, list) else [data]
    return {(tensor.dtype, tensor.ndim) for tensor in tensors if isinstance(tensor, torch.Tensor)}


def _by_grid(item: MultiModalKwargsItem, form: Form, hf_config: Any) -> int | None:
    """Number of embeddings of an image by its grid; None if it has none. Raises Refused if its pixels do not fit."""
    grids = [element.data for name, element in item.items() if name.endswith(GRID)]
    merge = getattr(getattr(hf_config, "vision_config", None), "spatial_merge_size", None)
    if len(grids) != 1 or not isinstance(merge, int):
        return None
    grid = grids[0].flatten().tolist()
    num_patches = int(torch.tensor(grid, dtype=torch.float64).prod())
    fits = len(grid) == 3 and min(grid) > 0 and all(size % merge == 0 for size in grid[1:])
    for name, element in item.items():
        like = form.fields[name].data
        if name.endswith(GRID) or not isinstance(like, torch.Tensor) or like.ndim < 2:
            continue
        fits = fits and element.data.shape[0] == num_patches and element.data.shape[1:] == like.shape[1:]
    if not fits:
        raise Refused(Reason.INVALID_REQUEST, f"an image of another size than its grid of {grid[:3]}")
    return num_patches // merge**2


def _is_like(item: MultiModalKwargsItem, form: Form) -> bool:
    """True if an item and the processor's are equal in everything that the length of its embedding could depend on."""
    for name, element in item.items():
        ours, theirs = form.fields[name].data, element.data
        if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape:
            return False
        if not ours.is_floating_point() and not torch.equal(ours, theirs):
            return False
    return True


def num_rows(rows: torch.Tensor, config: Any) -> int:
    """Raises Refused for rows that are not this model's."""
    if rows.ndim != 2 or rows.shape[1] != config.get_inputs_embeds_size() or not rows.is_floating_point():
        raise Refused(Reason.INVALID_REQUEST, f"embeddings of shape {list(rows.shape)} and type {rows.dtype}")
    return int(rows.shape[0])
