# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_llumnix.engine.portability import DOCUMENT, render, why_not_portable
from vllm_llumnix.engine.request_state import Residence, settle_in

CPU: dict[str, Any] = {"model_runner_v2": False, "device": "cpu", "spec_decode": False}


def request(origin: str | None = "tcp://127.0.0.1:1", parameters: dict[str, Any] | None = None, **more: Any) -> Request:
    params = SamplingParams(max_tokens=5, **(parameters or {}))
    made = Request("r", [1, 2, 3], params, None, **more)
    settle_in(made, Residence(origin, "r", None))
    return made


@pytest.mark.parametrize(
    ("asked", "engine", "reason"),
    [
        (request(), CPU, None),
        (request(parameters={"seed": 1, "temperature": 1.0}), CPU, None),
        (request(origin=None), CPU, "its API server has no relay (it was not started with --enable-llumlet)"),
        (request(resumable=True), CPU, "streaming input"),
        (request(lora_request=LoRARequest("adapter", 1, "/adapter")), CPU, None),
        (request(parameters={"extra_args": {"kv_transfer_params": {"x": 1}}}), CPU, "KV transfer parameters"),
        (
            request(parameters={"extra_args": {"mine": 1}}),
            CPU,
            "extra arguments for custom logits processors",
        ),
        (request(parameters={"thinking_token_budget": 9}), CPU, "a thinking token budget"),
        (request(parameters={"seed": 1}), CPU | {"spec_decode": True}, "a seed with speculative decoding"),
        (request(parameters={"seed": 1}), CPU | {"device": "cuda"}, "a seed on the V1 GPU runner"),
        (request(parameters={"seed": 1}), CPU | {"device": "cuda", "model_runner_v2": True}, None),
        (request(parameters={"seed": 1, "temperature": 0.0}), CPU | {"device": "cuda"}, None),
    ],
)
def test_what_is_refused(asked: Request, engine: dict[str, Any], reason: str | None) -> None:
    assert why_not_portable(asked, **engine) == reason


def test_the_table_is_current() -> None:
    assert DOCUMENT.read_text() == render(), "run `make docs`"
