# SPDX-License-Identifier: Apache-2.0
"""Who a Redis lets in: users, passwords out of files, TLS; and a Redis Cluster, which is none of ours."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import MovedError, RedisError

from llumlet.contract.cms.links import LinkLost
from llumlet.contract.cms.redis_reports import RedisLink
from llumlet.contract.cms.stores import open_directory
from llumlet.contract.types import InstanceMetadata
from llumlet.process.redis_client import NO_CLUSTER, connect, reason_of
from llumsched.cms.redis import RedisStore
from llumsched.rescheduling.leadership import Lease
from llumsched.up.ports import free_port
from llumsim.live import SimulatedCluster
from tests.llumlet.fake_agent import until
from tests.support.authority import Authority, credential_files, token_file
from tests.support.redis_server import RedisServer, SentinelGroup, eventually

pytestmark = pytest.mark.asyncio
ROOT = Path(__file__).parents[3]
ACL = "on >p/w@1 resetchannels &llumnix:changes ~llumnix:* +@all -@admin -@dangerous"


async def all_works(url: str) -> None:
    """An instance, a scheduler, a rescheduler, and an instance that looks for others."""
    async with following(url) as store:
        lease, directory = Lease(url), open_directory(url)
        await lease.start()
        async with SimulatedCluster(1, url):
            await until(lambda: "sim-0" in store.view and store.view["sim-0"].status and lease.term > 0)
            assert [peer.instance_id for peer in (await directory.peers((), "")).peers] == ["sim-0"]
        await until(lambda: "sim-0" not in store.view)
        await lease.close()
        await directory.close()


@asynccontextmanager
async def following(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def problem_of(url: str) -> str:
    """Empty if there is none."""
    async with following(url) as store:
        await until(lambda: store.problem != "not connected yet")
        return store.problem


async def test_a_user_that_may_do_no_more_than_it_must() -> None:
    async with RedisServer("of the administrator") as server:
        written = " ".join((ROOT / "docs/operate/security.md").read_text().split())
        assert f"ACL SETUSER llumnix {ACL.replace('p/w@1', 'PASSWORD')}`" in written
        await server.tell("ACL", "SETUSER", "llumnix", *ACL.split())
        where = f"127.0.0.1:{server.port}"
        await all_works(f"redis://llumnix:p%2Fw%401@{where}")
        assert "invalid username-password pair" in await problem_of(f"redis://llumnix:wrong@{where}")
        await server.tell("ACL", "SETUSER", "stranger", "on", ">p", "~another:*", "+@all")
        assert "no permissions" in (await problem_of(f"redis://stranger:p@{where}")).lower()


async def test_a_password_out_of_a_file(tmp_path: Path) -> None:
    """Read for each connection: a new one needs no restart."""
    file = token_file(tmp_path, "password")
    file.write_text("first\n")
    async with RedisServer("first") as server:
        url = f"redis://127.0.0.1:{server.port}?password_file={file}"
        await all_works(url)
        async with SimulatedCluster(1, url), following(url) as store:
            await until(lambda: "sim-0" in store.view)
            await server.change_password("second")
            file.write_text("second\n")
            for kind in ("pubsub", "normal"):
                await server.tell("CLIENT", "KILL", "TYPE", kind)
            await until(lambda: not store.view.connected)
            began_s = time.monotonic()
            await until(lambda: store.view["sim-0"].received_s > began_s)
            link = RedisLink(url)
            file.unlink()
            with pytest.raises(LinkLost, match="No such file"):
                await link.open(InstanceMetadata(instance_id="x"), lambda: None)
            await link.close()


async def test_passwords_of_sentinels_out_of_a_file(tmp_path: Path) -> None:
    async with SentinelGroup() as group:
        url = group.url.replace(":secret@", "")
        for option, word in (("password", "secret"), ("sentinel_password", "watchword")):
            file = token_file(tmp_path, option)
            file.write_text(word)
            url = url.replace(f"{option}={word}", "") + f"&{option}_file={file}"
        assert "secret" not in url
        await all_works(url)


async def test_over_tls(tmp_path: Path) -> None:
    """Both ends show a certificate of the same authority; who shows another one, or none, does not get in."""
    authority = Authority(tmp_path)
    token = token_file(tmp_path)
    stranger = credential_files(Authority(tmp_path, "another authority"), "stranger", token)
    ours = credential_files(authority, "ours", token)
    async with RedisServer("secret", tls=credential_files(authority, "server", token)) as server:
        where = f"rediss://:secret@127.0.0.1:{server.port}"
        await all_works(f"{where}?ssl_ca_certs={ours.tls_ca}&ssl_certfile={ours.tls_cert}&ssl_keyfile={ours.tls_key}")
        keys = f"ssl_certfile={ours.tls_cert}&ssl_keyfile={ours.tls_key}"
        assert "CERTIFICATE_VERIFY_FAILED" in await problem_of(f"{where}?ssl_ca_certs={stranger.tls_ca}&{keys}")
        assert "CERTIFICATE_VERIFY_FAILED" in await problem_of(f"{where}?{keys}")
        assert await problem_of(f"{where}?ssl_ca_certs={ours.tls_ca}")
    # The name in the certificate is compared, too.
    elsewhere = credential_files(authority, "elsewhere", token, "192.0.2.1")
    async with RedisServer("secret", tls=elsewhere) as server:
        problem = await problem_of(f"rediss://:secret@127.0.0.1:{server.port}?ssl_ca_certs={ours.tls_ca}&{keys}")
        assert "IP address mismatch" in problem


async def test_clients_of_a_redis_trust_its_new_authority(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    authority, other, token = Authority(tmp_path), Authority(elsewhere, "other"), token_file(tmp_path)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(other.path.read_bytes())
    server = credential_files(authority, "server", token)
    async with SentinelGroup(tls=server) as group:
        keys = f"ssl_certfile={server.tls_cert}&ssl_keyfile={server.tls_key}&ssl_ca_certs={trusted}"
        client = connect(f"{group.url}&{keys}")
        with pytest.raises((RedisError, OSError)):
            await client.ping()
        trusted.write_bytes(authority.path.read_bytes())
        assert await client.ping()
        trusted.write_bytes(b"broken")
        await client.connection_pool.disconnect()
        assert await client.ping(), "the authority from before stays"
        assert "stay as they were" in caplog.text
        await client.aclose()


async def test_sentinels_over_tls(tmp_path: Path) -> None:
    authority, token = Authority(tmp_path), token_file(tmp_path)
    ours = credential_files(authority, "ours", token)
    async with SentinelGroup(tls=credential_files(authority, "server", token)) as group:
        assert group.url.startswith("rediss+sentinel://")
        tls = f"ssl_ca_certs={ours.tls_ca}&ssl_certfile={ours.tls_cert}&ssl_keyfile={ours.tls_key}"
        await all_works(f"{group.url}&{tls}")


async def test_a_cluster_is_refused_with_what_to_do_instead(caplog: pytest.LogCaptureFixture) -> None:
    async with RedisServer(options=("--cluster-enabled", "yes", "--cluster-port", str(free_port()))) as server:
        assert await problem_of(server.url) == NO_CLUSTER, "no slots yet"
        await server.tell("CLUSTER", "ADDSLOTSRANGE", "0", "16383")

        async def ready() -> bool:
            return b"cluster_state:ok" in await server.tell("CLUSTER", "INFO")

        await eventually(ready)
        assert await problem_of(server.url) == NO_CLUSTER
        assert caplog.text.count(NO_CLUSTER) == 2
        link = RedisLink(server.url)
        with pytest.raises(LinkLost) as lost:
            await link.open(InstanceMetadata(instance_id="x", compatibility_digest="d"), lambda: None)
        assert str(lost.value) == NO_CLUSTER
        await link.close()
        lease = Lease(server.url)
        await lease.start()
        await until(lambda: NO_CLUSTER in lease.reason)
        await lease.close()
    assert reason_of(MovedError("1 127.0.0.1:2")) == NO_CLUSTER
