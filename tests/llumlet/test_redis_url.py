# SPDX-License-Identifier: Apache-2.0
"""URLs of a Redis: what they say, and what is wrong with those that say nothing."""

from __future__ import annotations

import pytest

from llumlet.process.redis_client import checked_name
from llumlet.process.redis_url import Login, RedisUrl, redis_name, split_stores


def test_sentinels() -> None:
    url = RedisUrl.parse(
        "rediss+sentinel://u:p%2C@a:1,[::1],c/s%2F1/3?sentinel_username=v&sentinel_password=w&ssl_ca_certs=/ca"
    )
    assert url.hosts == (("a", 1), ("::1", 26379), ("c", 26379))
    assert (url.service, url.tls) == ("s/1", True)
    assert (url.login, url.sentinel_login) == (Login("u", "p,"), Login("v", "w"))
    assert url.name == "rediss+sentinel://a:1,[::1]:26379,c:26379/s/1"
    assert url.server == "rediss://a:1/3?ssl_ca_certs=%2Fca"


def test_url_of_a_single_server() -> None:
    url = RedisUrl.parse("redis://u:p%40@[::1]/3?password_file=x&protocol=3".replace(":p%40", ""))
    assert (url.hosts, url.service, url.tls) == ((("::1", 6379),), "", False)
    assert url.login == Login("u", "", "x")
    assert url.server == "redis://[::1]:6379/3?protocol=3"
    assert redis_name("redis://h/?x=1") == "redis://h:6379"


@pytest.mark.parametrize(
    ("url", "faults"),
    [
        ("redis+sentinel://a:1,b:2", ["names no service"]),
        ("redis+sentinel://:secret@/s", ["names no host"]),
        ("redis+sentinel://a,,b/s", ["names no host"]),
        ("redis+sentinel://a:secret/s/x?password=secret", ["is not one", "a database that is no number"]),
        ("redis+sentinel://u:secret/secret@a:1", ["is not one: no HOST:PORT (a password's '/'"]),
        ("redis+sentinel://u:12/secret@a:1", ["is not one: no HOST:PORT (a password's '/'"]),
        ("redis://u:12/secret@a:1", ["is not one: no HOST:PORT (a password's '/'"]),
        ("redis://a:1,b:2", ["several servers, which are for redis+sentinel://"]),
        ("redis://u:secret@h?password_file=f&sentinel_password=secret",
         ["both password and password_file", "has no use for sentinel_password"]),
        ("redis+sentinel://h/s?sentinel_password_file=f&sentinel_password=secret", ["both sentinel_password and"]),
        ("redis-sentinel://h/s", ["neither a redis:// nor a redis+sentinel:// URL"]),
    ],
)  # fmt: skip
def test_urls_that_are_none(url: str, faults: list[str]) -> None:
    with pytest.raises(ValueError, match=r"the .*URL") as refusal:
        RedisUrl.parse(url)
    said = str(refusal.value).split("; ")
    assert len(said) == len(faults)
    assert all(fault in one for fault, one in zip(faults, said, strict=True)), said
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["redis://h", "rediss://h", "redis+sentinel://h/s", "rediss+sentinel://h/s"])
def test_faults_of_the_client_are_reported_at_once(scheme: str) -> None:
    assert checked_name(f"{scheme}?socket_timeout=3").startswith(scheme[:8])
    for option, fault in (("colour=red", "colour"), ("db=x", "'db'"), ("password_file=/none", "/none: No such file")):
        with pytest.raises(ValueError, match=fault):
            checked_name(f"{scheme}?{option}")


def test_several_stores() -> None:
    sentinels = "redis+sentinel://u:p@a:1,b:2/s?db=1"
    assert split_stores(f"h:1, {sentinels},redis://r,h:1,,") == ["h:1", sentinels, "redis://r"]
    assert split_stores("") == []
    assert split_stores("redis+sentinel://a,b") == ["redis+sentinel://a", "b"], "no service: refused as both"
