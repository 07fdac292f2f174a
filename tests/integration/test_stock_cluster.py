# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM, with this package installed: alone, and behind the scheduler and the gateway in lite mode."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.test_cluster import AT, LENGTH, PROMPT, SECONDS, assert_whole, begin
from tests.support.client import Client
from tests.support.control import Control
from tests.support.failures import failure
from tests.support.harness import SERVED_NAME, Fleet, Server, ServerSpec

LITE = "--enable-full-mode-scheduling=false"
LOADS = ("instance_lrs_total_requests", "instance_lrs_total_tokens")


@pytest.fixture(scope="module")
def stock(model_dir: Path, log_dir: Path) -> Iterator[list[Server]]:
    """Two; the second may be killed. Where a model runs, torch listens."""
    spec = ServerSpec(
        model_dir,
        llumlet=False,
        executor="mp",
        max_model_len=4096,
        flags=("--dtype", "float32"),
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with Fleet(log_dir / "stock") as fleet:
        yield fleet.start(*(dataclasses.replace(spec, name=name) for name in ("survivor", "victim")))


def listening(process: psutil.Process) -> list[int]:
    return [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_without_the_flag_nothing_of_ours_runs(stock: list[Server]) -> None:
    server = stock[0]
    assert server.generate(list(range(100, 140)), 5)
    assert listening(psutil.Process(server.pid)) == [server.port]
    assert listening(psutil.Process(server.process("EngineCore"))) == []
    assert "llumlet" not in server.log_text()


async def values(url: str, *names: str) -> list[float]:
    """Of Prometheus metrics, each the sum of its samples."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", raise_for_status=True) as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    samples = [one for family in families for one in family.samples]
    return [sum(one.value for one in samples if one.name == name) for name in names]


@failure("an instance of stock vLLM aborts all its requests, as at SIGTERM", "decoding", "continued by the gateway")
@pytest.mark.asyncio
@pytest.mark.rest
async def test_requests_that_their_engine_aborts_go_on_elsewhere(
    stock: list[Server], model_dir: Path, tmp_path: Path
) -> None:
    """Streams go on, and whole answers are asked for anew."""
    lite = [LITE, "--llm-backend-endpoints", ",".join(f"127.0.0.1:{engine.port}" for engine in stock)]
    _, victim = stock
    body = {"model": SERVED_NAME, "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
    async with (
        Control(tmp_path, model=model_dir, schedulers=[lite], gateway=[LITE]) as control,
        Client(control.gateway_url) as client,
        Client(victim.base_url) as direct,
        aiohttp.ClientSession(raise_for_status=True) as session,
    ):
        expected = await (await direct.complete(PROMPT, LENGTH, ignore_eos=True)).result()
        await control.knows(2)

        async def whole() -> Any:
            async with session.post(f"{control.gateway_url}/v1/completions", json=body) as answer:
                return (await answer.json())["choices"][0]

        answers = [asyncio.create_task(whole()) for _ in range(2)]
        streams = [await begin(client) for _ in range(4)]
        for stream in streams:
            await stream.wait_for(AT)
        assert (await values(victim.base_url, "vllm:num_requests_running"))[0] > 1
        try:
            async with session.post(f"{victim.base_url}/pause", params={"mode": "abort"}):
                pass
            await assert_whole(streams, expected.token_ids)
            for choice in await asyncio.gather(*answers):
                assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
        finally:
            async with session.post(f"{victim.base_url}/resume"):
                pass


@failure("all of an instance of stock vLLM is killed", "decoding", "continued by the gateway")
@pytest.mark.asyncio
async def test_stock_engines(stock: list[Server], model_dir: Path, tmp_path: Path) -> None:
    """Requests are spread, a killed instance loses none of them, and in the end the scheduler counts none."""
    survivor, victim = stock
    lite = [LITE, "--llm-backend-endpoints", ",".join(f"127.0.0.1:{engine.port}" for engine in stock)]
    async with (
        Control(tmp_path, model=model_dir, schedulers=[lite], gateway=[LITE]) as control,
        Client(control.gateway_url) as client,
        Client(survivor.base_url) as direct,
    ):
        expected = (await (await direct.complete(PROMPT, LENGTH, ignore_eos=True)).result()).token_ids
        await control.knows(2)
        streams = [await begin(client) for _ in range(4)]
        for stream in streams:
            await stream.wait_for(AT)
        assert [await values(engine.base_url, "vllm:num_requests_running") for engine in stock] == [[2], [2]]
        assert (await values(control.scheduler_url, *LOADS))[0] == 4

        for pid in victim.pids():
            os.kill(pid, signal.SIGKILL)
        await assert_whole(streams, expected)
        await control.knows(1)
        assert (await (await begin(client)).result()).token_ids == expected
        deadline = time.monotonic() + SECONDS
        while (counted := await values(control.scheduler_url, *LOADS)) != [0, 0]:
            assert time.monotonic() < deadline, counted
            await asyncio.sleep(0.1)
