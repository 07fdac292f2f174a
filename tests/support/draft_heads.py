# SPDX-License-Identifier: Apache-2.0
"""Small heads that draft for `tests.support.model`'s Llama (EAGLE): one decoder layer over what the model made.

    path = build_head(PRESETS["tiny"])

It hands on what it gets, a little changed by what its own attention sees: it proposes the token that was just sampled,
again and again, and that model hardly ever repeats itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Final

from tests.support.model import ModelSpec, build, cached
from tests.support.other_models import OTHER
from tests.support.other_models import build as build_other

FORMAT: Final = 1
"""Raised whenever the same model gives other files than before."""
CHANGE: Final = 0.02


def build_head(spec: ModelSpec) -> Path:
    """The directory of the head for the model of `spec`, made if it is not there yet."""
    digest = hashlib.sha256(json.dumps(["eagle", FORMAT, spec.digest]).encode()).hexdigest()[:16]
    return cached(digest, lambda out: _write(spec, out))


def _write(spec: ModelSpec, out: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((build(spec) / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}, indent=1) + "\n")
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    generator = torch.Generator().manual_seed(1)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(gain * columns**-0.5)

    layer = "layers.0"
    weights = {
        # Of a token's embedding nothing, of what the model made of it all.
        "fc.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1),
        f"{layer}.self_attn.q_proj.weight": normal(heads, hidden),
        f"{layer}.self_attn.k_proj.weight": normal(kv_heads, hidden),
        f"{layer}.self_attn.v_proj.weight": normal(kv_heads, hidden),
        f"{layer}.self_attn.o_proj.weight": normal(hidden, heads, CHANGE),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}.mlp.gate_proj.weight": normal(2 * hidden, hidden),
        f"{layer}.mlp.up_proj.weight": normal(2 * hidden, hidden),
        f"{layer}.mlp.down_proj.weight": normal(hidden, 2 * hidden, CHANGE),
    }
    dtype = getattr(torch, spec.dtype)
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, out / "model.safetensors")


def build_with_mtp() -> Path:
    """The directory of a Qwen3-Next with a layer that predicts the token after the next (MTP), made if it is not there
    yet: `tests.support.other_models`' one, and its layer of attention once more."""
    digest = hashlib.sha256(json.dumps(["mtp", FORMAT, OTHER["qwen3-next"].digest]).encode()).hexdigest()[:16]
    return cached(digest, _write_with_mtp)


def _write_with_mtp(out: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = build_other(OTHER["qwen3-next"])
    shutil.copytree(model, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "spec.json"))
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=1) + "\n")
    weights = load_file(model / "model.safetensors")
    attention = f"model.layers.{config['num_hidden_layers'] - 1}."
    hidden, like = config["hidden_size"], weights["lm_head.weight"]
    zeros = torch.zeros(hidden, dtype=like.dtype)  # these norms add one
    weights |= {
        name.replace(attention, "mtp.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(attention)
    }
    weights |= {f"mtp.{norm}.weight": zeros.clone() for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    weights["mtp.fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1).to(like.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
