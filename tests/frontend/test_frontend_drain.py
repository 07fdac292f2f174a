# SPDX-License-Identifier: Apache-2.0
"""What an API server that drains answers to HTTP."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_llumnix.frontend import drain


@pytest.fixture
def server() -> TestClient:
    app = FastAPI()
    for path in ("/v1/completions", "/v1/responses/7/cancel"):
        app.post(path)(lambda: "done")
    for path in ("/health", "/metrics"):
        app.get(path)(lambda: "fine")
    app.add_middleware(drain.RefuseNew)
    return TestClient(app)


def test_nothing_is_refused_before_the_drain(server: TestClient) -> None:
    assert server.post("/v1/completions").status_code == 200
    assert server.get("/health").status_code == 200


def test_new_work_is_refused_in_a_sentence(server: TestClient) -> None:
    drain.refusing.set()
    answer = server.post("/v1/completions")
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"
    assert server.get("/health").status_code == 503


def test_what_ends_work_or_only_looks_is_not_refused(server: TestClient) -> None:
    drain.refusing.set()
    assert server.post("/v1/responses/7/cancel").status_code == 200
    assert server.get("/metrics").status_code == 200
