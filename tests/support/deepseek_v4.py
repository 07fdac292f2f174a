# SPDX-License-Identifier: Apache-2.0
"""A small random DeepSeek V4, by the names of its checkpoints.

    path = build()

Its first layer looks at a window; the others compress the tokens behind theirs, four or 128 into one, and keep those
that are not compressed yet. That makes five KV cache groups, with blocks of 64, 64, 256, 4 and 8 tokens. Experts are
chosen by the token: which six of 64 are best would hang on the last bit.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.model import BOS, EOS, cached, write_tokenizer

if TYPE_CHECKING:
    import torch

FORMAT = 1
"""Raised whenever the same configuration gives other weights than before."""
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    # The kernels know these sizes only, and of experts no fewer.
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 512,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_hash_layers": 4,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
WINDOW: int = CONFIG["sliding_window"]
FLAGS = ("--dtype", "bfloat16", "--tokenizer-mode", "hf")


def build() -> Path:
    """The directory of the model, made if it is not there yet."""
    text = json.dumps([FORMAT, CONFIG], sort_keys=True)
    return cached(hashlib.sha256(text.encode()).hexdigest()[:16], _write)


def _write(out: Path) -> None:
    from safetensors.torch import save_file

    tokenizer = write_tokenizer(out, CONFIG["vocab_size"], CONFIG["max_position_embeddings"])
    ids = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    (out / "config.json").write_text(json.dumps(CONFIG | ids, indent=1))
    save_file(_Weights().of_all(), out / "model.safetensors", metadata={"format": "pt"})


class _Weights:
    """Normal ones, by name. A linear layer's have a deviation of `gain` / sqrt(number of inputs)."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(0)
        self._named: dict[str, torch.Tensor] = {}
        self._hidden: int = CONFIG["hidden_size"]

    def of_all(self) -> dict[str, torch.Tensor]:
        self._linear("embed", CONFIG["vocab_size"], self._hidden, gain=self._hidden**0.5)
        self._linear("head", CONFIG["vocab_size"], self._hidden, gain=3.0)
        self._norm("norm", self._hidden)
        self._connections("hc_head", CONFIG["hc_mult"], 1)
        for number, ratio in enumerate(CONFIG["compress_ratios"]):
            layer = f"layers.{number}"
            for part in ("attn", "ffn"):
                self._norm(f"{layer}.{part}_norm", self._hidden)
                self._connections(f"{layer}.hc_{part}", (2 + CONFIG["hc_mult"]) * CONFIG["hc_mult"], 3)
            self._attention(f"{layer}.attn", ratio)
            self._experts(f"{layer}.ffn")
        return self._named

    def _attention(self, name: str, ratio: int) -> None:
        heads, size, rank = CONFIG["num_attention_heads"], CONFIG["head_dim"], CONFIG["q_lora_rank"]
        groups = CONFIG["o_groups"]
        self._linear(f"{name}.wq_a", rank, self._hidden)
        self._linear(f"{name}.wkv", size, self._hidden)
        self._norm(f"{name}.q_norm", rank)
        self._norm(f"{name}.kv_norm", size)
        self._linear(f"{name}.wq_b", heads * size, rank, gain=2.0)
        self._linear(f"{name}.wo_a", groups * CONFIG["o_lora_rank"], heads * size // groups, gain=2.0)
        self._linear(f"{name}.wo_b", self._hidden, groups * CONFIG["o_lora_rank"], gain=2.0)
        self._named[f"{name}.attn_sink"] = self._torch.zeros(heads)
        if ratio:
            self._compressor(f"{name}.compressor", ratio, size)
        if ratio == 4:
            index_heads, index_size = CONFIG["index_n_heads"], CONFIG["index_head_dim"]
            self._linear(f"{name}.indexer.wq_b", index_heads * index_size, rank)
            self._linear(f"{name}.indexer.weights_proj", index_heads, self._hidden)
            self._compressor(f"{name}.indexer.compressor", ratio, index_size)

    def _compressor(self, name: str, ratio: int, size: int) -> None:
        width = size * (2 if ratio == 4 else 1)
        self._named[f"{name}.ape"] = 0.5 * self._torch.randn(ratio, width, generator=self._generator)
        self._linear(f"{name}.wkv", width, self._hidden)
        self._linear(f"{name}.wgate", width, self._hidden)
        self._norm(f"{name}.norm", size)

    def _experts(self, name: str) -> None:
        count, chosen, size = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"], CONFIG["moe_intermediate_size"]
        self._linear(f"{name}.gate", count, self._hidden)
        shape = (CONFIG["vocab_size"], chosen)
        self._named[f"{name}.gate.tid2eid"] = self._torch.randint(
            0, count, shape, generator=self._generator, dtype=self._torch.int32
        )
        for expert in (*(f"experts.{number}" for number in range(count)), "shared_experts"):
            self._linear(f"{name}.{expert}.w1", size, self._hidden, gain=2.0)
            self._linear(f"{name}.{expert}.w2", self._hidden, size, gain=2.0)
            self._linear(f"{name}.{expert}.w3", size, self._hidden, gain=2.0)

    def _connections(self, name: str, rows: int, scales: int) -> None:
        """Of hyper-connections, in float32."""
        width = CONFIG["hc_mult"] * self._hidden
        self._named[f"{name}_fn"] = self._torch.randn(rows, width, generator=self._generator) * width**-0.5
        self._named[f"{name}_base"] = self._torch.zeros(rows)
        self._named[f"{name}_scale"] = self._torch.ones(scales)

    def _linear(self, name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        weights = self._torch.randn(outputs, inputs, generator=self._generator) * (gain * inputs**-0.5)
        self._named[f"{name}.weight"] = weights.to(self._torch.bfloat16)

    def _norm(self, name: str, size: int) -> None:
        self._named[f"{name}.weight"] = self._torch.ones(size, dtype=self._torch.bfloat16)
