# SPDX-License-Identifier: Apache-2.0
"""Messages that make no sense, and what is said about them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llumlet.contract import validation
from llumlet.contract.types import AbortMigrateInRequest, AbortRequest, DrainRequest, Epoch, Holder, MigrateRequest
from llumlet.process.addresses import Address
from tests.llumlet import messages

RATIO = {"migration_type": "RATIO", "kv_cache_usage_ratio": 0.5}
TOKEN = {"migration_type": "TOKEN", "num_tokens": 100}


@pytest.mark.parametrize(
    "request_",
    [
        messages.migrate(),
        messages.migrate(method="RECOMPUTE", force=True, stall_budget_ms=0),
        messages.migrate_by_rule(),
        messages.migrate_by_rule(num_reqs=-1),
        messages.migrate_by_rule(**TOKEN),
        messages.migrate_by_rule(**RATIO),
        messages.migrate_by_rule(**(RATIO | {"kv_cache_usage_ratio": 1.0})),
    ],
)
def test_legal_migrate_requests(request_: MigrateRequest) -> None:
    assert validation.migrate_faults(request_) == []


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (messages.migrate(src_engine_id=""), "src_engine_id is empty"),
        (messages.migrate(dst_engine_id=""), "dst_engine_id is empty"),
        (messages.migrate(dst_engine_ip=""), "dst_engine_ip is empty"),
        (messages.migrate(dst_engine_port=0), "dst_engine_port 0 is not a port"),
        (messages.migrate(dst_engine_port=70000), "dst_engine_port 70000 is not a port"),
        (messages.migrate(request_ids=[]), "nothing is selected"),
        (messages.migrate(request_ids=["a", ""]), "request_ids[1] is empty"),
        (messages.migrate(request_ids=["a", "b", "a"]), "request_ids holds 'a' twice"),
        (messages.migrate(num_reqs=1), "not both"),
        (messages.migrate(method=4), "method 4"),
        (messages.migrate(method=77), "method 77"),
        (messages.migrate(stall_budget_ms=-1), "stall_budget_ms -1.0 is not a duration"),
        (messages.migrate(stall_budget_ms=math.nan), "stall_budget_ms nan is not a duration"),
        (messages.migrate_by_rule(migration_type=9), "migration_type 9 is not one of NUM_REQ"),
        (messages.migrate_by_rule(migration_req_policy=0), "migration_req_policy 0 is not one of"),
        (messages.migrate_by_rule(migration_req_policy=44), "migration_req_policy 44"),
        (messages.migrate_by_rule(num_reqs=0), "num_reqs 0 is neither"),
        (messages.migrate_by_rule(num_reqs=-2), "num_reqs -2 is neither"),
        (messages.migrate_by_rule(**(TOKEN | {"num_tokens": -5})), "num_tokens -5 is not positive"),
        (messages.migrate_by_rule(**(RATIO | {"kv_cache_usage_ratio": 0})), "not in (0, 1]"),
        (messages.migrate_by_rule(**(RATIO | {"kv_cache_usage_ratio": 1.5})), "not in (0, 1]"),
        (messages.migrate_by_rule(**(RATIO | {"kv_cache_usage_ratio": math.nan})), "not in (0, 1]"),
        (
            messages.migrate_by_rule(migration_type="TOKEN"),
            "TOKEN needs num_tokens, not num_reqs",
        ),
    ],
)
def test_faulty_migrate_requests(request_: MigrateRequest, fault: str) -> None:
    (found,) = validation.migrate_faults(request_)
    assert fault in found


def test_all_faults_are_said_at_once() -> None:
    assert len(validation.migrate_faults(MigrateRequest(method=9))) == 6


def test_migrate_in() -> None:
    assert validation.migrate_in_faults(messages.migrate_in()) == []
    assert "src_address" in validation.migrate_in_faults(messages.migrate_in(src_address="h"))[0]
    assert validation.migrate_in_faults(messages.migrate_in(request=None)) == ["request is missing"]
    inner = messages.migrate_in(request=MigrateRequest(request_ids=["a"]))
    assert validation.migrate_in_faults(inner) == ["request.src_engine_id is empty"]


@pytest.mark.parametrize(
    ("faults", "fault"),
    [
        (validation.abort_faults(AbortRequest()), "request_ids is empty"),
        (validation.abort_faults(AbortRequest(request_ids=[""])), "request_ids[0] is empty"),
        (validation.abort_migrate_in_faults(AbortMigrateInRequest()), "neither"),
        (
            validation.abort_migrate_in_faults(AbortMigrateInRequest(migration_ids=["a", "a"])),
            "migration_ids holds 'a' twice",
        ),
        (validation.reserve_faults(messages.reserve(request_state=b"")), "request_state is empty"),
        (validation.reserve_faults(messages.reserve(src_address="")), "src_address"),
        (validation.reserve_faults(messages.reserve(method=5)), "method 5"),
        (validation.reserve_faults(messages.reserve(handover=None)), "handover.migration_id"),
        (validation.copy_round_faults(messages.copy_round(to_block=1)), "run backwards"),
        (validation.copy_round_faults(messages.copy_round(to_block=6)), "3 block_ids for blocks"),
        (
            validation.copy_round_faults(messages.copy_round(handover=messages.handover(dst_incarnation=""))),
            "handover.dst_incarnation is empty",
        ),
        (validation.commit_faults(messages.commit(epoch=None)), "epoch must be above 0.0"),
        (validation.commit_faults(messages.commit(epoch=Epoch())), "epoch must be above 0.0"),
        (
            validation.settle_faults(messages.settle(handover=messages.handover(request_id=""))),
            "handover.request_id is empty",
        ),
        (validation.adopt_faults(messages.adopt(request_state=b"")), "request_state is empty"),
        (validation.adopt_faults(messages.adopt(epoch=Epoch(hop=1))), "a term above 0"),
        (validation.adopt_faults(messages.adopt(holder=Holder(address="h:1", incarnation="i"))), "holder.instance_id"),
        (
            validation.adopt_faults(messages.adopt(holder=Holder(instance_id="A", incarnation="i", address="h"))),
            "holder.address",
        ),
        (validation.cached_prefix_faults(messages.cached_prefix(blocks=b"")), "blocks has 0 bytes"),
        (validation.cached_prefix_faults(messages.cached_prefix(blocks=b"123456789")), "blocks has 9 bytes"),
        (validation.cached_prefix_faults(messages.cached_prefix(block_size=0)), "block_size is 0"),
        (validation.claim_faults(messages.claim(request_id="")), "request_id is empty"),
        (validation.claim_faults(messages.claim(epoch=Epoch(hop=3))), "a term above 0"),
        (validation.end_claim_faults(messages.end_claim(claim_id="c" * (64 << 10) + "c")), "claim_id has 65537"),
    ],
)
def test_other_messages(faults: list[str], fault: str) -> None:
    assert fault in faults[0]


def test_legal_peer_messages() -> None:
    assert validation.reserve_faults(messages.reserve()) == []
    assert validation.copy_round_faults(messages.copy_round()) == []
    assert validation.commit_faults(messages.commit()) == []
    assert validation.commit_faults(messages.commit(block_ids=[], computed_tokens=0)) == []
    unanswered = messages.settle(handover=messages.handover(dst_incarnation=""))
    assert validation.settle_faults(unanswered) == []
    assert validation.adopt_faults(messages.adopt()) == []
    assert validation.adopt_faults(messages.adopt(holder=None)) == []
    assert validation.cached_prefix_faults(messages.cached_prefix()) == []
    assert validation.claim_faults(messages.claim()) == []
    assert validation.end_claim_faults(messages.end_claim()) == []


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("[::1]:5000", ("::1", 5000)),
        (" node-3.cluster:1 ", ("node-3.cluster", 1)),
    ],
)
def test_addresses(text: str, parsed: Any) -> None:
    assert Address.parse(text) == parsed
    assert str(Address.parse(text)) == text.strip()


def test_drain_requests() -> None:
    assert validation.drain_faults(DrainRequest()) == []
    assert validation.drain_faults(DrainRequest(destinations=["a:1", "[::1]:2"], timeout_s=10)) == []
    assert len(validation.drain_faults(DrainRequest(destinations=["a", "b:0"], timeout_s=-1))) == 3
    assert validation.drain_faults(DrainRequest(timeout_s=math.inf)) == ["timeout_s inf is not a time in seconds"]
