# SPDX-License-Identifier: Apache-2.0
"""Two servers with certificates and tokens: live moves between them, and strangers who get nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.contract.types import Reason
from llumlet.process.credentials import NONE, CredentialFiles, Credentials
from llumlet.process.tokens import Role
from tests.integration.conftest import Engines
from tests.llumlet import messages
from tests.support.authority import Authority, credential_files, flags_of, token_file
from tests.support.client import Client
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.moves import migrate_through

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 180))
GREEDY: dict[str, Any] = {"ignore_eos": True}


class Cluster(NamedTuple):
    authority: Authority
    tokens: Path
    """The instances' file: those of peers in clear, and what is enough to know an operator's."""
    caller: CredentialFiles
    """An operator's."""

    def instance(self, name: str) -> CredentialFiles:
        return credential_files(self.authority, name, self.tokens)

    def peer(self, token: str, directory: Path) -> Credentials:
        """Who has a certificate of the cluster, and this token alone."""
        own = token_file(directory, "peer")
        own.write_text(token)
        return Credentials.load(dataclasses.replace(self.caller, token_file=str(own)))

    @property
    def peers_tokens(self) -> list[str]:
        found: list[str] = json.loads(self.tokens.read_text())["peer"]
        return found

    def set_peers_tokens(self, *tokens: str) -> None:
        operators = hashlib.sha256(Path(self.caller.token_file).read_bytes().strip()).hexdigest()
        self.tokens.write_text(json.dumps({"peer": tokens, "operator": [f"sha256:{operators}"]}))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    directory = tmp_path_factory.mktemp("cluster")
    authority = Authority(directory)
    caller = credential_files(authority, "caller", token_file(directory, "operator"))
    cluster = Cluster(authority, token_file(directory), caller)
    cluster.set_peers_tokens(secrets.token_hex(32))
    return cluster


@pytest.fixture(scope="module")
def pair(cluster: Cluster, model_dir: Path, log_dir: Path) -> Iterator[Pair]:
    specs = [
        ServerSpec(
            model_dir,
            name=name,
            instance_id=name,
            flags=(*flags_of(cluster.instance(name)), "--llumlet-transport", "tcp"),
        )
        for name in "ab"
    ]
    with Fleet(log_dir / "secured") as fleet:
        yield Pair(*fleet.start(*specs))


class Pair(NamedTuple):
    a: Server
    b: Server


def secrets_of(cluster: Cluster) -> list[str]:
    """The tokens, and the lines of a private key."""
    key, operator = (Path(path).read_text() for path in (cluster.caller.tls_key, cluster.caller.token_file))
    return [operator.strip(), *cluster.peers_tokens, *re.findall(r"(?m)^[A-Za-z0-9+/=]{30,}$", key)]


def secrets_shown(server: Server, secrets: list[str]) -> Iterator[str]:
    """Where a secret of the cluster can be seen: log, command lines, environments."""
    places = {"log": server.log_text()}
    for pid in server.pids():
        for what in ("cmdline", "environ"):
            places[f"{what} of {pid}"] = Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
    assert len(places) >= 5
    return (place for place, text in places.items() for secret in secrets if secret in text)


async def test_a_move_and_strangers(pair: Pair, cluster: Cluster, tmp_path: Path) -> None:
    a, b = pair
    assert a.llumlet is not None
    assert b.llumlet is not None
    credentials = Credentials.load(cluster.caller, Role.OPERATOR)

    async with Client(a.base_url) as client, LlumletClient(str(a.llumlet), credentials=credentials) as llumlet:
        expected = await (await client.complete(PROMPT, 600, **GREEDY, cache_salt="unmoved")).result()
        stream = await client.complete(PROMPT, 600, **GREEDY, cache_salt="moved")
        await stream.wait_for(30)
        (request,) = (await llumlet.list_requests()).requests
        (move,) = await migrate_through(llumlet, a.llumlet, b.llumlet, request_ids=[request.request_id])
        assert move.live, f"{move.phase} {move.reason} {move.detail}"
        assert move.transport == "tcp"
        result = await stream.result()
    assert result.token_ids == expected.token_ids

    for stranger in strangers(cluster, tmp_path):
        async with LlumletClient(str(b.llumlet), credentials=stranger) as llumlet:
            with pytest.raises(LlumletCallFailed) as failed:
                await llumlet.get_instance_status()
            if isinstance(failed.value, LlumletError):
                assert failed.value.reason == Reason.UNAUTHENTICATED
            else:
                assert isinstance(failed.value, LlumletUnreachable)

    found = secrets_of(cluster)
    assert len(found) > 2
    for server in (a, b):
        assert list(secrets_shown(server, found)) == []


@pytest.mark.rest
async def test_the_instances_token_is_replaced_under_a_moved_request(
    pair: Pair, cluster: Cluster, tmp_path: Path
) -> None:
    """It goes on reporting to its origin, and moves back with the token that has come in the meantime."""
    a, b = pair
    assert a.llumlet is not None
    assert b.llumlet is not None
    (last,), following = cluster.peers_tokens, secrets.token_hex(32)
    credentials = Credentials.load(cluster.caller, Role.OPERATOR)

    async def until(token: str, is_accepted: bool) -> None:
        for server in pair:
            async with LlumletClient(str(server.llumlet), credentials=cluster.peer(token, tmp_path)) as peer:
                async with asyncio.timeout(10):
                    while await accepts(peer) is not is_accepted:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)

    async with (
        Client(a.base_url) as client,
        LlumletClient(str(a.llumlet), credentials=credentials) as home,
        LlumletClient(str(b.llumlet), credentials=credentials) as guest,
    ):
        stream = await client.complete(PROMPT, 3000, **GREEDY, cache_salt="moved")
        await stream.wait_for(30)
        (request,) = (await home.list_requests()).requests
        ids = [request.request_id]
        (there,) = await migrate_through(home, a.llumlet, b.llumlet, request_ids=ids)
        assert there.live, f"{there.phase} {there.reason} {there.detail}"
        cluster.set_peers_tokens(last, following)
        await until(following, True)
        cluster.set_peers_tokens(following)
        await until(last, False)
        (back,) = await migrate_through(guest, b.llumlet, a.llumlet, request_ids=ids)
        assert back.live, f"{back.phase} {back.reason} {back.detail}"
        await stream.wait_for(len(stream.token_ids) + 50)
        await stream.disconnect()
        length = len(stream.token_ids)
        expected = await (await client.complete(PROMPT, length, **GREEDY, cache_salt="unmoved")).result()
    assert stream.token_ids == expected.token_ids


async def accepts(peer: LlumletClient) -> bool:
    try:
        await peer.get_instance_metadata()
    except LlumletError as error:
        assert error.reason is Reason.UNAUTHENTICATED  # noqa: PT017
        return False
    return True


async def test_an_operator_is_no_peer(pair: Pair, cluster: Cluster) -> None:
    async with LlumletClient(str(pair.a.llumlet), credentials=Credentials.load(cluster.caller)) as operator:
        with pytest.raises(LlumletError) as refused:
            await operator.query(messages.settle())
        assert refused.value.reason is Reason.ROLE_REFUSED


def strangers(cluster: Cluster, tmp_path: Path) -> list[Credentials]:
    """In clear; without the token; with another token; with a certificate of another authority."""
    good = Credentials.load(cluster.caller)
    other = credential_files(Authority(tmp_path, "strangers"), "stranger", Path(cluster.caller.token_file))
    return [
        NONE,
        dataclasses.replace(good, token_file=None),
        cluster.peer("x" * 64, tmp_path),
        Credentials.load(dataclasses.replace(other, tls_ca=cluster.caller.tls_ca)),
    ]


@pytest.mark.rest
async def test_a_destination_of_another_cluster(pair: Pair, cluster: Cluster, engines: Engines) -> None:
    """The request stays where it is, and the stranger, who has everything but a certificate, hears nothing of it."""
    a, stranger = pair.a, engines.b
    assert a.llumlet is not None
    assert stranger.llumlet is not None
    async with Client(a.base_url) as client:
        stream = await client.complete(PROMPT, 400, **GREEDY)
        await stream.wait_for(30)
        async with LlumletClient(str(a.llumlet), credentials=Credentials.load(cluster.caller)) as llumlet:
            (request,) = (await llumlet.list_requests()).requests
            (move,) = await migrate_through(llumlet, a.llumlet, stranger.llumlet, request_ids=[request.request_id])
            assert (move.phase, move.reason) == ("stayed", "peer_unreachable")
        result = await stream.result()
    assert len(result.token_ids) == 400
