# SPDX-License-Identifier: Apache-2.0
"""What `vllm-llumnix doctor --model` says of models, beside what engines that serve them do
(`tests/integration/test_hybrids.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.other_models import OTHER, build
from vllm_llumnix import doctor

NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'


def test_windows() -> None:
    check = doctor.model(["--model", str(build(OTHER["gemma3"]))])
    assert not check.problem
    assert check.result.startswith(
        "requests move with their KV cache: 3 layers keep those of the latest tokens; "
        "1 layers keep keys and values of every token (V1 runner on cpu, pages "
    )


def test_states_beside_speculation() -> None:
    """Flags count: the same model without them moves live."""
    check = doctor.model(["--model", str(build(OTHER["qwen3-next"])), "--speculative-config", NGRAM])
    assert not check.problem
    assert check.result.startswith(
        "requests move with their tokens alone (states that change with every step beside speculative decoding on the "
        "V1 runner): 3 layers keep a state that changes with every step; 1 layers keep "
    )


@pytest.mark.parametrize(("flag", "why"), [("--no-such-flag", "--no-such-flag"), ("--dtype=int3", "int3")])
def test_model_that_vllm_cannot_serve_is_reported(model_dir: Path, flag: str, why: str) -> None:
    check = doctor.model(["--model", str(model_dir), flag])
    assert check.result == "vLLM cannot build it here"
    assert why in check.problem


def test_no_model(tmp_path: Path) -> None:
    assert str(tmp_path) in doctor.model(["--model", str(tmp_path)]).problem
