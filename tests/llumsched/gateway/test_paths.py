# SPDX-License-Identifier: Apache-2.0
"""Paths other than completions and chats: which there are, and that they pass as they are."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from llumlet.process.addresses import Address
from llumsched.causes import Cause
from llumsched.gateway import prompts
from llumsched.gateway.forms import fields_of
from llumsched.gateway.paths import PATHS, Kind, Style, find
from llumsched.gateway.server import _OWN
from tests.llumsched.gateway.support import Cluster, Reply, cluster, until
from tests.llumsched.gateway.test_scheduling import scheduled
from tests.support.mock_api import Mock

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"
TOKENIZE = "/tokenize"
EMBEDDINGS = "/v1/embeddings"
COHERE = "/cohere/v2/chat"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
BODY = {"model": "mock", "input": "Grüß dich"}
STREAMED = BODY | {"stream": True}
OF_OTHERS = {
    "/v1/models/{model}",
    "/v1/audio/speech",
    "/healthz",
    "/ready",
    "/docs/oauth2-redirect",
    "/openapi.json",
    "/redoc",
    "/metrics",
}
"""In the table, and no route that vLLM's own code decorates: vllm-omni's, the gateway's, FastAPI's, Prometheus'."""
_ROUTE_MAKERS = {"get", "post", "put", "delete", "patch", "websocket", "add_api_route", "mount"}
_OTHER_PROCESSES = ("dp_supervisor.py", "preload.py")
"""Of `vllm/entrypoints`: these serve no clients."""


def _routes() -> Iterator[str]:
    """Of the installed vLLM, read rather than imported: which it registers depends on model and flags."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for file in Path(spec.origin).with_name("entrypoints").rglob("*.py"):
        if file.name in _OTHER_PROCESSES:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                path = node.args[0]
                if node.func.attr in _ROUTE_MAKERS and isinstance(path, ast.Constant) and isinstance(path.value, str):
                    yield from [path.value] if path.value.startswith("/") else []


def test_the_table_has_every_route_of_the_installed_vllm() -> None:
    routes = set(_routes())
    assert len(routes) > 60
    assert not routes - PATHS.keys(), "llumsched/gateway/paths.py does not know these"
    assert PATHS.keys() - routes <= OF_OTHERS, "this vLLM does not have these any more"


def test_the_gateway_answers_what_the_table_says_is_its_own() -> None:
    assert {path for path, one in PATHS.items() if one.kind is Kind.OWN} == _OWN.keys()
    continued = {path for path, one in PATHS.items() if one.kind is Kind.CONTINUED}
    assert continued == {"/v1/completions", "/v1/chat/completions"}


@pytest.mark.parametrize("name", ["..", ".", "a/b", "a b", "a%2fb", "", "x" * 257, "é", "a?b", "a\r\nb", "a\n"])
def test_no_name_in_a_path_is_more_than_a_name(name: str) -> None:
    assert find(f"/v1/responses/{name}") is None
    assert find(f"/v1/responses/{name}/cancel") is None


def _id_in(content: bytes) -> str:
    """The id that a body wants for its response."""
    try:
        return str(json.loads(content).get("request_id", ""))
    except ValueError:
        return ""


_SHOWN = re.compile(rb"resp_[a-z2-7]{24}_[0-9a-f]{32}")


@dataclass
class Engine(Mock):
    """Knows every path. Tells at which port it was asked, and with what."""

    events: list[bytes] = field(default_factory=list)
    """Of the streams it gives."""
    once: list[bytes] = field(default_factory=list)
    """Of the first stream, instead."""
    losses: int = 0
    """Streams that break off after `lost_after` events, before all others."""
    lost_after: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    """By port, answered to all but the gateway's own requests."""
    stored: dict[str, int] = field(default_factory=dict)
    """At which port each response is."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    may_end: asyncio.Event | None = None
    """Streams stop before their last event until then."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        found = find(request.path)
        assert found is not None
        if found.path.kind in (Kind.CONTINUED, Kind.OWN):
            return await super().answer(request)
        content = await request.read()
        assert request.transport is not None
        port = request.transport.get_extra_info("sockname")[1]
        self.seen = self.seen if self.seen is not None else []
        one = {"port": port, "method": request.method, "target": request.raw_path, "headers": request.headers}
        self.seen.append(one | {"content": content})
        if found.path.kind is Kind.STICKY and self.stored.get(found.name) != port:
            return web.json_response({"error": {"message": "no such response", "code": 404}}, status=404)
        if (status := self.statuses.get(port, self.status)) != 200:
            return web.json_response({"error": {"message": "mocked", "code": status}}, status=status)
        if b'"stream": true' in content or "stream=true" in request.query_string:
            return await self._stream_events(request, port, found.name or _id_in(content))
        answer_id = found.name or _id_in(content) or f"resp_{next(self.numbers)}"
        self.stored[answer_id] = port
        body = {"id": answer_id, "port": port, "usage": {"input_tokens": 7, "output_tokens": 9}}
        return web.Response(body=json.dumps(body, indent=1).encode(), headers={"X-Mine": "1"}, status=200)

    async def _stream_events(self, request: web.BaseRequest, port: int, answer_id: str) -> web.StreamResponse:
        self.stored[answer_id] = port
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Mine": "1"})
        await response.prepare(request)
        self.answering.add(str(id(response)))
        try:
            events, is_lost = self.once or self.events, self.losses > 0
            self.once = []
            if is_lost:
                self.losses -= 1
                events = [*events[: self.lost_after], events[self.lost_after][:5]]
            for number, event in enumerate(events):
                if self.may_end is not None and number == len(events) - 1:
                    await self.may_end.wait()
                await response.write(event.replace(b"resp_s", answer_id.encode() or b"resp_s"))
            if is_lost:
                assert request.transport is not None
                request.transport.close()
            else:
                await response.write_eof()
            return response
        finally:
            self.answering.discard(str(id(response)))

    @property
    def ports(self) -> list[int]:
        """Where clients' requests came, in their order."""
        return [one["port"] for one in self.seen or () if "port" in one]


@asynccontextmanager
async def engines(number: int = 2, **settings: Any) -> AsyncIterator[tuple[Cluster, Engine]]:
    mock = Engine(seen=[])
    async with cluster(num_engines=number, mock=mock, **settings) as it:
        await until(lambda: all(backend.models for backend in it.gateway.backends))
        yield it, mock


def _event(data: Any, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


STREAMS: dict[str, list[bytes]] = {
    RESPONSES: [
        _event({"type": "response.created", "response": {"id": "resp_s"}, "sequence_number": 0}, "response.created"),
        _event(
            {"type": "response.output_text.delta", "delta": "ü", "sequence_number": 1}, "response.output_text.delta"
        ),
        _event(
            {"response": {"usage": {"input_tokens": 3, "output_tokens": 5}}, "sequence_number": 2},
            "response.completed",
        ),
    ],
    MESSAGES: [
        _event({"type": "message_start", "message": {"usage": {"input_tokens": 3}}}, "message_start"),
        _event({"type": "message_delta", "usage": {"input_tokens": 3, "output_tokens": 5}}, "message_delta"),
        _event({"type": "message_stop"}, "message_stop"),
    ],
    COHERE: [_event({"type": "message-start"}), _event({"type": "message-end"}), _event("[DONE]")],
    GENERATE: [
        _event({"choices": [{"index": 0, "token_ids": [1]}]}),
        _event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}),
        _event("[DONE]"),
    ],
}


def _last_event(reply: Reply) -> Any:
    """The JSON of the last event that is not the end mark."""
    events = [event for event in reply.content.decode().split("\n\n") if event and "[DONE]" not in event]
    return json.loads(events[-1].split("data: ", 1)[1])


# What passes


@pytest.mark.asyncio
async def test_every_path_passes_as_it_is() -> None:
    placed = [path for path, one in PATHS.items() if one.kind is Kind.PLACED]
    assert len(placed) > 25
    async with engines() as (it, mock):
        for path in placed:
            content = json.dumps(BODY | {"path": path}, indent=3, ensure_ascii=False).encode() + b"\n"
            headers = {"X-Request-Id": "mine", "Authorization": "Bearer key", "Content-Type": "application/json"}
            reply = await it.post(f"{path}?a=b%26c&d=%E4", content, headers)
            seen = (mock.seen or [])[-1]
            came = seen["content"]
            if path == RESPONSES:
                came = re.sub(rb',"request_id":"resp_[0-9a-f]{32}"\}', b"}", came) + b"\n"
                content = content.rstrip()[:-1] + b"}\n"
            assert (seen["method"], seen["target"], came) == ("POST", f"{path}?a=b%26c&d=%E4", content), path
            assert {name: seen["headers"][name] for name in headers} == headers, path
            assert (reply.status, reply.headers["X-Mine"], reply.headers["X-Request-Id"]) == (200, "1", "mine"), path
            assert reply.content == json.dumps(reply.json, indent=1).encode(), path
        assert len(set(mock.ports)) == 2  # in turn
        text = (await it.get("/metrics")).content.decode()
        num_named = sum(not PATHS[path].is_form for path in placed)
        assert f'request_total{{model="mock",status_code="200"}} {num_named}.0' in text
        assert f'request_output_tokens_sum{{model="mock"}} {9 * num_named}.0' in text


@pytest.mark.asyncio
@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_passes_as_it_is(path: str) -> None:
    async with engines() as (it, mock):
        mock.events = STREAMS[path]
        reply = await it.post(path, STREAMED)
        assert (reply.status, reply.headers["X-Mine"]) == (200, "1")
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert _SHOWN.sub(b"resp_s", reply.content) == b"".join(STREAMS[path])
        if path != COHERE:
            text = (await it.get("/metrics")).content.decode()
            assert 'request_input_tokens_sum{model="mock"} 3.0' in text
            assert 'request_output_tokens_sum{model="mock"} 5.0' in text


@pytest.mark.asyncio
async def test_a_form_passes_as_its_bytes_to_an_engine_of_its_model() -> None:
    async with engines() as (it, mock):
        for backend, model in zip(it.gateway.backends, ("a", "whisper"), strict=True):
            backend.models = {model: {}}
        form = aiohttp.FormData()
        form.add_field("file", b"\x00RIFF\r\n--\xff" * 20_000, filename="model.wav", content_type="audio/wav")
        form.add_field("model", "whisper")
        payload = form()
        content = bytes(await payload.as_bytes())
        for _ in range(3):
            reply = await it.post(TRANSCRIPTIONS, content, {"Content-Type": payload.headers["Content-Type"]})
            assert (reply.status, reply.json["port"]) == (200, it.ports[1])
            assert (mock.seen or [])[-1]["content"] == content
        assert (await it.post(TRANSCRIPTIONS, b"no form")).status == 400  # of which model, nobody knows
        next(iter(it.gateway.backends)).models = {"whisper": {}}
        assert (await it.post(TRANSCRIPTIONS, b"no form")).status == 200  # an engine's to refuse


def _model_of(content: bytes, content_type: str) -> str:
    return fields_of(content, content_type, ["model"]).get("model", "")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.text(max_size=40))
def test_no_bytes_upset_the_reading_of_a_form(content: bytes, boundary: str) -> None:
    boundary = boundary[:17]
    content = content.replace(b"|", b"\r\n--b\r\n")
    assert isinstance(_model_of(content, f"multipart/form-data; boundary={boundary}"), str)
    whole = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b\r\n\r\n' + content + b"\r\n--b--\r\n"
    if b"model" not in content:
        assert _model_of(whole, 'multipart/form-data; boundary="b"') == "m"
    assert _model_of(whole, "application/json") == ""


def test_the_length_of_a_prompt_is_guessed_from_its_texts_and_numbers() -> None:
    assert prompts.rough_number({"model": "long-name", "input": "x" * 40}) == 10
    assert prompts.rough_number({"token_ids": list(range(1000))}) == 1000
    assert prompts.rough_number({"text_1": "abcd", "text_2": ["abcd"] * 5}) == 6
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    parts = [{"type": "text", "text": "abcd"}, image, {"type": "input_image", "source": "data:," + "A" * 9000}]
    assert prompts.rough_number({"messages": [{"role": "user", "content": parts}]}) == 1
    assert prompts.rough_number({"documents": [{}] * 1_000_000}) == 0


# Lost engines


@pytest.mark.asyncio
@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_is_lost_before_its_first_event_begins_elsewhere(path: str) -> None:
    async with engines(3) as (it, mock):
        mock.events, mock.losses = STREAMS[path], 1
        reply = await it.post(path, STREAMED)
        assert _SHOWN.sub(b"resp_s", reply.content) == b"".join(STREAMS[path])
        assert len(set(mock.ports)) == len(mock.ports) == 2
        assert 'request_retry_total{model="mock",status_code="200"} 1.0' in (await it.get("/metrics")).content.decode()


@pytest.mark.asyncio
@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_is_lost_later_ends_with_an_error_of_its_api(path: str) -> None:
    async with engines() as (it, mock):
        mock.events, mock.losses, mock.lost_after = STREAMS[path], 1, 2
        reply = await it.post(path, STREAMED)
        whole = b"".join(STREAMS[path][:2])
        assert _SHOWN.sub(b"resp_s", reply.content).startswith(whole)
        error = _last_event(reply)
        if path == RESPONSES:
            assert (error["type"], error["sequence_number"], error["code"]) == ("error", 2, "BadGatewayError")
            message = error["message"]
        else:
            message = error["error"]["message"]
            assert error.get("type") == ("error" if path == MESSAGES else None)
        assert "The stream was lost" in message
        assert reply.content.endswith(b"data: [DONE]\n\n") == (path in (COHERE, GENERATE))
        assert (b"event: error\n" in reply.content) == (path in (MESSAGES, RESPONSES))
        text = (await it.get("/metrics")).content.decode()
        assert 'request_total{model="mock",status_code="502"} 1.0' in text
        assert 'request_continuation_total{model="mock",outcome="refused"} 1.0' in text


@pytest.mark.asyncio
async def test_an_error_with_which_an_engine_begins_its_stream_is_not_the_last_word() -> None:
    failed = _event({"type": "error", "error": {"type": "internal_error", "message": "EngineCore died"}}, "error")
    async with engines() as (it, mock):
        mock.events, mock.once = STREAMS[MESSAGES], [failed]
        assert (await it.post(MESSAGES, STREAMED)).content == b"".join(STREAMS[MESSAGES])
        assert len(mock.ports) == 2
        mock.events, mock.may_end = [STREAMS[MESSAGES][0], failed], asyncio.Event()
        async with it.client.post(it.url + MESSAGES, json=STREAMED) as answer:
            begun = await answer.content.readany()
            mock.may_end.set()
            assert begun + await answer.read() == b"".join(mock.events)
        mock.events = [_event({"error": {"message": "too long", "code": 400}}), _event("[DONE]")]
        num_before = len(mock.ports)
        assert (await it.post(GENERATE, STREAMED)).content == b"".join(mock.events)
        assert len(mock.ports) == num_before + 1
        text = (await it.get("/metrics")).content.decode()
        for status in (200, 400, 502):
            assert f'request_total{{model="mock",status_code="{status}"}} 1.0' in text


@pytest.mark.asyncio
async def test_an_answer_in_one_piece_is_tried_elsewhere() -> None:
    async with engines() as (it, mock):
        mock.statuses = {it.ports[0]: 500}
        for path in (EMBEDDINGS, TOKENIZE):
            for _ in range(2):
                assert (await it.post(path, BODY)).json["port"] == it.ports[1]
        await it.lose(0)
        for _ in range(2):
            assert (await it.post(EMBEDDINGS, BODY)).json["port"] == it.ports[1]
        await it.lose(1)
        reply = await it.post(MESSAGES, BODY)
        assert (reply.status, reply.json["type"]) == (503, "error")
        assert reply.json["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.asyncio
async def test_an_older_vllm_without_the_path_is_asked_in_vain_and_not_blamed() -> None:
    async with engines() as (it, mock):
        mock.statuses = {it.ports[0]: 404}
        while mock.ports.count(it.ports[0]) < 5:
            assert (await it.post(EMBEDDINGS, BODY)).json["port"] == it.ports[1]
        assert not it.gateway.backends.avoided()
        mock.statuses[it.ports[1]] = 404
        assert (await it.post(EMBEDDINGS, BODY)).json == {"error": {"message": "mocked", "code": 404}}


@pytest.mark.asyncio
async def test_an_instance_that_refused_comes_back_if_it_has_no_completions_at_all() -> None:
    """Embeddings only. The gateway's own request is one for a completion."""
    async with engines() as (it, mock):
        outliers = it.gateway.backends.outliers
        backend = it.gateway.backends.at(Address("127.0.0.1", it.ports[0]))
        mock.status = 404
        for _ in range(5):
            outliers.failed(backend, Cause.REFUSALS, "it answered 400")
        assert outliers.is_out(backend)
        await until(lambda: not outliers.is_out(backend))


@pytest.mark.asyncio
async def test_work_of_the_api_server_alone_proves_no_engine() -> None:
    async with engines(1) as (it, _):
        (backend,) = it.gateway.backends
        backend.is_stalled = True
        before_s = backend.last_token_s
        assert (await it.post(TOKENIZE, BODY)).status == 200
        assert (backend.is_stalled, backend.last_token_s) == (True, before_s)
        assert (await it.post(EMBEDDINGS, BODY)).status == 200
        assert (backend.is_stalled, backend.last_token_s > before_s) == (False, True)


# Limits


@pytest.mark.asyncio
async def test_the_limits_hold() -> None:
    async with engines(max_body_bytes=1000, max_requests=1) as (it, mock):
        mock.events, mock.may_end = STREAMS[MESSAGES], asyncio.Event()
        reply = await it.post(MESSAGES, BODY | {"system": "x" * 2000})
        assert (reply.status, reply.json["type"]) == (413, "error")
        assert (await it.post(MESSAGES, b"no JSON")).status == 400
        assert not mock.ports
        async with it.client.post(it.url + MESSAGES, json=STREAMED) as answer:
            await answer.content.readany()
            reply = await it.post(COHERE, BODY, {"X-Request-Id": "mine"})
            assert (reply.status, reply.headers["X-Request-Id"]) == (429, "mine")
            assert reply.headers["Retry-After"] in ("1", "2", "3")
        await it.until_idle()  # its client has left, so the engine's request has ended
        assert 'status_code="499"' in (await it.get("/metrics")).content.decode()


@pytest.mark.asyncio
@pytest.mark.parametrize("full_mode", [True, False])
async def test_full_mode_releases_a_stream_once_its_engine_has_it(full_mode: bool) -> None:
    mock = Engine(seen=[], events=STREAMS[RESPONSES], may_end=asyncio.Event())
    async with scheduled(mock=mock, full_mode=full_mode) as (it, scheduler):
        async with it.client.post(it.url + RESPONSES, json=STREAMED | {"input": "x" * 40}) as answer:
            await answer.content.readany()
            if full_mode:
                await until(lambda: scheduler.of("/release"))
            else:
                await until(lambda: scheduler.reports)
                assert not scheduler.of("/release"), "nothing but the gateway tells that it runs"
            assert mock.may_end is not None
            mock.may_end.set()
            await answer.read()
        await it.until_idle()
        await until(lambda: scheduler.of("/release"))
        assert (await it.post(EMBEDDINGS, BODY | {"input": [1]})).status == 200
        await until(lambda: len(scheduler.of("/release")) == 2)


@pytest.mark.asyncio
async def test_a_scheduler_places_and_is_told_of_the_end() -> None:
    """Whatever became of it: some paths bring nothing to the engine, whose status then tells nothing."""
    mock = Engine(seen=[], events=STREAMS[RESPONSES])
    async with scheduled(mock=mock) as (it, scheduler):
        assert (await it.post(RESPONSES, STREAMED | {"input": "x" * 40})).status == 200
        assert (await it.post(EMBEDDINGS, BODY | {"input": list(range(50))})).status == 200
        assert (await it.post(TOKENIZE, BODY)).status == 200
        asked = scheduler.of("/schedule")
        counted = [(one["model"], one.get("prompt_num_tokens", 0)) for one in asked]
        assert counted == [("mock", 10), ("mock", 50), ("mock", 0)]
        await until(lambda: len(scheduler.of("/release")) == 3)
        assert [one["id"] for one in scheduler.of("/release")] == [one["id"] for one in asked]


# What does not pass


@pytest.mark.asyncio
async def test_unpassed_path_is_refused_with_the_reason() -> None:
    async with engines() as (it, mock):
        for path, one in PATHS.items():
            status = {Kind.REFUSED: 403, Kind.CANNOT_PASS: 501}.get(one.kind)
            if status:
                for reply in (await it.post(path, b"{}"), await it.ask(path, it.gateway.port)):
                    assert (reply.status, reply.json["error"]["code"]) == (status, status), path
                    assert path in reply.json["error"]["message"], path
                    assert one.why in reply.json["error"]["message"], path
        reply = await it.post("/v1/brand_new", BODY)
        assert (reply.status, reply.json["error"]["type"]) == (404, "NotFoundError")
        assert "/v1/brand_new" in reply.json["error"]["message"]
        assert (await it.post("/v1/responses/a%2Fb", BODY)).status == 404
        reply = await it.get(EMBEDDINGS)
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")
        assert (await it.get("/ping")).status == 200
        assert not mock.ports


def test_each_api_has_a_path_in_each_form() -> None:
    assert {one.style for one in PATHS.values()} == set(Style)
