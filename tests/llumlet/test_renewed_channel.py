# SPDX-License-Identifier: Apache-2.0
"""Channels that are made anew when the files of TLS change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from llumlet.contract import channels
from llumlet.contract.channels import RenewedChannel
from llumlet.process.addresses import Address


@pytest.mark.asyncio
async def test_close_ends_calls_on_former_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = asyncio.Event()

    async def hangs(request: bytes, context: Any) -> bytes:
        has_begun.set()
        await asyncio.Event().wait()
        return request

    server = aio.server()
    method = grpc.unary_unary_rpc_method_handler(hangs)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("it", {"Hangs": method}),))
    address = Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    monkeypatch.setattr(channels, "open_channel", lambda where, _: aio.insecure_channel(str(where)))
    credentials: Any = SimpleNamespace(tls=object())
    renewed = RenewedChannel(credentials, address)
    call = renewed.get().unary_unary("/it/Hangs")(b"")
    waiting = asyncio.ensure_future(call)
    await has_begun.wait()
    credentials.tls = object()
    former, now = renewed.get(), renewed.get()
    assert former is now, "the files changed once"
    assert not call.done()
    await renewed.close()
    assert call.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await server.stop(None)
