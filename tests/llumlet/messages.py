# SPDX-License-Identifier: Apache-2.0
"""Messages that the validation lets pass."""

from __future__ import annotations

from typing import Any

from llumlet.contract.types import (
    AdoptRequest,
    CachedPrefixRequest,
    ClaimRequest,
    CommitRequest,
    CopyRoundRequest,
    EndClaimRequest,
    Epoch,
    Handover,
    Holder,
    MigrateInRequest,
    MigrateRequest,
    ReserveRequest,
    SettleRequest,
)


def handover(**changes: Any) -> Handover:
    fields = {
        "migration_id": "m-1",
        "request_id": "r-1",
        "src_incarnation": "i-9",
        "dst_incarnation": "i-1",
    }
    return Handover(**(fields | changes))


def migrate(**changes: Any) -> MigrateRequest:
    fields: dict[str, Any] = {
        "src_engine_id": "fake-a",
        "dst_engine_id": "fake-b",
        "dst_engine_ip": "127.0.0.1",
        "dst_engine_port": 4000,
        "request_ids": ["cmpl-7-0a1b2c3d"],
    }
    return MigrateRequest(**(fields | changes))


def migrate_by_rule(**changes: Any) -> MigrateRequest:
    rule = {"migration_type": "NUM_REQ", "migration_req_policy": "SR", "num_reqs": 1}
    return migrate(**({"request_ids": []} | rule | changes))


def migrate_in(**changes: Any) -> MigrateInRequest:
    request = MigrateRequest(src_engine_id="fake-a", request_ids=["r-1"])
    return MigrateInRequest(**({"src_address": "127.0.0.1:4000", "request": request} | changes))


def reserve(**changes: Any) -> ReserveRequest:
    fields: dict[str, Any] = {
        "handover": handover(dst_incarnation=""),
        "src_engine_id": "fake-b",
        "dst_engine_id": "fake-a",
        "src_address": "127.0.0.1:4000",
        "request_state": b"state",
        "source_memory": b"\x00\xff memory",
        "num_blocks": 8,
    }
    return ReserveRequest(**(fields | changes))


def copy_round(**changes: Any) -> CopyRoundRequest:
    fields: dict[str, Any] = {
        "handover": handover(step=2),
        "round": 1,
        "from_block": 2,
        "to_block": 5,
        "num_tokens": 160,
        "block_ids": [70, 9, 11],
        "new_token_ids": [128255, 0],
    }
    return CopyRoundRequest(**(fields | changes))


def commit(**changes: Any) -> CommitRequest:
    fields: dict[str, Any] = {
        "handover": handover(step=3),
        "epoch": Epoch(hop=1),
        "base": 20,
        "computed_tokens": 119,
        "from_block": 5,
        "block_ids": [12],
    }
    return CommitRequest(**(fields | changes))


def settle(**changes: Any) -> SettleRequest:
    return SettleRequest(**({"handover": handover(step=4)} | changes))


def adopt(**changes: Any) -> AdoptRequest:
    fields: dict[str, Any] = {
        "epoch": Epoch(term=1),
        "compatibility_digest": "d",
        "request_state": b"state",
        "holder": Holder(instance_id="A", incarnation="i-1", address="127.0.0.1:4000"),
    }
    return AdoptRequest(**(fields | changes))


def cached_prefix(**changes: Any) -> CachedPrefixRequest:
    return CachedPrefixRequest(**({"blocks": b"12345678" * 3, "block_size": 16} | changes))


def claim(**changes: Any) -> ClaimRequest:
    fields: dict[str, Any] = {"request_id": "r-1", "epoch": Epoch(term=1), "incarnation": "i-1"}
    return ClaimRequest(**(fields | changes))


def end_claim(**changes: Any) -> EndClaimRequest:
    return EndClaimRequest(**({"claim_id": "c-1"} | changes))
