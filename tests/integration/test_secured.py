# SPDX-License-Identifier: Apache-2.0
"""Two servers with certificates and a token: a live move between them, and strangers who get nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.client import Client
from benchmarks.harness import Fleet, Server, ServerSpec
from benchmarks.moves import migrate_through
from llumlet.client import LlumletClient
from llumlet.credential_files import CredentialFiles
from llumlet.credentials import NONE, Credentials
from llumlet.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.types import Reason
from tests.integration.conftest import Engines
from tests.support.authority import Authority, credential_files, flags_of, token_file

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 180))
GREEDY: dict[str, Any] = {"ignore_eos": True}


class Cluster(NamedTuple):
    authority: Authority
    token: Path
    caller: CredentialFiles

    def instance(self, name: str) -> CredentialFiles:
        return credential_files(self.authority, name, self.token)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    directory = tmp_path_factory.mktemp("cluster")
    authority, token = Authority(directory), token_file(directory)
    return Cluster(authority, token, credential_files(authority, "caller", token))


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
    """The token, and the lines of a private key."""
    key = Path(cluster.caller.tls_key).read_text()
    return [cluster.token.read_text().strip(), *re.findall(r"(?m)^[A-Za-z0-9+/=]{30,}$", key)]


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
    credentials = Credentials.load(cluster.caller)

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

    secrets = secrets_of(cluster)
    assert len(secrets) > 1
    for server in (a, b):
        assert list(secrets_shown(server, secrets)) == []


def strangers(cluster: Cluster, tmp_path: Path) -> list[Credentials]:
    """In clear; without the token; with another token; with a certificate of another authority."""
    good = Credentials.load(cluster.caller)
    other = Credentials.load(credential_files(Authority(tmp_path, "strangers"), "stranger", cluster.token))
    return [
        NONE,
        dataclasses.replace(good, token=b""),
        dataclasses.replace(good, token=b"x" * 64),
        dataclasses.replace(other, authority=good.authority),
    ]


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
