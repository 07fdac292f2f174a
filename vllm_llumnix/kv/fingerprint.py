# SPDX-License-Identifier: Apache-2.0
"""Names for a model: for its configuration, for the checkpoint that it comes from, and for the weights in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("vllm.llumnix")

_NAMES = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
"""Fields of a model's configuration that say where it came from: the same model may lie under another path."""
SAMPLED_BYTES = 4096
SAMPLED_ROWS = 64
SAMPLED_PLACES = 1024
"""Samples per checkpoint, `SAMPLED_BYTES` each. A layer with 1 % of the bytes gets about ten."""
_OF_KEYS_AND_VALUES = ("k_scale", "v_scale")
_PLACES_IN_A_FILE = 8
"""At least."""
_MISTRAL = "consolidated*.safetensors"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.tensors")
"""Files of a checkpoint, those first that vLLM prefers."""
_WEIGHTS_OF = {"auto": (_MISTRAL, *_WEIGHTS), "mistral": (_MISTRAL,), "npcache": ("*.bin",), "pt": ("*.pt",)}
"""The same for load formats that prefer others."""


def text_config_of(model: Any) -> str:
    """A short name for all that the model's configuration says of how it computes, overrides included.

    Parameters do not tell of rotary embeddings: those are buffers. model: vLLM's `ModelConfig` of a worker with the
    model: some models (Llama 4, Falcon-H1) correct their configuration when they are built, in the process that does
    it, so that engines with workers of their own and without would be told apart by what the engine's says.
    """
    described = {name: value for name, value in model.hf_text_config.to_dict().items() if name not in _NAMES}
    text = json.dumps(described, sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def checkpoint_of(model: Any, load: Any) -> str:
    """A short name for the contents of the files that the weights come from; for their address if there are no such
    files on this machine; empty if the weights are made up (`--load-format dummy`).

    In memory weights lie packed and cut, as it suits the device, its kernels and the number of workers. The files are
    the same for all of these, and differ between a model and what has been made of it, whichever layers were trained.
    model, load: vLLM's `ModelConfig` and `LoadConfig`.
    """
    if load.load_format == "dummy":
        return ""
    address = model.model_weights or model.model
    try:
        began = time.monotonic()
        files = _files_of(address, model.revision, load)
        places = max(_PLACES_IN_A_FILE, SAMPLED_PLACES // len(files))
        described: list[Any] = sorted(_sampled_file(file, places) for file in files)
        logger.info("sampled %d files of %s in %.1f s", len(files), address, time.monotonic() - began)
    except (OSError, ValueError) as error:
        logger.warning("the checkpoint of %s is known by this address alone: %s", address, error)
        described = [address, model.revision]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _files_of(address: str, revision: str | None, load: Any) -> list[Path]:
    """The files from which vLLM loads the weights, and none that lies beside them. Raises OSError or ValueError if the
    address names nothing on this machine."""
    path = Path(address)
    if path.is_file():
        return [path]
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(address, revision=revision, cache_dir=load.download_dir, local_files_only=True))
    for pattern in _WEIGHTS_OF.get(load.load_format, _WEIGHTS):
        if files := _loaded([str(file) for file in path.glob(pattern)], path, pattern):
            return files
    raise FileNotFoundError(f"{path} has no weights of a kind that is known")


def _loaded(found: list[str], directory: Path, pattern: str) -> list[Path]:
    """Leaves out the files that vLLM does not load: those that an index does not name, the state of a training.
    Raises FileNotFoundError if the index of a checkpoint names a file that is missing."""
    from vllm.model_executor.model_loader.weight_utils import (
        filter_duplicate_safetensors_files,
        filter_files_not_needed_for_inference,
    )

    if found and pattern.endswith(".safetensors"):
        prefix = "consolidated" if pattern == _MISTRAL else "model"
        found = filter_duplicate_safetensors_files(found, str(directory), f"{prefix}.safetensors.index.json")
    else:
        found = filter_files_not_needed_for_inference(found)
    return [Path(file) for file in found]


def _sampled_file(file: Path, places: int) -> tuple[int, str]:
    """Its size, and a digest of evenly spaced pieces. Wherever it lies, and whatever it is called."""
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for offset in np.linspace(0, max(0, size - SAMPLED_BYTES), places).astype(np.int64).tolist():
            digest.update(os.pread(opened.fileno(), SAMPLED_BYTES, offset))
    return size, digest.hexdigest()


def fingerprint(model: torch.nn.Module) -> str:
    """Eight hex digits that tell models of different weights apart.

    Made of the names, shapes and types of all parameters and scales, and of up to 4 KiB of each. Equal for
    workers that loaded the same weights in the same way. vLLM's CPU build moves the weights of
    linear layers into packed buffers and leaves empty parameters; there the embeddings and norms
    speak for the model, beside its checkpoint. They do, too, where data-parallel ranks share the experts out or
    experts change places: every rank holds others, and the KV cache knows nothing of them. Raises
    `torch.OutOfMemoryError`.
    """
    digest, scattered = 0, _scattered_experts(model)
    scales = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("_scale"))
    for name, parameter in sorted([*model.named_parameters(), *scales], key=lambda named: named[0]):
        if id(parameter) in scattered:
            continue
        digest = zlib.crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), digest)
        digest = zlib.crc32(_sampled_or_nothing(name, parameter), digest)
    return f"{digest:08x}"


def common_fingerprint(model: torch.nn.Module, rank_in_tensor_group: int) -> int:
    """This rank's part of a number that is the same however many ranks the model is split over: their sum, modulo 2^32.

    Made of the norms' weights and of the numbers by which keys and values are scaled in an fp8 cache, which every rank
    of a tensor-parallel group has and the first speaks of, and of up to 64 rows of the token embeddings, each by the
    rank that has it. Linear layers are another matter: see `checkpoint_of`. Raises `torch.OutOfMemoryError`.
    """
    total = 0
    for name, module in model.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if "VocabParallelEmbedding" in kinds and "ParallelLMHead" not in kinds:
            total += sum(zlib.crc32(described.encode() + content) for described, content in _sampled_rows(name, module))
    if rank_in_tensor_group == 0:
        norms = [(name, weight) for name, weight in model.named_parameters() if weight.ndim == 1 and "norm" in name]
        scales = [(name, scale) for name, scale in model.named_buffers() if name.endswith(_OF_KEYS_AND_VALUES)]
        for name, tensor in norms + [(name, scale) for name, scale in scales if scale.numel() == 1]:
            described = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            total += zlib.crc32(described.encode() + _sampled_or_nothing(name, tensor))
    return total % 2**32


def _sampled_rows(name: str, embedding: torch.nn.Module) -> Iterator[tuple[str, bytes]]:
    """Evenly spaced rows of the vocabulary that this rank has: which, and up to 4 KiB of each. None of one that is
    packed or cut in a way of its own."""
    try:
        begin, end = embedding.shard_indices.org_vocab_start_index, embedding.shard_indices.org_vocab_end_index
        rows = sorted({index * embedding.org_vocab_size // SAMPLED_ROWS for index in range(SAMPLED_ROWS)})
        found = [(f"{name} {row}", embedding.weight[row - begin]) for row in rows if begin <= row < end]
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        logger.warning("the embeddings %s are not part of the model's fingerprint: %s", name, error)
        return
    for described, row_of_weights in found:
        yield described, _sampled_or_nothing(described, row_of_weights)


def _scattered_experts(model: torch.nn.Module) -> set[int]:
    """The ids of parameters and scales of experts that do not lie where they lie in a peer of the same model and
    settings."""
    scattered = set[int]()
    for module in model.modules():
        if any(cls.__name__ == "RoutedExperts" for cls in type(module).__mro__):
            parallel = module.moe_config.moe_parallel_config
            if parallel.dp_size > 1 or parallel.enable_eplb:
                scattered.update(map(id, [*module.parameters(), *module.buffers()]))
    return scattered


def _sampled_or_nothing(name: str, parameter: torch.Tensor) -> bytes:
    """Nothing on the meta device, or of a type that this device cannot index: the others speak for the model."""
    try:
        return _sampled(parameter)
    except torch.OutOfMemoryError:
        raise
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
