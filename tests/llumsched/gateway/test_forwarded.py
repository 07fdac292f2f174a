# SPDX-License-Identifier: Apache-2.0
"""Engines are told for whom the gateway asks, and get no header that is not on the list."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llumsched.gateway.forwarded import OWNED, PASSED
from tests.llumsched.gateway.support import cluster

BODY = {"model": "mock", "prompt": "one two three", "max_tokens": 3}


_READ = re.compile(r"(?<!response\.)\bheaders(?:\.get\(\s*|\[)(\"[^\"]+\"|[A-Z_]{6,})")
_CONSTANT = re.compile(r"^([A-Z_]+)\s*=\s*\"([^\"]+)\"", re.MULTILINE)


def _headers_read() -> Iterator[str]:
    """Names of the headers that the API server of the installed vLLM reads of requests, in lower case."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for folder in ("entrypoints", "tracing"):
        for file in Path(spec.origin).with_name(folder).rglob("*.py"):
            text = file.read_text()
            constants = dict(_CONSTANT.findall(text))
            for name in _READ.findall(text):
                yield constants.get(name, name).strip('"').lower()
            for names in re.findall(r"TRACE_HEADERS = \[(.*)\]", text):
                yield from re.findall(r"\"([^\"]+)\"", names)


def test_every_header_that_the_installed_vllm_reads_is_passed_or_owned_on_purpose() -> None:
    read = set(_headers_read())
    assert {"x-vllm-priority", "x-session-id", "traceparent", "authorization"} <= read
    owned = {name.lower() for name in OWNED}
    passed = {name.decode() for name in PASSED}
    assert not read - owned - passed, "llumsched/gateway/forwarded.py does not know these"
    assert not owned & passed


@pytest.mark.asyncio
async def test_only_listed_headers_reach_an_engine() -> None:
    sent = {name.title(): "1" for name in [*OWNED, "X-Other", "X-Amzn-Trace-Id", "Proxy-Authorization", "Baggage"]}
    sent |= {name.decode(): "1" for name in PASSED - {b"x-forwarded-for"}}
    async with cluster(num_engines=1) as it:
        await it.post("/v1/completions", BODY, sent | {"Content-Type": "application/json"})
        (seen,) = it.engines.seen or []
        got = {name.lower() for name in seen["headers"]}
        added = {"host", "content-length", "x-request-id", "x-forwarded-for", "authorization"}
        assert got == {name.lower() for name in sent if name.lower().encode() in PASSED} | added


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("sent", "addresses", "scheme"),
    [
        ({}, "127.0.0.1", "http"),
        ({"X-Forwarded-For": "10.0.0.7", "X-Forwarded-Proto": "https"}, "10.0.0.7, 127.0.0.1", "https"),
        ({"x-forwarded-for": "::1, 10.0.0.7"}, "::1, 10.0.0.7, 127.0.0.1", "http"),
        ({"Connection": "close, X-Forwarded-For, x-forwarded-proto"}, "127.0.0.1", "http"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_clients_address_is_put_after_those_that_came(
    path: str, sent: dict[str, str], addresses: str, scheme: str
) -> None:
    async with cluster(num_engines=1) as it:
        assert (await it.post(path, BODY, sent)).status == 200
        (seen,) = it.engines.seen or []
        assert seen["headers"].getall("X-Forwarded-For") == [addresses]
        assert seen["headers"].getall("X-Forwarded-Proto") == [scheme]
