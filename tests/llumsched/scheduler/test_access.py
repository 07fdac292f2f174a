# SPDX-License-Identifier: Apache-2.0
"""The scheduler's HTTP service, which wants a token, and those who have one."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from llumlet.process.addresses import Address
from llumlet.process.secret_files import LOOK_S
from llumsched.cli import prepare
from llumsched.commands import explain_command as explain
from llumsched.contract import SchedulingRequest
from llumsched.gateway.config import Config
from llumsched.gateway.scheduler_client import SchedulerAway, SchedulerClient
from llumsched.policy.document import Mode, load_policy
from llumsched.scheduler.process import RunningScheduler, SchedulerConfig, serve
from llumsched.scheduler_access import IN_CLEAR, OF_GATEWAYS, SchedulerAccess, ServiceTokens, read_tokens
from llumsched.top.source import Source
from tests.llumsched import cases
from tests.llumsched.scheduler.test_cli import parsed
from tests.support.authority import Authority

GATEWAY, NEXT, READER, OPERATOR = (name * 8 for name in ("gate", "next", "read", "oper"))
HASHED = "sha256:" + hashlib.sha256(NEXT.encode()).hexdigest()
TOKENS = {"gateway": [GATEWAY, HASHED], "reader": [READER], "operator": [OPERATOR]}
ASKED = {"id": "r", "model": "m", "gateway_id": "g"}
REQUEST = SchedulingRequest(id="r", model="m", gateway_id="g")
CONFIG = SchedulerConfig(load_policy("load-balance", Mode.FULL), port=0, cms="listen://127.0.0.1:0", warms_up_s=0.0)

Write = Callable[[Any], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Puts a file of tokens there, whole at once."""

    def write(content: Any) -> str:
        (tmp_path / "new").write_text(content if isinstance(content, str) else json.dumps(content))
        (tmp_path / "new").chmod(0o600)
        return str((tmp_path / "new").rename(tmp_path / "tokens.json"))

    return write


@pytest_asyncio.fixture
async def scheduler(write: Write) -> AsyncIterator[RunningScheduler]:
    running = await serve(dataclasses.replace(CONFIG, service_token_file=write(TOKENS)))
    cases.put(running.view, "a", api_server_port=8000)
    yield running
    await running.close()


async def _status(scheduler: RunningScheduler, method: str, path: str, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    url = f"http://127.0.0.1:{scheduler.port}{path}"
    body = None if method == "GET" else json.dumps([] if path in ("/report", "/release") else ASKED)
    async with aiohttp.ClientSession() as session, session.request(method, url, data=body, headers=headers) as answer:
        if answer.status == 401:
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")
        return answer.status


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "shown",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Bearer {HASHED}",
        f"Digest {GATEWAY}",
        "Basic x",
        "Basic eDp5",
        "Bearer \xfc",
    ],
)
async def test_without_a_token_it_says_only_that_it_lives(scheduler: RunningScheduler, shown: str | None) -> None:
    for method, path in (("POST", "/schedule"), ("POST", "/release"), ("GET", "/debug/view"), ("GET", "/metrics"),
                         ("GET", "/"), ("GET", "/events"), ("GET", "/keepalive"), ("GET", "/nothing")):  # fmt: skip
        assert await _status(scheduler, method, path, shown) == 401
    for path in ("/healthz", "/ready"):
        assert await _status(scheduler, "GET", path, shown) == 200


def test_the_documentation_says_what_gateways_may_ask() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "operate" / "security.md").read_text()
    (row,) = re.findall(r"^\| `gateway` \|(.*)\|$", text, re.MULTILINE)
    assert set(re.findall(r"`(/\w+)`", row)) == OF_GATEWAYS


READS = (("GET", "/debug/view"), ("GET", "/debug/schedule"), ("POST", "/debug/schedule"),
         ("POST", "/debug/rescheduling/plan"))  # fmt: skip
LOOKS = (("GET", "/metrics"), ("GET", "/"), ("GET", "/page.js"))
PLACES = (("POST", "/schedule"), ("POST", "/report"), ("POST", "/release"))


@pytest.mark.asyncio
async def test_a_role_may_what_it_is_for(scheduler: RunningScheduler) -> None:
    async def may(token: str, *asked: tuple[str, str]) -> set[bool]:
        return {await _status(scheduler, *one, f"Bearer {token}") not in (401, 403) for one in asked}

    for gateway in (GATEWAY, NEXT):
        assert await may(gateway, *PLACES, ("GET", "/instances")) == {True}
        assert await may(gateway, *READS, *LOOKS) == {False}
    assert await may(READER, *READS, *LOOKS) == {True}
    assert await may(READER, *PLACES) == {False}
    assert await may(OPERATOR, *READS, *LOOKS, *PLACES, ("GET", "/instances")) == {True}
    assert await _status(scheduler, "POST", "/schedule", GATEWAY) == 200, "as gateways of Llumnix show it"
    assert await _status(scheduler, "GET", "/", aiohttp.encode_basic_auth("me", READER)) == 200


@pytest.mark.asyncio
async def test_a_gateway_shows_its_token(scheduler: RunningScheduler, tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_text(NEXT + "\n")
    file.chmod(0o600)
    address = Address("127.0.0.1", scheduler.port)
    flags = ["gateway", "--scheduler-endpoints", str(address), "--service-token-file", str(file)]
    config, _, faults = prepare("gateway", flags, {})
    assert not faults
    async with aiohttp.ClientSession() as session:
        knows = SchedulerClient(config, session)
        assert (await knows.schedule(REQUEST)).result[0].id == "a"
        assert await knows.instances() == [Address("127.0.0.1", 8000)]
        stranger = SchedulerClient(Config(scheduler_endpoints=(address,)), session)
        with pytest.raises(SchedulerAway, match="answered 401"):
            await stranger.schedule(REQUEST)


@pytest.mark.asyncio
async def test_people_show_theirs(scheduler: RunningScheduler) -> None:
    address, reader = Address("127.0.0.1", scheduler.port), SchedulerAccess({"Authorization": f"Bearer {READER}"})
    assert (await explain._ask(address, ASKED, reader))[0] == 200
    assert (await explain._ask(address, ASKED, IN_CLEAR))[0] == 401
    for access, why in ((reader, "no rescheduler runs in it"), (IN_CLEAR, "it answers 401")):
        async with Source("127.0.0.1:1", address, access=access) as source:
            async with asyncio.timeout(30):
                await source._asked.wait()
            assert why in source._moves_problem


@pytest.mark.asyncio
async def test_requests_are_encrypted(write: Write, tmp_path: Path) -> None:
    """By gateways and by people, and to nobody who has no certificate of the authority."""
    authority, strangers = Authority(tmp_path), Authority(tmp_path, "strangers")
    certificate, key = map(str, authority.issue("scheduler"))
    config = dataclasses.replace(CONFIG, service_token_file=write(TOKENS), ssl_certfile=certificate, ssl_keyfile=key)
    running = await serve(config)
    cases.put(running.view, "a", api_server_port=8000)
    address = Address("127.0.0.1", running.port)
    token = tmp_path / "reader"
    token.touch(mode=0o600)
    token.write_text(READER)
    try:
        for ca, reached in ((authority, True), (strangers, False)):
            settings = {"scheduler_ca_file": str(ca.path), "service_token": f"Bearer {GATEWAY}"}
            flags = ["explain", "--service-token-file", str(token), "--scheduler-ca-file", str(ca.path)]
            explanation, _, faults = prepare("explain", flags, {})
            assert not faults
            access = explanation.access.access
            async with aiohttp.ClientSession() as session:
                gateway = SchedulerClient(Config(scheduler_endpoints=(address,), **settings), session)
                assert await gateway.refusal() == ("" if reached else None)
                assert await gateway.instances() == ([Address("127.0.0.1", 8000)] if reached else [])
                if reached:
                    answer = await gateway.schedule(REQUEST)
                    assert answer.result[0].id == "a"
                    gateway.release(answer)
                    await gateway.close()
                    assert (await explain._ask(address, ASKED, access))[0] == 200
                else:
                    with pytest.raises(SchedulerAway, match="certificate"):
                        await gateway.schedule(REQUEST)
                    with pytest.raises(aiohttp.ClientConnectorCertificateError):
                        await explain._ask(address, ASKED, access)
        async with aiohttp.ClientSession() as session:
            in_clear = SchedulerClient(Config(scheduler_endpoints=(address,)), session)
            with pytest.raises(SchedulerAway):
                await in_clear.schedule(REQUEST)
    finally:
        await running.close()


def test_files_of_tls_are_looked_at_first(write: Write, tmp_path: Path) -> None:
    certificate, key = map(str, Authority(tmp_path).issue("scheduler"))
    _, other = map(str, Authority(tmp_path, "other").issue("other"))
    assert not parsed("--ssl-certfile", certificate, "--ssl-keyfile", key)[0]
    assert "belong together" in parsed("--ssl-certfile", certificate)[0][0]
    assert "do not fit" in parsed("--ssl-certfile", certificate, "--ssl-keyfile", other)[0][0]
    assert "holds no certificates" in prepare("explain", ["explain", "--scheduler-ca-file", other], {}).faults[0]
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_bytes(b"\xff")
    (fault,) = prepare("explain", ["explain", "--service-token-file", str(tmp_path / "token")], {}).faults
    assert fault == f"--service-token-file {tmp_path / 'token'} does not hold one word of printable ASCII characters"


def test_tokens_are_replaced_without_a_restart(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    tokens = ServiceTokens(write({"reader": [READER]}), lambda: clock[0])

    def roles() -> list[str | None]:
        clock[0] += LOOK_S + 0.1
        return [tokens.role(f"Bearer {token}") for token in (READER, NEXT)]

    assert roles() == ["reader", None]
    write({"reader": [READER, NEXT]})
    assert roles() == ["reader", "reader"]
    write("{")
    assert roles() == ["reader", "reader"]
    assert "stay as they were" in caplog.text
    write({"reader": [HASHED]})
    assert roles() == [None, "reader"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "is no JSON"),
        ({}, "holds no tokens"),
        ({"reader": []}, "holds no tokens"),
        ({"peer": [GATEWAY]}, "peer"),
        ({"reader": ["x" * 31]}, "key 0 of 'reader' is neither 32"),
        ({"reader": [READER, NEXT], "operator": [HASHED]}, "key 0 of 'operator' is repeated"),
    ],
)
def test_files_of_tokens_that_are_none(write: Write, content: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=r"tokens\.json") as refusal:
        read_tokens(write(content))
    assert fault in str(refusal.value)
    assert not any(token in str(refusal.value) for token in (GATEWAY, NEXT, READER, HASHED, "x" * 31))


def test_beyond_this_machine_it_wants_tokens_and_tls(write: Write, tmp_path: Path) -> None:
    certificate, key = map(str, Authority(tmp_path).issue("scheduler"))
    tokens, tls = ("--service-token-file", write(TOKENS)), ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    for host in ("0.0.0.0", "192.0.2.1"):
        for some in ((), tokens, tls):
            (fault,), _ = parsed("--host", host, *some)
            assert "is not a loopback address" in fault
        assert not parsed("--host", host, "--insecure")[0]
        assert not parsed("--host", host, *tokens, *tls)[0]
    assert "holds no tokens" in parsed("--service-token-file", write({}))[0][0]
