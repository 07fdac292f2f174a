# SPDX-License-Identifier: Apache-2.0
"""What the record of an engine's steps says of an engine that is dead, and of one that only is silent."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from llumlet.contract.server import serve
from llumlet.process.credentials import Credentials
from llumlet.protocol.origin.owners import STUCK_SECONDS, Owner, steps_of
from tests.llumlet.fake_agent import FakeAgent
from vllm_llumnix.frontend import liveness as deaths
from vllm_llumnix.frontend.liveness import is_gone
from vllm_llumnix.steps import step_record
from vllm_llumnix.steps.step_record import StepRecord


@pytest.fixture
def owner() -> Owner:
    return Owner("e", uuid.uuid4().hex, b"e")


@pytest.fixture
def record(owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRecord]:
    monkeypatch.setattr(step_record, "DIRECTORY", tmp_path)
    record = StepRecord(owner.incarnation, 4, 2)
    yield record
    record.close()


def later() -> float:
    return time.monotonic() + 2 * STUCK_SECONDS


def test_a_grammar_may_be_why_an_engine_is_dead(owner: Owner, record: StepRecord) -> None:
    record.compile("compiled")
    record.begin(SimpleNamespace(num_scheduled_tokens={"in a step": 1}))
    owner.died("its process has ended", time.monotonic())
    steps = steps_of(owner, time.monotonic(), step_record.read)
    assert steps is not None
    assert [steps.had(name) for name in ("compiled", "in a step", "waits")] == [True, True, False]


def test_a_grammar_that_takes_long_is_why_nobody_is_silent(owner: Owner, record: StepRecord) -> None:
    record.compile("compiled")
    assert steps_of(owner, later(), step_record.read) is None, "it is cut off"
    record.begin(SimpleNamespace(num_scheduled_tokens={"in a step": 1}))
    assert steps_of(owner, time.monotonic(), step_record.read) is None, "a young step: it gets on"
    steps = steps_of(owner, later(), step_record.read)
    assert steps is not None
    assert [steps.had(name) for name in ("compiled", "in a step")] == [False, True]


@pytest.mark.asyncio
async def test_a_process_that_is_ending_breaks_connections_off_before_its_port_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deaths, "GONE_SECONDS", 30.0)
    connections = 0

    async def break_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.transport.abort()
        if connections == 3:
            server.close()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    assert await is_gone(f"{host}:{port}", Credentials())
    assert connections == 3


@pytest.mark.asyncio
async def test_an_engine_that_answers_or_only_keeps_silent_is_not_gone() -> None:
    server = await serve(FakeAgent("living"))
    assert not await is_gone(str(server.address), Credentials())
    await server.stop(grace_s=0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not await is_gone(f"127.0.0.1:{silent.getsockname()[1]}", Credentials())
