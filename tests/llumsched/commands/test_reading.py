# SPDX-License-Identifier: Apache-2.0
"""`llumnix ps` and `llumnix status`, as processes of their own against real llumlet servers."""

from __future__ import annotations

import asyncio

import pytest

from llumlet.contract.errors import LlumletError
from llumlet.contract.types import Health, Mode, Reason
from tests.llumlet.fake_agent import moving_request_info, request_info
from tests.llumsched.conftest import Instance, Llumnix

pytestmark = pytest.mark.asyncio


async def test_ps_shows_a_row_per_request(llumnix: Llumnix, source: Instance) -> None:
    source.agent.requests.append(moving_request_info("cmpl-mov-11111111"))
    done = await llumnix("ps", "--llumlet", source.address)
    assert (done.code, done.err) == (0, "")
    header, *rows = done.out.splitlines()
    assert header.split()[:3] == ["INSTANCE", "REQUEST", "PHASE"]
    assert len(rows) == 4
    assert rows[0].split() == [
        *("fake-a", "cmpl-abc123-0a1b2c3d", "decode", "100", "7", "4"),
        *(rows[0].split()[6], "0.0", "tcp://127.0.0.1:7001", "live"),
    ]
    assert "already_migrating" in rows[3]
    assert rows[3].rstrip().endswith("→ fake-b copying local")


async def test_ps_shows_requests_that_lose_their_kv_cache(llumnix: Llumnix, source: Instance) -> None:
    source.agent.kv_unsupported = "not exactly one KV cache group"
    source.agent.requests[:] = [
        request_info("cmpl-one-11111111", moves_as=Mode.RECOMPUTE, detail=source.agent.kv_unsupported),
        request_info("cmpl-two-22222222", moves_as=Mode.WAITING),
    ]
    done = await llumnix("ps", "--llumlet", source.address)
    assert [row.split()[-1] for row in done.out.splitlines()[1:]] == ["recompute", "waiting"]
    (document,) = (await llumnix("ps", "--llumlet", source.address, "--json")).lines
    first, second = document["requests"]
    assert (first["movable"], first["moves_as"], first["detail"]) == (True, "recompute", source.agent.kv_unsupported)
    assert (second["movable"], second["moves_as"], second["detail"]) == (True, "waiting", "")
    done = await llumnix("status", "--llumlet", source.address)
    assert done.out.splitlines()[1].split()[-3] == "recompute"
    (document,) = (await llumnix("status", "--llumlet", source.address, "--json")).lines
    assert document["status"]["kv_unsupported"] == source.agent.kv_unsupported


async def test_ps_json(llumnix: Llumnix, source: Instance) -> None:
    source.agent.requests.append(moving_request_info("cmpl-mov-11111111"))
    done = await llumnix("ps", "--llumlet", source.address, "--json")
    assert (done.code, done.err) == (0, "")
    (document,) = done.lines
    assert document["address"] == source.address
    assert document["error"] is None
    assert document["instance_id"] == "fake-a"
    first, *_, moving = document["requests"]
    assert first["request_id"] == "cmpl-abc123-0a1b2c3d"
    assert first["external_request_id"] == "cmpl-abc123"
    assert (first["phase"], first["prompt_tokens"], first["num_blocks"]) == ("decode", 100, 4)
    assert (first["movable"], first["reason"], first["move"]) == (True, None, None)
    assert (moving["movable"], moving["reason"]) == (False, "already_migrating")
    assert moving["epoch"] == {"term": 0, "hop": 2}
    assert moving["move"]["direction"] == "out"
    assert moving["move"]["phase"] == "copying"


async def test_ps_of_several_instances(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    destination.agent.requests.append(request_info("cmpl-there-22222222"))
    both = f"{source.address},{destination.address}"
    done = await llumnix("ps", "--llumlet", both, "--llumlet", source.address)
    assert done.code == 0
    assert done.out.count("fake-a") == 3
    assert "fake-b" in done.out


async def test_ps_of_an_idle_instance(llumnix: Llumnix, destination: Instance) -> None:
    done = await llumnix("ps", "--llumlet", destination.address)
    assert (done.code, done.out, done.err) == (0, "no requests\n", "")


async def test_ids_of_clients_cannot_steer_the_terminal(llumnix: Llumnix, destination: Instance) -> None:
    evil = "x\x1b]0;owned\x07[bold]\n-00000000"
    destination.agent.requests.append(request_info(evil))
    done = await llumnix("ps", "--llumlet", destination.address)
    assert "\x1b" not in done.out
    assert "x�]0;owned�[bold]�-00000000" in done.out


async def test_the_living_are_shown_beside_the_dead(llumnix: Llumnix, source: Instance, unused_tcp_port: int) -> None:
    addresses = f"127.0.0.1:{unused_tcp_port},{source.address}"
    done = await llumnix("ps", "--llumlet", addresses)
    assert done.code == 4
    assert "cmpl-abc123-0a1b2c3d" in done.out
    assert f"cannot reach 127.0.0.1:{unused_tcp_port}: Connection refused" in done.err
    assert "--enable-llumlet" in done.err

    done = await llumnix("ps", "--llumlet", addresses, "--json")
    assert (done.code, done.err) == (4, "")
    dead, living = done.lines
    assert dead["error"]["kind"] == "unreachable"
    assert "requests" not in dead
    assert len(living["requests"]) == 3


async def test_the_wrong_port(llumnix: Llumnix) -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await llumnix("status", "--llumlet", address)
        assert done.code == 4
        assert f"{address} is not a llumlet" in done.err
        assert "--llumlet-port" in done.err
        done = await llumnix("status", "--llumlet", address, "--json")
        assert done.lines[0]["error"]["kind"] == "not_a_llumlet"


async def test_a_refusal(llumnix: Llumnix, source: Instance) -> None:
    source.agent.failures["list_requests"] = LlumletError(Reason.SHUTTING_DOWN, "draining")
    done = await llumnix("ps", "--llumlet", source.address)
    assert done.code == 5
    assert f"{source.address} refused: shutting_down: draining" in done.err
    done = await llumnix("ps", "--llumlet", source.address, "--json")
    assert done.lines[0]["error"] == {
        "kind": "refused",
        "reason": "shutting_down",
        "status": "UNAVAILABLE",
        "detail": "draining",
    }


async def test_status_shows_a_row_per_instance(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    done = await llumnix("status", "--llumlet", f"{source.address},{destination.address}")
    assert (done.code, done.err) == (0, "")
    _, *rows = (row.split() for row in done.out.splitlines())
    assert rows[0] == [
        *("fake-a", "neutral", source.address, "tiny-llama", "schedulable", "3", "0"),
        *("25/100", "25%", "4+0+0", "1/3", "0/2", "live", "local,tcp", "0.1.0"),
    ]
    assert rows[1][:3] == ["fake-b", "neutral", destination.address]


async def test_status_of_an_engine_that_hangs(llumnix: Llumnix, source: Instance) -> None:
    source.agent.health = Health.HUNG
    done = await llumnix("status", "--llumlet", source.address)
    assert "hung, 5.4 s" in done.out
    assert "schedulable" not in done.out


async def test_status_json(llumnix: Llumnix, source: Instance) -> None:
    done = await llumnix("status", "--llumlet", source.address, "--json")
    (document,) = done.lines
    assert document["error"] is None
    assert document["status"]["num_free_blocks"] == 75
    assert document["status"]["num_waiting_requests"] == 0
    assert document["metadata"]["transports"] == ["local", "tcp"]
    assert document["metadata"]["bytes_per_block"] == 1 << 20
