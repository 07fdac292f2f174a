# SPDX-License-Identifier: Apache-2.0
"""The tokens of roles: what each opens, which files there are, and how one is replaced."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio

from llumlet.contract.client import LlumletClient
from llumlet.contract.proto import llumlet_pb2
from llumlet.contract.server import MAY_CALL, RunningServer, may_call, serve
from llumlet.process.credentials import CredentialFiles, Credentials, CredentialsError
from llumlet.process.secret_files import Current
from llumlet.process.tokens import ALL, Role, read_tokens
from llumsched.cms.embedded import EmbeddedStore
from tests.frontend.fakes import until
from tests.llumlet.fake_agent import FakeAgent, request_info
from tests.llumsched.conftest import Llumnix, llumnix
from tests.support.authority import token_file

__all__ = ["llumnix"]

PEER, OPERATOR, READER = (secrets.token_hex(32) for _ in range(3))
METHODS = [method for service in llumlet_pb2.DESCRIPTOR.services_by_name.values() for method in service.methods]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def hashed(token: str) -> str:
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def written(directory: Path, tokens: Mapping[str, Sequence[str]] | str, name: str = "tokens") -> str:
    file = token_file(directory, name)
    file.write_text(tokens if isinstance(tokens, str) else json.dumps(tokens))
    return str(file)


def holder(directory: Path, token: str, name: str = "own") -> Credentials:
    """Who has one word."""
    return Credentials.load(CredentialFiles(token_file=written(directory, token, name)), Role.OPERATOR)


@pytest.fixture
def instance(tmp_path: Path) -> Credentials:
    tokens = {"peer": [PEER], "operator": [hashed(OPERATOR)], "reader": [hashed(READER)]}
    return Credentials.load(CredentialFiles(token_file=written(tmp_path, tokens)))


@pytest_asyncio.fixture
async def server(instance: Credentials) -> AsyncIterator[RunningServer]:
    async with await serve(FakeAgent(requests=[request_info()]), credentials=instance) as running:
        yield running


async def code_of(address: object, path: str, token: str) -> grpc.StatusCode:
    """Of a call with a message that is none: whoever may call is told that."""
    streams = next(method.server_streaming for method in METHODS if path_of(method) == path)
    async with aio.insecure_channel(str(address)) as channel:
        call = (channel.unary_stream if streams else channel.unary_unary)(path)
        return await call(b"\xff", metadata=bearer(token), timeout=5).code()


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def test_every_method_has_its_roles() -> None:
    """One that is new belongs into the table; the service `Peer` is for peers as a whole."""
    own = {path_of(method) for method in METHODS if method.containing_service.name != "Peer"}
    assert own == {path for path in MAY_CALL if path.startswith("/llumlet.")}
    assert all(may_call(path, ALL) for path in (*own, "/llumlet.Peer/Reserve", "/of.another/Service"))
    assert not any(may_call("/of.another/Service", frozenset({role})) for role in Role)


REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


@pytest.mark.asyncio
@pytest.mark.parametrize("role", [*Role, None])
async def test_tokens_open_their_role_s_methods(server: RunningServer, role: Role | None) -> None:
    token = {Role.PEER: PEER, Role.OPERATOR: OPERATOR, Role.READER: READER, None: "x" * 64}[role]
    for method in METHODS:
        path = path_of(method)
        if method.containing_service.name == "Cms":
            continue
        code = await code_of(server.address, path, token)
        if role is None:
            assert code is grpc.StatusCode.UNAUTHENTICATED, path
        elif may_call(path, frozenset({role})):
            assert code not in REFUSALS, path
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED, path


@pytest.mark.asyncio
async def test_a_peer_s_prompts_are_not_for_operators_nor_drains_for_peers(server: RunningServer) -> None:
    assert await code_of(server.address, "/llumlet.Peer/Adopt", OPERATOR) is grpc.StatusCode.PERMISSION_DENIED
    assert await code_of(server.address, "/llumlet.Llumlet/Drain", PEER) is grpc.StatusCode.PERMISSION_DENIED
    assert await code_of(server.address, "/llumlet.Llumlet/Migrate", READER) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.asyncio
async def test_reader_may_not_report(instance: Credentials) -> None:
    store = EmbeddedStore("127.0.0.1", 0, credentials=instance)
    await store.start()
    try:
        assert await code_of(store.address, "/llumlet.Cms/Watch", PEER) is grpc.StatusCode.PERMISSION_DENIED
        for path in ("/llumlet.Cms/Peers", "/llumlet.Cms/Watch"):
            assert await code_of(store.address, path, READER) not in REFUSALS
        async with aio.insecure_channel(str(store.address)) as channel:
            report = channel.stream_stream("/llumlet.Cms/Report")
            for token in (OPERATOR, READER):
                refused = report(metadata=bearer(token), timeout=5)
                assert await refused.code() is grpc.StatusCode.PERMISSION_DENIED
            taken = report(metadata=bearer(PEER), timeout=5)
            await taken.write(b"\xff")
            assert await taken.code() not in {*REFUSALS, grpc.StatusCode.DEADLINE_EXCEEDED}
    finally:
        await store.close()


@pytest.mark.asyncio
async def test_commands_say_which_role_is_wanted(server: RunningServer, llumnix: Llumnix, tmp_path: Path) -> None:
    reader, operator = (written(tmp_path, token, name) for token, name in ((READER, "reader"), (OPERATOR, "operator")))
    listed = await llumnix("ps", "--llumlet", str(server.address), "--llumlet-token-file", reader)
    assert listed.code == 0, listed.err
    drain = ("drain", str(server.address), "--llumlet-token-file")
    refused = await llumnix(*drain, reader)
    assert refused.code != 0
    assert "an operator's" in refused.out + refused.err
    drained = await llumnix(*drain, operator)
    assert drained.code == 0, drained.err


@pytest.mark.asyncio
async def test_an_operator_s_token_is_replaced_without_a_restart(server: RunningServer, tmp_path: Path) -> None:
    """The server's file gets the next one, then the client's, then the last one is taken away."""
    following, path = secrets.token_hex(32), "/llumlet.Llumlet/ListRequests"

    async def until_refused(token: str, refused: bool) -> None:
        async with asyncio.timeout(5):
            while (await code_of(server.address, path, token) in REFUSALS) is not refused:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    own = holder(tmp_path, OPERATOR)
    async with LlumletClient(server.address, credentials=own) as client:
        await client.list_requests()
        written(tmp_path, {"peer": [PEER], "operator": [hashed(OPERATOR), following]})
        await until_refused(following, False)
        await client.list_requests()
        holder(tmp_path, following)
        await until(lambda: own.own_tokens == (following.encode(),))
        await client.list_requests()
        written(tmp_path, {"peer": [PEER], "operator": [following]})
        await until_refused(OPERATOR, True)
        await client.list_requests()


# Files


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("short", "one word of at least 32"),
        ("two words " + "x" * 40, "one word of at least 32"),
        ("", "one word of at least 32"),
        ("{", "is no JSON"),
        (b"{\xff".decode("latin-1"), "is no JSON"),
        ({"peers": [PEER]}, "'peers' is none of the roles peer, operator, reader"),
        ({"peer": PEER}, "'peer' has no list of tokens"),
        ({"peer": [7]}, "'peer' has no list of tokens"),
        ({"peer": ["short"]}, "key 0 of 'peer'"),
        ({"peer": [PEER], "operator": [PEER]}, "is repeated"),
        ({"peer": [PEER, hashed(PEER)]}, "is repeated"),
        ({}, "holds no tokens"),
        ({"peer": []}, "holds no tokens"),
        ({"operator": [OPERATOR]}, "the tokens of the role peer, in clear"),
        ({"peer": [PEER, hashed(READER)]}, "the tokens of the role peer, in clear"),
        pytest.param(hashed(PEER), "the tokens of the role peer, in clear", id="hashed"),
    ],
)
def test_a_file_that_cannot_be_an_instance_s(
    tmp_path: Path, content: Mapping[str, list[str]] | str, fault: str
) -> None:
    with pytest.raises(CredentialsError) as refusal:
        Credentials.load(CredentialFiles(token_file=written(tmp_path, content)))
    assert fault in str(refusal.value)
    assert "--llumlet-token-file" in str(refusal.value)
    assert not any(token in str(refusal.value) for token in (PEER, OPERATOR, READER))


def test_a_scheduler_s_file_may_hold_hashes_only(tmp_path: Path) -> None:
    path = written(tmp_path, {"peer": [hashed(PEER)], "operator": [OPERATOR]})
    scheduler = Credentials.load(CredentialFiles(token_file=path), Role.OPERATOR)
    assert scheduler.roles([("authorization", f"Bearer {PEER}")]) == {Role.PEER}
    assert scheduler.call_metadata == (("authorization", f"Bearer {OPERATOR}"),)
    assert not any(token in repr(scheduler) + repr(scheduler.tokens) for token in (PEER, OPERATOR))


def test_a_file_that_was_damaged_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    tokens = Current(read_tokens, "tokens", written(tmp_path, PEER), clock=lambda: now_s)
    for content in ("damaged", json.dumps({"peer": [hashed(PEER)], "reader": ["short"]})):
        written(tmp_path, content)
        now_s += 2
        assert tokens.value.roles(PEER) == ALL
        assert "stay as they were" in caplog.messages[-1]
        assert PEER not in caplog.text
    written(tmp_path, {"peer": [hashed(READER)]})
    assert tokens.value.roles(PEER) == ALL
    now_s += 2
    with caplog.at_level(logging.INFO):
        assert tokens.value.roles(PEER) == frozenset()
    assert tokens.value.roles(READER) == {Role.PEER}
