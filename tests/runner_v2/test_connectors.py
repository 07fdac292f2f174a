# SPDX-License-Identifier: Apache-2.0
"""Beside KV connectors of vLLM's under the V2 runner and asynchronous scheduling: there and back as if unmoved."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_connectors import NIXL, PROMPT, Pair, handing_over, offloading, there_and_back, two
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.model import PRESETS, build

LENGTH = 120
AT = 12


@pytest.fixture(scope="module", params=[offloading, pytest.param(handing_over, marks=NIXL)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    connector: Callable[[], dict[str, Any]] = request.param
    logs: Path = tmp_path_factory.mktemp(connector.__name__)
    with two(logs, build(PRESETS["tiny"]), connector(), runner="v2", executor="mp") as pair:
        yield pair


@pytest.mark.full
@pytest.mark.asyncio
async def test_there_and_back(pair: Pair) -> None:
    async with Client(pair.a.base_url) as client:

        async def begin(name: str) -> Any:
            salt = f"{name}-{uuid.uuid4().hex}"
            return await client.complete(PROMPT, LENGTH, ignore_eos=True, cache_salt=salt)

        expected = await (await begin("unmoved")).result()
        stream = await begin("moved")
        await stream.wait_for(AT)
        await there_and_back(pair, stream)
        assert (await stream.result()).token_ids == expected.token_ids
    for server in pair[:2]:
        assert "behind AsyncScheduler" in server.log_text()
        await wait_idle(server)
