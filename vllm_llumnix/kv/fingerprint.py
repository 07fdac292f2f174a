# SPDX-License-Identifier: Apache-2.0
"""Names for the model that a worker has loaded: for its configuration, and for its weights."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

_NAMES = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
"""What a model's configuration says of where it came from: the same model may lie under another path."""
SAMPLED_BYTES = 4096
SAMPLED_ROWS = 64


def text_config_of(model: Any) -> str:
    """A short name for all that the model's configuration says of how it computes, overrides included.

    Parameters do not tell of rotary embeddings: those are buffers. model: vLLM's `ModelConfig` of a worker with the
    model: some models (Llama 4, Falcon-H1) correct their configuration when they are built, in the process that does
    it, so that engines with workers of their own and without would be told apart by what the engine's says.
    """
    described = {name: value for name, value in model.hf_text_config.to_dict().items() if name not in _NAMES}
    text = json.dumps(described, sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(model: torch.nn.Module) -> str:
    """Eight hex digits that tell models of different weights apart.

    Made of the names, shapes and types of all parameters, and of up to 4 KiB of each. Equal for
    workers that loaded the same weights in the same way. vLLM's CPU build moves the weights of
    linear layers into packed buffers and leaves empty parameters; there the embeddings and norms
    speak for the model. They do, too, where data-parallel ranks share the experts out or
    experts change places: every rank holds others, and the KV cache knows nothing of them.
    """
    digest, scattered = 0, _scattered_experts(model)
    for name, parameter in sorted(model.named_parameters()):
        if id(parameter) in scattered:
            continue
        digest = zlib.crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), digest)
        digest = zlib.crc32(_sampled_or_nothing(name, parameter), digest)
    return f"{digest:08x}"


def common_fingerprint(model: torch.nn.Module, rank_in_tensor_group: int) -> int:
    """This rank's part of a number that is the same however many ranks the model is split over: their sum, modulo 2^32.

    Made of the norms' weights, which every rank of a tensor-parallel group has and the first speaks of, and of up to
    64 rows of the token embeddings, each by the rank that has it.
    """
    total = 0
    for name, module in model.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if "VocabParallelEmbedding" in kinds and "ParallelLMHead" not in kinds:
            total += sum(zlib.crc32(described.encode() + content) for described, content in _sampled_rows(name, module))
    for name, parameter in model.named_parameters():
        if rank_in_tensor_group == 0 and parameter.ndim == 1 and "norm" in name:
            described = f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            total += zlib.crc32(described.encode() + _sampled_or_nothing(name, parameter))
    return total % 2**32


def _sampled_rows(name: str, embedding: torch.nn.Module) -> Iterator[tuple[str, bytes]]:
    """Evenly spaced rows of the vocabulary that this rank has: which, and up to 4 KiB of each. None of one that is
    packed in a way of its own."""
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return
    begin, end = embedding.shard_indices.org_vocab_start_index, embedding.shard_indices.org_vocab_end_index
    for row in {index * embedding.org_vocab_size // SAMPLED_ROWS for index in range(SAMPLED_ROWS)}:
        if begin <= row < end:
            described = f"{name} {row}"
            yield described, _sampled_or_nothing(described, weight[row - begin])


def _scattered_experts(model: torch.nn.Module) -> set[int]:
    """The ids of parameters of experts that do not lie where they lie in a peer of the same model and settings."""
    scattered = set[int]()
    for module in model.modules():
        if any(cls.__name__ == "RoutedExperts" for cls in type(module).__mro__):
            parallel = module.moe_config.moe_parallel_config
            if parallel.dp_size > 1 or parallel.enable_eplb:
                scattered.update(map(id, module.parameters()))
    return scattered


def _sampled_or_nothing(name: str, parameter: torch.Tensor) -> bytes:
    """Nothing on the meta device, or of a type that this device cannot index: the others speak for the model."""
    try:
        return _sampled(parameter)
    except (RuntimeError, TypeError) as error:
        logger.warning("the weights of %s are not part of the model's fingerprint: %s", name, error)
        return b""


def _sampled(parameter: torch.Tensor) -> bytes:
    """Evenly spaced elements of a tensor, whatever its strides and device."""
    count = min(parameter.numel(), max(1, SAMPLED_BYTES // parameter.element_size()))
    if count == 0:
        return b""
    shape = tuple(parameter.shape) or (1,)
    flat = np.linspace(0, parameter.numel() - 1, count).astype(np.int64)
    index = tuple(torch.from_numpy(axis).to(parameter.device) for axis in np.unravel_index(flat, shape))
    sample = parameter.detach().reshape(shape)[index] if parameter.ndim == 0 else parameter.detach()[index]
    return bytes(sample.contiguous().view(torch.uint8).cpu().numpy())
