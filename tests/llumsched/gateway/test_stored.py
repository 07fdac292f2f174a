# SPDX-License-Identifier: Apache-2.0
"""Responses that one instance has: found by their ids alone, by every worker and gateway, and by their own client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llumlet.process.addresses import Address
from llumsched.endpoints import Endpoint
from llumsched.gateway.api_keys import ApiKeys
from llumsched.gateway.backends import Backend
from llumsched.gateway.config import AccessLog, Config
from llumsched.gateway.server import Gateway
from llumsched.gateway.sse import event
from llumsched.gateway.stored import StoredResponses, new_id
from tests.llumsched.gateway.support import Cluster, Reply, until
from tests.llumsched.gateway.test_paths import BODY, RESPONSES, STREAMED, STREAMS, Engine, engines

KEYS = {"a": "sk-of-a-0123456789", "b": "sk-of-b-0123456789"}
MANY = 50


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., str]:
    path = tmp_path / "keys.json"

    def write(**more: Any) -> str:
        new = tmp_path / "new"
        new.write_text(json.dumps({name: {"keys": [key]} | more for name, key in KEYS.items()}))
        new.chmod(0o600)
        new.rename(path)
        return str(path)

    return write


def _as(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"} if name else {}


async def _get(it: Cluster, path: str, name: str = "", port: int = 0) -> Reply:
    url = f"http://127.0.0.1:{port or it.gateway.port}{path}"
    async with it.client.get(url, headers=_as(name)) as answer:
        return Reply(answer.status, answer.headers, await answer.read())


async def _made(it: Cluster, mock: Engine, name: str = "") -> tuple[str, int]:
    """The id that its client got for a new response, and the port of its engine."""
    reply = await it.post(RESPONSES, BODY, _as(name))
    own = json.loads((mock.seen or [])[-1]["content"])["request_id"]
    assert own not in reply.content.decode()
    return reply.json["id"], reply.json["port"]


@pytest.mark.asyncio
async def test_stored_response_is_asked_of_the_instance_that_its_id_names() -> None:
    async with engines(4) as (it, mock):
        mock.events = STREAMS[RESPONSES]
        made = [await _made(it, mock) for _ in range(4)]
        reply = await it.post(RESPONSES, STREAMED)
        first = json.loads(reply.content.decode().split("data: ")[1].split("\n")[0])
        made.append((first["response"]["id"], mock.ports[-1]))
        for shown, port in made:
            del (mock.seen or [])[:]
            own = f"resp_{shown.rpartition('_')[2]}"
            url = f"{RESPONSES}/{shown}"
            reply = await it.get(f"{url}?stream=true&starting_after=1")
            assert shown.encode() in reply.content
            assert mock.ports[-1] == port
            assert (mock.seen or [])[-1]["target"] == f"{RESPONSES}/{own}?stream=true&starting_after=1"
            assert (await it.post(f"{url}/cancel", b"")).json["port"] == port
            reply = await it.post(RESPONSES, BODY | {"previous_response_id": shown})
            assert reply.json["port"] == port
            assert json.loads((mock.seen or [])[-1]["content"])["previous_response_id"] == own
            assert mock.ports == [port] * 3, "nobody else was asked"


@pytest.mark.asyncio
async def test_stream_of_a_stored_response_says_how_it_ended() -> None:
    async with engines(2) as (it, mock):
        shown, _ = await _made(it, mock)
        created = event({"type": "response.created", "response": {"status": "in_progress"}, "sequence_number": 0})
        ended = {"type": "response.incomplete", "response": {"status": "cancelled"}, "sequence_number": 1}
        mock.events = [created, event(ended)]
        reply = await it.get(f"{RESPONSES}/{shown}?stream=true")
        assert (reply.status, reply.content) == (200, b"".join(mock.events))


@pytest.mark.asyncio
async def test_no_id_makes_the_gateway_ask_an_instance_that_does_not_have_it() -> None:
    async with engines(MANY) as (it, mock):
        shown, _ = await _made(it, mock)
        num_before = len(mock.ports)
        own = f"resp_{shown.rpartition('_')[2]}"
        changed = shown[:-1] + ("0" if shown[-1] != "0" else "1")
        for wrong in ("resp_x", own, changed, "resp_" + "a" * 24 + "_" + "0" * 32):
            assert (await it.get(f"{RESPONSES}/{wrong}")).status == 404
            assert (await it.post(f"{RESPONSES}/{wrong}/cancel", b"")).status == 404
            assert (await it.post(RESPONSES, BODY | {"previous_response_id": wrong})).status == 404
        for wrong in ("../../sleep", ["x"], 5):
            assert (await it.post(RESPONSES, BODY | {"previous_response_id": wrong})).status == 404
        assert len(mock.ports) == num_before


@pytest.mark.asyncio
async def test_only_the_key_that_made_a_response_reads_goes_on_from_or_cancels_it(keys: Callable[..., str]) -> None:
    async with engines(2, api_key_file=keys()) as (it, mock):
        shown, port = await _made(it, mock, "a")
        url = f"{RESPONSES}/{shown}"
        assert (await _get(it, url, "a")).json["port"] == port
        num_before = len(mock.ports)
        assert (await _get(it, url, "b")).status == 404
        assert (await it.post(f"{url}/cancel", b"", _as("b"))).status == 404
        assert (await it.post(RESPONSES, BODY | {"previous_response_id": shown}, _as("b"))).status == 404
        assert len(mock.ports) == num_before
        own = f"resp_{shown.rpartition('_')[2]}"
        await it.post(RESPONSES, BODY | {"request_id": own}, _as("b"))
        wanted = json.loads((mock.seen or [])[-1]["content"])["request_id"]
        assert wanted != own, "a client chooses no id, and so not another client's"


@pytest.mark.asyncio
@pytest.mark.parametrize("has_keys", [True, False])
async def test_another_gateway_reads_the_ids_of_the_first(keys: Callable[..., str], has_keys: bool) -> None:
    file, name = (keys(), "a") if has_keys else ("", "")
    async with engines(3, api_key_file=file) as (it, mock):
        shown, port = await _made(it, mock, name)
        endpoints = tuple(Address("127.0.0.1", port) for port in reversed(it.ports))
        config = Config(
            port=0, metrics_port=0, scheduling_policy="round-robin", backend_endpoints=endpoints, api_key_file=file,
            access_log=AccessLog.OFF,
        )  # fmt: skip
        async with Gateway(config) as second:
            await until(lambda: all(backend.models for backend in second.backends))
            assert (await _get(it, f"{RESPONSES}/{shown}", name, second.port)).json["port"] == port


@pytest.mark.asyncio
async def test_id_made_after_a_change_of_the_keys_is_read_at_once(keys: Callable[..., str]) -> None:
    """Another worker has read the changed file, and this one has not yet."""
    file = keys()
    found = ApiKeys(file)
    backend = Backend(Endpoint(Address("127.0.0.1", 1)))
    here = StoredResponses([backend], lambda: found.secrets, found.reload)  # type: ignore[arg-type]
    KEYS["c"] = "sk-of-c-0123456789"
    try:
        keys()
    finally:
        del KEYS["c"]
    other = ApiKeys(file)
    there = StoredResponses([backend], lambda: other.secrets)  # type: ignore[arg-type]
    shown = there.shown(new_id(), backend, "a")
    assert await here.find(shown, "b") is None
    assert await here.find(shown, "a")


@pytest.mark.asyncio
async def test_ids_are_read_after_the_keys_have_changed_but_not_by_who_lost_its_key(keys: Callable[..., str]) -> None:
    found = ApiKeys(keys())
    backend = Backend(Endpoint(Address("127.0.0.1", 1)))
    stored = StoredResponses([backend], lambda: found.secrets)  # type: ignore[arg-type]
    shown = stored.shown(new_id(), backend, "a")
    assert await stored.find(shown, "a")
    KEYS["c"] = "sk-of-c-0123456789"
    try:
        keys()
        found.reload()
    finally:
        del KEYS["c"]
    assert await stored.find(shown, "a")
    assert not await stored.find(shown, "b")
    assert stored.shown(new_id(), backend, "a")[5:13] != shown[5:13], "the newest secret is used"


def test_key_in_clear_and_its_hash_give_the_same_secret(tmp_path: Path) -> None:
    secrets = []
    for key in (KEYS["a"], "sha256:" + hashlib.sha256(KEYS["a"].encode()).hexdigest()):
        path = tmp_path / f"{len(secrets)}"
        path.write_text(json.dumps({"a": {"keys": [key]}, "b": {"keys": [KEYS["b"]]}}))
        path.chmod(0o600)
        secrets.append(ApiKeys(str(path)).secrets)
    assert secrets[0] == secrets[1]


@pytest.mark.asyncio
async def test_questions_for_a_response_count_for_the_rate_of_their_key(keys: Callable[..., str]) -> None:
    async with engines(1, api_key_file=keys(requests_per_minute=3)) as (it, mock):
        shown, _ = await _made(it, mock, "a")
        statuses = [(await _get(it, f"{RESPONSES}/{shown}", "a")).status for _ in range(3)]
        assert statuses == [200, 200, 429]


@pytest.mark.asyncio
async def test_instance_that_is_gone_with_its_responses() -> None:
    async with engines() as (it, mock):
        shown, port = await _made(it, mock)
        await it.lose(it.ports.index(port))
        reply = await it.get(f"{RESPONSES}/{shown}")
        assert reply.status == 503
        assert "does not answer" in reply.json["error"]["message"]
        other = await it.post(RESPONSES, BODY | {"previous_response_id": shown})
        assert (other.status, other.json["port"] != port) == (200, True)
