# SPDX-License-Identifier: Apache-2.0
"""The attributes of a vLLM worker that are wrapped at run time, and why. See `patching.seam`."""

from __future__ import annotations

from vllm_llumnix.patching.seam import Kind, Seam, Seams


def _worker(attribute: str, why: str, remove_when: str, test: str) -> Seam:
    return Seam("vllm/v1/worker/gpu_worker.py", "Worker", attribute, Kind.WRAPPED, why, "worker", remove_when, test)


_SLEEP = "vLLM calls back when the KV memory goes and comes"
_TEST = "tests/kv/test_kv_cuda.py"

SEAMS = Seams(
    _worker(
        "sleep", "nobody reads or writes KV memory that sleep mode has taken away", _SLEEP, "tests/kv/test_kv_cuda.py"
    ),
    _worker("discard", "as sleep, for the KV memory alone", _SLEEP, _TEST),
    _worker("wake_up", "the KV memory is back", _SLEEP, _TEST),
    _worker(
        "compile_or_warm_up_model",
        "nobody touches the GPU while CUDA graphs are captured, which elastic expert parallelism does at run time",
        "vLLM captures graphs in thread-local mode",
        _TEST,
    ),
    _worker(
        "execute_model",
        "a request that comes back has its state in another block; and a test makes the model hang",
        "vLLM forgets the place of a state when a request is over, also in a step that computes nothing",
        "tests/integration/test_hybrids.py",
    ),
    Seam(
        "vllm/v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder",
        "sync_batch",
        Kind.WRAPPED,
        "a request that enters the V1 runner's batch with a history is told that it has thought already",
        "worker",
        "vLLM counts what is there when a request enters the batch again",
        "tests/engine/test_thinking_budget.py",
    ),
)
