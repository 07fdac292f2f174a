# SPDX-License-Identifier: Apache-2.0
"""Whom an API server takes for a peer: asked of a real CMS of either kind, which simulated instances report to."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from llumlet.contract.cms.links import LinkLost
from llumlet.contract.cms.stores import open_directory
from llumlet.contract.types import PeerInfo, PeersResponse
from llumlet.process.credentials import NONE
from llumsched.cms.embedded import EmbeddedStore
from llumsched.up.ports import free_port
from llumsim.live import SimulatedCluster
from tests.llumlet.fake_agent import until
from tests.support.cms import cms_of
from vllm_llumnix.frontend import peers as peers_module
from vllm_llumnix.frontend.peers import Peers
from vllm_llumnix.wire.addresses import Reach

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture(params=["embedded", "redis"])
async def cms(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    async with cms_of(request.param) as url:
        yield url


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "REFRESH_SECONDS", 0.02)


def peers(cms: str, *named: str, own: str = "sim-0") -> Peers:
    return Peers(named, cms, (own,), NONE, Reach(anywhere=False))


async def test_the_others_that_report(cms: str) -> None:
    async with SimulatedCluster(3, cms) as cluster:
        others = {str(instance.address) for instance in cluster.instances.values() if instance.id != "sim-0"}
        found = peers(cms, "127.0.0.1:9")
        assert found.expected
        assert found.addresses == ("127.0.0.1:9",)

        found.keep_fresh()
        await until(lambda: set(found.addresses) == {"127.0.0.1:9", *others})
        found.cancel()


async def test_known_peers_survive_a_lost_cms() -> None:
    store = EmbeddedStore()
    await store.start()
    found = peers(str(store.address))
    async with SimulatedCluster(2, str(store.address)) as cluster:
        found.keep_fresh()
        await until(lambda: found.addresses == (str(cluster[1].address),))
        await store.close()
        await until(lambda: found.problem)
        assert found.addresses == (str(cluster[1].address),)
    found.cancel()


async def test_unreachable_cms_gives_no_peers() -> None:
    for store in (f"127.0.0.1:{free_port()}", f"redis://127.0.0.1:{free_port()}"):
        directory = open_directory(store)
        with pytest.raises(LinkLost):
            await directory.peers((), "")
        await directory.close()
    with pytest.raises(ValueError, match="HOST:PORT"):
        open_directory("nonsense")


async def test_incompatible_instance_is_no_peer() -> None:
    """Not ourselves, nor who is out of reach: an address in a message is not followed beyond this host without
    credentials."""
    told = [("free", "127.0.0.1:11", 90), ("sim-0", "127.0.0.1:1", 80), ("far", "192.0.2.1:3", 70)]
    told += [("busy", "127.0.0.1:61", 40)]
    found = peers("127.0.0.1:1")
    found._learn(PeersResponse(peers=[PeerInfo(instance_id=i, address=a, room_tokens=r) for i, a, r in told]))
    assert found.addresses == ("127.0.0.1:11", "127.0.0.1:61")
    assert found.room == {"127.0.0.1:11": 90, "127.0.0.1:61": 40}
    assert not peers("").expected
