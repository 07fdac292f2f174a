# SPDX-License-Identifier: Apache-2.0
"""The attributes of vLLM's engine client that are set at run time, and why; a subclass overrides the client's methods.
See `patching.seam`."""

from __future__ import annotations

from vllm_llumnix.patching.seam import Kind, Seam, Seams

_CLIENT = "vllm/v1/engine/core_client.py"
_TEST = "tests/frontend/test_frontend_lifetime.py"
_OUTLIVES = "vLLM lets an API server outlive its engine"

SEAMS = Seams(
    Seam(
        _CLIENT,
        "BackgroundResources",
        "validate_alive",
        Kind.REPLACED,
        "vLLM's receive task ends when the engine says that it is dying; ours goes on with what the relay brings",
        "api",
        _OUTLIVES,
        _TEST,
    ),
    Seam(
        _CLIENT,
        "BackgroundResources",
        "engine_dead",
        Kind.SET,
        "vLLM refuses new requests and reports itself unhealthy, while streams go on",
        "api",
        _OUTLIVES,
        _TEST,
    ),
    Seam(
        "vllm/entrypoints/generate/base/serving.py",
        "GenerateBaseServing",
        "_raise_if_error",
        Kind.WRAPPED,
        "the client is told why its request was ended, with a code on which nobody sends it again",
        "api",
        "vLLM takes the text and the code of an error from the engine's output",
        "tests/frontend/test_frontend_endings.py",
    ),
)
