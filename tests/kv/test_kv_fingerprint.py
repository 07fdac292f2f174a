# SPDX-License-Identifier: Apache-2.0
"""Fingerprints tell weights apart, and not the places of experts; a checkpoint's tells a model from its fine-tune."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.load import LoadConfig

from tests.support.model import PRESETS, build, fine_tuned
from vllm_llumnix.kv.fingerprint import checkpoint_of, common_fingerprint, fingerprint


class RoutedExperts(torch.nn.Module):
    """Named as vLLM's; of its fields, those that say who has which experts."""

    def __init__(self, experts: torch.Tensor, dp_size: int, enable_eplb: bool) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(experts)
        parallel = SimpleNamespace(dp_size=dp_size, enable_eplb=enable_eplb)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)


def model(rank: int = 0, router: float = 1.0, dp_size: int = 1, *, eplb: bool = False) -> torch.nn.Module:
    """`rank` decides over the experts."""
    gate = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(gate.weight, router)
    torch.nn.init.zeros_(gate.bias)
    return torch.nn.ModuleDict(
        {"gate": gate, "experts": RoutedExperts(torch.full((2, 4, 4), float(rank)), dp_size, eplb)}
    )


def test_experts_count_where_they_stay() -> None:
    assert fingerprint(model(0)) == fingerprint(model(0))
    assert fingerprint(model(0)) != fingerprint(model(1))


@pytest.mark.parametrize("scattered", [{"dp_size": 2}, {"eplb": True}])
def test_experts_that_are_elsewhere_on_every_rank(scattered: dict) -> None:
    assert fingerprint(model(0, **scattered)) == fingerprint(model(1, **scattered))
    assert fingerprint(model(0, **scattered)) != fingerprint(model(0, router=2.0, **scattered))


def test_parameters_that_cannot_be_read(llumlet_log: pytest.LogCaptureFixture) -> None:
    """They are there by name, shape and type: no reason not to start."""

    def with_meta(router: float, rows: int = 2) -> torch.nn.Module:
        built = model(router=router)
        built.register_parameter("absent", torch.nn.Parameter(torch.empty(rows, 2, device="meta")))
        return built

    assert fingerprint(with_meta(1.0)) == fingerprint(with_meta(1.0))
    assert "the weights of absent are not part of" in llumlet_log.text
    assert len({fingerprint(with_meta(1.0)), fingerprint(with_meta(2.0)), fingerprint(with_meta(1.0, 3))}) == 3


class VocabParallelEmbedding(torch.nn.Module):
    """Named as vLLM's: `rank`'s part of `table`, and where it begins and ends."""

    def __init__(self, table: torch.Tensor, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.org_vocab_size = len(table)
        size = -(-len(table) // num_ranks)
        begin, end = rank * size, min((rank + 1) * size, len(table))
        self.shard_indices = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end)
        part = torch.zeros(size, table.shape[1])  # the last one is padded
        part[: end - begin] = table[begin:end]
        self.weight = torch.nn.Parameter(part)


def split(table: torch.Tensor, norm: float, num_ranks: int) -> int:
    """Of a model that so many ranks share."""
    parts = [
        torch.nn.ModuleDict(
            {"embed_tokens": VocabParallelEmbedding(table, rank, num_ranks), "norm": torch.nn.RMSNorm(8)}
        )
        for rank in range(num_ranks)
    ]
    for part in parts:
        torch.nn.init.constant_(part["norm"].weight, norm)
    return sum(common_fingerprint(part, rank) for rank, part in enumerate(parts)) % 2**32


def test_an_embedding_that_cannot_be_read_is_no_reason_not_to_start() -> None:
    table = torch.arange(64.0).reshape(8, 8)
    packed, absent = (torch.nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(table, 0, 1)}) for _ in range(2))
    del packed["embed_tokens"].weight
    absent.to("meta")
    assert common_fingerprint(packed, 0) == 0
    assert common_fingerprint(absent, 0) == common_fingerprint(absent, 1) != 0


def test_fingerprint_without_gpu_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that was left out would make this engine another than its equals."""

    def full(*_: Any) -> bytes:
        raise torch.OutOfMemoryError("CUDA out of memory")

    table = torch.arange(64.0).reshape(8, 8)
    embedding = torch.nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(table, 0, 1)})
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__getitem__", full)
        for sampled in (lambda: fingerprint(embedding), lambda: common_fingerprint(embedding, 0)):
            with pytest.raises(torch.OutOfMemoryError):
                sampled()
    assert fingerprint(embedding)


def test_however_many_ranks() -> None:
    table = torch.arange(1001 * 8, dtype=torch.float32).reshape(1001, 8)
    alone = split(table, 1.0, 1)
    assert alone == split(table, 1.0, 2) == split(table, 1.0, 4)
    assert len({alone, split(table, 2.0, 2), split(table + 1, 1.0, 2), split(table.flip(0), 1.0, 2)}) == 4


def test_rows_of_embeddings_that_nobody_knows_are_left_out(llumlet_log: pytest.LogCaptureFixture) -> None:
    """As of a plugin that shards them by names of its own: no reason not to start."""
    table = torch.arange(64.0).reshape(8, 8)
    by_name, packed = (torch.nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(table, 0, 1)}) for _ in range(2))
    del by_name["embed_tokens"].shard_indices
    packed["embed_tokens"].weight = torch.nn.Parameter(table[:2].flatten()[:4])
    assert common_fingerprint(by_name, 0) == common_fingerprint(packed, 0) == 0
    assert llumlet_log.text.count("embeddings embed_tokens are not part of") == 2


def scaled(k_scale: float = 1.0, w_scale: float = 1.0) -> torch.nn.Module:
    attention = torch.nn.Module()
    attention.register_buffer("_k_scale", torch.tensor(k_scale))
    attention.register_buffer("input_scale", torch.tensor([w_scale, 1.0]))
    attention.register_buffer("cos_sin_cache", torch.rand(4))
    return torch.nn.ModuleDict({"attn": attention})


def test_another_calibration_of_an_fp8_cache_is_another_model() -> None:
    """The bytes of its KV cache stand for other numbers."""
    assert fingerprint(scaled()) == fingerprint(scaled())
    assert len({fingerprint(scaled()), fingerprint(scaled(k_scale=2.0)), fingerprint(scaled(w_scale=2.0))}) == 3
    assert common_fingerprint(scaled(), 0) != common_fingerprint(scaled(k_scale=2.0), 0)
    assert common_fingerprint(scaled(), 1) == 0, "the first rank speaks for all"


@pytest.fixture(scope="module")
def base() -> Path:
    return build(PRESETS["tiny"])


def name_of(model: Path | str, load_format: str = "auto", **fields: Any) -> str:
    described = SimpleNamespace(**{"model": str(model), "model_weights": "", "revision": None, **fields})
    return checkpoint_of(described, LoadConfig(load_format=load_format))


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "o_proj", "down_proj"])
def test_a_fine_tune_is_told_from_its_base(base: Path, tmp_path: Path, part: str) -> None:
    """An adapter that was merged: norms and embeddings are the same to the bit, and so is the configuration."""
    assert name_of(fine_tuned(base, tmp_path / "tuned", part)) != name_of(base)


def test_the_same_checkpoint_elsewhere(base: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(base, tmp_path / "elsewhere"))
    (file,) = copied.glob("*.safetensors")
    file.rename(copied / "renamed.safetensors")
    (copied / "pytorch_model.bin").write_bytes(b"which vLLM does not load")
    assert name_of(copied) == name_of(base)


def with_files(directory: Path, weights: list[str], *beside: str, index: str = "") -> Path:
    """A directory of files with names, those of weights with content of their own; `index`: a file that names these."""
    directory.mkdir()
    for name in weights:
        (directory / name).write_bytes(name.encode() * 999)
    for name in beside:
        (directory / name).write_bytes(b"beside" * 999)
    if index:
        weight_map = {f"layers.{number}.weight": name for number, name in enumerate(weights)}
        (directory / index).write_text(json.dumps({"weight_map": weight_map}))
    return directory


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("load_format", "weights", "index", "beside"),
    [
        ("auto", SHARDS, "model.safetensors.index.json", "adapter_model.safetensors"),
        ("safetensors", SHARDS, "model.safetensors.index.json", "consolidated.safetensors"),
        ("hf", SHARDS, "model.safetensors.index.json", "consolidated.safetensors"),
        ("mistral", ["consolidated.safetensors"], "", "model.safetensors"),
        ("auto", ["consolidated.safetensors"], "consolidated.safetensors.index.json", "consolidated.00.safetensors"),
        ("auto", ["pytorch_model.bin"], "", "training_args.bin"),
        ("pt", ["model.pt"], "", "optimizer.pt"),
        ("npcache", ["pytorch_model.bin"], "", "model.safetensors"),
    ],
)
def test_files_that_vllm_does_not_load_change_nothing(
    tmp_path: Path, load_format: str, weights: list[str], index: str, beside: str
) -> None:
    """One machine has them, its peer has not, and both engines have loaded the same model."""
    without = with_files(tmp_path / "without", weights, index=index)
    beside_it = with_files(tmp_path / "with", weights, beside, index=index)
    assert name_of(beside_it, load_format) == name_of(without, load_format)
    (beside_it / weights[-1]).write_bytes(b"of another model" * 999)
    assert name_of(beside_it, load_format) != name_of(without, load_format)


def test_mistral_files_come_first_where_vllm_prefers_them(tmp_path: Path) -> None:
    both = with_files(tmp_path / "both", ["model.safetensors", "consolidated.safetensors"])
    one = with_files(tmp_path / "one", ["consolidated.safetensors"])
    assert name_of(both, "auto") == name_of(one, "auto") == name_of(both, "mistral")
    assert name_of(both, "hf") != name_of(one, "auto")


def test_the_log_says_how_long_the_samples_of_how_many_files_took(
    tmp_path: Path, llumlet_log: pytest.LogCaptureFixture
) -> None:
    llumlet_log.set_level(logging.INFO, "vllm.llumnix")
    name_of(with_files(tmp_path / "model", SHARDS))
    assert "sampled 2 files of" in llumlet_log.text


def test_weights_that_are_made_up_or_fetched_from_elsewhere(base: Path, llumlet_log: pytest.LogCaptureFixture) -> None:
    assert name_of(base, "dummy") == name_of("no/such", "dummy") == ""
    (here, there) = (name_of(base, model_weights=f"s3://bucket/{name}") for name in ("base", "tuned"))
    assert len({here, there, name_of(base)}) == 3
    assert here == name_of("/another/place", model_weights="s3://bucket/base")
    assert "s3://bucket/base is known by this address alone" in llumlet_log.text


def test_a_directory_without_weights_is_known_by_its_address(
    tmp_path: Path, llumlet_log: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    assert name_of(first) != name_of(second)
    assert "has no weights of a kind that is known" in llumlet_log.text
