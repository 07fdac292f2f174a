# SPDX-License-Identifier: Apache-2.0
"""The test model's promises: varied output, a cache that matters, a vocabulary that shows."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model import PRESETS, build, build_tokenizer, silent_ids

transformers = pytest.importorskip("transformers")

PROMPT = list(range(100, 180))
BLOCK_SIZE = 32


def load(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], num_tokens: int, cache: Any = None) -> tuple:
    """The tokens of each row of the cache's batch, and the cache."""
    rows = cache.layers[0].keys.shape[0] if cache is not None else 1
    ids = torch.tensor([list(prompt)] * rows)
    output = []
    for _ in range(num_tokens):
        answer = model(ids, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        ids = answer.logits[:, -1].float().argmax(-1, keepdim=True)
        output.append(ids[:, 0])
    return torch.stack(output, 1), cache


def entropy_bits(tokens: Sequence[int]) -> float:
    counts = Counter(tokens).values()
    return -sum(n / len(tokens) * math.log2(n / len(tokens)) for n in counts)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return load(model_dir)


@pytest.fixture(
    scope="module", params=["tiny", *(pytest.param(name, marks=pytest.mark.full) for name in ("gqa", "mla"))]
)
def any_model(request: pytest.FixtureRequest) -> Any:
    return load(build(PRESETS[request.param]))


def test_greedy_output_is_varied(any_model: Any) -> None:
    tokens = greedy(any_model, PROMPT, 300)[0][0].tolist()
    assert entropy_bits(tokens) > 6.0, "at most 8.2 bits are possible"
    assert len(set(tokens)) > 120


def test_outputs_depend_on_prompt_and_seed(model: Any, tmp_path: Path) -> None:
    other = load(build(dataclasses.replace(PRESETS["tiny"], seed=1), tmp_path / "other"))
    outputs = [
        greedy(model, PROMPT, 40)[0][0].tolist(),
        greedy(model, [*PROMPT[:-1], 999], 40)[0][0].tolist(),
        greedy(other, PROMPT, 40)[0][0].tolist(),
    ]
    for one, another in itertools.combinations(outputs, 2):
        assert one != another


def test_altered_byte_of_the_cache_changes_the_tokens(any_model: Any) -> None:
    """In any layer, of keys and of values (with MLA: without position, and with), in the first, a middle and the last
    partial block."""
    output, cache = greedy(any_model, PROMPT, 60)
    layers, length = len(cache.layers), cache.layers[0].keys.shape[2]
    blocks = (0, length // BLOCK_SIZE // 2, length // BLOCK_SIZE)
    places = list(itertools.product(range(layers), ("keys", "values"), blocks))
    altered = copy.deepcopy(cache)
    altered.batch_repeat_interleave(len(places) + 1)
    for row, (layer, kind, block) in enumerate(places, start=1):
        element = getattr(altered.layers[layer], kind)[row, 0, block * BLOCK_SIZE, :1]
        element.view(torch.uint8)[1] ^= 0xFF
    last = int(output[0, -1])
    same = dict(enumerate(places, start=1))
    for _ in range(10):
        # All rows go on from the unaltered row's token: only the caches differ.
        after, altered = greedy(any_model, [last], 15, altered)
        same = {row: place for row, place in same.items() if torch.equal(after[row], after[0])}
        if not same:
            return
        last = int(after[0, -1])
    assert not list(same.values())


def test_every_token_shows_as_its_own_text(model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    size = PRESETS["tiny"].vocab_size
    assert len(tokenizer) == size
    texts = [tokenizer.decode([index]) for index in range(size)]
    assert len(set(texts)) == size
    blank = {index for index, text in enumerate(texts) if not text.strip()}
    assert blank < set(silent_ids(build_tokenizer(size)))


def test_text_survives_the_tokenizer(model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    text = 'The quick brown fox: {"jumps": [1, 2]}\n\tover bade lodu.'
    assert tokenizer.decode(tokenizer.encode(text)) == text


@torch.no_grad()
def test_silent_tokens_are_out_of_reach_of_sampling(model: Any, model_dir: Path) -> None:
    silent = silent_ids(build_tokenizer(PRESETS["tiny"].vocab_size))
    probabilities = model(torch.tensor([PROMPT])).logits[0].float().softmax(-1)
    assert probabilities[:, silent].max() < 1e-6


def test_a_model_is_built_once_and_the_same_everywhere(tmp_path: Path) -> None:
    spec = PRESETS["tiny"]
    first, second = build(spec, tmp_path / "first"), build(spec, tmp_path / "second")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert build(spec, first) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    shutil.rmtree(second)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        build(PRESETS["tiny"], tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_bench_preset_holds_32_kib_a_token() -> None:
    assert PRESETS["bench"].kv_bytes_per_token == 32 * 1024
    assert PRESETS["bench"].max_position >= 8192


def test_bytes_a_token() -> None:
    assert PRESETS["gqa"].kv_bytes_per_token == PRESETS["tiny"].kv_bytes_per_token // 2
    assert PRESETS["mla"].kv_bytes_per_token == 4 * (512 + 64) * 2


def test_long_preset_holds_32k_tokens_and_what_follows() -> None:
    assert PRESETS["long"].max_position >= 32 * 1024 + 4096
    assert PRESETS["long"].kv_bytes_per_token <= 4 * 1024


def test_float32_variant_has_the_same_shape(tmp_path: Path) -> None:
    spec = dataclasses.replace(PRESETS["tiny"], dtype="float32")
    assert spec.kv_bytes_per_token == 2 * PRESETS["tiny"].kv_bytes_per_token
    assert load(build(spec, tmp_path / "float32")).dtype == torch.float32
