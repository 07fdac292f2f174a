# SPDX-License-Identifier: Apache-2.0
"""Whom an API server takes for a peer: asked of a real CMS of either kind, which simulated instances report to."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from llumlet.credentials import NONE
from llumlet.directory import look_up
from llumlet.report_links import LinkLost
from llumlet.types import InstanceMetadata, InstanceState, InstanceStatus
from llumsched.cms.embedded import EmbeddedStore
from llumsched.testing import SimulatedCluster
from llumsched.up.ports import free_port
from tests.llumlet.fake_agent import until
from tests.support.cms import cms_of
from vllm_llumnix.frontend import peers as peers_module
from vllm_llumnix.frontend.peers import Peers
from vllm_llumnix.reach import Reach

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture(params=["embedded", "redis"])
async def cms(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    async with cms_of(request.param) as url:
        yield url


def peers(cms: str, *named: str, own: str = "sim-0") -> Peers:
    return Peers(named, cms, own.__eq__, NONE, Reach(anywhere=False))


async def test_the_others_that_report(cms: str) -> None:
    async with SimulatedCluster(3, cms) as cluster:
        others = {str(instance.address) for instance in cluster.instances.values() if instance.id != "sim-0"}
        found = peers(cms, "127.0.0.1:9")
        assert found.expected
        assert found.addresses == ("127.0.0.1:9",)

        def known() -> bool:
            found._asked_at = float("-inf")
            found.keep_fresh()
            return set(found.addresses) == {"127.0.0.1:9", *others}

        await until(known)
        found.cancel()


async def test_what_was_known_stays_when_the_cms_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "REFRESH_SECONDS", 0.0)
    store = EmbeddedStore()
    await store.start()
    found = peers(str(store.address))
    async with SimulatedCluster(2, str(store.address)) as cluster:

        def asked() -> None:
            found.keep_fresh()

        await until(lambda: asked() or found.addresses == (str(cluster[1].address),))
        await store.close()
        await until(lambda: asked() or found.problem)
        assert found.addresses == (str(cluster[1].address),)
    found.cancel()


async def test_nobody_answers() -> None:
    with pytest.raises(LinkLost):
        await look_up(f"127.0.0.1:{free_port()}")
    with pytest.raises(LinkLost):
        await look_up(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match="HOST:PORT"):
        await look_up("nonsense")


def state(
    name: str, *, used: int = 0, digest: str = "d", ip: str = "127.0.0.1", schedulable: bool = True
) -> InstanceState:
    return InstanceState(
        metadata=InstanceMetadata(instance_id=name, ip=ip, llumlet_port=used + 1, compatibility_digest=digest),
        status=InstanceStatus(
            instance_id=name, schedulable=schedulable, num_used_gpu_tokens=used, num_total_gpu_tokens=100
        ),
    )


async def test_who_is_no_peer() -> None:
    """The freest first; not ourselves, not who takes nothing or cannot exchange requests with us, nor who is out of
    reach: an address in a message is not followed beyond this host without credentials."""
    states = [
        state("sim-0"),
        state("busy", used=60),
        state("free", used=10),
        state("other model", used=1, digest="e"),
        state("draining", used=2, schedulable=False),
        state("far", used=3, ip="192.0.2.1"),
    ]
    found = peers("127.0.0.1:1")
    found._learn(states)
    assert found.addresses == ("127.0.0.1:11", "127.0.0.1:61")
    assert found.room == {"127.0.0.1:11": 90, "127.0.0.1:61": 40}
    assert not peers("").expected
