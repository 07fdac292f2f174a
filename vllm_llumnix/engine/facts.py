# SPDX-License-Identifier: Apache-2.0
"""What two engines must have in common before a request of one is continued by the other."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from vllm_llumnix.engine.block_rows import kind_of
from vllm_llumnix.engine.portability import custom_logits_processors
from vllm_llumnix.engine.vllm_types import Engine
from vllm_llumnix.kv.messages import MoverInfo
from vllm_llumnix.patching import state

_NAMES = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
"""What a model's configuration says of where it came from: the same model may lie under another path."""


def text_config_of(model: Any) -> str:
    """A short name for all that the model's configuration says of how it computes, overrides included.

    Parameters do not tell of rotary embeddings: those are buffers. model: vLLM's `ModelConfig`.
    """
    described = {name: value for name, value in model.hf_text_config.to_dict().items() if name not in _NAMES}
    text = json.dumps(described, sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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


def engine_facts(engine: Engine, movers: list[MoverInfo]) -> dict[str, Any]:
    """What two engines must have in common for KV bytes and sampler state of one to be right in the other."""
    import vllm

    config = engine.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    layouts = [mover.memory.layout for mover in movers]
    return {
        "vllm": vllm.__version__,
        "patches": state.current().digest,
        # The fingerprint sees what the runner keeps as parameters; on CPU, packed linear layers are not among them.
        "model": text_config_of(model),
        "weights": [mover.weights for mover in movers],
        "isa": [mover.isa for mover in movers],
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": engine.scheduler.block_size,
        "groups": [
            (str(kind_of(group)), group.kv_cache_spec.block_size, len(group.layer_names))
            for group in engine.scheduler.kv_cache_config.kv_cache_groups
        ],
        "layout": [layout.layout for layout in layouts],
        "caches": [mover.caches for mover in movers],
        "pages": [[(region.num_layers, region.page_bytes) for region in layout.regions] for layout in layouts],
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": (
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.cp_kv_cache_interleave_size,
        ),
        "model_runner_v2": bool(engine.scheduler.use_v2_model_runner),
        "vocab_size": model.get_vocab_size(),
        "quantization": str(model.quantization),
        # Other layers, whether or not a request has an adapter; which adapters there are may differ.
        "lora": config.lora_config is not None,
        "speculative": str(config.speculative_config.method) if config.speculative_config else None,
        "logprobs_mode": str(model.logprobs_mode),
        "reasoning": reasoning_of(config.reasoning_config),
        "watermark": watermark_of(config.watermark_config),
        "logits_processors": [f"{it.__module__}:{it.__qualname__}" for it in custom_logits_processors(engine)],
    }
