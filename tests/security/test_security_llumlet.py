# SPDX-License-Identifier: Apache-2.0
"""Who may call a llumlet that has credentials."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.contract.proto import llumlet_pb2
from llumlet.contract.server import RunningServer, serve
from llumlet.contract.types import Reason
from llumlet.process.credentials import NONE, CredentialFiles, Credentials
from tests.llumlet import messages
from tests.llumlet.fake_agent import FakeAgent, request_info
from tests.llumsched.conftest import Llumnix, llumnix
from tests.support.authority import Authority, credential_files, flags_of, token_file

pytestmark = pytest.mark.asyncio
__all__ = ["llumnix"]


@pytest_asyncio.fixture
async def agent() -> FakeAgent:
    return FakeAgent(requests=[request_info()])


@pytest_asyncio.fixture
async def server(agent: FakeAgent, files: CredentialFiles) -> AsyncIterator[RunningServer]:
    running = await serve(agent, credentials=Credentials.load(files))
    yield running
    await running.stop(grace_s=0.2)


@pytest_asyncio.fixture
async def token_server(agent: FakeAgent, token: Path) -> AsyncIterator[RunningServer]:
    """On loopback a token alone will do."""
    running = await serve(agent, credentials=Credentials.load(CredentialFiles(token_file=str(token))))
    yield running
    await running.stop(grace_s=0.2)


async def failure(server: RunningServer, credentials: Credentials) -> LlumletCallFailed:
    async with LlumletClient(server.address, credentials=credentials) as client:
        with pytest.raises(LlumletCallFailed) as failed:
            await client.get_instance_status(deadline_s=5)
    return failed.value


async def test_member_of_the_cluster_is_accepted(server: RunningServer, authority: Authority, token: Path) -> None:
    caller = Credentials.load(credential_files(authority, "caller", token))
    async with LlumletClient(server.address, credentials=caller) as client:
        assert (await client.get_instance_status()).instance_id == "fake-a"
        events = [event async for event in client.migrate(messages.migrate())]
        assert events[-1].summary.selected == 1
        assert (await client.reserve(messages.reserve())).dst_incarnation == "i-1"


@pytest.mark.parametrize("shown", ["none", "another"])
async def test_without_the_token(
    server: RunningServer, agent: FakeAgent, files: CredentialFiles, tmp_path: Path, shown: str
) -> None:
    other = str(token_file(tmp_path, "other")) if shown == "another" else ""
    refusal = await failure(server, Credentials.load(dataclasses.replace(files, token_file=other)))
    assert isinstance(refusal, LlumletError)
    assert (refusal.reason, refusal.code) == (Reason.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED)
    assert "--llumlet-token-file" in refusal.detail
    assert not agent.calls


SERVICES = [llumlet_pb2.DESCRIPTOR.services_by_name[name] for name in ("Llumlet", "Peer")]
METHODS = [method for service in SERVICES for method in service.methods]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
async def test_no_method_is_open(token_server: RunningServer, agent: FakeAgent, method: MethodDescriptor) -> None:
    async with aio.insecure_channel(str(token_server.address)) as channel:
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = (channel.unary_stream if method.server_streaming else channel.unary_unary)(path)(b"")
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not agent.calls


@pytest.mark.parametrize(
    "shown",
    [
        ["Bearer"],
        ["Basic {}"],
        ["bearer {}"],
        ["Bearer {}x"],
        ["{}"],
        ["Bearer {}", "Bearer {}"],
        ["Bearer " + "y" * 4000],
    ],
)
async def test_near_misses(token_server: RunningServer, files: CredentialFiles, shown: list[str]) -> None:
    token = Credentials.load(files).own_tokens[0].decode()
    metadata = tuple(("authorization", text.format(token)) for text in shown)
    async with aio.insecure_channel(str(token_server.address)) as channel:
        call = channel.unary_unary("/llumlet.Llumlet/GetInstanceStatus")
        with pytest.raises(aio.AioRpcError) as refusal:
            await call(b"", metadata=metadata)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stranger_s_message_is_not_read(token_server: RunningServer) -> None:
    """What is no message at all gets the same answer."""
    async with aio.insecure_channel(str(token_server.address)) as channel:
        with pytest.raises(aio.AioRpcError) as refusal:
            await channel.unary_unary("/llumlet.Peer/Reserve")(b"\xff" * 100_000)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_certificate_of_another_authority(
    server: RunningServer, agent: FakeAgent, authority: Authority, token: Path, tmp_path: Path
) -> None:
    stranger = credential_files(Authority(tmp_path, "strangers"), "stranger", token)
    refusal = await failure(server, Credentials.load(dataclasses.replace(stranger, tls_ca=str(authority.path))))
    assert isinstance(refusal, LlumletUnreachable)
    assert "another certificate" in str(refusal)
    assert not refusal.nobody_listens
    assert not agent.calls


async def test_a_server_of_another_authority_hears_nothing(
    agent: FakeAgent, files: CredentialFiles, token: Path, tmp_path: Path
) -> None:
    """Not even the token: it does not get past the handshake."""
    impostor = Credentials.load(credential_files(Authority(tmp_path, "strangers"), "impostor", token))
    async with await serve(agent, credentials=dataclasses.replace(impostor, token_file=None)) as server:
        refusal = await failure(server, Credentials.load(files))
        assert isinstance(refusal, LlumletUnreachable)
        assert "not of the authority in --llumlet-tls-ca" in str(refusal)
        assert not refusal.nobody_listens
        assert not agent.calls


async def test_a_server_under_another_address(agent: FakeAgent, authority: Authority, token: Path) -> None:
    """A certificate of the cluster, but not for the address that was called: so addresses cannot be made up."""
    elsewhere = Credentials.load(credential_files(authority, "elsewhere", token, address="192.0.2.7"))
    async with await serve(agent, credentials=elsewhere) as server:
        refusal = await failure(server, elsewhere)
        assert isinstance(refusal, LlumletUnreachable)
        assert "does not name this address" in str(refusal)
        assert not refusal.nobody_listens
        assert not agent.calls


async def test_no_certificate_and_no_tls(
    server: RunningServer, agent: FakeAgent, authority: Authority, files: CredentialFiles
) -> None:
    only_token = Credentials(token_file=Credentials.load(files).token_file)
    assert "it wants TLS" in str(await failure(server, only_token))
    only_ca = grpc.ssl_channel_credentials(authority.path.read_bytes())
    async with aio.secure_channel(str(server.address), only_ca) as channel:
        call = channel.unary_unary("/llumlet.Llumlet/GetInstanceStatus")
        with pytest.raises(aio.AioRpcError) as refusal:
            await call(b"", timeout=5, metadata=Credentials.load(files).call_metadata)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not agent.calls


async def test_health_needs_no_token_and_reflection_does(token_server: RunningServer) -> None:
    async with aio.insecure_channel(str(token_server.address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="llumlet.Llumlet"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(aio.AioRpcError) as refusal:
            async for _ in reflection.ServerReflectionInfo(iter([question])):
                pass
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_other_addresses_need_complete_credentials(files: CredentialFiles) -> None:
    complete = Credentials.load(files)
    for incomplete in (
        NONE,
        dataclasses.replace(complete, token_file=None),
        Credentials(token_file=complete.token_file),
    ):
        with pytest.raises(ValueError, match="not a loopback address"):
            await serve(FakeAgent(), "0.0.0.0", credentials=incomplete)
    async with await serve(FakeAgent(), "0.0.0.0", credentials=complete):
        pass


# The command line


async def test_commands_take_flags_or_variables(
    server: RunningServer, llumnix: Llumnix, files: CredentialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_flags = await llumnix("ps", "--llumlet", str(server.address), "--json", *flags_of(files))
    assert by_flags.code == 0, by_flags.err
    assert by_flags.lines[0]["instance_id"] == "fake-a"
    for name, path in dataclasses.asdict(files).items():
        monkeypatch.setenv(f"LLUMNIX_{name.upper()}", path)
    by_variables = await llumnix("status", "--llumlet", str(server.address), "--json")
    assert by_variables.code == 0, by_variables.err


async def test_commands_say_what_is_missing(
    server: RunningServer, llumnix: Llumnix, files: CredentialFiles, tmp_path: Path
) -> None:
    other = dataclasses.replace(files, token_file=str(token_file(tmp_path, "other")))
    refused = await llumnix("ps", "--llumlet", str(server.address), *flags_of(other))
    assert refused.code == 5
    assert "unauthenticated" in refused.err
    assert "LLUMNIX_TOKEN_FILE" in refused.err
    wrong = await llumnix("ps", "--llumlet", str(server.address), "--llumlet-tls-cert", files.tls_cert)
    assert wrong.code == 2
    assert "mutual TLS needs --llumlet-tls-key, --llumlet-tls-ca as well" in wrong.err
    unknown = await llumnix("ps", "--llumlet", str(server.address))
    assert unknown.code == 4
