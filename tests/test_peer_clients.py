# SPDX-License-Identifier: Apache-2.0
"""Clients of other llumlets, as engines and origins keep them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from llumlet.contract.errors import LlumletError
from llumlet.contract.server import serve
from llumlet.contract.types import Reason
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, CredentialFiles, Credentials
from tests.llumlet.fake_agent import FakeAgent
from tests.support.authority import token_file
from vllm_llumnix.wire import peer_clients
from vllm_llumnix.wire.addresses import Reach
from vllm_llumnix.wire.peer_clients import PeerClients

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def clients() -> AsyncIterator[PeerClients]:
    clients = PeerClients(NONE, Reach(anywhere=False))
    yield clients
    await clients.close()


async def test_addresses_share_a_client_in_any_spelling(clients: PeerClients) -> None:
    kept = clients.at("127.0.0.1:40001")
    assert clients.at(Address("127.0.0.1", 40001)) is kept
    assert clients.at("127.0.0.1:40002") is not kept


async def test_an_address_that_is_not_to_be_called(clients: PeerClients) -> None:
    with pytest.raises(LlumletError, match="not a loopback address") as refusal:
        clients.at("10.1.2.3:40001")
    assert refusal.value.reason == Reason.ADDRESS_REFUSED


async def test_no_address_at_all(clients: PeerClients) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        clients.at("nowhere")


async def test_the_credentials_are_shown(tmp_path: Path) -> None:
    credentials = Credentials.load(CredentialFiles(token_file=str(token_file(tmp_path))))
    clients = PeerClients(credentials, Reach(anywhere=False))
    async with await serve(FakeAgent("guarded"), credentials=credentials) as server:
        assert (await clients.at(server.address).get_instance_metadata()).instance_id == "guarded"
        await clients.close()


async def test_dropped_client_can_still_be_used(clients: PeerClients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_clients, "MAX_CLIENTS", 2)
    async with await serve(FakeAgent("far")) as server, clients.at(server.address) as first:
        second = clients.at("127.0.0.1:2")
        clients.at("127.0.0.1:3")
        assert clients.at("127.0.0.1:2") is second
        assert (await first.get_instance_metadata()).instance_id == "far"
        assert clients.at(server.address) is not first
