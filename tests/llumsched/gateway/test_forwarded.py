# SPDX-License-Identifier: Apache-2.0
"""Engines are told for whom the gateway asks."""

from __future__ import annotations

import pytest

from tests.llumsched.gateway.support import cluster

BODY = {"model": "mock", "prompt": "one two three", "max_tokens": 3}


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
