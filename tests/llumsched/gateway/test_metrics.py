# SPDX-License-Identifier: Apache-2.0
"""What the gateway tells of requests: its metrics, and the lines of its access log. Clients choose part of the text."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
from typing import Any

import pytest
from aiohttp import web

from llumsched.gateway.config import AccessLog
from llumsched.gateway.gateway_metrics import CLIENT_GONE, Metrics, Record
from llumsched.gateway.objectives import Objectives
from llumsched.gateway.sse import DONE, event
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, Scripted, cluster, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "mock", "prompt": "one two three", "max_tokens": 4}


async def _models(it: Cluster) -> set[str]:
    """The values of the label, in all metrics."""
    return set(re.findall(r'model="([^"]*)"', (await it.get("/metrics")).content.decode()))


@pytest.mark.asyncio
async def test_only_models_that_an_instance_serves_are_labels() -> None:
    async with cluster(num_engines=1) as it:
        await it.get("/v1/models")  # the mock engine would answer for any
        for number in range(20):
            assert (await it.post(COMPLETIONS, BODY | {"model": f"nonsense-{number}"})).status == 404
        assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert await _models(it) == {"mock", "_unknown"}
        counted = (await it.get("/metrics")).content
        assert b'request_total{model="_unknown",status_code="404"} 20.0' in counted
        assert b'request_total{model="mock",status_code="200"} 1.0' in counted


class _Locked(Mock):
    """Tells its models to nobody without a key, and serves only those."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.Response(status=401)
        if b'"mock"' not in await request.read():
            return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)
        return await super().answer(request)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_shows_what_an_instance_serves_that_does_not_tell(stream: bool) -> None:
    async with cluster(num_engines=1, mock=_Locked()) as it:
        assert (await it.post(COMPLETIONS, BODY | {"model": "nonsense"})).status == 404
        assert await _models(it) == {"_unknown"}
        assert (await it.post(COMPLETIONS, BODY | {"stream": stream})).status == 200
        assert await _models(it) == {"mock", "_unknown"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("objectives", "mock", "body", "met"),
    [
        ({"ttft": "60000", "tpot": "60000"}, Mock(), {}, "true"),
        ({"tpot": "60000"}, Mock(), {}, "true"),
        ({"ttft": "60000", "tpot": "1"}, Mock(interval_s=0.02), {}, "false"),
        ({"ttft": "0.001"}, Mock(), {}, "false"),
        ({"ttft": "60000"}, Mock(status=400), {}, "false"),
        ({"ttft": "60000"}, Mock(), {"stream": False}, None),
        ({}, Mock(), {}, None),
    ],
)
async def test_requests_are_counted_by_whether_they_met_their_objectives(
    objectives: dict[str, str], mock: Mock, body: dict[str, Any], met: str | None
) -> None:
    async with cluster(num_engines=1, mock=mock) as it:
        await it.get("/v1/models")
        headers = {f"x-llm-d-slo-{name}-ms": value for name, value in objectives.items()}
        await it.post(COMPLETIONS, BODY | {"stream": True} | body, headers)
        await it.until_idle()
        counted = re.findall(rb"request_slo_total{(.*)} (.*)", (await it.get("/metrics")).content)
        assert counted == ([] if met is None else [(f'met="{met}",model="mock"'.encode(), b"1.0")])


@pytest.mark.asyncio
async def test_continuations_are_counted_by_the_same_label() -> None:
    async with cluster(num_engines=2) as it:
        it.engines.cut_at = 300
        await it.post(COMPLETIONS, BODY | {"stream": True, "temperature": 0})
        assert b'request_continuation_total{model="mock",outcome="continued"} 1.0' in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_scrape_does_not_block_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, num_begun = threading.Event(), 0
    async with cluster(num_engines=1) as it:
        render = it.gateway.metrics.text

        def text() -> bytes:
            nonlocal num_begun
            num_begun += 1
            assert may_end.wait(DEADLINE_S)
            return render()

        monkeypatch.setattr(it.gateway.metrics, "text", text)
        try:
            leaving, *staying = [asyncio.create_task(it.get("/metrics")) for _ in range(3)]
            await until(lambda: num_begun)
            leaving.cancel()
            for _ in range(3):
                assert (await it.post(COMPLETIONS, BODY)).status == 200
            assert num_begun == 1, "once for all of them"
        finally:
            may_end.set()
        assert {b"request_total" in reply.content for reply in await asyncio.gather(*staying)} == {True}
        assert b'status_code="200"} 3.0' in (await it.get("/metrics")).content
        assert num_begun == 2, "the next one sees what has become of it since"


def _chat(**delta: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


FINISH = event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "total_tokens": 10, "completion_tokens": 7}})
SPOKEN = [_chat(role="assistant", content=""), _chat(reasoning="hm"), _chat(content="data: data:"), FINISH]


@pytest.mark.asyncio
@pytest.mark.parametrize(("events", "num_tokens"), [(SPOKEN, 2), ([*SPOKEN, USAGE], 7)])
async def test_output_tokens_that_no_ids_tell_are_those_of_the_usage_or_the_events_with_a_text(
    events: list[bytes], num_tokens: int
) -> None:
    async with cluster(num_engines=1, mock=Scripted(script=[*events, DONE])) as it:
        await it.post(CHAT, {"model": "mock", "messages": [], "stream": True, "n": 2})
        counted = (await it.get("/metrics")).content.decode()
        assert re.findall(r"request_output_tokens_total{.*} (.*)", counted) == [f"{num_tokens}.0"]


@pytest.mark.asyncio
@pytest.mark.parametrize("model", ["x" * 257, "é" * 1000])
async def test_a_models_name_has_a_limit(model: str) -> None:
    async with cluster(num_engines=1) as it:
        await it.get("/v1/models")
        reply = await it.post(COMPLETIONS, BODY | {"model": model})
        assert reply.status == 400
        assert len(reply.content) < 200, "the name does not come back"
        assert (await it.post(COMPLETIONS, BODY | {"model": "x" * 256})).status == 404


@pytest.mark.asyncio
async def test_a_client_writes_no_lines_and_no_fields_into_the_access_log(capfd: pytest.CaptureFixture[str]) -> None:
    async with cluster(num_engines=1, access_log=AccessLog.LINE) as it:
        await it.get("/v1/models")
        forged = "m\n2026-01-01T00:00:00 200 /v1/forged id=root \x1b[31m\u2028\x9b instance=x"
        await it.post(COMPLETIONS, BODY | {"model": forged}, {"X-Request-Id": "one two"})
    (line,) = capfd.readouterr().out.splitlines()
    assert line.isprintable()
    fields = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
    assert fields["model"] == forged.translate({ord(char): f"\\u{ord(char):04x}" for char in "\n \x1b\u2028\x9b"})
    assert (fields["instance"], fields["id"].isalnum()) == ("-", True)


@pytest.mark.asyncio
async def test_front_door_shows_no_metrics_and_the_port_for_operators_nothing_else() -> None:
    async with cluster(num_engines=1) as it:
        assert (await it.ask("/metrics", it.gateway.port)).status == 403
        port = it.gateway.metrics_port
        assert b"gateway_current_requests" in (await it.ask("/metrics", port)).content
        assert [(await it.ask(path, port)).status for path in ("/ready", "/health")] == [200, 200]
        assert (await it.ask("/v1/models", port)).status == 404
        async with it.client.post(f"http://127.0.0.1:{port}{COMPLETIONS}", json=BODY) as answer:
            assert answer.status == 405
        assert not it.engines.seen


@pytest.mark.asyncio
async def test_metrics_are_rendered_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rendered = [100.0], 0
    async with cluster(num_engines=1) as it:
        metrics = it.gateway.metrics
        metrics.least_render_s = 1.0
        render = metrics.text

        def text() -> bytes:
            nonlocal rendered
            rendered += 1
            return render()

        monkeypatch.setattr(metrics, "text", text)
        monkeypatch.setattr(metrics, "clock", lambda: clock[0])
        for _ in range(20):
            await it.get("/metrics")
            clock[0] += 0.1
        assert rendered == 2


@pytest.mark.asyncio
async def test_gateway_serves_though_its_port_for_metrics_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        async with cluster(num_engines=1, metrics_port=port) as it:
            assert (await it.post(COMPLETIONS, BODY)).status == 200
    assert f"no metrics: 127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({"e2e_s": 0.3}, False),
        ({"e2e_s": 0.1}, None),
        ({"e2e_s": 9.0, "ttft_s": 0.3}, False),
        ({"e2e_s": 9.0, "ttft_s": 0.1}, None),
        ({"e2e_s": 0.3, "wants_stream": False}, None),
        ({"e2e_s": 0.3, "objectives": Objectives(tpot_ms=1.0)}, None),
    ],
)
def test_client_that_gives_up_late_has_missed_its_objective(fields: dict[str, Any], met: bool | None) -> None:
    record = Record("r", "/v1/completions", status=CLIENT_GONE, wants_stream=True, objectives=Objectives(ttft_ms=200.0))
    for name, value in fields.items():
        setattr(record, name, value)
    assert record.has_met_objectives is met


def test_rendering_gives_way_to_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    usual_s, meanwhile_s = sys.getswitchinterval(), []
    monkeypatch.setattr(
        "llumsched.gateway.gateway_metrics.generate_latest", lambda _: meanwhile_s.append(sys.getswitchinterval())
    )
    Metrics().text()
    assert meanwhile_s[0] <= usual_s / 5
    assert sys.getswitchinterval() == usual_s
