# SPDX-License-Identifier: Apache-2.0
"""Which requests a Migrate call means, at a simulated instance."""

from __future__ import annotations

from collections.abc import Iterable

from llumlet.bridge import rule_of
from llumlet.errors import LlumletError
from llumlet.protocol.ids import RequestId
from llumlet.protocol.selection import Candidate
from llumlet.protocol.selection import select as select_by_rule
from llumlet.types import MigrateRequest, Reason
from llumsched.testing.engine import SimulatedEngine, SimulatedRequest


def select(engine: SimulatedEngine, request: MigrateRequest) -> list[SimulatedRequest]:
    """The requests that a call means. Raises LlumletError for an id that is not here."""
    here = {each.request_id: each for each in engine.requests}
    ids = list(request.request_ids)
    unknown = [request_id for request_id in ids if request_id not in here]
    if unknown:
        raise LlumletError(Reason.UNKNOWN_REQUEST, f"not here: {', '.join(unknown)}")
    if not ids:
        decoding = [each for each in engine.running if not each.in_prefill]
        candidates = [*_queued(engine.waiting, running=False), *_queued(decoding, running=True)]
        ids = list(select_by_rule(candidates, rule_of(request), engine.model.num_blocks * engine.model.block_size))
    return [here[request_id] for request_id in ids]


def _queued(requests: Iterable[SimulatedRequest], *, running: bool) -> list[Candidate]:
    in_order = sorted(requests, key=lambda each: each.arrival_order)
    return [
        Candidate(RequestId(each.request_id), running, position, each.num_tokens, movable=not each.moving)
        for position, each in enumerate(in_order)
    ]
