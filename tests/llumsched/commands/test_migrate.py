# SPDX-License-Identifier: Apache-2.0
"""`llumnix migrate`, as a process of its own against real llumlet servers."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from llumlet.contract.errors import LlumletError
from llumlet.contract.types import MigrateRequest, MigrationReqPolicy, MigrationType, Mode, MovePhase, Reason
from tests.llumlet.fake_agent import request_info, until
from tests.llumsched.conftest import Done, Instance, Llumnix, finish, start

pytestmark = pytest.mark.asyncio


def between(source: Instance, destination: Instance) -> list[str]:
    return ["migrate", "--from", source.address, "--to", destination.address]


def asked(source: Instance) -> MigrateRequest:
    (request,) = source.agent.asked("migrate")
    assert isinstance(request, MigrateRequest)
    return request


async def test_migrate_moves_a_request(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    done = await llumnix(*between(source, destination), "--request", "cmpl-abc123")
    assert done.code == 0
    request = asked(source)
    assert (request.src_engine_id, request.dst_engine_id) == ("fake-a", "fake-b")
    assert f"{request.dst_engine_ip}:{request.dst_engine_port}" == destination.address
    assert list(request.request_ids) == ["cmpl-abc123-0a1b2c3d"]
    assert request.method == Mode.MODE_UNSPECIFIED
    assert not request.force
    assert not request.HasField("stall_budget_ms")
    assert request.trigger_policy == "manual"

    assert done.err.splitlines() == [
        "cmpl-abc123-0a1b2c3d: selected",
        "cmpl-abc123-0a1b2c3d: copying",
        "cmpl-abc123-0a1b2c3d: moved",
    ]
    header, row, *rest = done.out.splitlines()
    assert header.split()[:4] == ["REQUEST", "PHASE", "MODE", "TOKENS"]
    assert row.split() == [
        *("cmpl-abc123-0a1b2c3d", "moved", "live", "256", "32", "3", "20.0", "GiB", "1"),
        *("local", "41.8"),
    ]
    assert rest[-1] == "moved 1 of 1 in 0.01 s"


async def test_json_has_an_object_per_event_and_the_summary_last(
    llumnix: Llumnix, source: Instance, destination: Instance
) -> None:
    ids = ["--request", "cmpl-abc123", "--request", "chat-zzz-00000000"]
    done = await llumnix(*between(source, destination), *ids, "--json")
    assert (done.code, done.err) == (0, "")
    *progress, summary = done.lines
    assert [line["phase"] for line in progress] == ["selected", "copying", "moved"] * 2
    assert {line["event"] for line in progress} == {"progress"}
    moved = progress[2]
    assert moved["mode"] == "live"
    assert moved["reason"] is None
    assert moved["copied_bytes"] == 5 << 32
    assert moved["recomputed_tokens"] == 1
    assert moved["phase_ms"] == {"reserving": 1.5, "copying": 40.25, "pull": 9.5}
    assert moved["epoch"] == {"term": 0, "hop": 1}
    assert summary == {
        "event": "summary",
        "selected": 2,
        "moved": 2,
        "stayed": 0,
        "gone": 0,
        "lost": 0,
        "total_ms": 12.5,
        "recomputed": 0,
        "exit_code": 0,
    }


async def test_a_rule(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    flags = ["--rule", "NUM_REQ", "--order", "SR", "--value", "2"]
    done = await llumnix(*between(source, destination), *flags)
    assert done.code == 0
    request = asked(source)
    assert request.migration_type == MigrationType.NUM_REQ
    assert request.migration_req_policy == MigrationReqPolicy.SR
    assert request.num_reqs == 2
    assert source.agent.moved == ["cmpl-abc123-0a1b2c3d", "cmpl-abd456-ffffffff"]


async def test_method_force_and_budget_are_passed_on(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    flags = ["--all", "--method", "blocking", "--force", "--stall-budget-ms", "12.5"]
    assert (await llumnix(*between(source, destination), *flags)).code == 0
    request = asked(source)
    assert (request.method, request.force, request.stall_budget_ms) == (Mode.BLOCKING, True, 12.5)


async def test_a_request_that_stays_is_explained(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    why = (MovePhase.STAYED, Reason.DESTINATION_FULL, "wanted 12 blocks, free 3")
    source.agent.outcomes["cmpl-abd456-ffffffff"] = why
    done = await llumnix(*between(source, destination), "--all")
    assert done.code == 1
    assert "stayed (destination_full)" in done.out
    assert "cmpl-abd456-ffffffff: wanted 12 blocks, free 3" in done.out
    assert "destination_full: No free KV blocks" in done.out
    assert "moved 2 of 3 in 0.01 s, 1 stayed" in done.out

    done = await llumnix(*between(source, destination), "--all", "--json")
    assert done.code == 1
    stayed = next(line for line in done.lines if line.get("phase") == "stayed")
    assert stayed["reason"] == "destination_full"
    assert stayed["detail"] == "wanted 12 blocks, free 3"
    assert done.lines[-1]["exit_code"] == 1


async def test_migrate_tells_recomputed_requests(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    source.agent.tokens_alone["cmpl-abc123-0a1b2c3d"] = "not exactly one KV cache group"
    done = await llumnix(*between(source, destination), "--all")
    assert done.code == 0
    assert "cmpl-abc123-0a1b2c3d: without its KV cache: not exactly one KV cache group" in done.out
    assert "moved 3 of 3 (1 computed again there) in 0.01 s" in done.out
    *_, moved, summary = [
        line
        for line in (await llumnix(*between(source, destination), "--all", "--json")).lines
        if (line.get("phase") == "moved" and line["tokens_alone"]) or line["event"] == "summary"
    ]
    assert (moved["mode"], moved["tokens_alone"]) == ("recompute", "not exactly one KV cache group")
    assert summary["recomputed"] > 0


@pytest.mark.parametrize("phase", [MovePhase.GONE, MovePhase.LOST])
async def test_only_moved_counts_as_success(
    llumnix: Llumnix, source: Instance, destination: Instance, phase: MovePhase
) -> None:
    source.agent.outcomes["chat-zzz-00000000"] = (phase, Reason.REQUEST_FINISHED, "")
    done = await llumnix(*between(source, destination), "--request", "chat-zzz-00000000")
    assert done.code == 1
    assert f"1 {MovePhase.Name(phase).lower()}" in done.out


async def test_nothing_to_move(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    source.agent.requests.clear()
    done = await llumnix(*between(source, destination), "--all")
    assert done.code == 3
    assert "nothing to move" in done.out


async def test_unknown_requests_are_named_with_their_neighbours(
    llumnix: Llumnix, source: Instance, destination: Instance
) -> None:
    ids = ["--request", "cmpl-abc124", "--request", "cmpl-ab", "--request", "cmpl-abc123"]
    done = await llumnix(*between(source, destination), *ids)
    assert done.code == 5
    assert "no request 'cmpl-abc124'; near: cmpl-abc123" in done.err
    assert "'cmpl-ab' is the beginning of 2 requests" in done.err
    assert "`llumnix ps` lists the requests" in done.err
    assert source.agent.asked("migrate") == []


async def test_a_refusal_of_the_whole_call(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    source.agent.failures["migrate"] = LlumletError(Reason.INCOMPATIBLE_ENGINE, "block size 64, 32")
    done = await llumnix(*between(source, destination), "--all", "--json")
    assert done.code == 5
    assert done.lines == [
        {
            "event": "error",
            "error": {
                "address": source.address,
                "kind": "refused",
                "reason": "incompatible_engine",
                "status": "FAILED_PRECONDITION",
                "detail": "block size 64, 32",
            },
        }
    ]


async def test_both_ends_are_checked_before_anything_is_asked(
    llumnix: Llumnix, source: Instance, unused_tcp_port: int
) -> None:
    there = f"127.0.0.1:{unused_tcp_port}"
    done = await llumnix("migrate", "--from", source.address, "--to", there, "--all")
    assert done.code == 4
    assert f"cannot reach {there}" in done.err
    assert source.agent.asked("migrate") == []


async def test_both_ends_unreachable_are_both_named(llumnix: Llumnix, unused_tcp_port_factory: object) -> None:
    assert callable(unused_tcp_port_factory)
    here, there = (f"127.0.0.1:{unused_tcp_port_factory()}" for _ in range(2))
    done = await llumnix("migrate", "--from", here, "--to", there, "--all")
    assert done.code == 4
    assert here in done.err
    assert there in done.err


async def test_a_source_that_dies_in_the_middle(source: Instance, destination: Instance) -> None:
    source.agent.go.clear()
    process = await start(*between(source, destination), "--all")
    await asyncio.wait_for(source.agent.copying.wait(), 60)
    await source.server.stop(grace_s=0)
    done = await finish(process)
    assert done.code == 5
    assert "shutting_down" in done.err
    assert "cmpl-abc123-0a1b2c3d" in done.out


async def test_watching_ends_at_its_timeout_but_the_moves_go_on(
    llumnix: Llumnix, source: Instance, destination: Instance
) -> None:
    source.agent.go.clear()
    flags = ["--request", "chat-zzz", "--timeout", "6"]
    done = await llumnix(*between(source, destination), *flags)
    assert done.code == 4
    assert "no answer before the deadline" in done.err
    assert "The moves go on" in done.err
    source.agent.go.set()
    await until(lambda: source.agent.moved == ["chat-zzz-00000000"])


async def test_interrupting_leaves_the_moves_going_on(source: Instance, destination: Instance) -> None:
    done = await interrupted(source, [*between(source, destination), "--request", "chat-zzz"])
    assert done.code == 130
    assert "The moves go on" in done.err
    assert "Traceback" not in done.err
    source.agent.go.set()
    await until(lambda: source.agent.moved == ["chat-zzz-00000000"])


async def test_interrupting_with_json(source: Instance, destination: Instance) -> None:
    flags = ["--request", "chat-zzz", "--json"]
    done = await interrupted(source, [*between(source, destination), *flags])
    assert done.code == 130
    assert done.lines[-1]["event"] == "interrupted"


async def interrupted(source: Instance, arguments: list[str]) -> Done:
    """Ctrl-C as soon as the first progress has been shown."""
    source.agent.go.clear()
    process = await start(*arguments)
    stream = process.stdout if "--json" in arguments else process.stderr
    assert stream is not None
    first = await asyncio.wait_for(stream.readline(), 60)
    process.send_signal(signal.SIGINT)
    done = await finish(process)
    if "--json" in arguments:
        assert json.loads(first)["event"] == "progress"
    return done


async def test_all_requests_of_one_client_id_move(llumnix: Llumnix, source: Instance, destination: Instance) -> None:
    for request_id in ("0_many-00000000", "1_many-00000000"):
        source.agent.requests.append(request_info(request_id, external_request_id="many"))
    done = await llumnix(*between(source, destination), "--request", "many")
    assert done.code == 0
    assert list(asked(source).request_ids) == ["0_many-00000000", "1_many-00000000"]
