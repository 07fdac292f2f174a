# SPDX-License-Identifier: Apache-2.0
"""The client of a request that was ended is told why, through vLLM's own front-end."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, VLLMUnprocessableEntityError

from llumsched.gateway import ends
from llumsched.gateway.paths import Style
from vllm_llumnix.frontend import endings


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[GenerateBaseServing]:
    monkeypatch.setattr(GenerateBaseServing, "_raise_if_error", GenerateBaseServing._raise_if_error)
    endings._wrap.cache_clear()
    yield GenerateBaseServing.__new__(GenerateBaseServing)
    endings._wrap.cache_clear()
    endings._endings.clear()


@pytest.mark.parametrize(
    ("request_id", "external_id"),
    [("chatcmpl-x", "chatcmpl-x"), ("cmpl-x", "cmpl-x-1"), ("chatcmpl-x", "chatcmpl-x_1")],
    ids=["chat", "one of several prompts", "one of several chats"],
)
def test_why(serving: GenerateBaseServing, request_id: str, external_id: str) -> None:
    endings.explain(external_id, "because")
    serving._raise_if_error("length", request_id)
    serving._raise_if_error(None, request_id)
    with pytest.raises(GenerationError, match="Internal server error"):
        serving._raise_if_error("error", f"{request_id}y")
    with pytest.raises(VLLMUnprocessableEntityError, match="because"):
        serving._raise_if_error("error", request_id)
    with pytest.raises(GenerationError, match="Internal server error"):
        serving._raise_if_error("error", request_id)


def test_ended_request_is_not_sent_again(serving: GenerateBaseServing) -> None:
    """As it stands in a stream, and for a gateway that would go on with one that has lost its engine."""
    error = create_error_response(VLLMUnprocessableEntityError("two engines died"))
    assert (error.error.code, error.error.message) == (422, "two engines died")
    event = b"data: " + json.dumps(error.model_dump()).encode() + b"\n\n"
    assert ends.in_events(event, Style.OPENAI) == (ends.End.REFUSED, 0)


def test_unwanted_requests_are_forgotten(serving: GenerateBaseServing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clients have left, say."""
    monkeypatch.setattr(endings, "MAX_ENDINGS", 2)
    for number in range(3):
        endings.explain(f"cmpl-{number}-0", "because")
    assert list(endings._endings) == ["cmpl-1-0", "cmpl-2-0"]
