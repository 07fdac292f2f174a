# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llumsched.latency.fitting import pairs
from llumsim.engine.step_model import (
    EngineConfig,
    StepModel,
    built_in_hardware,
    describe_hardware,
    load_hardware,
    parse_hardware,
)

MODEL = {
    "name": "small",
    "step_s": {"a": 0.01, "b": 1e-4, "c": 0, "d": 1e-3, "e": 1e-6},
    "engine": {"num_blocks": 100},
    "bytes_per_token": 1024,
    "link_bytes_per_s": 1e9,
}


def test_pairs_are_those_of_causal_attention() -> None:
    assert pairs(3, 4) == sum(3 + position for position in range(1, 5))


@pytest.mark.parametrize("name", built_in_hardware())
def test_built_in_models_say_where_they_come_from(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert len(hardware.sources) > 3


def test_a10_model_has_the_papers_capacity_and_slowdown() -> None:
    hardware = load_hardware("a10-llama-7b")
    assert hardware.engine.num_blocks * hardware.engine.block_size == 13_616
    one = hardware.step.duration(0, 0, 1, 64)
    full = hardware.step.duration(0, 0, 212, 212 * 64)
    assert full / one == pytest.approx(2.6, rel=0.02)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(MODEL))
    hardware = load_hardware(str(path))
    assert hardware.step == StepModel.of_seconds(0.01, 1e-4, 0, 1e-3, 1e-6)
    assert hardware.step.duration(100, 0, 2, 50) == 22_050_000_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": {"a": 0.01}},
        {"step_s": {**MODEL["step_s"], "e": -1}},  # type: ignore[dict-item]
        {"step_s": {**MODEL["step_s"], "a": 0}},  # type: ignore[dict-item]
        {"engine": {"num_blocks": 100, "max_num_batched_tokens": 8}},
        {"engine": {"blocks": 100}},
        {"bytes": 1},
    ],
)
def test_faults_of_a_step_model_are_reported(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="step model wrong"):
        parse_hardware(json.dumps(MODEL | wrong), "wrong")


def test_unknown_models_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="a10-llama-7b"):
        load_hardware("a11")


def test_engine_config_refuses_a_budget_below_its_slots() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        EngineConfig(num_blocks=10, max_num_seqs=100, max_num_batched_tokens=50)


def test_written_step_model_is_read_again() -> None:
    document = MODEL | {"request_s": 0.004, "answer_s": 0.002, "sources": ["measured"]}
    hardware = parse_hardware(json.dumps(document), "it")
    assert (hardware.request_s, hardware.answer_s) == (0.004, 0.002)
    step_s = {"a": 0.01, "b": 1e-4, "c": 0.0, "d": 1e-3, "e": 1e-6}
    assert parse_hardware(describe_hardware(hardware, step_s), "it again") == hardware
