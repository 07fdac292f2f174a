# SPDX-License-Identifier: Apache-2.0
"""What goes through the gateway, and that it goes through unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llumlet.process.addresses import Address
from llumsched.gateway.body import Body
from llumsched.gateway.errors import InvalidRequest
from llumsched.model_memory import AWAY_RETRY_S
from tests.llumsched.gateway.support import DEADLINE_S, cluster, until
from tests.support.mock_api import Mock

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "mock", "messages": [{"role": "user", "content": "Grüß dich, 世界"}], "max_tokens": 5},
    COMPLETIONS: {"model": "mock", "prompt": "one two three", "max_tokens": 5},
}
DEEP = b'{"model": "mock", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PROMPTS)
async def test_an_answer_in_one_piece_comes_as_the_engine_wrote_it(path: str) -> None:
    async with cluster() as it:
        body = json.dumps(PROMPTS[path] | {"unknown_field": [1, {"ü": None}]}, indent=3).encode()
        reply = await it.post(
            path, body, {"X-Request-Id": "mine-1", "Authorization": "Bearer key", "X-Session-Id": "1"}
        )
        assert reply.status == 200
        assert reply.headers["X-Request-Id"] == "mine-1"
        assert reply.json["id"].endswith("cmpl-mine-1")
        assert reply.json["usage"]["completion_tokens"] == 5
        (seen,) = it.engines.seen or []
        assert seen["content"] == body
        headers = seen["headers"]
        assert (headers["X-Request-Id"], headers["Authorization"], headers["X-Session-Id"]) == (
            "mine-1",
            "Bearer key",
            "1",
        )


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PROMPTS)
async def test_a_stream_comes_as_the_engine_would_have_written_it_for_the_client(path: str) -> None:
    async with cluster() as it:
        body = PROMPTS[path] | {"stream": True, "stream_options": {"include_usage": True}}
        ids = {"X-Request-Id": "s"}
        through = await it.post(path, body, ids)
        async with it.client.post(f"http://127.0.0.1:{it.ports[0]}{path}", json=body, headers=ids) as answer:
            direct = await answer.read()
        assert _without_time(through.content) == _without_time(direct)
        assert b"token_ids" in direct
        assert through.headers["Content-Type"] == "text/event-stream; charset=utf-8"


@pytest.mark.asyncio
async def test_a_client_that_asks_for_token_ids_gets_them() -> None:
    async with cluster() as it:
        reply = await it.post(CHAT, PROMPTS[CHAT] | {"stream": True, "return_token_ids": True})
        ids = [event["choices"][0].get("token_ids") for event in reply.events]
        assert [len(found or ()) for found in ids] == [0, 1, 1, 1, 1, 1]
        assert len(reply.events[0]["prompt_token_ids"]) > 1


@pytest.mark.asyncio
async def test_requests_go_round_and_only_to_engines_of_their_model() -> None:
    async with cluster(num_engines=3) as it:
        for backend, models in zip(it.gateway.backends, ({"a": {}}, {"a": {}, "b": {}}, {"b": {}}), strict=True):
            backend.models = dict(models)
        used: dict[str, set[str]] = {"a": set(), "b": set()}
        for model in "abababab":
            backend = it.gateway.backends.next_for(model)
            assert backend is not None
            used[model].add(str(backend))
        ports = [f"127.0.0.1:{port}" for port in it.ports]
        assert used == {"a": set(ports[:2]), "b": set(ports[1:])}


@pytest.mark.asyncio
async def test_models_are_merged_and_an_unknown_one_is_refused() -> None:
    async with cluster(mock=Mock(models=("mock", "adapter"))) as it:
        reply = await it.get("/v1/models")
        assert [card["id"] for card in reply.json["data"]] == ["adapter", "mock"]
        reply = await it.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"model": "other"})
        assert reply.status == 404
        assert reply.json["error"]["message"] == "The model `other` does not exist."
        assert reply.headers["X-Request-Id"]


@pytest.mark.asyncio
async def test_round_robin_knows_models_that_are_away() -> None:
    mock = Mock(models=("mock", "adapter"))
    async with cluster(mock=mock, models=("coming",)) as it:
        for model, status in (("adapter", 200), ("coming", 503), ("never", 404)):
            assert (await it.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"model": model})).status == status, model
        mock.models = ("mock",)
        await it.gateway.backends.refresh()
        reply = await it.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"model": "adapter"})
        assert (reply.status, int(reply.headers["Retry-After"]) >= AWAY_RETRY_S) == (503, True)


@pytest.mark.asyncio
async def test_round_robin_refuses_requests_without_a_model_where_there_are_several() -> None:
    mock, body = Mock(models=("mock", "adapter")), PROMPTS[COMPLETIONS] | {"model": ""}
    async with cluster(mock=mock) as it:
        await it.gateway.backends.refresh()
        assert (await it.post(COMPLETIONS, body)).status == 200
        next(iter(it.gateway.backends)).models = {"other": {}}
        reply = await it.post(COMPLETIONS, body)
        assert (reply.status, "`model` is needed" in reply.json["error"]["message"]) == (400, True)
        assert (await it.post("/tokenize", {"prompt": "a"})).status == 400


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"x"', b"nonsense", b'{"model": 3}', b'{"priority": 0.5}', b'{"a": "\xff"}', b"{}x", DEEP],
    ids=lambda content: repr(content[:20]),
)
async def test_malformed_json_is_refused_here(content: bytes) -> None:
    async with cluster(num_engines=1) as it:
        reply = await it.post(CHAT, content)
        assert (reply.status, reply.json["error"]["type"]) == (400, "BadRequestError")
        assert reply.headers["X-Request-Id"]
        assert not it.engines.seen


@pytest.mark.asyncio
async def test_an_oversized_body_is_refused() -> None:
    async with cluster(num_engines=1, max_body_bytes=1000) as it:
        reply = await it.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"prompt": "x" * 2000})
        assert reply.status == 413
        assert not it.engines.seen
        assert (await it.post(COMPLETIONS, PROMPTS[COMPLETIONS])).status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("wish", [True, False, None, 1, 0, "true", "false"])
async def test_token_ids_come_as_the_engine_reads_the_wish(wish: object) -> None:
    body = PROMPTS[COMPLETIONS] | {"stream": True, "return_token_ids": wish}
    async with cluster(num_engines=1) as it:
        direct = f"http://127.0.0.1:{it.ports[0]}{COMPLETIONS}"
        async with it.client.post(direct, json=body) as answer:
            whole = [event async for event in answer.content if event.startswith(b"data: {")]
        reply = await it.post(COMPLETIONS, body)
        wanted = [json.loads(event[5:])["choices"][0].get("token_ids") for event in whole]
        assert [event["choices"][0].get("token_ids") for event in reply.events] == wanted
        assert all(wanted) == bool(wish and wish != "false")


@dataclass
class Closing:
    """An engine that answers the first request on a connection, and closes at the second, this much later."""

    after_s: float
    taken: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            for number in itertools.count():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
                await reader.readexactly(int(fields.get("content-length", 0)))
                body = b'{"data": [{"id": "mock"}]}'
                if head.startswith("post"):
                    self.taken.append(fields["x-request-id"])
                    if number and self.taken[-1].startswith("second"):
                        await asyncio.sleep(self.after_s)
                        return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))


@pytest.mark.asyncio
@pytest.mark.parametrize(("after_s", "status", "times"), [(0.0, 200, 2), (0.3, 502, 1)])
async def test_a_request_is_sent_again_once_and_only_if_the_connection_was_closed_before(
    after_s: float, status: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two idle connections: a second one that is about to close would be as good as none."""
    monkeypatch.setattr("llumsched.gateway.upstream._CLOSED_UNREAD_S", 0.1 if after_s else 30.0)
    engine = Closing(after_s)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server, cluster(num_engines=0, backend_endpoints=(address,), retry_max_count=0) as it:
        firsts = (it.post(COMPLETIONS, PROMPTS[COMPLETIONS], {"X-Request-Id": f"first-{n}"}) for n in range(3))
        assert [reply.status for reply in await asyncio.gather(*firsts)] == [200] * 3
        reply = await it.post(COMPLETIONS, PROMPTS[COMPLETIONS], {"X-Request-Id": "second"})
        assert reply.status == status
        assert engine.taken.count("second") == times


@pytest.mark.asyncio
async def test_an_engines_own_refusal_reaches_the_client() -> None:
    async with cluster(num_engines=1) as it:
        it.engines.status = 422
        reply = await it.post(COMPLETIONS, PROMPTS[COMPLETIONS])
        assert (reply.status, reply.json) == (422, {"error": {"message": "mocked", "code": 422}})


@pytest.mark.asyncio
async def test_paths_and_methods_that_are_not_there() -> None:
    async with cluster(num_engines=1) as it:
        assert (await it.get("/healthz")).status == 200
        assert (await it.get("/v1/nothing")).status == 404
        assert (await it.get(CHAT)).status == 405
        assert b"gateway_current_requests" in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_request_ids_that_are_not_sane_are_replaced_and_two_of_a_name_are_told_apart() -> None:
    async with cluster(mock=Mock(seen=[], interval_s=0.05)) as it:
        body = PROMPTS[COMPLETIONS]
        replies = await asyncio.gather(*(it.post(COMPLETIONS, body, {"X-Request-Id": "same"}) for _ in range(3)))
        assert {reply.headers["X-Request-Id"] for reply in replies} == {"same"}
        assert len({seen["headers"]["X-Request-Id"] for seen in it.engines.seen or []}) == 3
        for wish in ("a b", "x" * 200, "../etc", "é"):
            reply = await it.post(COMPLETIONS, body, {"X-Request-Id": wish})
            assert reply.headers["X-Request-Id"] != wish
        assert (await it.post(COMPLETIONS, body | {"request_id": "in-body"})).headers["X-Request-Id"] == "in-body"


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text(), _JSON, max_size=6), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_any_body_passes_as_it_is_but_for_the_wish_for_token_ids(
    fields: dict[str, Any], ascii_only: bool, indent: Any
) -> None:
    fields.pop("model", None)
    try:
        content = json.dumps(fields | {"model": "m"}, ensure_ascii=ascii_only, indent=indent).encode() + b" \n"
    except UnicodeEncodeError:
        return
    body = Body.read(content)
    assert body.content is content
    sent = b"".join(body.with_token_ids())
    assert json.loads(sent) == fields | {"model": "m", "return_token_ids": True}
    assert sent.startswith(content.rstrip()[:-1])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
@example(b'{"temperature": 1e999}')
@example(DEEP)
def test_no_bytes_upset_the_reading_of_a_body(content: bytes) -> None:
    try:
        document = Body.read(content).document()
    except InvalidRequest:
        return
    assert isinstance(document, dict)


@pytest.mark.asyncio
async def test_clients_that_leave_take_their_requests_with_them(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(mock=Mock(seen=[], interval_s=0.02)) as it:
        for stream in (True, False):
            body = PROMPTS[CHAT] | {"max_tokens": 1000, "stream": stream}
            if stream:
                async with it.client.post(it.url + CHAT, json=body) as answer:
                    await answer.content.readany()
                    assert it.engines.answering
            else:
                asked = asyncio.create_task(it.post(CHAT, body))
                await until(lambda: it.engines.answering)
                asked.cancel()
            await it.until_idle()
        assert it.engines.num_dropped == 2
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def _post(body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body)) + body


@pytest.mark.asyncio
async def test_clients_that_stop_in_the_middle_of_a_request_do_not_stay_in_flight() -> None:
    async with cluster(client_timeout_s=0.3, max_requests=1) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        writer.write(_post(json.dumps(PROMPTS[COMPLETIONS]).encode())[:-1])
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readline()).split()[1] == b"408"
        await it.until_idle()
        assert (await it.post(COMPLETIONS, PROMPTS[COMPLETIONS])).status == 200
        writer.close()


class _Endless(Mock):
    """More than any socket's buffers hold."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != COMPLETIONS:
            return await super().answer(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % (b"x" * (1 << 18))
        while True:
            await response.write(event)


@pytest.mark.asyncio
async def test_clients_that_take_nothing_of_their_stream_lose_it() -> None:
    async with cluster(num_engines=1, mock=_Endless(), client_timeout_s=0.5) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port, limit=1)
        writer.write(_post(b'{"model": "mock", "prompt": "x", "stream": true}'))
        await until(lambda: it.gateway.upstream.calls)
        await it.until_idle()
        assert b'request_total{model="mock",status_code="499"} 1.0' in (await it.get("/metrics")).content
        writer.close()


@pytest.mark.asyncio
async def test_a_stream_may_be_read_slowly() -> None:
    async with cluster(num_engines=1, mock=_Endless(), client_timeout_s=1.0) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port, limit=1 << 20)
        writer.write(_post(b'{"model": "mock", "prompt": "x", "stream": true}'))
        for _ in range(15):
            await reader.readexactly(1 << 20)
            await asyncio.sleep(0.2)
        assert it.gateway.services.num_in_flight == 1
        writer.close()
        await it.until_idle()


def _without_time(content: bytes) -> list[Any]:
    events = [event.removeprefix("data: ") for event in content.decode().split("\n\n")]
    return [json.loads(event) | {"created": 0} if event.startswith("{") else event for event in events]


@pytest.mark.parametrize("text", [r"\ud800", r"a \udc00 b", r"\ud83d\ude00\ud83d", r"\\\uD8aB\n"])
def test_half_of_a_surrogate_pair_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"`\\u[dD]...` is half of a surrogate pair"):
        Body.read(b'{"model": "m", "prompt": "%b"}' % text.encode())


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud800", "🙂"])
def test_whole_pairs_pass(text: str) -> None:
    assert Body.read(b'{"model": "m", "prompt": "%b"}' % text.encode()).model == "m"
    with pytest.raises(InvalidRequest) as error:
        Body.read(b'{"model": "m", "prompt": "%b"' % text.encode())
    assert "surrogate" not in str(error.value)
