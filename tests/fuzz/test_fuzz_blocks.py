# SPDX-License-Identifier: Apache-2.0
"""Anything may come over the connection from which blocks are served: nothing leaves that was not granted."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import time
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv.fakes import Memory
from vllm_llumnix.kv.memory.block_memory import HostMemory
from vllm_llumnix.kv.mover.messages import DEPTH, KEY_BYTES, NetworkName, SealKind
from vllm_llumnix.kv.networks.staging import StagingArea
from vllm_llumnix.kv.serving import block_server
from vllm_llumnix.kv.serving.block_server import BlockServer
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES, Grants

NONCE, CAPABILITY = bytes(32), bytes(range(CAPABILITY_BYTES))
GRANTED = [3, 4, 5]
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

values = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=64) | st.text(max_size=20)
anything = st.recursive(values, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner))
requests = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["send", "stage"]) | values,
        "nonce": st.just(NONCE) | values,
        "capability": st.just(CAPABILITY) | values,
        "blocks": st.lists(st.integers(-2, 40) | st.just(2**31), max_size=8) | anything,
        "layers_outermost": st.booleans() | values,
        "slot": st.integers(-1, DEPTH) | values,
        "key": st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES) | values,
        "number": st.integers(-1, 2**32) | values,
        "kind": st.sampled_from(get_args(SealKind)) | values,
        "network": st.sampled_from(get_args(NetworkName)) | values,
    }
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(block_server, "GRANT_SECONDS", 0.0)
    memory, grants = Memory(seed=1), Grants()
    grants.allow(CAPABILITY, GRANTED)
    area = StagingArea(memory.blocks, area_bytes=1)
    server = BlockServer(HostMemory(memory.blocks), NONCE, grants, "127.0.0.1", staging={"mooncake": area})
    server.start()
    yield server
    assert len(ask(server, framed(msgspec.msgpack.encode(good(GRANTED))))) > memory.blocks.bytes_per_block
    server.close()
    deadline = time.monotonic() + 10
    while area.num_free * area.slot_bytes < area.num_bytes:
        assert time.monotonic() < deadline, "buffers are left behind"
        time.sleep(0.01)
    assert not any(ctypes.string_at(area.address, area.num_bytes)), "what was staged is left behind"


def good(blocks: list[int]) -> dict[str, Any]:
    return {"type": "send", "nonce": NONCE, "capability": CAPABILITY, "blocks": blocks, "layers_outermost": True}


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def ask(server: BlockServer, data: bytes) -> bytes:
    """Everything that comes back until the server has closed the connection, or has nothing to say."""
    received = bytearray()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    with connection, contextlib.suppress(OSError):  # it may be closed before it has read everything
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            received += part
    return bytes(received)


@FUZZ
@given(data=st.binary(max_size=200) | st.binary(max_size=200).map(framed))
def test_bytes(server: BlockServer, data: bytes) -> None:
    assert len(ask(server, data)) < 200, "more than a refusal"


@FUZZ
@given(request=requests | anything)
def test_requests(server: BlockServer, request: Any) -> None:
    try:
        data = framed(msgspec.msgpack.encode(request))
    except (OverflowError, UnicodeEncodeError):
        return
    received = ask(server, data)
    if len(received) < 200 and not is_staged(received):
        return
    # Blocks were sent, or put where they can be read: then all of it was right.
    assert request["nonce"] == NONCE
    assert request["capability"] == CAPABILITY
    assert request["blocks"]
    assert set(request["blocks"]) <= set(GRANTED)
    assert request["type"] in ("send", "stage")


def is_staged(received: bytes) -> bool:
    if len(received) < 4:
        return False
    answer = msgspec.msgpack.decode(received[4:])
    return isinstance(answer, dict) and bool(answer.get("address"))
