# SPDX-License-Identifier: Apache-2.0
"""Small random models whose output depends on every byte of their KV cache: Llama's, and DeepSeek's for its attention.

    python -m tests.support.model --preset tiny --out DIR

A test that moves a request can only fail if a lost or altered block changes the tokens. A random
network with the usual initialisation does not do that: it falls into a loop of a few tokens
whatever its cache holds. These models are scaled to stay chaotic (see `_weights`): 300 greedy
tokens hold more than 170 different ones, and one flipped byte of the cache changes what follows.
Tests hold both.

The tokenizer has exactly the model's vocabulary. Every token the model produces decodes to visible
text, different from every other token's; whitespace, the unknown token and the end of a sequence
can be encoded and can be forced by a grammar, but are never produced otherwise, so that a stream
ends at `max_tokens` and not by chance.

Models are deterministic (seeded) and cached under `cache_root()` by a digest of everything that
determines them.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import string
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

FORMAT = 3
"""Raised whenever the same spec gives other files than before; part of the cache key."""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
BOS, EOS, UNKNOWN = "<s>", "</s>", "\N{WHITE SQUARE}"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that determines a model. Sizes count elements, not bytes."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int = 64
    vocab_size: int = 1024
    max_position: int = 8192
    dtype: str = "bfloat16"
    seed: int = 0
    num_kv_heads: int | None = None
    """None: every attention head has its own."""
    latent_size: int | None = None
    """Of multi-head latent attention (MLA), which has no KV heads: a token's keys and values are made of so many
    elements and of `rope_size` with its position. None: there is none.
    """
    rope_size: int = 64

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """What all layers keep."""
        elements = 2 * self.kv_heads * self.head_dim if self.latent_size is None else self.latent_size + self.rope_size
        return self.num_layers * elements * DTYPE_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        text = json.dumps([FORMAT, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


PRESETS = {
    # Starts fast and decodes fast: for tests and the demo. 4 KiB of KV a token.
    "tiny": ModelSpec(hidden_size=256, num_layers=4, num_heads=4),
    # 32 KiB of KV a token and a gap of about 10 ms on one core: for measurements.
    "bench": ModelSpec(hidden_size=512, num_layers=16, num_heads=8),
    # As `tiny`, for contexts of 32k tokens and what is generated behind them.
    "long": ModelSpec(hidden_size=256, num_layers=4, num_heads=4, max_position=40960),
    # As `tiny`, with two attention heads for each KV head.
    "gqa": ModelSpec(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2),
    # As `tiny`, with MLA. The kernels of GPUs and CPUs know it in DeepSeek's sizes only.
    "mla": ModelSpec(hidden_size=256, num_layers=4, num_heads=16, head_dim=128, latent_size=512),
}


def cache_root() -> Path:
    """Where what takes long to make is kept: `$XDG_CACHE_HOME/vllm-llumnix`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-llumnix"


def build(spec: ModelSpec, out: Path | None = None) -> Path:
    """The directory of the model, built if it is not there yet. Safe against a second builder and
    against a kill.
    """
    return cached(spec.digest, lambda scratch: _write(spec, scratch), out)


def fine_tuned(base: Path, out: Path, part: str) -> Path:
    """A copy of the model in `base` of which some linear layers were trained, as of an adapter that was merged: `part`
    is in their names. Norms, embeddings and the configuration are the same to the bit."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, out)
    for file in out.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if part in name:
                weight += 0.01 * torch.randn_like(weight)
        save_file(weights, file, metadata={"format": "pt"})
    return out


def cached(digest: str, write: Callable[[Path], None], out: Path | None = None) -> Path:
    """The directory of a model that is made by `write`, which gets an empty directory; `digest` speaks for all that
    determines it."""
    target = out if out is not None else cache_root() / "models" / digest
    stamp = target / "spec.json"
    if stamp.is_file() and json.loads(stamp.read_text()).get("digest") == digest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(scratch)
        _dump(scratch / "spec.json", {"digest": digest})
        if out is not None and target.exists():
            _require_ours(target)
            shutil.rmtree(target)
        try:
            scratch.rename(target)
        except OSError:
            # Another builder was faster; its files are the same as ours.
            if not stamp.is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _require_ours(target: Path) -> None:
    if any(target.iterdir()) and not (target / "spec.json").is_file():
        raise FileExistsError(f"{target} exists and holds something else than a model built by this program")


def _write(spec: ModelSpec, out: Path) -> None:
    from safetensors.torch import save_file

    tokenizer = write_tokenizer(out, spec.vocab_size, spec.max_position)
    save_file(_weights(spec, silent_ids(tokenizer)), out / "model.safetensors", metadata={"format": "pt"})
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    _dump(
        out / "config.json",
        {
            **_architecture(spec),
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.kv_heads,
            "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.max_position,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": spec.dtype,
            "bos_token_id": bos,
            "eos_token_id": eos,
        },
    )
    _dump(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})


def _architecture(spec: ModelSpec) -> dict[str, object]:
    if spec.latent_size is None:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": spec.head_dim}
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "kv_lora_rank": spec.latent_size,
        "qk_nope_head_dim": spec.head_dim,
        "qk_rope_head_dim": spec.rope_size,
        "v_head_dim": spec.head_dim,
        "first_k_dense_replace": spec.num_layers,  # no layer has experts
    }


def _dump(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_tokenizer(out: Path, vocab_size: int, max_position: int) -> Tokenizer:
    """The tokenizer of a model in `out`, with what vLLM looks for beside it."""
    tokenizer = build_tokenizer(vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    _dump(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": UNKNOWN,
            "model_max_length": max_position,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A BPE tokenizer of exactly `vocab_size` tokens: printable ASCII, syllables, and invented
    two-syllable words.

    Characters outside ASCII encode to `UNKNOWN`. Raises ValueError if `vocab_size` does not hold
    the fixed part.
    """
    from tokenizers import Tokenizer, decoders, models

    characters = [*string.printable[:95], "\n", "\t"]
    consonants = [c for c in string.ascii_lowercase if c not in "aeiouy"]
    merges: list[tuple[str, str]] = []
    merges += [(" ", c) for c in consonants]
    syllables = [(c, v) for c in consonants for v in "aeiou"]
    merges += [(f" {c}", v) for c, v in syllables]
    merges += syllables
    tokens = [BOS, EOS, UNKNOWN, *characters, *(a + b for a, b in merges)]
    num_words = vocab_size - len(tokens)
    words = [(f" {a}{b}", f"{c}{d}") for a, b in syllables for c, d in syllables]
    if not 0 <= num_words <= len(words):
        largest = len(tokens) + len(words)
        raise ValueError(f"{vocab_size} tokens are not possible, only {len(tokens)} to {largest}")
    merges += (chosen := random.Random(0).sample(words, num_words))
    tokens += [a + b for a, b in chosen]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def silent_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens the model must not produce by itself: they end a sequence or leave no visible text."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in (BOS, EOS, UNKNOWN, " ", "\n", "\t")]


def _weights(spec: ModelSpec, silent: list[int]) -> dict[str, torch.Tensor]:
    """Random weights in chaos, by the names that Hugging Face's Llama and DeepSeek V2 have for them.

    The gains were found by measurement: with a spread below 2 or values amplified the greedy output
    falls into a loop; with queries and keys at a larger gain the attention looks at few positions
    and most of the cache does not matter. The last layer has nobody behind it to amplify a
    difference, so its attention output is scaled up.

    Keys and values are stored small, by a power of two that queries and the attention's output
    give back: no result changes, but a byte of the cache with its bits inverted, which turns an
    exponent e into -e, becomes a number of hundreds and drowns everything else.

    Channel 0 of the residual stream is reserved: every embedding puts 1 there, no layer writes or
    reads it, and the output layer uses it only to push the silent tokens far below all others,
    whatever the context.
    """
    import torch

    spread, query_key_gain, mlp_gain, last_attention_gain, silence = 2.4, 0.9, 2.0, 4.0, -1000.0
    stored = 2.0**-6
    generator = torch.Generator().manual_seed(spec.seed)
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    std = spread / hidden**0.5

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(std * gain)

    def reading(rows: int, gain: float = 1.0) -> torch.Tensor:
        weight = normal(rows, hidden, gain)
        weight[:, 0] = 0.0
        return weight

    def writing(columns: int, gain: float = 1.0) -> torch.Tensor:
        weight = normal(hidden, columns, gain)
        weight[0, :] = 0.0
        return weight

    def attention(prefix: str, gain: float) -> dict[str, torch.Tensor]:
        if spec.latent_size is None:
            return {
                f"{prefix}.q_proj.weight": reading(heads, query_key_gain / stored),
                f"{prefix}.k_proj.weight": reading(kv_heads, query_key_gain * stored),
                f"{prefix}.v_proj.weight": reading(kv_heads, stored),
                f"{prefix}.o_proj.weight": writing(heads, gain / stored),
            }
        # Keys and values are made of what is kept, which is as small; keys are as large with position as without.
        wide = (hidden / spec.latent_size) ** 0.5 / stored
        plain, placed = (spec.head_dim, query_key_gain), (spec.rope_size, query_key_gain / stored)
        queries = [reading(*rows) for _ in range(spec.num_heads) for rows in (plain, placed)]
        kept = [reading(spec.latent_size), reading(spec.rope_size, query_key_gain * stored)]
        gains = (query_key_gain * wide, wide)
        made = [normal(spec.head_dim, spec.latent_size, gain) for _ in range(spec.num_heads) for gain in gains]
        return {
            f"{prefix}.q_proj.weight": torch.cat(queries),
            f"{prefix}.kv_a_proj_with_mqa.weight": torch.cat(kept),
            f"{prefix}.kv_a_layernorm.weight": torch.full((spec.latent_size,), stored),
            f"{prefix}.kv_b_proj.weight": torch.cat(made),
            f"{prefix}.o_proj.weight": writing(heads, gain * (hidden / heads) ** 0.5),
        }

    weights = {"model.embed_tokens.weight": normal(spec.vocab_size, hidden)}
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    for layer in range(spec.num_layers):
        last = layer == spec.num_layers - 1
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            **attention(f"{prefix}.self_attn", last_attention_gain if last else 1.0),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.mlp.gate_proj.weight": reading(2 * hidden),
            f"{prefix}.mlp.up_proj.weight": reading(2 * hidden),
            f"{prefix}.mlp.down_proj.weight": writing(2 * hidden, mlp_gain),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = reading(spec.vocab_size)
    weights["lm_head.weight"][silent] = 0.0
    weights["lm_head.weight"][silent, 0] = silence
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[spec.dtype]
    return {name: weight.to(dtype).contiguous() for name, weight in weights.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.model", description="Build a small random test model."
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="directory to write; by default the model goes into the cache")
    options = parser.parse_args(arguments)
    spec = dataclasses.replace(PRESETS[options.preset], dtype=options.dtype, seed=options.seed)
    print(build(spec, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
