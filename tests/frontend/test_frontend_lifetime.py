# SPDX-License-Identifier: Apache-2.0
"""What a client leaves behind, several of them in one process, and what they need of vLLM's classes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from vllm.v1.engine.core_client import AsyncMPClient, DPAsyncMPClient, DPLBAsyncMPClient, MPClient

from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from tests.frontend.conftest import NewPeer
from tests.frontend.fakes import (
    FakeEngine,
    FakePeer,
    close_client,
    new_client,
    output,
    relayed,
    request,
    tokens_of,
    until,
)
from vllm_llumnix import hooks
from vllm_llumnix.errors import ConfigError
from vllm_llumnix.frontend.client import LlumnixClientMixin, llumnix_client_class
from vllm_llumnix.switch import CONFIG_VARIABLE

CLASSES = [AsyncMPClient, DPAsyncMPClient, DPLBAsyncMPClient]


def relay_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "llumnix-relay"]


@pytest.mark.asyncio
async def test_shutdown_leaves_no_task_and_no_socket(
    engine: FakeEngine, directory: Path, context: zmq.asyncio.Context
) -> None:
    client = new_client(AsyncMPClient, directory)
    peer = FakePeer(context, client.relay_address)
    await client.add_request_async(request("r"))
    await peer.tokens(relayed("r", 0, 10))
    await tokens_of(client, 1)
    assert len(relay_tasks()) == 1
    socket = client.origin.relay._socket
    client.shutdown()
    client.shutdown()
    assert socket.closed
    await until(lambda: not relay_tasks())
    await client.abort_requests_async(["r"])
    close_client(client)
    peer.close()


@pytest.mark.asyncio
async def test_shutdown_from_another_thread(engine: FakeEngine, directory: Path) -> None:
    """As vLLM's engine monitor does."""
    client = new_client(AsyncMPClient, directory)
    socket = client.origin.relay._socket
    await asyncio.to_thread(client.shutdown)
    await until(lambda: socket.closed and not relay_tasks())
    close_client(client)


@pytest.mark.asyncio
async def test_the_relay_does_not_keep_the_client_alive(
    engine: FakeEngine, directory: Path, context: zmq.asyncio.Context
) -> None:
    client = new_client(AsyncMPClient, directory)
    client.origin._metrics.look = lambda engines: None  # a question that is open does, for seconds
    await client.add_request_async(request("r"))
    peer = FakePeer(context, client.relay_address)
    await peer.tokens(relayed("r", 0, 10))
    await tokens_of(client, 1)
    gone, socket, zmq_context = weakref.ref(client), client.origin.relay._socket, client.resources.ctx
    del client
    gc.collect()
    assert gone() is None
    await until(lambda: socket.closed and not relay_tasks())
    zmq_context.destroy(linger=0)
    peer.close()


def test_a_client_made_before_the_event_loop_starts_later(directory: Path) -> None:
    made: list[Any] = []

    async def use() -> None:
        client = made[0]
        await client.add_request_async(request("r"))
        assert client.relay_address is not None
        assert len(relay_tasks()) == 1
        close_client(client)

    ready = zmq.asyncio.Context()
    engine: list[FakeEngine] = []

    async def connect() -> None:
        engine.append(FakeEngine(ready, directory))

    asyncio.run(connect())
    made.append(new_client(AsyncMPClient, directory))
    assert made[0].relay_address is None
    asyncio.run(use())
    engine[0].close()
    ready.destroy(linger=0)


@pytest.mark.asyncio
async def test_two_api_servers_are_independent(
    context: zmq.asyncio.Context, directory: Path, client: Any, engine: FakeEngine, new_peer: NewPeer
) -> None:
    (directory / "second").mkdir()
    other_engine = FakeEngine(context, directory / "second")
    other = new_client(AsyncMPClient, directory / "second", client_index=1)
    assert other.relay_address != client.relay_address
    peer, other_peer = new_peer(), FakePeer(context, other.relay_address)
    for each, at in ((client, engine), (other, other_engine)):
        await each.add_request_async(request("same id"))
        assert (await at.added()).queue_server_address == each.relay_address
    await engine.send(output("same id", 10))
    await peer.tokens(relayed("same id", 1, 11, base=1))
    await other_peer.tokens(relayed("same id", 0, 20))
    assert await tokens_of(client, 2) == [10, 11]
    assert await tokens_of(other, 1) == [20]
    await other.abort_requests_async(["same id"])
    assert await other_peer.answer() == wire.Dismissal([("same id", Epoch(0, 1))])
    await peer.tokens(relayed("same id", 2, 12, base=1))
    assert await tokens_of(client, 1) == [12]
    close_client(other)
    other_peer.close()
    other_engine.close()


def test_without_configuration_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.client_class(AsyncMPClient) is llumnix_client_class(AsyncMPClient)
    monkeypatch.delenv(CONFIG_VARIABLE)
    assert hooks.client_class(AsyncMPClient) is AsyncMPClient
    with pytest.raises(ConfigError, match=CONFIG_VARIABLE):
        llumnix_client_class(AsyncMPClient)(None)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_subclass_stands_before_vllms_class(cls: type) -> None:
    ours = llumnix_client_class(cls)
    assert ours is llumnix_client_class(cls)
    assert issubclass(ours, cls)
    assert ours.__name__ == f"Llumnix{cls.__name__}"
    for name in ("add_request_async", "abort_requests_async", "shutdown", "_ensure_output_queue_task"):
        assert getattr(ours, name) is getattr(LlumnixClientMixin, name)
    assert ours.process_engine_outputs is LlumnixClientMixin.process_engine_outputs
    assert ours._stock_hook is getattr(cls, "process_engine_outputs", None)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("cls", CLASSES)
def test_vllm_still_has_what_is_overridden(cls: Any) -> None:
    assert parameters(cls.add_request_async) == ["self", "request"]
    assert parameters(cls.abort_requests_async) == ["self", "request_ids"]
    assert parameters(cls.shutdown) == ["self", "timeout"]
    assert parameters(cls._ensure_output_queue_task) == ["self"]
    assert parameters(cls._send_input) == ["self", "request_type", "request", "engine"]
    assert parameters(cls.__init__)[:2] == ["self", "vllm_config"]


def test_vllm_still_keeps_the_data_parallel_accounts() -> None:
    assert parameters(DPAsyncMPClient.get_core_engine_for_request) == ["self", "request"]
    assert parameters(DPLBAsyncMPClient.process_engine_outputs) == ["self", "outputs"]
    source = inspect.getsource(DPLBAsyncMPClient)
    assert "self.reqs_in_flight[request.request_id] = chosen_engine" in source
    assert "self.engine_inflight[engine] -= 1" in source


def test_vllm_still_enqueues_right_after_the_hook() -> None:
    source = inspect.getsource(AsyncMPClient._ensure_output_queue_task)
    hook = source.index("await output_handler(_self, outputs)")
    put = source.index("outputs_queue.put_nowait(outputs)")
    assert hook < put
    assert "await" not in source[hook + len("await") : put]
    assert 'getattr(self.__class__, "process_engine_outputs", None)' in source


def test_an_engine_is_named_by_its_rank() -> None:
    assert 'rank.to_bytes(2, "little") for rank in self.engine_ranks_managed' in inspect.getsource(MPClient.__init__)


def test_the_hook_never_suspends() -> None:
    """Run by hand, it ends at its first step: no other task can enqueue in between."""
    hook: Coroutine[Any, Any, None] = LlumnixClientMixin.process_engine_outputs(_Hooked(), _Outputs())
    with pytest.raises(StopIteration):
        hook.send(None)


class _Outputs:
    outputs = ()


class _Hooked(LlumnixClientMixin):
    def __init__(self) -> None:
        pass
