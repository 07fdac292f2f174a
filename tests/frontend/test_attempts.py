# SPDX-License-Identifier: Apache-2.0
"""What a gateway's header says, and to whom."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.testclient import TestClient

from llumlet.contract.attempt_header import MAX_DEATHS, attempt_after, deaths_before
from vllm_llumnix.frontend import asgi


def _name() -> str:
    served = asgi.served.get()
    assert served is not None
    return served.name


@pytest.fixture
def server() -> TestClient:
    """Tells what is known where vLLM adds a request: in the handler, and while an answer is streamed."""
    app = FastAPI()

    async def stream() -> object:
        yield str(asgi.num_deaths.get())

    async def stream_name() -> object:
        yield _name()

    app.get("/name")(lambda: PlainTextResponse(_name()))
    app.get("/streamed-name")(lambda: StreamingResponse(stream_name()))
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


@pytest.mark.parametrize("path", ["/name", "/streamed-name"])
def test_request_id_is_known_where_engine_requests_are_made(server: TestClient, path: str) -> None:
    assert server.get(path, headers={"X-Request-Id": "gate-7"}).text == "gate-7"
    assert server.get(path).text == "", "the next request is another one"


@pytest.mark.parametrize(
    ("first", "later", "taken"), [(0, -1, 0), (3, 2, 2), (1, 0, 0), (0, 0, 0), (-1, -2, -2), (-1, 0, 0)]
)
def test_only_the_client_makes_a_request_urgent(first: int, later: int, taken: int) -> None:
    served = asgi.Served("r")
    assert (served.priority_of(first), served.priority_of(later)) == (first, taken)


def test_attempt_header_is_read_as_written() -> None:
    assert [deaths_before(attempt_after(number)) for number in range(MAX_DEATHS)] == list(range(MAX_DEATHS))
