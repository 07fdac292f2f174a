# SPDX-License-Identifier: Apache-2.0
"""`llumnix drain`, as a process of its own against a real llumlet server."""

from __future__ import annotations

import pytest

from llumlet.contract.types import DrainRequest
from llumsched.console.exit_codes import ExitCode
from tests.llumsched.conftest import Instance, Llumnix

pytestmark = pytest.mark.asyncio


async def test_it_shows_progress_and_the_end(llumnix: Llumnix, source: Instance) -> None:
    done = await llumnix("drain", "--llumlet", source.address, "--to", "127.0.0.1:1,127.0.0.1:2", "--timeout", "9")
    assert done.code == ExitCode.OK
    assert "3 streams, 3 requests here, 0 moving, 0 moved; refused: 2x destination_full" in done.err
    assert done.out == "drained in 1.5 s: 3 requests moved, every stream came to its end\n"
    asked = DrainRequest(destinations=["127.0.0.1:1", "127.0.0.1:2"], timeout_s=9)
    assert source.agent.asked("drain") == [asked]


async def test_streams_that_go_on_at_others_are_no_failure(llumnix: Llumnix, source: Instance) -> None:
    source.agent.num_streams = 2
    done = await llumnix("drain", "--llumlet", source.address)
    assert done.code == ExitCode.OK
    assert done.out.endswith("the engine ends; 2 streams go on at others, through its API server\n")


async def test_streams_that_were_cut_are_a_failure(llumnix: Llumnix, source: Instance) -> None:
    source.agent.num_cut = 2
    done = await llumnix("drain", "--llumlet", source.address, "--json")
    assert done.code == ExitCode.NOT_MOVED
    first, last = done.lines
    assert (first["event"], first["refusals"]) == ("progress", {"destination_full": 2})
    assert (last["event"], last["num_cut"], last["exit_code"]) == ("summary", 2, 1)


async def test_drain_of_an_unreachable_instance_fails(llumnix: Llumnix) -> None:
    done = await llumnix("drain", "--llumlet", "127.0.0.1:1", "--json")
    assert done.code == ExitCode.UNREACHABLE
    assert done.lines[0]["event"] == "error"


async def test_all_faults_at_once(llumnix: Llumnix) -> None:
    done = await llumnix("drain", "--llumlet", "127.0.0.1:1", "--to", "127.0.0.1:1", "--timeout", "0")
    assert done.code == ExitCode.USAGE
    assert done.err.splitlines()[:2] == [
        "llumnix drain: --timeout must be positive",
        "llumnix drain: --llumlet and --to name the same llumlet, 127.0.0.1:1",
    ]
