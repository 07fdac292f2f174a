# SPDX-License-Identifier: Apache-2.0
"""`/live` says 200 whatever becomes of the engine, through all the middleware that vLLM's front end has."""

from __future__ import annotations

import argparse

import pytest
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from vllm_llumnix import hooks
from vllm_llumnix.frontend import server_drain as drain


@pytest.fixture
def server() -> TestClient:
    """Its engine is dead, and it wants a key."""
    app = FastAPI()
    app.get("/health")(lambda: Response(status_code=503))
    app.get("/v1/models")(lambda: "models")
    arguments = argparse.Namespace(
        allowed_origins=["*"],
        allow_credentials=False,
        allowed_methods=["*"],
        allowed_headers=["*"],
        api_key=["secret"],
        enable_request_id_headers=True,
        middleware=list(hooks.MIDDLEWARE),
    )
    init_entrypoints_middleware(arguments, app, ("generate",))
    return TestClient(app)


@pytest.mark.parametrize("is_draining", [False, True])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_it_lives_with_a_dead_engine_and_in_a_drain_and_wants_no_key(
    server: TestClient, method: str, is_draining: bool
) -> None:
    assert server.get("/v1/models").status_code == 401
    if is_draining:
        drain.refusing.set()
    answer = server.request(method, "/live")
    assert (answer.status_code, answer.text) == (200, "OK" if method == "GET" else "")
    assert answer.headers["content-length"] == "2"
    assert server.get("/health").status_code == 503


def test_behind_a_path_it_is_the_same(server: TestClient) -> None:
    with TestClient(server.app, root_path="/engine-7") as behind:
        assert behind.get("/engine-7/live").status_code == 200


def test_nothing_else_is_answered(server: TestClient) -> None:
    assert server.post("/live").status_code == 404
    assert server.get("/live/").status_code == 404
    assert server.get("/v1/live").status_code == 401
