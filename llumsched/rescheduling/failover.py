# SPDX-License-Identifier: Apache-2.0
"""Policies `prefill_failover`, `decode_failover` and `neutral_failover`: everything away from what is failing.

`roundRobinSelector`: sources and destinations by id, source i begins with destination i modulo their number. Beyond it,
the requests of one source are dealt to all healthy destinations in turn, as many as it can move at a time; the rest
follows in later passes, which go on in the round where this one ended.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice

import numpy as np

from llumlet.protocol.selection import ALL, Order, Unit
from llumsched.rescheduling.draft import Draft
from llumsched.rescheduling.moves import Move, Selection


def fail_over(draft: Draft, policy: str, infer_type: str) -> tuple[int, int]:
    """Adds moves to the draft. Returns how many sources and destinations there were."""
    snapshot = draft.snapshot
    of_type = snapshot.infer_types == infer_type
    holding = (snapshot.running + snapshot.waiting > 0) & (draft.out_slots >= 1) & snapshot.reachable & snapshot.moves
    sources = np.flatnonzero(of_type & snapshot.failing & holding).tolist()
    destinations = of_type & ~snapshot.failing & (draft.in_slots >= 1)
    for turn, source in enumerate(sources):
        if draft.history.source_avoided(snapshot.ids[source], draft.now_s):
            draft.refused["source_avoided"] += 1
            continue
        same = np.flatnonzero(destinations & (snapshot.groups == snapshot.groups[source])).tolist()
        if not same:
            draft.refused["no_destination"] += 1
            continue
        start = (turn + draft.history.dealt(snapshot.ids[source])) % len(same)
        _deal(draft, policy, source, same[start:] + same[:start])
    return len(sources), int(destinations.sum())


def _permitted(draft: Draft, source: int, destination: int) -> bool:
    """Health goes before rest: only what refused or failed is left alone."""
    ids = draft.snapshot.ids
    obstacle = draft.history.obstacle(ids[source], ids[destination], draft.now_s)
    if obstacle == "destination_avoided" or (source, destination) in draft.pairs:
        draft.refused[obstacle or "move_open"] += 1
        return False
    return destination not in draft.sources


def _deal(draft: Draft, policy: str, source: int, ring: list[int]) -> None:
    snapshot, slots = draft.snapshot, int(draft.out_slots[source])
    left = int(snapshot.running[source] + snapshot.waiting[source] - draft.leaving[source])
    if left <= 0:
        return
    permitted = (destination for destination in ring if _permitted(draft, source, destination))
    destinations = list(islice(permitted, min(left, slots)))
    if not destinations:
        return
    if left <= slots and len(ring) == 1:
        tokens = float(snapshot.running_tokens[source] + snapshot.waiting_tokens[source])
        _add(draft, policy, (source, destinations[0]), Selection(Unit.NUM_REQ, Order.LR, ALL), tokens, left)
        return
    # Requests with a KV cache first: what waits has the least to lose.
    running = min(int(snapshot.running[source]), left)
    queue = ([Order.LR] * running + [Order.FCW] * (left - running))[:slots]
    for (order, destination), number in _shares(draft, queue, destinations).items():
        held, requests = (
            (snapshot.waiting_tokens, snapshot.waiting)
            if order is Order.FCW
            else (snapshot.running_tokens, snapshot.running)
        )
        tokens = number * float(held[source]) / max(float(requests[source]), 1.0)
        _add(draft, policy, (source, destination), Selection(Unit.NUM_REQ, order, float(number)), tokens, number)


def _shares(draft: Draft, queue: list[Order], destinations: list[int]) -> Counter[tuple[Order, int]]:
    """Requests per order and destination: one each in turn, to those with slots left."""
    slots = {destination: int(draft.in_slots[destination]) for destination in destinations}
    ring = deque(destinations)
    shares: Counter[tuple[Order, int]] = Counter()
    for order in queue:
        while ring and slots[ring[0]] <= 0:
            ring.popleft()
        if not ring:
            draft.refused["no_slot"] += 1
            break
        shares[order, ring[0]] += 1
        slots[ring[0]] -= 1
        ring.rotate(-1)
    return shares


def _add(
    draft: Draft, policy: str, ends: tuple[int, int], selection: Selection, tokens: float, num_requests: int
) -> None:
    if draft.room <= 0:
        draft.refused["pass_is_full"] += 1
        return
    source, destination = (draft.snapshot.ids[row] for row in ends)
    draft.choose(*ends, Move(policy, source, destination, selection, tokens, float(num_requests)))
