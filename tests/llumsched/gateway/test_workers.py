# SPDX-License-Identifier: Apache-2.0
"""Ports that the workers of a gateway share."""

from __future__ import annotations

import socket

import pytest

from llumsched.gateway import workers
from llumsched.gateway.config import Config
from llumsched.up.ports import free_ports


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_second_gateway_with_workers_does_not_share_the_ports_of_the_first(
    flag: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a worker starts")

    monkeypatch.setattr(workers, "Worker", start)
    port, metrics_port = free_ports(2)
    taken = {"--port": port, "--metrics-port": metrics_port}[flag]
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", taken))
        first.listen()
        assert workers._supervise(Config(workers=2, port=port, metrics_port=metrics_port)) == 1
    assert capfd.readouterr().err == f"llumnix gateway: 127.0.0.1:{taken}: Address already in use; see {flag}\n"
