# SPDX-License-Identifier: Apache-2.0
"""What a gateway's header says, and to whom."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from llumlet.attempts import MAX_DEATHS, attempt_after, deaths_before
from vllm_llumnix.frontend import asgi


@pytest.fixture
def server() -> TestClient:
    """Tells what is known where vLLM adds a request: in the handler, and while an answer is streamed."""
    app = FastAPI()

    async def stream() -> object:
        yield str(asgi.num_deaths.get())

    app.get("/at-once")(lambda: asgi.num_deaths.get())
    app.get("/streamed")(lambda: StreamingResponse(stream()))
    app.add_middleware(asgi.ReadAttempt)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/at-once", "/streamed"])
@pytest.mark.parametrize(
    ("header", "num_deaths"),
    [("2", 1), ("3", 2), ("9999999999", MAX_DEATHS), ("1", 0), ("0", 0), ("-3", 0), ("two", 0), ("", 0)],
)
def test_the_second_attempt_comes_after_one_death(server: TestClient, path: str, header: str, num_deaths: int) -> None:
    assert server.get(path, headers={"X-Llumnix-Attempt": header}).text == str(num_deaths)
    assert server.get(path).text == "0", "the next request is another one"


def test_what_a_gateway_says_is_what_is_read() -> None:
    assert [deaths_before(attempt_after(number)) for number in range(MAX_DEATHS)] == list(range(MAX_DEATHS))
