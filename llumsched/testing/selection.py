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
    candidates = [each for each in _ordered(engine, request.migration_req_policy) if not each.moving]
    if request.migration_type == MigrationType.NUM_REQ:
        return candidates if request.num_reqs == -1 else candidates[: request.num_reqs]
    tokens = request.num_tokens
    if request.migration_type == MigrationType.RATIO:
        tokens = int(request.kv_cache_usage_ratio * engine.model.num_blocks * engine.model.block_size)
    return _of_tokens(candidates, tokens)


def _ordered(engine: SimulatedEngine, policy: MigrationReqPolicy) -> list[SimulatedRequest]:
    waiting = sorted(engine.waiting, key=_ORDERS[MigrationReqPolicy.FCR])
    if policy == MigrationReqPolicy.FCW:
        return waiting
    decoding = [each for each in engine.running if not each.in_prefill]
    running = sorted(decoding, key=_ORDERS[policy])
    return waiting + running if policy == MigrationReqPolicy.FCWSR else running


def _of_tokens(candidates: list[SimulatedRequest], tokens: int) -> list[SimulatedRequest]:
    """Those that fit into what is left of `tokens`; the first alone if none does."""
    chosen = []
    for each in candidates:
        if each.num_tokens <= tokens:
            tokens -= each.num_tokens
            chosen.append(each)
    return chosen or candidates[:1]
