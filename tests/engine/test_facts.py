# SPDX-License-Identifier: Apache-2.0
"""What two engines must have in common, beyond parameters of equal bytes and pages of equal sizes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.config.reasoning import ReasoningConfig
from vllm.config.watermarking import WatermarkConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.sample.sampler import Sampler

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.config import ACCEPTABLE
from vllm_llumnix.engine.attach import _compile_logprobs
from vllm_llumnix.engine.blocks.movers import SourceMemory, decode_memory
from vllm_llumnix.engine.compatibility.facts import WRITTEN_AS_BY, WrittenAs, reasoning_of, watermark_of, written_as_by
from vllm_llumnix.engine.compatibility.identity import EngineFacts
from vllm_llumnix.kv.fingerprint import text_config_of
from vllm_llumnix.kv.memory.vllm_cache import caches_of
from vllm_llumnix.patching import contract
from vllm_llumnix.patching.relied_on import RELIED_ON
from vllm_llumnix.patching.series import directory_of

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}


def config_name(model: Path, **overrides: Any) -> str:
    arguments = EngineArgs(model=str(model), max_model_len=2048, hf_overrides=overrides)
    return text_config_of(arguments.create_model_config())


def test_another_path_is_the_same_model(model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_dir, tmp_path / "elsewhere"))
    assert config_name(model_dir) == config_name(copy)


@pytest.mark.parametrize("overrides", [{"rope_parameters": ROPE}, {"rms_norm_eps": 1e-5}])
def test_facts_include_more_than_parameters(model_dir: Path, overrides: dict[str, Any]) -> None:
    assert config_name(model_dir, **overrides) == config_name(model_dir, **overrides)
    assert config_name(model_dir, **overrides) != config_name(model_dir)


def caches(**quantised: torch.dtype) -> str:
    """Of two layers in bfloat16, or as `quantised` says, in pages of equal sizes."""
    dtypes = {name: quantised.get(name, torch.bfloat16) for name in ("first", "second")}
    specs = {
        name: FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=128 // dtype.itemsize, dtype=dtype)
        for name, dtype in dtypes.items()
    }
    assert len({spec.page_size_bytes for spec in specs.values()}) == 1
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    return caches_of(SimpleNamespace(kv_cache_config=config), {})


def test_every_layer_counts() -> None:
    assert caches() == caches()
    assert len({caches(), caches(first=torch.uint8), caches(second=torch.uint8)}) == 3


def test_how_much_of_a_token_is_kept_counts() -> None:
    def compressed(ratio: int) -> str:
        spec = MLAAttentionSpec(
            block_size=64 * ratio, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, tokens_per_state=ratio
        )
        group = KVCacheGroupSpec(["first"], spec)
        config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
        return caches_of(SimpleNamespace(kv_cache_config=config), {})

    assert len({compressed(1), compressed(4)}) == 2


def test_how_thinking_is_counted(model_dir: Path) -> None:
    model = EngineArgs(model=str(model_dir), max_model_len=2048).create_model_config()
    named = ReasoningConfig(reasoning_start_str="ba", reasoning_end_str="do go")
    assert reasoning_of(None) is reasoning_of(named) is None
    named.initialize_token_ids(model)
    assert reasoning_of(named) == [[220], [233, 143], [233, 143]]


def test_every_part_of_a_watermark_counts() -> None:
    assert watermark_of(None) is None
    assert watermark_of(WatermarkConfig(key=7)) == watermark_of(WatermarkConfig(key=7))
    others = [{"key": 8}, {"algorithm": "dual_key_gumbel"}, {"context_width": 5}, {"deduplicate_contexts": "all"}]
    assert len({watermark_of(WatermarkConfig(**{"key": 7, **other})) for other in ({}, *others)}) == 5


TOKENS = {
    "vllm": "0.32.0",
    "device": "cpu amx",
    "attention": "CPU_ATTN",
    "parallel": "TP 2",
    "model": "#12",
    "checkpoint_files": "#23",
    "parameters": "#34",
}
CACHE = {
    "block_size": "32",
    "pages": "#56",
    "tensor_parallel": "1",
    "pipeline_and_context_parallel": "",
    "layout": "HNC",
    "arrangement": "",
    "attention_backend": "FLASH_ATTN",
}


def facts(accepted: tuple[str, ...] = (), **other: str) -> EngineFacts:
    tokens, cache = ({**known, **{k: other[k] for k in known.keys() & other.keys()}} for known in (TOKENS, CACHE))
    return EngineFacts.of(tokens, cache, accepted)


def test_each_difference_is_told() -> None:
    assert facts().why_not_tokens(facts()) is facts().why_not_cache(facts()) is None
    assert facts().why_not_tokens(facts(model="#13", vllm="0.33.0")) == (
        "vllm: 0.32.0 here, 0.33.0 at the source, see --llumlet-accept vllm; model differ"
    )
    assert facts().why_not_cache(facts(block_size="16")) == "block size: 32 here, 16 at the source"
    assert facts().digest == facts(block_size="16").digest
    assert facts().cache_digest != facts(block_size="16").cache_digest


def test_another_attention_backend_rounds_differently_and_fills_pages_in_its_own_way() -> None:
    theirs = facts(attention="FLASHINFER", attention_backend="FLASHINFER")
    assert facts().why_not_tokens(theirs) == (
        "attention: CPU_ATTN here, FLASHINFER at the source, see --llumlet-accept attention"
    )
    assert facts().why_not_cache(theirs) == "attention backend: FLASH_ATTN here, FLASHINFER at the source"


def test_movers_know_how_many_workers_there_are() -> None:
    """And which heads each has; not what stages of a pipeline have, nor pages that differ for another reason."""
    one, two = facts(), facts(tensor_parallel="2", pages="#57")
    assert one.why_not_cache(two) is two.why_not_cache(one) is None
    assert one.cache_digest != two.cache_digest
    assert one.why_not_cache(facts(pages="#57")) == "pages differ"
    assert one.why_not_cache(facts(tensor_parallel="2", block_size="16")) == "block size: 32 here, 16 at the source"


def test_pages_of_another_order() -> None:
    """Movers copy them vector by vector, where kernels have no arrangement of their own."""
    one, other = facts(layout="HNC"), facts(layout="NHC")
    assert one.why_not_cache(other) is other.why_not_cache(one) is None
    assert one.cache_digest != other.cache_digest
    assert one.why_not_cache(facts(layout="NHC", pages="#57")) == "pages differ"
    one, other = (facts(layout=layout, arrangement="cpu vec") for layout in ("HNC", "NHC"))
    assert one.why_not_cache(other) == "layout: HNC here, NHC at the source"


def test_blocks_of_another_size() -> None:
    """Movers copy parts of them, if they can. Facts know no more than that pages then are of other sizes."""
    one, other = facts(), facts(block_size="16", pages="#28")
    assert one.why_not_cache(other, of_any_block_size=True) is None
    assert one.why_not_cache(other) == "block size: 32 here, 16 at the source; pages differ"
    assert one.why_not_cache(facts(pages="#28"), of_any_block_size=True) == "pages differ"
    stages = "PP 2 in turns of 1"
    one, other = (facts(pipeline_and_context_parallel=stages, block_size=size) for size in ("32", "16"))
    assert one.why_not_cache(other, of_any_block_size=True) == "block size: 32 here, 16 at the source"


@pytest.mark.parametrize("name", ACCEPTABLE)
def test_accepted_differences_do_not_refuse(name: str) -> None:
    """And where that decides how parameters are cut and packed, that they are so in another way; not another model."""
    ours, theirs = facts((name,)), facts((name,), **{name: "another"})
    assert ours.why_not_tokens(theirs) is None
    assert ours.digest == theirs.digest
    packed = facts((name,), **{name: "another", "parameters": "#35"}).why_not_tokens(ours)
    assert packed == (None if name in ("device", "parallel") else "parameters differ")
    assert facts((name,), checkpoint_files="#tuned").why_not_tokens(ours) == "checkpoint files differ"
    assert (facts((name,), model="#13").why_not_tokens(ours) or "").startswith("model differ")
    for other in {*ACCEPTABLE} - {name}:
        assert other in (ours.why_not_tokens(facts((name,), **{other: "another"})) or "")
    assert "accept: none here" in (facts().why_not_tokens(ours) or ""), "one of the two engines does not"


@pytest.mark.parametrize("version", WRITTEN_AS_BY)
def test_releases_that_write_the_same_have_been_compared(version: str) -> None:
    """Whoever says so of a further release reads what has changed in the functions that write, and names it."""
    written_as = WRITTEN_AS_BY[version]
    ours = {(row.path, row.name) for row in RELIED_ON if row.used_by == "engine/compatibility/facts.py"}
    hashes = []
    for release in (version, written_as.release):
        signed = contract.load(directory_of(release))
        hashes.append({it.name: it.digest for it in signed.functions if (it.path, it.name) in ours})
    theirs, earlier = hashes
    assert len(theirs) == len(earlier) == len(ours)
    assert {name for name in theirs if theirs[name] != earlier[name]} == written_as.read


def test_releases_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WRITTEN_AS_BY, "0.34.0", WrittenAs("0.33.0", frozenset()))
    assert [written_as_by(f"0.{minor}.0") for minor in (31, 32, 33, 34, 35)] == [
        "0.31.0",
        "0.32.0",
        "0.32.0",
        "0.32.0",
        "0.35.0",
    ]


def test_weights_that_were_exchanged() -> None:
    memory = decode_memory(msgspec.msgpack.encode(SourceMemory(facts(), [], weight_version="7")))
    memory.require_alike(facts(), "7")
    memory.require_cache_alike(facts(), 0)
    with pytest.raises(Refused, match="of version '0' here, and not '7'") as refused:
        memory.require_alike(facts(), "0")
    assert refused.value.reason is Reason.OTHER_WEIGHTS
    with pytest.raises(Refused, match="model differ"):
        memory.require_alike(facts(model="#13"), "")
    with pytest.raises(Refused, match="stays behind: pages differ"):
        memory.require_cache_alike(facts(pages="#0"), 0)


def test_weights_of_one_name_that_were_exchanged() -> None:
    memory = decode_memory(msgspec.msgpack.encode(SourceMemory(facts(), [], weight_version="7", num_weight_changes=1)))
    memory.require_alike(facts(), "7")
    memory.require_cache_alike(facts(), 1)
    with pytest.raises(Refused, match="stays behind: weights were changed 2 times here, 1 there") as refused:
        memory.require_cache_alike(facts(), 2)
    assert refused.value.reason is Reason.OTHER_WEIGHTS


def test_a_kernel_that_cannot_be_compiled_is_no_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch, llumlet_log: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(Sampler, "gather_logprobs", broken)
    model_config = SimpleNamespace(get_vocab_size=lambda: 8)
    _compile_logprobs(SimpleNamespace(device="cpu", vllm_config=SimpleNamespace(model_config=model_config)))
    assert "cannot be compiled now: no C++ compiler" in llumlet_log.text
