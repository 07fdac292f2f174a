# SPDX-License-Identifier: Apache-2.0
"""Which addresses in messages are connected to."""

from __future__ import annotations

import pytest

from vllm_llumnix.wire.addresses import Reach, reachable_host

HERE, ANYWHERE = Reach(anywhere=False), Reach(anywhere=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_host_is_always_reached(host: str) -> None:
    assert HERE.why_not(host) is None
    assert ANYWHERE.why_not(host) is None


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "169.254.169.254", "0.0.0.0", "fe80::1", "node-7", "localhost.evil.example"]
)
def test_others_only_where_they_can_prove_who_they_are(host: str) -> None:
    assert "not a loopback address" in (HERE.why_not(host) or "")
    assert ANYWHERE.why_not(host) is None


@pytest.mark.parametrize(
    "host", ["", " ", "a b", "unix:/tmp/x", "127.0.0.1;10.0.0.1", "//x", "x" * 300, "e\nvil", "[::1]", "a/b", "*"]
)
def test_invalid_host_is_refused(host: str) -> None:
    assert "is not a host" in (ANYWHERE.why_not(host) or "")
    assert HERE.why_not(host)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "unix:/x:1", ":1", "a:b:1"])
def test_invalid_llumlet_address_is_refused(address: str) -> None:
    assert ANYWHERE.why_not_llumlet(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:4000", "tcp://[::1]:4000"])
def test_relays_here(address: str) -> None:
    assert HERE.why_not_relay(address) is None


def test_a_relay_elsewhere() -> None:
    assert "not a loopback address" in (HERE.why_not_relay("tcp://10.0.0.1:4000") or "")
    assert ANYWHERE.why_not_relay("tcp://10.0.0.1:4000") is None


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:4000",
        "ipc:///tmp/x",
        "inproc://x",
        "pgm://127.0.0.1:4000",
        "tcp://localhost:4000",
        "tcp://*:4000",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:4000 ",
        "tcp://127.0.0.1;10.0.0.1:4000",
        "tcp://10.0.0.1:1;127.0.0.1:4000",
        "tcp://127.0.0.1:4000/path",
        "TCP://127.0.0.1:4000",
        "tcp://127.0.0.1:04000",
    ],
)
def test_invalid_relay_address_is_refused(address: str) -> None:
    assert "is not tcp://IP:PORT" in (ANYWHERE.why_not_relay(address) or "")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.5", "node-7"])
def test_advertised_addresses_are_reachable(host: str) -> None:
    assert reachable_host(host) == host


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_wildcard_is_never_advertised(wildcard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.5")
    assert reachable_host(wildcard) == "192.0.2.5"
