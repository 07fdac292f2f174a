# SPDX-License-Identifier: Apache-2.0
"""Facts of an engine, for engines whose requests may come and to which its own may go: see `identity`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm_llumnix.engine.blocks.block_rows import kind_of
from vllm_llumnix.engine.compatibility.identity import (
    ARRANGEMENT,
    BLOCK_SIZE,
    LAYOUT,
    PAGES,
    PARAMETERS,
    STAGES,
    TENSOR_PARALLEL,
    EngineFacts,
    named,
)
from vllm_llumnix.engine.compatibility.portability import custom_logits_processors
from vllm_llumnix.engine.vllm_types import Engine
from vllm_llumnix.kv.fingerprint import checkpoint_of
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.vllm_worker_types import KVCacheGroup
from vllm_llumnix.patching import state


class WrittenAs(NamedTuple):
    """`release`: the earlier one. `read`: functions of those that this module relies on (`patching/relied_on.py`) that
    differ between the two, and have been read: what they write is the same."""

    release: str
    read: frozenset[str]


WRITTEN_AS_BY = {
    "0.33.0": WrittenAs(
        "0.32.0",
        frozenset(
            {
                # Values of another order in pages of five dimensions, which ROCm alone has.
                "triton_reshape_and_cache_flash",
                "reshape_and_cache_kernel_flash",
                # Tells Triton the range of an address.
                "TritonAttentionImpl.do_kv_cache_update",
                # Of states that lag behind (ReplaySSM, RecoverSSM), which are not carried.
                "MambaStateShapeCalculator",
            }
        ),
    )
}
"""Releases of vLLM that keep in a KV cache, byte by byte, what an earlier one keeps there. `make test-next` moves
requests between them. A test wants every difference between two releases in `read`."""


def written_as_by(version: str) -> str:
    """The earliest release whose KV caches are like those of this one."""
    while (as_by := WRITTEN_AS_BY.get(version)) is not None:
        version = as_by.release
    return version


def reasoning_of(config: Any) -> list[list[int]] | None:
    """The markers by which thinking is counted; None without. config: vLLM's `ReasoningConfig`."""
    if config is None or not config.enabled:
        return None
    return [config.reasoning_start_token_ids, config.reasoning_end_token_ids, config.natural_reasoning_end_token_ids]


def watermark_of(config: Any) -> str | None:
    """A name for everything by which text is marked, the key included; None without. config: vLLM's `WatermarkConfig`.

    Peers are shown a digest in which this is. A key may be a small number, so that guessing is made to cost something.
    """
    if config is None:
        return None
    text = json.dumps({field.name: getattr(config, field.name) for field in dataclasses.fields(config)}, sort_keys=True)
    return hashlib.scrypt(text.encode(), salt=b"llumnix-watermark", n=2**14, r=8, p=1, dklen=16).hex()


def engine_facts(engine: Engine, movers: list[MoverInfo], accepted: Iterable[str] = ()) -> EngineFacts:
    """accepted: differences that do not matter, see `config.ACCEPTABLE`."""
    import vllm

    config = engine.vllm_config
    model, parallel = config.model_config, config.parallel_config
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    layouts = [mover.memory.layout for mover in movers]
    sizes = {
        "PP": parallel.pipeline_parallel_size,
        "PCP": parallel.prefill_context_parallel_size,
        "DCP": parallel.decode_context_parallel_size,
    }
    stages = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    attention = " ".join(sorted({mover.attention for mover in movers}))
    devices = sorted({f"{mover.device} {mover.isa}" for mover in movers})
    tokens = {
        "vllm": f"{vllm.__version__} with patches {state.current().digest}",
        "device": ", ".join(devices),
        "attention": attention,
        "parallel": " ".join([f"TP {parallel.tensor_parallel_size}", *stages]),
        "model": "#" + " ".join(sorted({mover.config for mover in movers})),
        "weights": f"#{sum(mover.common_weights for mover in movers) % 2**32:08x}",
        "checkpoint_files": named(checkpoint_of(model, config.load_config)),
        # Of what the runner keeps as parameters; on CPU, packed linear layers are not among them.
        PARAMETERS: named([mover.weights for mover in movers]),
        "dtype": model.dtype,
        "cache_dtype": config.cache_config.cache_dtype,
        "window_replay": sum(group.kv_cache_spec.prefix_replay_tokens for group in groups),
        "model_runner": "V2" if engine.scheduler.use_v2_model_runner else "V1",
        "vocab_size": model.get_vocab_size(),
        "quantization": model.quantization,
        # Other layers, whether or not a request has an adapter; which adapters there are may differ.
        "lora": config.lora_config is not None,
        "speculation": config.speculative_config.method if config.speculative_config else None,
        "logprobs_mode": model.logprobs_mode,
        "sampling_masks": model.return_sampling_mask,
        "routed_experts": config.aux_output_config.enable_return_routed_experts,
        "reasoning": named(reasoning_of(config.reasoning_config)),
        "watermark": named(watermark_of(config.watermark_config)),
        "logits_processors": named([f"{it.__module__}:{it.__qualname__}" for it in custom_logits_processors(engine)]),
    }
    cache = {
        BLOCK_SIZE: engine.scheduler.block_size,
        "groups": ", ".join(_described(group, engine.scheduler.block_size) for group in groups),
        # Whether layers or blocks are outermost is no matter.
        LAYOUT: ", ".join(sorted({layout.interior for layout in layouts})),
        STAGES: f"{' '.join(stages)} in turns of {parallel.cp_kv_cache_interleave_size}" if stages else "",
        TENSOR_PARALLEL: parallel.tensor_parallel_size,
        # Of the inside of a page: the kernels of CPUs have one for each kind, those of GPUs one for each backend.
        ARRANGEMENT: ", ".join(device for device in devices if device.startswith("cpu")),
        "attention_backend": attention,
        "written_as_by_vllm": written_as_by(vllm.__version__),
        "kinds_of_caches": named(sorted({mover.caches for mover in movers})),
        PAGES: named([[(region.num_layers, region.page_bytes) for region in layout.regions] for layout in layouts]),
    }
    return EngineFacts.of(tokens, cache, accepted)


def _described(group: KVCacheGroup, usual_size: int) -> str:
    """Description of a group; names its block size if that is not the usual one."""
    kind = kind_of(group)
    of_what = kind.value if kind is not None else type(group.kv_cache_spec).__name__
    size = group.kv_cache_spec.block_size
    return f"{of_what} in {len(group.layer_names)} layers" + (f", by {size}" if size != usual_size else "")
