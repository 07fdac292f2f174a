# SPDX-License-Identifier: Apache-2.0
"""Which requests a Migrate call means, at a simulated instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llumlet.errors import LlumletError
from llumlet.types import MigrateRequest, MigrationReqPolicy, MigrationType, Reason
from llumsched.testing.engine import SimulatedEngine, SimulatedRequest

_ORDERS: Final[dict[int, Callable[[SimulatedRequest], float]]] = {
    MigrationReqPolicy.LCR: lambda request: -request.arrival_order,
    MigrationReqPolicy.FCR: lambda request: request.arrival_order,
    MigrationReqPolicy.LR: lambda request: -request.num_tokens,
    MigrationReqPolicy.SR: lambda request: request.num_tokens,
    MigrationReqPolicy.FCWSR: lambda request: request.num_tokens,
}


def select(engine: SimulatedEngine, request: MigrateRequest) -> list[SimulatedRequest]:
    """Raises LlumletError for an id that is not here."""
    if request.request_ids:
        here = {each.request_id: each for each in engine.requests}
        unknown = [request_id for request_id in request.request_ids if request_id not in here]
        if unknown:
            raise LlumletError(Reason.UNKNOWN_REQUEST, f"not here: {', '.join(unknown)}")
        return [here[request_id] for request_id in request.request_ids]
    candidates = _ordered(engine, request.migration_req_policy)
    if request.migration_type == MigrationType.NUM_REQ:
        if request.num_reqs == -1:
            return candidates + [each for each in _movable(engine) if each not in candidates]
        return candidates[: request.num_reqs]
    tokens = request.num_tokens
    if request.migration_type == MigrationType.RATIO:
        tokens = int(request.kv_cache_usage_ratio * engine.model.num_blocks * engine.model.block_size)
    return _of_tokens(candidates, tokens)


def _ordered(engine: SimulatedEngine, policy: MigrationReqPolicy) -> list[SimulatedRequest]:
    movable = _movable(engine)
    waiting = [each for each in movable if each in engine.waiting]
    if policy == MigrationReqPolicy.FCW or (policy == MigrationReqPolicy.FCWSR and waiting):
        return waiting
    return sorted((each for each in movable if each not in engine.waiting), key=_ORDERS[policy])


def _movable(engine: SimulatedEngine) -> list[SimulatedRequest]:
    """Those that wait before those that run; first come, first."""
    decoding = [each for each in engine.running if not each.in_prefill]
    first_come = _ORDERS[MigrationReqPolicy.FCR]
    both = sorted(engine.waiting, key=first_come) + sorted(decoding, key=first_come)
    return [each for each in both if not each.moving]


def _of_tokens(candidates: list[SimulatedRequest], tokens: int) -> list[SimulatedRequest]:
    """Those that fit into what is left of `tokens`; the first alone if none does."""
    chosen = []
    for each in candidates:
        if each.num_tokens <= tokens:
            tokens -= each.num_tokens
            chosen.append(each)
    return chosen or candidates[:1]
