# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters for the small models, as PEFT lays them out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.model import ModelSpec

RANK = 8


def write_adapter(directory: Path, spec: ModelSpec, seed: int, scale: float = 0.25) -> Path:
    """A random adapter of rank 8 for the query projections of all layers; returns its directory.

    With the default scale the text becomes another one within a few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(spec.num_layers):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, spec.hidden_size, generator=generator) * scale
        weights[f"{prefix}.lora_B.weight"] = (
            torch.randn(spec.num_heads * spec.head_dim, RANK, generator=generator) * scale
        )
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
