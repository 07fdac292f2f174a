# SPDX-License-Identifier: Apache-2.0
"""Wanted numbers of instances over HTTP and to Prometheus, from the view of a scheduler process."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
import yaml

from llumsched.policy.document import Mode, load_policy
from llumsched.scaling.scaling_config import Bounds, ScalingConfig
from llumsched.scheduler import process
from llumsched.scheduler.process import SchedulerConfig, serve
from tests.llumsched import cases
from tests.llumsched.scheduler.test_http import Client

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

ROOT = Path(__file__).resolve().parents[3]


async def started(stack: AsyncExitStack, scaling: ScalingConfig) -> Client:
    policy = load_policy("load-balance", Mode.FULL)
    running = await serve(
        SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0, scaling=scaling)
    )
    stack.push_async_callback(running.close)
    session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)))
    return Client(running, session)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    """Two full instances of the model `m`, and one of `n`, with two roles, of which one is idle."""
    async with AsyncExitStack() as stack:
        made = await started(
            stack, ScalingConfig(bounds=Bounds(1, 8), interval_s=0.02, low_freeness=100, high_freeness=200)
        )
        view = made.running.view
        for name in "ab":
            cases.put(view, name, num_used_gpu_tokens=9000, num_running_requests=30)
        cases.put(view, "c", served_models=["n"])
        cases.put(view, "d", served_models=["n"], instance_type="decode")
        yield made


async def groups(client: Client, query: str = "") -> tuple[int, dict[str, object]]:
    status, text = await client.get(f"/scale{query}")
    return status, json.loads(text)


async def test_every_group_with_why_and_who_would_leave(client: Client) -> None:
    async def seen() -> Sequence[dict[str, object]]:
        _, answer = await groups(client)
        found = answer["groups"]
        assert isinstance(found, list)
        return found

    while len(found := await seen()) < 3:
        pass
    assert found[0] == {
        "model": "m", "infer_type": "neutral", "wanted": 3, "replicas": 2, "starting": 0, "leaving": 0,
        "saturation": 1.2, "reason": "KV cache", "leave": [], "cheapest_first": ["b"],
    }  # fmt: skip
    assert [(one["model"], one["infer_type"], one["wanted"]) for one in found[1:]] == [
        ("n", "decode", 1),
        ("n", "neutral", 1),
    ]


async def test_single_group_is_told_for_simple_scalers(client: Client) -> None:
    while (await groups(client, "?model=m"))[0] != 200:
        pass
    assert (await groups(client, "?model=m"))[1]["wanted"] == 3
    assert (await groups(client, "?model=n&infer_type=decode"))[1]["wanted"] == 1
    status, answer = await groups(client, "?model=n")
    assert (status, answer) == (400, {"error": "model 'n': several infer types: say infer_type"})
    assert (await groups(client, "?model=other"))[0] == 404
    assert await groups(client, "?modle=m") == (400, {"error": "unknown: modle"})


async def test_the_manifest_for_keda_asks_for_what_is_answered(client: Client) -> None:
    """Checks the manifest of docs/operate/scaling.md, with a model's name put in."""
    text = (ROOT / "docs" / "operate" / "scaling.md").read_text()
    (manifest,) = (yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "keda.sh" in one)
    assert (manifest["apiVersion"], manifest["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    (trigger,) = manifest["spec"]["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("metrics-api", "AverageValue")
    url, told = urlsplit(trigger["metadata"]["url"]), trigger["metadata"]
    assert (url.port, url.path) == (process.PORT, "/scale")
    while (await groups(client, "?model=m"))[0] != 200:
        pass
    status, answer = await groups(client, f"?{url.query.replace('NAME', 'm')}")
    assert (status, answer[told["valueLocation"]], told["targetValue"]) == (200, 3, "1")
    (query,) = re.findall(r"query `max\((\w+)\{(.*)\}\)`", text)
    _, metrics = await client.get("/metrics")
    labels = dict(re.findall(r'(\w+)="(\w+)"', query[1].replace("NAME", "m")))
    assert f'{query[0]}{{infer_type="{labels["infer_type"]}",model="{labels["model"]}"}} 3.0\n' in metrics


async def test_prometheus_has_the_same(client: Client) -> None:
    while (await groups(client, "?model=m"))[0] != 200:
        pass
    _, text = await client.get("/metrics")
    of = '{infer_type="neutral",model="m"}'
    assert f"llumnix_saturation{of} 1.2\n" in text
    assert f"llumnix_wanted_replicas{of} 3.0\n" in text
    assert f"llumnix_replicas{of} 2.0\n" in text


async def test_a_scheduler_that_does_not_look_says_how_it_would() -> None:
    async with AsyncExitStack() as stack:
        client = await started(stack, ScalingConfig())
        status, answer = await groups(client)
        assert status == 404
        assert "--scaling MIN:MAX" in str(answer["error"])
        assert "llumnix_saturation" not in (await client.get("/metrics"))[1]
