# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.request import Request

from tests.engine.rig import Rig, full, ring, states, window
from tests.exactness import test_lora, test_matrix, test_together
from tests.integration import test_any_state, test_images, test_input_sessions, test_refusals
from tests.runner_v2 import cells as runner_v2_cells
from tests.runner_v2 import test_input_sessions as runner_v2_sessions
from tests.runner_v2 import test_inputs as runner_v2_inputs
from tests.runner_v2 import test_kinds as runner_v2_kinds
from tests.runner_v2 import test_marks_and_traces, test_routed_experts, test_speculation_and_lora
from tests.runner_v2 import test_states as runner_v2_states
from vllm_llumnix.engine.compatibility.portability import (
    KV_REFUSED_ENGINES,
    MARK,
    MOVED,
    REFUSED_ENGINES,
    REFUSED_REQUESTS,
    Evidence,
    Exactness,
    custom_logits_processors,
    why_engine_unsupported,
    why_kv_unsupported,
    why_not_portable,
)
from vllm_llumnix.engine.requests.request_state import Residence, settle_in
from vllm_llumnix.kv.mover.process import boot_id

CPU: dict[str, Any] = {"model_runner_v2": False, "device": "cpu", "spec_decode": False}
CUDA = CPU | {"device": "cuda"}
V2 = {"model_runner_v2": True}
SPEC_DECODE = {"spec_decode": True}


def request(
    *,
    origin: str | None = "tcp://127.0.0.1:1",
    prompt: tuple[int, ...] | None = (1, 2, 3),
    pooling: PoolingParams | None = None,
    more: dict[str, Any] | None = None,
    **parameters: Any,
) -> Request:
    """`parameters` of its sampling; `more` of vLLM's Request."""
    sampling = None if pooling is not None else SamplingParams(max_tokens=5, **parameters)
    made = Request("r", None if prompt is None else [*prompt], sampling, pooling, **(more or {}))
    settle_in(made, Residence(origin, "r", None))
    return made


def begun(*, num_computed: int = 0, **parameters: Any) -> Request:
    """In its prefill, or else with a token put out (and preempted, say)."""
    made = request(**parameters)
    made.num_computed_tokens = num_computed
    if not num_computed:
        made.append_output_token_ids(7)
    return made


FETCHED_FROM_HERE = "its KV cache is to be fetched from here by another engine (do_remote_decode)"
OTHER_PARAMETERS = "KV transfer parameters other than those of a prompt that another engine has computed"
IMAGE = MultiModalFeatureSpec(MultiModalKwargsItem.dummy(), "image", "some-image", PlaceholderRange(offset=0, length=2))
PRUNED, ELSEWHERE_IMAGES, OVERLAPPING, LARGE = [row.reason for row in REFUSED_REQUESTS if "images" in row.reason]

REFUSED: list[tuple[str, Request, dict[str, Any]]] = [
    ("pooling requests are not moved", request(pooling=PoolingParams()), CPU),
    ("its API server has no relay (it was not started with --enable-llumlet)", request(origin=None), CPU),
    ("streaming input with a seed or guided decoding", request(more={"resumable": True}, seed=7, temperature=1), CPU),
    (
        "streaming input with a seed or guided decoding",
        request(more={"resumable": True}, structured_outputs=StructuredOutputsParams(regex="a+")),
        CPU,
    ),
    (PRUNED, request(more={"mm_features": [IMAGE]}), CPU | {"features_stay": "pruned"}),
    (ELSEWHERE_IMAGES, request(more={"mm_features": [dataclasses.replace(IMAGE, data=None)]}), CPU),
    (LARGE, request(prompt=None, more={"prompt_embeds": torch.zeros(13, 1 << 20)}), CPU),
    (OVERLAPPING, request(more={"mm_features": [IMAGE, IMAGE]}), CPU),
    (OVERLAPPING, request(prompt=None, more={"prompt_embeds": torch.zeros(3, 8).to_sparse()}), CPU),
    (FETCHED_FROM_HERE, request(extra_args={"kv_transfer_params": {"do_remote_decode": True}}), CPU),
    (
        FETCHED_FROM_HERE,
        request(extra_args={"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}),
        CPU,
    ),
    (OTHER_PARAMETERS, request(extra_args={"kv_transfer_params": {"max_load_tokens": 1}}), CPU),
    (OTHER_PARAMETERS, request(extra_args={"kv_transfer_params": "anything"}), CPU),
    (OTHER_PARAMETERS, request(extra_args={"ec_transfer_params": {"x": 1}}), CPU),
    (
        "a thinking token budget with speculative decoding on the V1 runner, once it has begun",
        begun(thinking_token_budget=9),
        CPU | SPEC_DECODE,
    ),
    ("a seed with speculative decoding on the V1 runner, once it has begun", begun(seed=1), CPU | SPEC_DECODE),
    ("a seed on the V1 GPU runner, once it has begun", begun(seed=1), CUDA),
    ("a seed on the V1 GPU runner, once it has begun", begun(num_computed=2, seed=1), CUDA),
]


@pytest.mark.parametrize(("reason", "asked", "engine"), REFUSED)
def test_refused_requests(reason: str, asked: Request, engine: dict[str, Any]) -> None:
    assert why_not_portable(asked, **engine) == reason


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        (request(), CPU),
        (request(seed=1, temperature=1.0), CPU),
        (request(more={"lora_request": LoRARequest("adapter", 1, "/adapter")}), CPU),
        (begun(extra_args={"mine": 1}), CPU),
        (begun(repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2)), CPU),
        (begun(thinking_token_budget=9), CPU),
        (begun(thinking_token_budget=9), CUDA | V2 | SPEC_DECODE),
        (begun(trace_decode_token_ids=[1, 2]), CUDA | V2),
        (begun(watermarking=True), CUDA | V2),
        (request(more={"mm_features": [IMAGE]}), CPU),
        (request(prompt=None, more={"prompt_embeds": torch.zeros(3, 8)}), CPU),
        (request(), CPU | {"features_stay": "pruned"}),
        (begun(seed=1), CUDA | V2),
        (begun(seed=1), CUDA | V2 | SPEC_DECODE),
        (begun(seed=1, temperature=0.0), CUDA),
        (begun(extra_args={"kv_transfer_params": {"do_remote_prefill": False, "remote_host": "there"}}), CPU),
        # They wait.
        (request(thinking_token_budget=9), CPU | SPEC_DECODE),
        (request(seed=1), CUDA),
        (request(seed=1), CPU | SPEC_DECODE),
    ],
)
def test_requests_that_move(asked: Request, engine: dict[str, Any]) -> None:
    assert why_not_portable(asked, **engine) is None


def _one_more_group(engine: Any, spec: KVCacheSpec) -> None:
    engine.scheduler.kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["layer.9"], spec))


def _hidden_states(engine: Any) -> None:
    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    _one_more_group(engine, HiddenStateCacheSpec(**shape))


def _states_of_drafts(engine: Any) -> None:
    _one_more_group(engine, states("align", 32))
    engine.vllm_config.speculative_config = object()


def _rings(engine: Any) -> None:
    _one_more_group(engine, ring(16))
    engine.scheduler.use_v2_model_runner = False


def _logged_states(engine: Any) -> None:
    _one_more_group(engine, states("align", 32))
    engine.vllm_config.cache_config.use_replayssm = True


def _connector(engine: Any) -> None:
    engine.scheduler.connector = object()


def _connector_beside_states(engine: Any) -> None:
    _one_more_group(engine, states("align", 32))
    engine.scheduler.connector = ExampleConnector.__new__(ExampleConnector)


def _encoder(engine: Any) -> None:
    engine.vllm_config.model_config.is_encoder_decoder = True


def _silent_processor(engine: Any) -> None:
    engine.vllm_config.model_config.logits_processors = [Silent]


def _routed_experts(engine: Any) -> None:
    engine.vllm_config.aux_output_config.enable_return_routed_experts = True


KV_UNSUPPORTED: dict[str, Callable[[Any], None]] = {
    "a KV cache of another kind than attention, windows, states and rings": _hidden_states,
    "states that change with every step beside speculative decoding on the V1 runner": _states_of_drafts,
    "rings on the V1 runner": _rings,
    "states that lag behind, with a log of what they lack (--use-replayssm)": _logged_states,
    "routed experts in the output (--enable-return-routed-experts)": _routed_experts,
    "a KV connector of which moves know nothing (--kv-transfer-config)": _connector,
    "states that change with every step beside a KV connector": _connector_beside_states,
}

UNSUPPORTED: dict[str, Callable[[Any], None]] = {
    "encoder-decoder models are not supported": _encoder,
    "custom logits processors without the mark `llumnix_portable = True`": _silent_processor,
}


@pytest.fixture
def engine(model_dir: Path) -> Any:
    """What the refusals read of an EngineCore, with vLLM's own configuration and scheduler."""
    scheduler = Rig(model_dir).scheduler
    return SimpleNamespace(scheduler=scheduler, vllm_config=scheduler.vllm_config)


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_refused_engines(engine: Any, reason: str) -> None:
    assert why_engine_unsupported(engine) is None
    UNSUPPORTED[reason](engine)
    assert why_engine_unsupported(engine) == reason
    assert why_kv_unsupported(engine, []) is None


@pytest.mark.parametrize("reason", KV_UNSUPPORTED)
def test_engines_whose_tokens_move(engine: Any, reason: str) -> None:
    assert why_kv_unsupported(engine, []) is None
    KV_UNSUPPORTED[reason](engine)
    assert why_kv_unsupported(engine, []) == reason
    assert why_engine_unsupported(engine) is None


@pytest.mark.parametrize("spec", [full(), window(64), states("align", 32)], ids=["full", "window", "states"])
def test_groups_that_move(engine: Any, spec: KVCacheSpec) -> None:
    _one_more_group(engine, spec)
    assert why_kv_unsupported(engine, []) is None


def test_a_worker_whose_memory_cannot_be_read(engine: Any) -> None:
    here = boot_id()
    movers = [
        SimpleNamespace(memory=SimpleNamespace(unavailable=why, boot_id=here)) for why in (None, "it is scattered")
    ]
    assert why_kv_unsupported(engine, movers[:1]) is None
    assert why_kv_unsupported(engine, movers) == "it is scattered"


def test_a_worker_on_another_host(engine: Any) -> None:
    """Its mover cannot be reached, so no copy would begin; tokens need no mover."""
    movers = [SimpleNamespace(memory=SimpleNamespace(unavailable=None, boot_id=host)) for host in (boot_id(), "other")]
    assert why_kv_unsupported(engine, movers[:1]) is None
    assert why_kv_unsupported(engine, movers) == "workers on another host than the engine"
    assert why_engine_unsupported(engine) is None


def test_every_refusal_is_tested() -> None:
    assert {reason for reason, _, _ in REFUSED} == {row.reason for row in REFUSED_REQUESTS}
    assert UNSUPPORTED.keys() == {row.reason for row in REFUSED_ENGINES}
    assert KV_UNSUPPORTED.keys() == {row.reason for row in KV_REFUSED_ENGINES}


# Custom logits processors


class Silent:
    """Says nothing about being moved."""


class Marked:
    llumnix_portable = True


class Heir(Marked):
    """May well remember more than its base."""


UNMARKED = f"custom logits processors without the mark `{MARK} = True`"


@pytest.mark.parametrize(
    ("processors", "reason"),
    [
        ([Marked], None),
        ([f"{__name__}:Marked"], None),
        ([f"{__name__}:Silent"], UNMARKED),
        ([Marked, Silent], UNMARKED),
        ([Heir], UNMARKED),
    ],
)
def test_listed_processors(engine: Any, processors: list[Any], reason: str | None) -> None:
    engine.vllm_config.model_config.logits_processors = processors
    assert why_engine_unsupported(engine) == reason


@pytest.mark.parametrize(("installed", "reason"), [("Marked", None), ("Silent", UNMARKED)])
def test_installed_plugins(
    engine: Any, installed: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads every one that it finds, asked for or not."""
    package = tmp_path / "plugin-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[vllm.logits_processors]\nmine = {__name__}:{installed}\n")
    monkeypatch.syspath_prepend(tmp_path)
    engine.vllm_config.model_config.logits_processors = [Marked]
    assert [it.__name__ for it in custom_logits_processors(engine)] == [installed, "Marked"]
    assert why_engine_unsupported(engine) == reason


# What moves

Shown = tuple[str, Any] | Callable[..., Any]
"""A value of an axis or of a configuration that a cell of the matrix has, or a test."""

SHOWN: dict[str, list[Shown]] = {
    "greedy decoding": [("sampling", "greedy")],
    "a seed, with temperature, top-p, top-k or min-p": [("sampling", "seed"), ("sampling", "top-p, top-k, min-p")],
    # The same logits; which tokens are drawn from them is nothing to compare.
    "no seed, temperature above 0": [("sampling", "greedy"), ("sampling", "seed")],
    "repetition, presence and frequency penalties": [("sampling", "penalties")],
    "logit_bias, allowed_token_ids, bad_words, min_tokens": [
        ("sampling", "logit_bias"),
        ("sampling", "allowed_token_ids"),
        ("sampling", "bad_words"),
        ("sampling", "min_tokens"),
    ],
    "stop strings, with or without include_stop_str_in_output": [
        ("sampling", "stop strings"),
        ("sampling", "include_stop_str"),
        test_together.test_end_on_the_hand_over,
    ],
    "stop_token_ids, end of sequence, max_tokens": [
        ("sampling", "stop_token_ids"),
        test_together.test_end_on_the_hand_over,
    ],
    "logprobs": [("logprobs", "output")],
    "prompt_logprobs, once the prompt is done": [("logprobs", "output and prompt")],
    "guided decoding: JSON schema, regex, choice, grammar": [
        ("sampling", "json, in a string"),
        ("sampling", "regex, in a number"),
        ("sampling", "choice"),
        ("sampling", "grammar"),
    ],
    "n above 1": [test_together.test_children_move_to_different_engines],
    "a LoRA adapter, to an engine that has it": [
        test_lora.test_there_and_back,
        test_lora.test_another_adapter_of_that_name,
    ],
    "priority, cache_salt": [("extras", "priority")],
    "a thinking token budget": [("sampling", "thinking budget")],
    "repetition detection": [("sampling", "repetition detection")],
    "trace replay, to an engine with --enable-trace-replay": [],
    "watermarking, to an engine with the same configuration": [],
    "sampling masks in the output (--return-sampling-mask)": [],
    "images and the like": [test_images.test_there_and_back],
    "prompt embeddings, among tokens or alone": [test_images.test_there_and_back],
    "custom logits processors, all with the mark `llumnix_portable = True`": [("processor", True)],
    "`vllm_xargs`, for such processors": [("sampling", "vllm_xargs")],
    "a prefix-cache hit at the destination": [("prefix", "cached")],
    "streaming input, between two parts": [test_input_sessions.test_there_and_back],
    "a preempted request": [test_any_state.test_preempted],
    "a request in its prefill, or waiting": [test_any_state.test_half_prefilled, test_any_state.test_waiting],
}


SHOWN_ON_V2: dict[str, list[Shown]] = {
    **{
        kind: [it for it in shown if isinstance(it, tuple)] for kind, shown in SHOWN.items() if "processors" not in kind
    },
    "custom logits processors, all with the mark `llumnix_portable = True`": [
        runner_v2_inputs.test_a_custom_logits_processor
    ],
    "`vllm_xargs`, for such processors": [runner_v2_inputs.test_a_custom_logits_processor],
    "trace replay, to an engine with --enable-trace-replay": [test_marks_and_traces.test_a_trace],
    "watermarking, to an engine with the same configuration": [test_marks_and_traces.test_a_watermark],
    "sampling masks in the output (--return-sampling-mask)": [test_marks_and_traces.test_sampling_masks],
    "images and the like": [runner_v2_inputs.test_there_and_back],
    "prompt embeddings, among tokens or alone": [runner_v2_inputs.test_there_and_back],
    "streaming input, between two parts": [runner_v2_sessions.test_there_and_back],
    "a LoRA adapter, to an engine that has it": [test_speculation_and_lora.test_seeded_with_an_adapter],
    "n above 1": [runner_v2_kinds.test_children_move_to_different_engines],
    "a preempted request": [runner_v2_states.test_preempted],
    "a request in its prefill, or waiting": [runner_v2_states.test_half_prefilled, runner_v2_states.test_waiting],
}


def test_every_kind_that_moves_is_shown_to_on_v2() -> None:
    """What is said to be measured there, is, with log probabilities where they are to be the same."""
    measured = {row.kind for row in MOVED if row.v2 is Evidence.MEASURED}
    assert {kind for kind, shown in SHOWN_ON_V2.items() if shown} == measured
    cells = [(value, cell) for cell in runner_v2_cells.COVER for value in cell.items()]
    for row in MOVED:
        for value in SHOWN_ON_V2.get(row.kind, ()):
            if isinstance(value, tuple):
                assert any(value == it and cell["logprobs"] != "none" for it, cell in cells), value


def test_every_kind_that_moves_is_shown_to() -> None:
    """What is said to be bit-exact in a data type that hides no difference."""
    assert SHOWN.keys() == {row.kind for row in MOVED}
    dtypes = collections.defaultdict(set)
    for where, cell in test_matrix.COVER:
        for value in (*cell.items(), *dataclasses.asdict(where).items()):
            dtypes[value].add(where.dtype)
    for row in MOVED:
        for value in SHOWN[row.kind]:
            if isinstance(value, tuple):
                assert dtypes[value] >= ({"bfloat16"} if row.exactness is Exactness.BIT_EXACT else {"float32"}), value


def test_every_engine_whose_tokens_move_is_shown_to() -> None:
    experts = "routed experts in the output (--enable-return-routed-experts)"
    assert test_routed_experts.FLAGS[-1] in experts
    assert {row.reason for row in KV_REFUSED_ENGINES if row.measured} == {test_refusals.CONNECTOR, experts}
