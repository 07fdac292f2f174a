# SPDX-License-Identifier: Apache-2.0
"""Ends that are the engine's own: the request goes elsewhere, unless two engines end it in the same way."""

from __future__ import annotations

import asyncio
import io
import json
import re
import timeit
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import web

from llumlet.process.addresses import Address
from llumsched.gateway import ends
from llumsched.gateway.body import Body
from llumsched.gateway.effects import of
from llumsched.gateway.ends import End
from llumsched.gateway.paths import PATHS, Kind, Style
from llumsched.gateway.sse import DONE, KEEP_ALIVE, event
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, Reply, cluster, until
from tests.support.mock_api import Mock

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE, MESSAGES, RESPONSES, COHERE = "/inference/v1/generate", "/v1/messages", "/v1/responses", "/cohere/v2/chat"
BODY: dict[str, Any] = {"model": "mock", "prompt": "one two three", "max_tokens": 6, "temperature": 0}
STREAMED = BODY | {"stream": True}
FAILED = {"error": {"message": "the grammar cannot be compiled", "type": "InternalServerError", "code": 500}}


@dataclass
class Said:
    """A scripted answer: a status, or a stream of events that ends or breaks off."""

    events: list[bytes] = field(default_factory=list)
    status: int = 200
    body: Any = None
    breaks: bool = False


@dataclass
class Scripts(Mock):
    """Gives these answers to the requests of clients, one after the other, and the last one for ever. To the gateway's
    own requests it answers as a mock engine does, or not at all."""

    script: list[Said] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """Ports at which clients' requests came."""
    ids: list[str] = field(default_factory=list)
    """Their ids."""
    is_broken: bool = False

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = PATHS.get(request.path)
        is_clients = path is not None and path.kind is not Kind.OWN and "X-Request-Id" in request.headers
        if not is_clients or request.path == "/detokenize":
            if self.is_broken and request.method == "POST":
                return web.Response(status=500)
            return await super().answer(request)
        if (request.content_length or 0) < 1 << 20:
            await request.read()
        while await request.content.readany():
            pass
        assert request.transport is not None
        self.asked.append(request.transport.get_extra_info("sockname")[1])
        self.ids.append(request.headers["X-Request-Id"])
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0] if self.script else None
        if said is None:
            return await super().answer(request)
        if not said.events and not said.breaks:
            return web.json_response(said.body, status=said.status)
        if not said.events:
            request.transport.close()
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in said.events:
            await response.write(part)
            await asyncio.sleep(0.02)
        if said.breaks:
            request.transport.close()
        return response


def _token(text: str, token: int, reason: str | None = None, prompt: list[int] | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": [token] if token else []}
    return event({"id": "x", "object": "text_completion", "created": 1, "model": "mock",
                  "choices": [choice | ({"prompt_token_ids": prompt} if prompt else {})]})  # fmt: skip


def _without_ids(data: bytes) -> bytes:
    return re.sub(rb"(token_ids.:)\[[0-9]*\]", rb"\1null", data)


USAGE = event({"id": "x", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}})
ABORTED = [_token(" a", 11, prompt=[1, 2]), _token(" b", 12), _token("", 0, "abort"), USAGE, DONE]


async def _ejected(it: Cluster) -> float:
    text = (await it.get("/metrics")).content.decode()
    found = [line.split()[1] for line in text.splitlines() if line.startswith("gateway_ejections_total{")]
    return sum(map(float, found)) + len(it.gateway.backends.avoided())


async def _doubts_end(it: Cluster) -> None:
    await until(lambda: not it.gateway.backends._doubted)


# Whose end it is


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "repetition"])
def test_models_ends_are_final(reason: str) -> None:
    assert ends.in_events(_token("a", 1, reason), Style.OPENAI) is None
    assert ends.of_answer(json.dumps({"choices": [{"finish_reason": reason}]}).encode(), Style.OPENAI) is None


@pytest.mark.parametrize(("reason", "end"), [("abort", End.ABORT), ("error", End.ERROR), ("unheard_of", End.ABORT)])
def test_other_ends_are_the_engines(reason: str, end: End) -> None:
    first = _token("finish_reason abort", 1)
    assert ends.in_events(first + _token("a", 1, reason), Style.OPENAI) == (end, len(first))
    body = json.dumps({"choices": [{"finish_reason": "stop"}, {"finish_reason": reason}]}, indent=1).encode()
    assert ends.of_answer(body, Style.OPENAI) is end


@pytest.mark.parametrize(
    ("style", "document", "end"),
    [
        (Style.ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, None),
        (Style.ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": None}}, End.ABORT),
        (Style.ANTHROPIC, {"type": "error", "error": {"type": "internal_error", "message": "x"}}, End.ERROR),
        (Style.RESPONSES, {"type": "response.created", "response": {"status": "in_progress", "error": None}}, None),
        (Style.RESPONSES, {"type": "response.completed", "response": {"status": "completed"}}, None),
        (Style.RESPONSES, {"type": "response.completed", "response": {"status": "cancelled"}}, End.ABORT),
        (Style.RESPONSES, {"type": "response.failed", "response": {"status": "failed"}}, End.ERROR),
        (Style.RESPONSES, {"type": "response.incomplete", "response": {
            "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}}, None),
        (Style.RESPONSES, {"type": "response.incomplete", "response": {
            "status": "incomplete", "incomplete_details": {"reason": "shutdown"}}}, End.ABORT),
        (Style.COHERE, {"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}, None),
        (Style.COHERE, {"type": "message-end", "delta": {"finish_reason": "ERROR"}}, End.ERROR),
        (Style.OPENAI, {"object": "error", "message": "x", "code": 500}, End.ERROR),
    ],
)  # fmt: skip
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_each_api_has_its_own_words(style: Style, document: Any, end: End | None, line_end: bytes) -> None:
    data = event(document).replace(b"\n", line_end)
    assert ends.in_events(data, style) == ((end, 0) if end else None)


@pytest.mark.parametrize(
    ("style", "document", "end"),
    [
        (Style.ANTHROPIC, {"type": "message", "content": [], "stop_reason": "end_turn"}, None),
        (Style.ANTHROPIC, {"type": "message", "content": []}, End.ABORT),
        (Style.RESPONSES, {"object": "response", "status": "completed", "error": None}, None),
        (Style.RESPONSES, {"object": "response", "status": "queued"}, None),
        (Style.RESPONSES, {"object": "response", "status": "cancelled"}, End.ABORT),
        (Style.RESPONSES, {"object": "response", "status": "failed"}, End.ERROR),
        (Style.COHERE, {"finish_reason": "COMPLETE"}, None),
        (Style.COHERE, {"finish_reason": "ERROR"}, End.ERROR),
    ],
)
def test_each_api_has_its_own_words_in_one_piece(style: Style, document: Any, end: End | None) -> None:
    assert ends.of_answer(json.dumps(document).encode(), style) is end


def test_judging_a_long_answer_makes_no_objects_of_its_logprobs() -> None:
    """It is done on the event loop, on which all streams move."""
    token: dict[str, Any] = {"token": "a", "logprob": -0.1, "bytes": [97]}
    logprobs = [token | {"top_logprobs": [token] * 5}] * 8000
    output = [{"type": "message", "content": [{"type": "output_text", "text": "x", "logprobs": logprobs}]}]
    body = json.dumps({"object": "response", "status": "completed", "output": output}).encode()
    judged = min(timeit.repeat(lambda: ends.of_answer(body, Style.RESPONSES), number=1, repeat=9))
    assert judged < 0.5 * min(timeit.repeat(lambda: msgspec.json.decode(body), number=1, repeat=9))
    streamed = event({"type": "response.completed", "response": json.loads(body)})
    judged = min(timeit.repeat(lambda: ends.in_events(streamed, Style.RESPONSES), number=1, repeat=9))
    assert judged < 0.5 * min(timeit.repeat(lambda: msgspec.json.decode(streamed[6:]), number=1, repeat=9))


# Aborts


@pytest.mark.asyncio
async def test_aborted_stream_goes_on_elsewhere() -> None:
    async with cluster(mock=(engines := Scripts(seen=[]))) as it:
        engines.script = [Said(ABORTED)]
        streaming = asyncio.create_task(it.post(COMPLETIONS, STREAMED | {"stream_options": {"include_usage": True}}))
        await until(lambda: engines.asked)
        engines.script = []
        reply = await streaming
        assert len(set(engines.asked)) == 2
        assert "abort" not in reply.content.decode()
        assert reply.text.startswith(" a b ")
        assert [one["choices"][0]["finish_reason"] for one in reply.events[:-1]][-1] == "length"
        assert reply.events[-1]["usage"]["completion_tokens"] == 6
        second = json.loads((engines.seen or [])[-1]["content"])
        assert (second["prompt"], second["max_tokens"]) == ([1, 2, 11, 12], 4)
        assert b'outcome="continued"} 1.0' in (await it.get("/metrics")).content


@pytest.mark.asyncio
@pytest.mark.parametrize("wishes", [{"logprobs": 1}, {"n": 2}])
async def test_aborted_stream_that_cannot_go_on_ends_with_an_error(wishes: dict[str, Any]) -> None:
    async with cluster(mock=Scripts(script=[Said(ABORTED)])) as it:
        reply = await it.post(COMPLETIONS, STREAMED | wishes)
        assert "aborted the request) and could not be continued" in reply.events[-1]["error"]["message"]
        assert b'status_code="502"} 1.0' in (await it.get("/metrics")).content


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "aborted", "whole"),
    [
        (COMPLETIONS, {"choices": [{"text": "a", "finish_reason": "abort"}]}, {"choices": []}),
        (CHAT, {"choices": [{"message": {}, "finish_reason": "abort"}]}, {"choices": []}),
        (GENERATE, {"choices": [{"token_ids": [], "finish_reason": "abort"}]}, {"choices": []}),
        (MESSAGES, {"type": "message", "content": []}, {"type": "message", "stop_reason": "end_turn"}),
        (RESPONSES, {"object": "response", "status": "cancelled"}, {"object": "response", "status": "completed"}),
    ],
)
async def test_aborted_answer_in_one_piece_is_asked_for_elsewhere(path: str, aborted: Any, whole: Any) -> None:
    async with cluster(mock=(engines := Scripts(script=[Said(body=aborted), Said(body=whole)]))) as it:
        reply = await it.post(path, BODY)
        assert (reply.status, reply.json) == (200, whole)
        assert len(set(engines.asked)) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(("reason", "status"), [("stop", 200), ("abort", 502), (None, 502)])
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_abort_of_a_long_answer_in_one_piece_is_counted(path: str, reason: str | None, status: int) -> None:
    """The client has its beginning by then, and learns of it by what the engine says."""
    text, rest = "x" * (2 << 20), {"prompt_token_ids": [1] * 4000}
    body: dict[str, Any] = {"choices": [{"text": text, "finish_reason": reason or "error"} | rest]}
    if path == MESSAGES:
        end = {"stop_reason": "end_turn"} if reason == "stop" else {}
        body = {"type": "message", "content": [{"text": text}]} | end
    async with cluster(mock=Scripts(script=[Said(body=body)])) as it:
        reply = await it.post(path, BODY)
        assert (reply.status, reply.json) == (200, body)
        await it.until_idle()
        text = (await it.get("/metrics")).content.decode()
        assert f'status_code="{status}"}} 1.0' in text
        await _doubts_end(it)


MESSAGE = [
    b'event: message_start\ndata: {"type":"message_start","message":{"stop_reason":null}}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]


@pytest.mark.asyncio
async def test_aborted_stream_that_is_passed_ends_with_an_error() -> None:
    async with cluster(mock=Scripts(script=[Said(MESSAGE)])) as it:
        reply = await it.post(MESSAGES, STREAMED)
        assert reply.content.startswith(MESSAGE[0] + b"event: error\n")
        assert b"aborted the request" in reply.content
        assert b"message_stop" not in reply.content


@pytest.mark.asyncio
async def test_stream_that_is_aborted_before_it_begins_begins_elsewhere() -> None:
    whole = [MESSAGE[0], MESSAGE[1].replace(b"null", b'"end_turn"'), MESSAGE[2]]
    async with cluster(mock=(engines := Scripts(script=[Said([b"".join(MESSAGE)]), Said(whole)]))) as it:
        assert (await it.post(MESSAGES, STREAMED)).content == b"".join(whole)
        assert len(set(engines.asked)) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_request_that_two_engines_abort_ends(stream: bool) -> None:
    """An operator does not want it, whichever engine has it."""
    said = Said(ABORTED) if stream else Said(body={"choices": [{"finish_reason": "abort"}]})
    async with cluster(num_engines=4, mock=(engines := Scripts(script=[said]))) as it:
        reply = await it.post(COMPLETIONS, BODY | {"stream": stream})
        error = reply.events[-1]["error"] if stream else reply.json["error"]
        assert (error["code"], "aborted this request: it ends here" in error["message"]) == (502, True)
        assert len(engines.asked) == 2
        await _doubts_end(it)
        assert await _ejected(it) == 0


# Errors


@pytest.mark.asyncio
async def test_client_with_failing_requests_ejects_no_instance() -> None:
    """Two others stream meanwhile."""

    class Partly(Scripts):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.path == COMPLETIONS and b"POISON" not in await request.read():
                return await Mock.answer(self, request)
            return await super().answer(request)

    mock = Partly(interval_s=0.02, script=[Said(status=500, body=FAILED)])
    async with cluster(num_engines=4, mock=mock) as it:
        streams = [asyncio.create_task(it.post(COMPLETIONS, STREAMED | {"max_tokens": 100})) for _ in range(2)]
        worst = 0.0
        for number in range(60):
            poisons = [it.post(COMPLETIONS, BODY | {"prompt": "POISON"}) for _ in range(1 if number % 10 else 12)]
            for reply in await asyncio.gather(*poisons):
                assert (reply.status, reply.json) == (500, FAILED)
            worst = max(worst, await _ejected(it))
        assert worst == 0
        assert any(one.endswith("-r1") for one in mock.ids)
        assert not any(one.endswith("-r2") for one in mock.ids), "no third instance"
        assert all(reply.events for reply in await asyncio.gather(*streams))


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, MESSAGES])
@pytest.mark.parametrize("num_engines", [1, 2, 4])
async def test_error_that_two_engines_report_in_a_stream_reaches_the_client(path: str, num_engines: int) -> None:
    failed = event(FAILED)
    async with cluster(num_engines=num_engines, mock=(engines := Scripts(script=[Said([failed, DONE])]))) as it:
        for _ in range(6):
            del engines.asked[:]
            reply = await it.post(path, STREAMED | {"messages": [], "response_format": {"type": "json_object"}})
            assert reply.status == 200
            assert reply.content.startswith(failed)
            assert len(engines.asked) == min(2, num_engines)
        await _doubts_end(it)
        assert await _ejected(it) == 0


@pytest.mark.asyncio
async def test_request_that_cannot_be_served_now_is_tried_as_often_as_allowed() -> None:
    """A status of 503 speaks of the instance, whatever the request is."""
    mock = Scripts(script=[Said(status=503, body=FAILED), Said(status=503, body=FAILED), Said(body={"choices": []})])
    async with cluster(num_engines=4, mock=mock) as it:
        assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert len(set(mock.asked)) == 3


@pytest.mark.asyncio
async def test_instances_that_fail_with_everything_are_found_by_one_question() -> None:
    """Two of four, so that requests find both of them."""
    mock = Scripts(script=[Said(status=500, body=FAILED)], is_broken=True)
    async with cluster(num_engines=4, mock=mock) as it:
        assert (await it.post(COMPLETIONS, BODY)).status == 500
        await until(lambda: len(it.gateway.backends.avoided()) == 2)
        first, _ = it.gateway.backends.avoided().values()
        assert "it answered 500 to a request for one token" in first.why
        assert {address.port for address in (one.address for one in it.gateway.backends.avoided())} == set(mock.asked)


@pytest.mark.asyncio
async def test_instance_that_fails_with_what_another_takes_is_at_fault() -> None:
    class First(Scripts):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            assert request.transport is not None
            if request.transport.get_extra_info("sockname")[1] != bad_port:
                return await Mock.answer(self, request)
            return await super().answer(request)

    bad_port = 0
    async with cluster(num_engines=2, mock=First(script=[Said(status=500, body=FAILED)])) as it:
        bad_port = it.ports[0]
        bad = it.gateway.backends.at(Address("127.0.0.1", bad_port))
        for _ in range(20):
            assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert it.gateway.backends.outliers.is_out(bad)


# Requests that may have had effects

PAYS = {
    "model": "mock",
    "input": "pay",
    "tools": [{"type": "mcp", "server_label": "bank", "server_url": "http://bank"}],
}


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (RESPONSES, PAYS, "it may have called a tool"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}]}, ""),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]}, "it may have called"),
        (MESSAGES, {"tools": [{"name": "f"}]}, ""),
        (
            MESSAGES,
            {
                "tools": [
                    {"type": kind}
                    for kind in ("bash_20250124", "text_editor_20250728", "computer_20250124", "memory_20250818")
                ]
            },
            "",
        ),
        (
            RESPONSES,
            {
                "tools": [
                    {"type": kind}
                    for kind in ("local_shell", "shell", "apply_patch", "computer", "computer_use_preview")
                ]
            },
            "",
        ),
        (MESSAGES, {"tools": [{"type": "bash_code_execution"}, {"type": ["shell"]}]}, "it may have called a tool"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "it may have called a tool"),
        (MESSAGES, {"mcp_servers": [{"url": "http://bank"}]}, "it may have called a tool"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"store": True}, "stored"),
        (RESPONSES, {"store": False, "background": False, "tools": []}, ""),
        (CHAT, {"store": True, "tools": [{"type": "function"}]}, ""),
        (COMPLETIONS, {"kv_transfer_params": {"do_remote_prefill": True}}, "blocks of a cache"),
    ],
)
def test_effects_of_requests(path: str, fields: dict[str, Any], why: str) -> None:
    found = of(path, Body.read(json.dumps(fields).encode()).head)
    assert (bool(found), why in found) == (bool(why), True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "said", [Said(breaks=True), Said(status=500, body=FAILED), Said(status=429, body=FAILED), Said([event(FAILED)])]
)
async def test_request_that_may_have_had_effects_is_sent_once(said: Said) -> None:
    async with cluster(num_engines=3, mock=(engines := Scripts(script=[said]))) as it:
        reply = await it.post(RESPONSES, PAYS | {"stream": bool(said.events)})
        assert len(engines.asked) == 1
        if said.breaks:
            assert "is not sent again: it may have called a tool" in reply.json["error"]["message"]
        else:
            assert FAILED["error"]["message"] in reply.content.decode()


@pytest.mark.asyncio
@pytest.mark.parametrize("fields", [PAYS, {"store": True}, {"background": True}, {"mcp_servers": [{"url": "a"}]}])
async def test_long_request_that_may_have_had_effects_is_sent_once(fields: dict[str, Any]) -> None:
    """Its body is read by another process."""
    async with cluster(num_engines=3, mock=(engines := Scripts(script=[Said(breaks=True)]))) as it:
        body = io.BytesIO(json.dumps(BODY | fields | {"input": "x" * (3 << 20)}).encode())
        async with asyncio.timeout(DEADLINE_S), it.client.post(it.url + RESPONSES, data=body) as answer:
            assert "is not sent again" in (await answer.json())["error"]["message"]
        assert len(engines.asked) == 1


@pytest.mark.asyncio
async def test_request_that_may_have_effects_goes_elsewhere_if_it_was_not_sent() -> None:
    async with cluster(num_engines=3, mock=(engines := Scripts(script=[Said(body={})]))) as it:
        await it.lose(0)
        for _ in range(3):
            assert (await it.post(RESPONSES, PAYS)).status == 200
        assert len(engines.asked) == 3


@pytest.mark.asyncio
async def test_request_that_may_have_effects_takes_no_connection_that_may_be_stale() -> None:
    """True if an engine that closes it has read the request cannot be known."""
    async with cluster(num_engines=1, mock=(engines := Scripts(script=[Said(body={}), Said(breaks=True)]))) as it:
        assert (await it.post(RESPONSES, BODY)).status == 200
        assert (await it.post(RESPONSES, PAYS)).status == 502
        assert len(engines.asked) == 2


# Beginnings


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_comments_are_no_beginning(path: str) -> None:
    comments = Said([b": keep-alive\n\n", b": keep-alive\r\n\r\n", b"retry: 100\n\n"], breaks=True)
    whole = [_token("a", 1, "stop"), DONE] if path == COMPLETIONS else MESSAGE[:1]
    async with cluster(mock=(engines := Scripts(script=[comments, Said(whole)]))) as it:
        reply = await it.post(path, STREAMED | {"logprobs": 1})
        assert reply.content == _without_ids(b"".join([*comments.events, *whole]))
        assert len(set(engines.asked)) == 2
        assert b"request_continuation_total{" not in (await it.get("/metrics")).content


@pytest.mark.asyncio
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_lines_end_in_each_way(path: str, line_end: bytes) -> None:
    whole = [part.replace(b"\n", line_end) for part in (_token("a", 1), _token("b", 2, "stop"), DONE)]
    async with cluster(mock=(engines := Scripts(script=[Said(whole)]))) as it:
        async with asyncio.timeout(DEADLINE_S), it.client.post(it.url + path, json=STREAMED) as answer:
            chunks = [chunk async for chunk, _ in answer.content.iter_chunks()]
        assert _without_ids(b"".join(chunks)) == _without_ids(b"".join(whole))
        assert len(chunks) > 1, "each event as it comes"
        assert len(engines.asked) == 1


@pytest.mark.asyncio
async def test_error_with_white_space_is_an_error() -> None:
    failed = b'data: { "error" : {"message": "x", "code" : 500}}\n\n'
    async with cluster(mock=(engines := Scripts(seen=[]))) as it:
        engines.script = [Said([*ABORTED[:2], failed, DONE])]
        streaming = asyncio.create_task(it.post(COMPLETIONS, STREAMED))
        await until(lambda: engines.asked)
        engines.script = []
        reply = await streaming
        assert b"error" not in reply.content
        assert reply.text.startswith(" a b ")


# Silence before the beginning


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES, RESPONSES])
async def test_stream_whose_engine_has_not_begun_gets_comments(path: str) -> None:
    begun = asyncio.Event()

    class Late(Scripts):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.path == path:
                await begun.wait()
            return await super().answer(request)

    async with (
        cluster(mock=Late(script=[Said([*ABORTED[:1], _token("b", 2, "stop"), DONE])]), sse_keepalive_s=0.1) as it,
        asyncio.timeout(DEADLINE_S),
        it.client.post(it.url + path, json=STREAMED) as answer,
    ):
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        assert await answer.content.readany() == KEEP_ALIVE
        begun.set()
        assert (await answer.content.read()).replace(KEEP_ALIVE, b"").endswith(DONE)


@pytest.mark.asyncio
async def test_stream_that_waits_for_an_instance_gets_comments() -> None:
    async with cluster(num_engines=1, mock=Scripts(script=[Said(status=400, body=FAILED)]), sse_keepalive_s=0.1) as it:
        placement = it.gateway.placement
        place, may_place = placement.place, asyncio.Event()

        async def late(*args: Any) -> Any:
            await may_place.wait()
            return await place(*args)

        placement.place = late  # type: ignore[method-assign]
        async with asyncio.timeout(DEADLINE_S), it.client.post(it.url + COMPLETIONS, json=STREAMED) as answer:
            assert await answer.content.readany() == KEEP_ALIVE
            may_place.set()
            rest = (await answer.content.read()).replace(KEEP_ALIVE, b"")
            reply = Reply(answer.status, answer.headers, rest)
        assert reply.events[-1]["error"]["message"] == FAILED["error"]["message"]
        assert not it.gateway.backends.avoided()


# Long answers in one piece


@pytest.mark.asyncio
async def test_long_answers_are_handed_on_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = asyncio.Event()

    @dataclass
    class Long(Scripts):
        breaks: bool = False

        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.path not in (CHAT, "/v1/audio/speech"):
                return await super().answer(request)
            self.asked.append(0)
            response = web.StreamResponse(headers={"Content-Type": "audio/wav"})
            await response.prepare(request)
            await response.write(b"x" * (10 if "audio" in request.path else 2_000_000))
            await may_end.wait()
            if self.breaks:
                assert request.transport is not None
                request.transport.close()
            await response.write(b"y")
            return response

    async with cluster(mock=(engines := Long())) as it:
        for path, size in (("/v1/audio/speech", 10), (CHAT, 2_000_000)):
            may_end.clear()
            async with asyncio.timeout(DEADLINE_S), it.client.post(it.url + path, json=BODY) as answer:
                assert answer.headers["Content-Type"] == "audio/wav"
                first = await answer.content.readany()
                assert first.startswith(b"x")
                may_end.set()
                assert first + await answer.content.read() == b"x" * size + b"y"
        may_end.clear()
        engines.breaks = True
        del engines.asked[:]
        async with asyncio.timeout(DEADLINE_S), it.client.post(it.url + "/v1/audio/speech", json=BODY) as answer:
            await answer.content.readany()
            may_end.set()
            with pytest.raises(Exception, match="payload"):
                await answer.content.read()
        assert len(engines.asked) == 1
        await it.until_idle()
        assert b'status_code="502"} 1.0' in (await it.get("/metrics")).content
