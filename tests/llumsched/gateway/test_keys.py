# SPDX-License-Identifier: Apache-2.0
"""API keys and TLS at the gateway's front, and the key that it shows to engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import threading
import timeit
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from llumlet.process.tokens import HashedKeys
from llumsched.cli import prepare
from llumsched.gateway import api_keys, background
from llumsched.gateway.access_log import _line
from llumsched.gateway.api_keys import Allowance, ApiKeys, Exceeded, Limit, Tenant, read_keys
from llumsched.gateway.body import Body
from llumsched.gateway.gateway_metrics import Record
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, cluster, until
from tests.support.authority import Authority
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "mock", "prompt": "one two three", "max_tokens": 3}
FIRST, SECOND = "sk-first-0123456789", "sk-second-0123456789"
SECOND_HASHED = "sha256:" + hashlib.sha256(SECOND.encode()).hexdigest()

Write = Callable[[Any], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Puts a file of keys there, whole at once."""
    path = tmp_path / "keys.json"

    def write(content: Any) -> str:
        new = tmp_path / "new"
        new.write_text(content if isinstance(content, str) else json.dumps(content))
        new.chmod(0o600)
        new.rename(path)
        return str(path)

    return write


def _with(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.asyncio
async def test_request_without_a_known_key_is_refused(write: Write) -> None:
    file = write({"a": {"keys": [FIRST]}, "b": {"keys": ["sk-another-0123456789", SECOND_HASHED]}})
    async with cluster(num_engines=1, api_key_file=file) as it:
        for headers in ({}, _with("sk-wrong"), _with(""), {"Authorization": FIRST}, {"Authorization": f"Basic {FIRST}"},
                        _with(SECOND_HASHED), _with("sk-\xfc"), {"X-Api-Key": "sk-wrong"},
                        {"Api-Key": f"Bearer {FIRST}"}):  # fmt: skip
            reply = await it.post(COMPLETIONS, BODY, headers)
            assert (reply.status, reply.json["error"]["message"]) == (401, "Unauthorized")
            assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert (await it.get("/v1/models")).status == 401
        assert (await it.get("/nothing")).status == 401
        assert not it.engines.seen
        for key in (FIRST, SECOND):
            assert (await it.post(COMPLETIONS, BODY, _with(key))).status == 200
        assert (await it.post(COMPLETIONS, BODY, {"authorization": f"bearer {FIRST}"})).status == 200
        for path in ("/health", "/healthz", "/ready"):
            assert (await it.get(path)).status == 200
        assert (await it.ask("/metrics", it.gateway.port)).status == 401
        assert b'gateway_key_refused_total{key="",limit="key"} 12.0' in (await it.get("/metrics")).content


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["x-api-key", "Api-Key"])
async def test_key_counts_in_every_header_in_which_an_api_has_it_and_reaches_no_engine(write: Write, name: str) -> None:
    file = write({"a": {"keys": [FIRST]}})
    async with cluster(num_engines=1, api_key_file=file) as it:
        for headers in ({name: FIRST}, _with("sk-of-another-gateway") | {name: FIRST}, _with(FIRST) | {name: FIRST}):
            assert (await it.post(COMPLETIONS, BODY, headers)).status == 200
        for seen in it.engines.seen or []:
            assert not [value for value in seen["headers"].values() if FIRST in value]
    async with cluster(num_engines=1, mock=_Guarded(seen=[])) as it:
        assert (await it.post(COMPLETIONS, BODY, {name: "engines-own"})).status == 200
        (seen,) = it.engines.seen or []
        assert name not in seen["headers"]


@pytest.mark.asyncio
async def test_refusals_of_keys_have_the_form_of_their_api(write: Write) -> None:
    file = write({"a": {"keys": [FIRST], "requests_per_minute": 0.001}})
    async with cluster(num_engines=1, api_key_file=file) as it:
        await it.post("/v1/messages", BODY, _with(FIRST))
        for headers, status in (({}, 401), (_with(FIRST), 429)):
            reply = await it.post("/v1/messages", BODY, headers)
            assert (reply.status, reply.json["type"]) == (status, "error")
            assert reply.json["error"]["message"]
            assert "error" in (await it.post(COMPLETIONS, BODY, headers)).json


class _Guarded(Mock):
    """An engine with an `--api-key`."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.startswith("/v1") and request.headers.getall("Authorization", []) != ["Bearer engines-own"]:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await super().answer(request)


@pytest.mark.asyncio
async def test_engines_are_asked_with_their_own_key_and_see_no_client_s(write: Write, tmp_path: Path) -> None:
    file = write({"a": {"keys": [FIRST]}})
    own = tmp_path / "own"
    own.touch(mode=0o600)
    own.write_text("engines-own\n")
    async with cluster(api_key_file=file, backend_api_key_file=str(own), mock=_Guarded(seen=[])) as it:
        assert (await it.post(COMPLETIONS, BODY, _with(FIRST))).status == 200
        async with it.client.get(it.url + "/v1/models", headers=_with(FIRST)) as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["mock"]
        for backend in it.gateway.backends:
            await it.gateway.backends.try_ejected(backend)
            assert await it.gateway.backends._generates(backend, DEADLINE_S)
    async with cluster(backend_api_key_file=str(own), mock=_Guarded(seen=[])) as it:
        assert (await it.post(COMPLETIONS, BODY, _with("the client's"))).status == 200
    async with cluster(api_key_file=file) as it:
        assert (await it.post(COMPLETIONS, BODY, _with(FIRST))).status == 200
        assert "Authorization" not in (it.engines.seen or [])[0]["headers"]


async def _refusal(it: Cluster, key: str, limit: Limit, body: dict[str, Any] = BODY) -> None:
    reply = await it.post(COMPLETIONS, body, _with(key) | {"X-Request-Id": "mine"})
    assert reply.status == 429
    error = reply.json["error"]
    assert (error["type"], error["param"], error["code"]) == ("TooManyRequestsError", None, 429)
    assert error["message"].startswith("This API key")
    assert int(reply.headers["Retry-After"]) >= 1
    assert reply.headers["X-Request-Id"] == "mine"
    assert f'limit="{limit}"'.encode() in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_a_key_has_so_many_requests_in_flight(write: Write) -> None:
    file = write({"a": {"keys": [FIRST], "concurrent_requests": 2}, "b": {"keys": [SECOND]}})
    async with cluster(api_key_file=file, mock=Mock(interval_s=0.05)) as it:
        long = BODY | {"max_tokens": 1000, "stream": True}
        running = [asyncio.create_task(it.post(COMPLETIONS, long, _with(FIRST))) for _ in range(2)]
        await until(lambda: len(it.engines.answering) == 2)
        await _refusal(it, FIRST, Limit.CONCURRENT)
        assert (await it.post(COMPLETIONS, BODY, _with(SECOND))).status == 200
        running[0].cancel()
        await until(lambda: it.gateway.services.num_in_flight == 1)
        assert (await it.post(COMPLETIONS, BODY, _with(FIRST))).status == 200
        running[1].cancel()
        await it.until_idle()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("best", "asked", "status"),
    [
        (None, -100, 403),
        ("any", -100, 200),
        (0, None, 200),
        (0, 0, 200),
        (0, -1, 403),
        (0, "-1", 403),
        (0, -0.5, 400),
        (0, -1.5, 400),
        (0, "first", 400),
        (0, [0], 400),
        (5, None, 403),
        (5, 4, 403),
        (5, 5, 200),
        (-2, -2, 200),
        (-2, -3, 403),
    ],
)
async def test_a_key_has_a_best_priority_of_0_or_what_the_file_says(
    write: Write, best: int | str | None, asked: Any, status: int
) -> None:
    said = {} if best is None else {"best_priority": None if best == "any" else best}
    file = write({"a": {"keys": [FIRST]} | said})
    async with cluster(num_engines=1, api_key_file=file) as it:
        body = BODY if asked is None else BODY | {"priority": asked}
        reply = await it.post(COMPLETIONS, body, _with(FIRST))
        assert reply.status == status
        if status == 403:
            assert reply.json["error"]["type"] == "PermissionDeniedError"
            assert b'gateway_key_refused_total{key="a",limit="priority"} 1.0' in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_a_key_has_objectives_for_requests_that_name_none(write: Write) -> None:
    file = write({"a": {"keys": [FIRST], "ttft_slo_ms": 0.001}})
    async with cluster(num_engines=1, api_key_file=file, ttft_slo_ms={"": 60_000.0}) as it:
        stream = BODY | {"stream": True}
        for headers, met in (({}, "false"), ({"x-llm-d-slo-ttft-ms": "60000"}, "true")):
            assert (await it.post(COMPLETIONS, stream, _with(FIRST) | headers)).status == 200
            counted = (await it.get("/metrics")).content
            assert f'request_slo_total{{met="{met}",model="mock"}} 1.0'.encode() in counted


@pytest.mark.asyncio
@pytest.mark.parametrize(("body", "header", "status"), [(0, "-1", 403), (-1, "0", 200), (None, "0", 200)])
@pytest.mark.parametrize("name", ["X-Priority", "x-vllm-priority"])
async def test_a_header_is_no_way_past_a_keys_best_priority(
    write: Write, name: str, body: int | None, header: str, status: int
) -> None:
    file = write({"a": {"keys": [FIRST], "best_priority": 0}})
    async with cluster(num_engines=1, api_key_file=file) as it:
        said = BODY if body is None else BODY | {"priority": body}
        assert (await it.post(COMPLETIONS, said, _with(FIRST) | {name: header})).status == status
        for seen in it.engines.seen or []:
            assert "X-Vllm-Priority" not in seen["headers"]
            assert json.loads(seen["content"])["priority"] == 0


@pytest.mark.asyncio
async def test_a_key_has_so_many_tokens_in_flight(write: Write) -> None:
    file = write({"a": {"keys": [FIRST], "tokens_in_flight": 10}})
    async with cluster(api_key_file=file, mock=Mock(interval_s=0.05)) as it:
        long = BODY | {"prompt": [1] * 4, "max_tokens": 2}
        it.engines.interval_s = 5.0
        running = asyncio.create_task(it.post(COMPLETIONS, long, _with(FIRST)))
        await until(lambda: it.engines.answering)
        it.engines.interval_s = 0.0
        for more in ({"prompt": [1] * 2, "max_tokens": 3}, {"prompt": [1, 2], "max_tokens": 1, "n": 2},
                     {"prompt": [1] * 3}, {"prompt": [[1], [2]], "max_completion_tokens": 2}):  # fmt: skip
            body = {name: value for name, value in BODY.items() if name != "max_tokens"} | more
            await _refusal(it, FIRST, Limit.TOKENS, body)
        assert (await it.post(COMPLETIONS, BODY | {"prompt": [1] * 2, "max_tokens": 2}, _with(FIRST))).status == 200
        assert (await it.post("/v1/embeddings", {"input": "abcdefgh"}, _with(FIRST))).status == 404, "it generates none"
        running.cancel()
        await it.until_idle()
        assert (await it.post(COMPLETIONS, BODY | {"prompt": [1] * 10, "max_tokens": 900}, _with(FIRST))).status == 200
        await _refusal(it, FIRST, Limit.TOKENS, BODY | {"prompt": [1] * 11})


@pytest.mark.asyncio
async def test_requests_without_a_limit_share_the_tokens_in_flight(write: Write) -> None:
    """The model's length alone is more than half of the allowance."""
    unlimited = {name: value for name, value in BODY.items() if name != "max_tokens"} | {"prompt": [1] * 100}
    async with cluster(num_engines=1, api_key_file=write({"a": {"keys": [FIRST], "tokens_in_flight": 200_000}})) as it:
        it.gateway.backends.max_model_len = lambda _: 131_072  # type: ignore[method-assign]
        it.engines.interval_s = 60.0
        running = [asyncio.create_task(it.post(COMPLETIONS, unlimited, _with(FIRST))) for _ in range(3)]
        await until(lambda: len(it.engines.answering) == 3)
        await _refusal(it, FIRST, Limit.TOKENS, unlimited)
        for task in running:
            task.cancel()
        await it.until_idle()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "worth_five",
    [{"n": 5}, {"n": "5"}, {"prompt": ["a"] * 5}, {"prompt": [[1, 2]] * 5}, {"prompt": ["a", "b", "c"], "n": 2}],
    ids=str,
)
async def test_each_sequence_of_a_request_counts_as_a_request(write: Write, worth_five: dict[str, Any]) -> None:
    file = write({"a": {"keys": [FIRST], "concurrent_requests": 4}, "b": {"keys": [SECOND], "requests_per_minute": 9}})
    async with cluster(num_engines=1, api_key_file=file) as it:
        reply = await it.post(COMPLETIONS, BODY | worth_five, _with(FIRST))
        assert reply.status == 429
        assert "counts as" in reply.json["error"]["message"]
        assert (await it.post(COMPLETIONS, BODY | {"n": 1, "prompt": ["a"] * 4}, _with(FIRST))).status == 200
        statuses = [(await it.post(COMPLETIONS, BODY | worth_five, _with(SECOND))).status for _ in range(3)]
        assert statuses == [200, 200, 429]


@pytest.mark.parametrize(
    ("body", "worth"),
    [
        ({"prompt": [1, 2, 3]}, (1, None)),
        ({"prompt": "a", "max_tokens": 7, "n": 3}, (3, 7)),
        ({"messages": [{"role": "user"}], "max_tokens": 7, "max_completion_tokens": 9}, (1, 9)),
        ({"messages": [[{"role": "user"}], [{}]], "n": 2, "max_tokens": "5"}, (4, 5)),
        ({"input": ["a", "b"], "max_output_tokens": 3}, (1, 3)),
        ({"token_ids": [1], "sampling_params": {"n": 4, "max_tokens": 6}}, (4, 6)),
        ({"prompt": [], "n": 0, "max_tokens": "many", "num_sequences": 0, "most_output": 0}, (1, None)),
    ],
    ids=str,
)
def test_work_that_a_body_asks_for(body: dict[str, Any], worth: tuple[int, int | None]) -> None:
    head = Body.read(json.dumps(body).encode()).head
    assert (head.num_sequences, head.most_output) == worth


class _Resting(Mock):
    """Makes responses in the background, and says what became of them."""

    state = "queued"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.startswith("/v1/responses"):
            return await super().answer(request)
        return web.json_response({"status": self.state})


@pytest.mark.asyncio
async def test_response_that_is_made_in_the_background_counts_until_it_is_finished(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LOOK_S", 0.02)
    file = write({"a": {"keys": [FIRST], "concurrent_requests": 2, "tokens_in_flight": 100}})
    async with cluster(num_engines=1, api_key_file=file, mock=_Resting()) as it:
        resting = BODY | {"background": True, "max_output_tokens": 40}
        for status in (200, 200, 429):
            assert (await it.post("/v1/responses", resting, _with(FIRST))).status == status
        assert (await it.post("/v1/responses", BODY, _with(FIRST))).status == 429
        it.engines.state = "completed"  # type: ignore[attr-defined]
        await until(lambda: not it.gateway.services.background._watching)
        assert (await it.post("/v1/responses", resting, _with(FIRST))).status == 200


def test_look_up_takes_the_same_time_for_any_number_of_keys() -> None:
    few, many = (HashedKeys({"a": [f"sk-{number:020}" for number in range(size)]}) for size in (10, 10_000))
    shown = [f"sk-{number:020}" for number in (5, 9_999, 123_456)]

    def best_s(keys: HashedKeys[str]) -> float:
        return min(timeit.repeat(lambda: [keys.whose(key) for key in shown], number=300, repeat=7))

    assert best_s(many) < 5 * best_s(few)
    assert [many.whose(key) for key in shown] == ["a", "a", None]


@pytest.mark.asyncio
async def test_a_key_may_ask_so_often(write: Write) -> None:
    file = write({"a": {"keys": [FIRST], "requests_per_minute": 3}})
    async with cluster(num_engines=1, api_key_file=file) as it:
        for _ in range(3):
            assert (await it.post(COMPLETIONS, BODY, _with(FIRST))).status == 200
        await _refusal(it, FIRST, Limit.RATE)


def test_rates() -> None:
    clock = [0.0]
    tenant = Tenant("a", Allowance([], requests_per_second=2, requests_per_minute=30), lambda: clock[0])

    def ask() -> float:
        """How long to wait; 0 if that was one."""
        try:
            with tenant.request():
                return 0.0
        except Exceeded as error:
            return error.retry_after_s or 0.0

    assert [ask(), ask(), ask()] == [0, 0, 0.5]
    clock[0] += 0.5
    assert [ask(), ask()] == [0, 0.5]
    taken = 3
    while clock[0] < 60:
        clock[0] += 0.125
        taken += not ask()
    assert taken == 30 + 30, "a minute's at once, and those of the minute"


@pytest.mark.asyncio
async def test_keys_change_without_a_restart(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "_RELOAD_S", 0.02)
    keys = {"a": {"keys": [FIRST], "concurrent_requests": 1}}
    async with cluster(api_key_file=write(keys), mock=Mock(interval_s=0.05)) as it:

        async def comes(key: str, status: int) -> None:
            for _ in range(DEADLINE_S * 50):
                if (await it.post(COMPLETIONS, BODY, _with(key))).status == status:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError(f"it never was {status}")

        running = asyncio.create_task(it.post(COMPLETIONS, BODY | {"max_tokens": 1000}, _with(FIRST)))
        await until(lambda: it.engines.answering)
        write(keys | {"b": {"keys": [SECOND]}})
        await comes(SECOND, 200)
        await _refusal(it, FIRST, Limit.CONCURRENT)
        write("{")
        write(keys)
        await comes(SECOND, 401)
        write({"a": {"keys": [SECOND], "concurrent_requests": 2}})
        await comes(SECOND, 200)
        assert (await it.post(COMPLETIONS, BODY, _with(FIRST))).status == 401
        running.cancel()
        await it.until_idle()


def test_a_file_that_cannot_be_used_changes_nothing(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(write({"a": {"keys": [FIRST]}}))
    for wrong in ("{", {}, {"a": {"keys": []}}):
        write(wrong)
        keys.reload()
        assert keys.whose([FIRST])
    assert len(caplog.records) == 3
    keys.reload()
    assert len(caplog.records) == 3, "told once"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[]", "Expected `object`"),
        ("{", "truncated"),
        ({}, "holds no keys"),
        ({"a": {"keys": []}}, "'a' has no keys"),
        ({"a": {}}, "keys"),
        ({"a": {"keys": [FIRST], "per_second": 1}}, "per_second"),
        ({"a": {"keys": ["short"]}}, "key 0 of 'a' is neither 16"),
        ({"a": {"keys": ["x" * 15 + " y"]}}, "key 0 of 'a' is neither 16"),
        ({"a": {"keys": ["sha256:" + "0" * 63]}}, "key 0 of 'a' is neither 16"),
        ({"a": {"keys": [SECOND]}, "b": {"keys": [SECOND_HASHED]}}, "key 0 of 'b' is repeated"),
        ({"a": {"keys": [FIRST], "requests_per_second": 0}}, "requests_per_second of 'a' must be positive"),
        ({"a": {"keys": [FIRST], "concurrent_requests": -1}}, "concurrent_requests of 'a' must be positive"),
    ],
    ids=str,
)
def test_files_of_keys_that_are_none(write: Write, content: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=r"keys\.json") as refusal:
        read_keys(write(content))
    assert fault in str(refusal.value)
    for secret in (FIRST, SECOND, SECOND_HASHED, "short"):
        assert secret not in str(refusal.value)


def _faults(*flags: str) -> str:
    return "\n".join(prepare("gateway", ["gateway", "--scheduler-endpoints", "a:1", *flags], {}).faults)


def test_beyond_this_machine_it_wants_keys_and_tls(write: Write, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("gateway")
    keys = ("--api-key-file", write({"a": {"keys": [FIRST]}}))
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    refusal = "is not a loopback address"
    for host in ("127.0.0.1", "::1", "localhost"):
        assert not _faults("--host", host)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        for some in ((), keys, tls):
            assert refusal in _faults("--host", host, *some)
        assert not _faults("--host", host, *keys, *tls)
        assert not _faults("--host", host, "--insecure")
        assert refusal in _faults("--host", host, "--insecure=false")
    assert "--ssl-certfile and --ssl-keyfile belong together" in _faults(*tls[:2])
    assert "do not fit" in _faults("--ssl-certfile", str(key), "--ssl-keyfile", str(key))
    Path(keys[1]).chmod(0o644)
    assert "chmod o-rw" in _faults(*keys)
    assert "No such file" in _faults("--backend-api-key-file", str(tmp_path / "none"))


@pytest.mark.asyncio
async def test_clients_come_over_tls(write: Write, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("gateway")
    trust = ssl.create_default_context(cafile=str(authority.path))
    settings = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key), "header_timeout_s": 0.5}
    async with cluster(api_key_file=write({"a": {"keys": [FIRST]}}), **settings) as it:
        url = f"https://127.0.0.1:{it.gateway.port}{COMPLETIONS}"
        body = BODY | {"stream": True}
        async with it.client.post(url, json=body, ssl=trust, headers=_with(FIRST)) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectionError):
            await it.post(COMPLETIONS, BODY, _with(FIRST))
        for handshakes in (False, True):
            context = trust if handshakes else None
            reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port, ssl=context)
            async with asyncio.timeout(10):
                assert not await reader.read()
            writer.close()


@pytest.mark.asyncio
async def test_request_that_comes_with_the_end_of_the_handshake_is_read(write: Write, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.issue("gateway"))
    trust = ssl.create_default_context(cafile=str(authority.path))
    async with cluster(ssl_certfile=certificate, ssl_keyfile=key) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.gateway.port)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
        client.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        writer.write(outgoing.read())  # the last flight and the request, in one segment
        async with asyncio.timeout(10):
            while True:
                with suppress(ssl.SSLWantReadError):
                    assert client.read(1 << 16).startswith(b"HTTP/1.1 200")
                    break
                incoming.write(data := await reader.read(1 << 16))
                assert data
        writer.close()


def test_no_handshake_is_lost_on_the_loop_of_the_command(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.issue("gateway"))
    trust = ssl.create_default_context(cafile=str(authority.path))

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read(16)).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()

    async def many() -> None:
        async with cluster(ssl_certfile=certificate, ssl_keyfile=key) as it, asyncio.timeout(60):
            await asyncio.gather(*(ask(it.gateway.port) for _ in range(30)))
            for _ in range(10):
                await ask(it.gateway.port)

    uvloop.run(many())


def test_whose_request_it_was_is_in_the_access_log() -> None:
    assert " key=team\\u0020a model=m " in _line(Record("id", COMPLETIONS, key="team a", model="m"))
    assert " id=id model=m " in _line(Record("id", COMPLETIONS, model="m"))


class _Slow(Mock):
    """Engines that tell their models only to who shows a key, and all of them only once all are asked."""

    num_asked = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            if "Authorization" not in request.headers:
                return web.json_response({}, status=401)
            self.num_asked += 1
            await until(lambda: self.num_asked == 5)
        return await super().answer(request)


@pytest.mark.asyncio
async def test_engines_are_asked_for_a_clients_models_all_at_once() -> None:
    async with cluster(num_engines=5, mock=_Slow()) as it:
        await until(lambda: it.gateway.backends.refreshed_s > 0)
        async with it.client.get(it.url + "/v1/models", headers={"x-api-key": "the engines'"}) as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["mock"]


@pytest.mark.asyncio
async def test_known_model_is_described_and_unknown_gets_404() -> None:
    async with cluster(num_engines=1, mock=Mock(models=("org/mock",))) as it:
        for path in ("/v1/models/org/mock", "/v1/models/org%2Fmock"):
            reply = await it.get(path)
            assert (reply.status, reply.json["id"]) == (200, "org/mock")
        reply = await it.get("/v1/models/none")
        assert (reply.status, reply.json["error"]["code"]) == (404, 404)


@pytest.mark.asyncio
async def test_many_keys_are_read_again_beside_the_event_loop(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "_RELOAD_S", 0.02)
    read_by: list[int] = []

    def noted(path: str) -> dict[str, Allowance]:
        read_by.append(threading.get_ident())
        return read_keys(path)

    keys = {f"n{number}": {"keys": [f"sk-of-{number:020}"]} for number in range(10_000)}
    async with cluster(num_engines=1, api_key_file=write(keys)) as it:
        monkeypatch.setattr(api_keys, "read_keys", noted)
        write(keys | {"a": {"keys": [FIRST]}})
        await until(lambda: it.gateway._keys and it.gateway._keys.whose([FIRST]))
        assert read_by
        assert threading.get_ident() not in read_by
