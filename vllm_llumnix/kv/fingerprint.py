# SPDX-License-Identifier: Apache-2.0
"""A name for the weights that a worker has loaded."""

from __future__ import annotations

import logging
import zlib

import numpy as np
import torch

logger = logging.getLogger(__name__)

SAMPLED_BYTES = 4096


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
        try:
            digest = zlib.crc32(_sampled(parameter), digest)
        except (RuntimeError, TypeError) as error:
            # On the meta device, or of a type that this device cannot index: the others speak for the model.
            logger.warning("the weights of %s are not part of the model's fingerprint: %s", name, error)
    return f"{digest:08x}"


def _scattered_experts(model: torch.nn.Module) -> set[int]:
    """The ids of parameters of experts that do not lie where they lie in a peer of the same model and settings."""
    scattered = set[int]()
    for module in model.modules():
        if any(cls.__name__ == "RoutedExperts" for cls in type(module).__mro__):
            parallel = module.moe_config.moe_parallel_config
            if parallel.dp_size > 1 or parallel.enable_eplb:
                scattered.update(map(id, module.parameters()))
    return scattered


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
