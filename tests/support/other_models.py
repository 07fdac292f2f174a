# SPDX-License-Identifier: Apache-2.0
"""Small random models of other kinds than `tests.support.model`'s Llama: hybrids, and mixtures of experts.

    path = build(OTHER["gemma3"])

The greedy output of each is as varied as that of the Llama, and its tokens depend on those before them. Hugging Face's
own classes write the weights, by the names that vLLM looks for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from tests.support.model import BOS, EOS, cached, write_tokenizer

FORMAT = 1
"""Raised whenever the same model gives other files than before."""
VOCABULARY = 1024
POSITIONS = 8192


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """`config` is the name of a class of Hugging Face's, `fields` are its arguments beside those that all share.
    Weights are normal with a deviation of `gain` / sqrt(hidden size): the less, the less a difference in the last bit
    grows from layer to layer."""

    config: str
    fields: dict[str, Any]
    gain: float = 2.4
    dtype: str = "float32"
    hidden_size: int = 128
    head_dim: int = 64
    repeats: int = 1
    """How often the four layers of `fields` come."""
    is_rough: bool = False
    """Whether vLLM's prefill and its decoding differ by more than the last bits, whatever the data type."""
    needs: tuple[str, ...] = ()
    """Flags of `vllm serve` without which it does not run on a CPU."""

    def enlarged(self) -> OtherModel:
        """For measurements: as wide and as deep as `tests.support.model`'s "bench"."""
        wider = {name: 4 * value if name in _AS_WIDE else value for name, value in self.fields.items()}
        # Some families have no size of a head but this one.
        of_all = self.head_dim * _NUM_HEADS == self.hidden_size
        head_dim = 512 // _NUM_HEADS if of_all else self.head_dim
        return dataclasses.replace(self, fields=wider, hidden_size=512, head_dim=head_dim, repeats=4)

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `vllm serve`."""
        return ("--dtype", self.dtype, *self.needs)

    @property
    def digest(self) -> str:
        text = json.dumps([FORMAT, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_NUM_HEADS = 4
_AS_WIDE = {"num_heads", "mamba_n_heads", "mamba_d_ssm", "conv_dim", "block_dim", "block_ff_dim"}
"""Fields that go with the hidden size."""
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_CHUNKED, _CONVOLUTION, _MAMBA = "chunked_attention", "conv", "mamba"
_NO_PREFIX_CACHING = ("--no-enable-prefix-caching",)
"""Where vLLM keeps states for the prefix cache, it looks for more of them than its scan of Mamba 2 on a CPU gives."""
OTHER = {
    "gemma3": OtherModel(
        "Gemma3TextConfig",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "intermediate_size": 256,
            "query_pre_attn_scalar": 64,
            "sliding_window": 64,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
        },
    ),
    "windows": OtherModel(
        "Gemma3TextConfig",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "intermediate_size": 256,
            "query_pre_attn_scalar": 64,
            "sliding_window": 64,
            "layer_types": [_SLIDING] * 4,
        },
    ),
    "gpt-oss": OtherModel(
        "GptOssConfig",
        {
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "original_max_position_embeddings": POSITIONS // 2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    # vLLM's linear attention on CPUs computes in bfloat16 only. All experts always: which two of four are best would
    # hang on the last bit.
    "qwen3-next": OtherModel(
        "Qwen3NextConfig",
        {
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
        },
        gain=1.0,
        dtype="bfloat16",
    ),
    "olmo3": OtherModel(
        "Olmo3Config",
        {"intermediate_size": 256, "sliding_window": 64, "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL]},
    ),
    "cohere2": OtherModel(
        "Cohere2Config",
        {"intermediate_size": 256, "sliding_window": 64, "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL]},
    ),
    # Windows that do not slide: a token looks at its own 64.
    "llama4": OtherModel(
        "Llama4TextConfig",
        {
            "intermediate_size": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "moe_layers": [0, 1, 2, 3],
            "attention_chunk_size": 64,
            "layer_types": [_CHUNKED, _CHUNKED, _CHUNKED, _FULL],
            "no_rope_layers": [1, 1, 1, 0],
        },
        needs=("--block-size", "32"),  # a whole number of blocks in each chunk
    ),
    # Short convolutions: the state is their latest inputs.
    "lfm2": OtherModel(
        "Lfm2Config",
        {
            "intermediate_size": 256,
            "layer_types": [_CONVOLUTION, _CONVOLUTION, _CONVOLUTION, _FULL],
            # vLLM reads these of the checkpoints, Hugging Face's class knows none of them.
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 1,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
        head_dim=32,
        is_rough=True,
    ),
    "nemotron-h": OtherModel(
        "NemotronHConfig",
        {
            "intermediate_size": 256,
            "layers_block_type": [_MAMBA, "mlp", _MAMBA, "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 32,
            "n_groups": 1,
            "chunk_size": 64,
        },
        needs=_NO_PREFIX_CACHING,
    ),
    "granite4": OtherModel(
        "GraniteMoeHybridConfig",
        {
            "intermediate_size": 256,
            "shared_intermediate_size": 256,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": [_MAMBA, _MAMBA, _MAMBA, "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
        },
        gain=3.0,
        head_dim=32,
        needs=_NO_PREFIX_CACHING,
    ),
    # Attention and a state in every layer.
    "falcon-h1": OtherModel(
        "FalconH1Config",
        {
            "intermediate_size": 256,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_d_ssm": 256,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
        },
        needs=_NO_PREFIX_CACHING,
    ),
    # States alone. Its heads together are `expand` times as wide as the hidden size.
    "mamba2": OtherModel(
        "Mamba2Config", {"expand": 2, "num_heads": 4, "state_size": 32, "n_groups": 1, "chunk_size": 64}
    ),
    "qwen3-moe": OtherModel(
        "Qwen3MoeConfig",
        {"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}


def build(model: OtherModel) -> Path:
    """The directory of the model, made if it is not there yet."""
    return cached(model.digest, lambda out: _write(model, out))


def _write(model: OtherModel, out: Path) -> None:
    import torch
    import transformers

    tokenizer = write_tokenizer(out, VOCABULARY, POSITIONS)
    config = config_of(model, tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS))
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    scale = model.hidden_size**-0.5
    # Gemma multiplies what it looks up by the root of the hidden size.
    deviations = {
        network.get_input_embeddings().weight: scale if model.config.startswith("Gemma") else 1.0,
        network.get_output_embeddings().weight: 3.0 * scale,
    }
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, deviations.get(parameter, model.gain * scale), generator=generator)
    network.to(getattr(torch, model.dtype)).save_pretrained(out)


def config_of(model: OtherModel, bos: int, eos: int) -> Any:
    """As Hugging Face's class has it; `bos` and `eos` are ids of tokens."""
    import transformers

    fields = dict(model.fields)
    for of_each_layer in {"layer_types", "layers_block_type", "no_rope_layers"} & fields.keys():
        fields[of_each_layer] = fields[of_each_layer] * model.repeats
    if "moe_layers" in fields:
        fields["moe_layers"] = list(range(len(fields["moe_layers"]) * model.repeats))
    return getattr(transformers, model.config)(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        hidden_size=model.hidden_size,
        num_hidden_layers=4 * model.repeats,
        num_attention_heads=_NUM_HEADS,
        num_key_value_heads=2,
        head_dim=model.head_dim,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=None,
        dtype=model.dtype,
        **fields,
    )
