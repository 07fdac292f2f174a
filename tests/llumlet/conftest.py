# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from llumlet.contract.client import LlumletClient
from llumlet.contract.server import RunningServer, serve
from tests.llumlet.fake_agent import FakeAgent, request_info


@pytest_asyncio.fixture
async def agent() -> FakeAgent:
    return FakeAgent(requests=[request_info()])


@pytest_asyncio.fixture
async def server(agent: FakeAgent) -> AsyncIterator[RunningServer]:
    running = await serve(agent)
    yield running
    agent.go.set()
    await running.stop(grace_s=0.2)


@pytest_asyncio.fixture
async def client(server: RunningServer) -> AsyncIterator[LlumletClient]:
    async with LlumletClient(server.address) as connected:
        yield connected
