# SPDX-License-Identifier: Apache-2.0
"""Faults of a message by itself.

Each function returns all faults, a sentence each. The agent checks if ids are known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from llumlet.contract import types
from llumlet.contract.block_hashes import HASH_BYTES
from llumlet.process.addresses import Address
from llumlet.protocol.move.selection import Unit, value_fault

MAX_ID_CHARACTERS = 64 << 10
"""Length limit of an id: a client names its request in an HTTP header, which may be about as long."""
MAX_BLOCK_ID = 2**31 - 1
MOST_WATCH_INTERVAL_S = 60.0

_VALUE_FIELD = {
    types.MigrationType.NUM_REQ: "num_reqs",
    types.MigrationType.TOKEN: "num_tokens",
    types.MigrationType.RATIO: "kv_cache_usage_ratio",
}
_METHODS = {types.Mode.MODE_UNSPECIFIED, types.Mode.LIVE, types.Mode.BLOCKING, types.Mode.RECOMPUTE}


def migrate_faults(request: types.MigrateRequest) -> list[str]:
    faults = []
    if not request.dst_engine_id:
        faults.append("dst_engine_id is empty")
    if not request.dst_engine_ip:
        faults.append("dst_engine_ip is empty")
    if not 0 < request.dst_engine_port < 65536:
        faults.append(f"dst_engine_port {request.dst_engine_port} is not a port")
    return faults + _selection_faults(request)


def drain_faults(request: types.DrainRequest) -> list[str]:
    faults = [fault for destination in request.destinations for fault in _address_faults("destinations", destination)]
    if not (math.isfinite(request.timeout_s) and request.timeout_s >= 0):
        faults.append(f"timeout_s {request.timeout_s} is not a time in seconds")
    return faults


def watch_cache_faults(request: types.WatchCacheRequest) -> list[str]:
    if 0 <= request.interval_s <= MOST_WATCH_INTERVAL_S:
        return []
    return [f"interval_s {request.interval_s} is not between 0 and {MOST_WATCH_INTERVAL_S:g} seconds"]


def migrate_in_faults(request: types.MigrateInRequest) -> list[str]:
    faults = _address_faults("src_address", request.src_address)
    if not request.HasField("request"):
        return [*faults, "request is missing"]
    return faults + [f"request.{fault}" for fault in _selection_faults(request.request)]


def abort_faults(request: types.AbortRequest) -> list[str]:
    return _id_faults("request_ids", request.request_ids, required=True)


def abort_migrate_in_faults(request: types.AbortMigrateInRequest) -> list[str]:
    if not request.migration_ids and not request.request_ids:
        return ["neither migration_ids nor request_ids are given"]
    return _id_faults("migration_ids", request.migration_ids) + _id_faults("request_ids", request.request_ids)


def reserve_faults(request: types.ReserveRequest) -> list[str]:
    faults = _handover_faults(request.handover, reserved=False)
    for field in ("src_engine_id", "dst_engine_id", "request_state"):
        if not getattr(request, field):
            faults.append(f"{field} is empty")
    for field in ("src_engine_id", "dst_engine_id", "src_address"):
        faults += _length_faults(field, getattr(request, field))
    faults += _address_faults("src_address", request.src_address)
    if request.method not in _METHODS | {types.Mode.WAITING}:
        faults.append(f"method {request.method} is not a way to move a request")
    return faults


def copy_round_faults(request: types.CopyRoundRequest) -> list[str]:
    faults = _handover_faults(request.handover)
    if request.from_block > request.to_block:
        faults.append(f"blocks [{request.from_block}, {request.to_block}) run backwards")
    elif not _are_rows(len(request.block_ids), request.to_block - request.from_block):
        blocks = f"[{request.from_block}, {request.to_block})"
        faults.append(f"{len(request.block_ids)} block_ids for blocks {blocks}")
    return faults + _block_id_faults(request.block_ids)


def _are_rows(num_ids: int, num_rows: int) -> bool:
    """True if each row has equally many ids; none if the cache keeps nothing per token."""
    return num_ids % num_rows == 0 if num_rows else num_ids == 0


def commit_faults(request: types.CommitRequest) -> list[str]:
    faults = _handover_faults(request.handover)
    if (request.epoch.term, request.epoch.hop) <= (0, 0):
        faults.append("epoch must be above 0.0, at which a request is born")
    return faults + _block_id_faults([*request.block_ids, *request.state_ids, *request.accepted_state_ids])


def adopt_faults(request: types.AdoptRequest) -> list[str]:
    faults = []
    if not request.request_state:
        faults.append("request_state is empty")
    if request.epoch.term == 0:
        faults.append("epoch must have a term above 0, which only an origin raises")
    if request.HasField("holder"):
        faults += _name_faults("holder", request.holder, ["instance_id", "incarnation"])
        faults += _address_faults("holder.address", request.holder.address)
    return faults


def cached_prefix_faults(request: types.CachedPrefixRequest) -> list[str]:
    faults = []
    if not request.blocks or len(request.blocks) % HASH_BYTES:
        faults.append(f"blocks has {len(request.blocks)} bytes, not {HASH_BYTES} for each of at least one block")
    if request.block_size == 0:
        faults.append("block_size is 0")
    return faults


def claim_faults(request: types.ClaimRequest) -> list[str]:
    faults = _name_faults("", request, ["request_id", "incarnation"])
    if request.epoch.term == 0:
        faults.append("epoch must have a term above 0: only a request that its origin took away can be claimed")
    return faults


def end_claim_faults(request: types.EndClaimRequest) -> list[str]:
    return _name_faults("", request, ["claim_id"])


def settle_faults(request: types.SettleRequest) -> list[str]:
    # A reservation whose answer never came is settled without knowing the destination's life.
    return _handover_faults(request.handover, reserved=False)


def _selection_faults(request: types.MigrateRequest) -> list[str]:
    faults = [] if request.src_engine_id else ["src_engine_id is empty"]
    faults += _id_faults("request_ids", request.request_ids)
    value = request.WhichOneof("value")
    by_rule = bool(request.migration_type or request.migration_req_policy or value)
    if by_rule and request.request_ids:
        faults.append("give request_ids or a rule (migration_type, migration_req_policy, a value), not both")
    elif by_rule:
        faults += _rule_faults(request, value)
    elif not request.request_ids:
        faults.append("nothing is selected: give request_ids, or a migration_type, a migration_req_policy and a value")
    if request.method not in _METHODS:
        faults.append(f"method {request.method} is not LIVE (1), BLOCKING (2) or RECOMPUTE (3)")
    if request.HasField("stall_budget_ms") and not 0 <= request.stall_budget_ms < math.inf:
        faults.append(f"stall_budget_ms {request.stall_budget_ms} is not a duration")
    return faults


def _rule_faults(request: types.MigrateRequest, value: str | None) -> list[str]:
    faults = []
    if request.migration_req_policy not in types.MigrationReqPolicy.values()[1:]:
        known = ", ".join(types.MigrationReqPolicy.keys()[1:])
        faults.append(f"migration_req_policy {request.migration_req_policy} is not one of {known}")
    field = _VALUE_FIELD.get(request.migration_type)
    if field is None:
        known = ", ".join(types.MigrationType.keys()[1:])
        faults.append(f"migration_type {request.migration_type} is not one of {known}")
    elif value != field:
        faults.append(f"{types.MigrationType.Name(request.migration_type)} needs {field}, not {value or 'nothing'}")
    elif fault := value_fault(Unit(types.MigrationType.Name(request.migration_type)), getattr(request, field)):
        faults.append(f"{field} {fault}")
    return faults


def _id_faults(field: str, ids: Iterable[str], *, required: bool = False) -> list[str]:
    ids = list(ids)
    faults = [f"{field}[{index}] is empty" for index, text in enumerate(ids) if not text]
    faults += [fault for index, text in enumerate(ids) for fault in _length_faults(f"{field}[{index}]", text)]
    repeated = sorted(text for text, times in Counter(ids).items() if text and times > 1)
    faults += [f"{field} holds {text!r} twice" for text in repeated]
    return [f"{field} is empty"] if required and not ids else faults


def _block_id_faults(block_ids: Sequence[int]) -> list[str]:
    return [f"block id {max(block_ids)} is too large"] if block_ids and max(block_ids) > MAX_BLOCK_ID else []


def _handover_faults(handover: types.Handover, *, reserved: bool = True) -> list[str]:
    fields = ["migration_id", "request_id", "src_incarnation"]
    if reserved:
        fields.append("dst_incarnation")
    return _name_faults("handover", handover, fields)


def _name_faults(where: str, message: object, fields: Iterable[str]) -> list[str]:
    """Fields that must name something. `where` is the field that holds the message, if one does."""
    names = {f"{where}.{field}".removeprefix("."): getattr(message, field) for field in fields}
    faults = [f"{field} is empty" for field, text in names.items() if not text]
    return faults + [fault for field, text in names.items() for fault in _length_faults(field, text)]


def _address_faults(field: str, text: str) -> list[str]:
    try:
        Address.parse(text)
    except ValueError as error:
        return [f"{field}: {error}"]
    return []


def _length_faults(field: str, text: str) -> list[str]:
    """The fault of an id that is too long: ids are kept, logged and quoted."""
    return [f"{field} has {len(text)} characters"] if len(text) > MAX_ID_CHARACTERS else []
