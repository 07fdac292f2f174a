# SPDX-License-Identifier: Apache-2.0
"""Policies `decode_load` and `neutral_load`: from the hottest to the coldest, as long as it pays.

`metricBalanceSelector`: sources by load, highest first, and destinations, lowest first, are paired one by one until a
destination is no lower than its source. A pair that is not to be used (it cools down, or refused lately, or the
destination has no room, or it does not pay) gives way to the source's next destination.

What a move is worth: it lowers Σ load² by 2·x·(difference - x), where x is the load that changes place; that
counts for `horizon_s`. What it costs, in the same unit: while bytes are copied both ends hold them, and for the stall
the moved requests do nothing. A prefill is never worth it: requests that cannot bring their KV cache along stay where
they are, unless they wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from llumlet.protocol.selection import Order, Unit
from llumsched.rescheduling.config import Scope
from llumsched.rescheduling.domains import Mask
from llumsched.rescheduling.draft import RATIO, Draft
from llumsched.rescheduling.moves import AS_NEEDED, Move, Selection
from llumsched.rescheduling.snapshot import Column

Rows = npt.NDArray[np.intp]

_TRIES_PER_MOVE = 4
"""Sources that are looked at for each move that a pass may make: when the hottest do not pay, others hardly do."""
_DESTINATIONS_PER_SOURCE = 4
"""Of those that may be used: when the coldest do not pay, others hardly do."""


@dataclass(frozen=True, slots=True)
class _Aim:
    """What a set of instances that may exchange requests is brought to."""

    metric: str
    mean: float


def balance(draft: Draft, policy: str, infer_type: str) -> tuple[int, int]:
    """Adds moves to the draft. Returns how many instances could have been sources and destinations."""
    snapshot, target = draft.snapshot, draft.config.target(infer_type)
    able = (snapshot.infer_types == infer_type) & ~snapshot.failing & np.isfinite(draft.load)
    waiting = snapshot.moves & _takes_waiting(draft.config.selection.order)
    movable = (snapshot.carries_kv & (snapshot.running > 0)) | (waiting & (snapshot.waiting > 0))
    able_sources = able & (draft.out_slots >= 1) & movable
    able_destinations = able & (draft.in_slots >= 1) & (snapshot.carries_kv | waiting)
    if target.threshold > 0 and draft.config.scope is Scope.CLUSTER:
        able_sources &= draft.load >= target.threshold
        able_destinations &= draft.load < target.threshold
    for part in _parts(draft, able):
        _pair(
            draft,
            policy,
            _Aim(target.metric, float(draft.load[part].mean())),
            able_sources & part,
            able_destinations & part,
        )
    return int(able_sources.sum()), int(able_destinations.sum())


def _takes_waiting(order: Order) -> bool:
    return order in (Order.FCW, Order.FCWSR)


def _parts(draft: Draft, able: Mask) -> list[Mask]:
    """Sets of instances that may exchange requests."""
    groups, units = draft.snapshot.groups, draft.snapshot.units
    parts = [able & (groups == group) for group in np.unique(groups[able])]
    if draft.config.scope is Scope.CLUSTER:
        return parts
    return [part & (units == unit) for part in parts for unit in np.unique(units[part]) if unit >= 0]


def _pair(draft: Draft, policy: str, aim: _Aim, able_sources: Mask, able_destinations: Mask) -> None:
    hottest = _sorted(-draft.load, able_sources).tolist()
    coldest = _in_use(draft, _sorted(draft.load, able_destinations))
    scale = 1.0 if aim.metric == RATIO else max(float(draft.load[able_sources].max(initial=0.0)), 1.0)
    most_room = float(draft.free_tokens[coldest].max(initial=0.0))
    tries = draft.room * _TRIES_PER_MOVE
    for source in hottest:
        if draft.room <= 0 or tries <= 0:
            break
        tries -= 1
        if source in draft.chosen or source in draft.destinations:
            continue
        if draft.history.source_avoided(draft.snapshot.ids[source], draft.now_s):
            draft.refused["source_avoided"] += 1
            continue
        if _mean_tokens(draft, source) > most_room:
            draft.refused["no_room"] += int(np.count_nonzero(draft.load[coldest] < draft.load[source]))
            continue
        for destination in islice(_permitted(draft, source, coldest), _DESTINATIONS_PER_SOURCE):
            move, fault = weigh(draft, policy, source, destination, scale, aim.mean)
            if move is not None:
                draft.choose(source, destination, move)
                break
            draft.refused[fault] += 1
            if fault == "below_threshold":
                break  # with others the difference is smaller still


def _sorted(keys: Column, mask: Mask) -> Rows:
    rows = np.flatnonzero(mask)
    return rows[np.argsort(keys[rows], kind="stable")]


def _in_use(draft: Draft, destinations: Rows) -> Rows:
    """Without those that nobody is to use now."""
    avoided = draft.history.avoided_destinations(draft.now_s)
    if not avoided:
        return destinations
    kept = [row for row in destinations.tolist() if draft.snapshot.ids[row] not in avoided]
    draft.refused["destination_avoided"] += len(destinations) - len(kept)
    return np.array(kept, dtype=np.intp)


def _permitted(draft: Draft, source: int, coldest: Rows) -> Iterator[int]:
    """Destinations below the source with which it may be paired and that have room for a request, coldest first.

    In a full cluster hundreds have no room, for each of as many sources: those cost no more than a comparison.
    """
    ids = draft.snapshot.ids
    lower = coldest[draft.load[coldest] < draft.load[source]]
    fits = draft.free_tokens[lower] >= _mean_tokens(draft, source)
    if not fits.all():
        draft.refused["no_room"] += int((~fits).sum())
    for destination in lower[fits].tolist():
        if destination == source or destination in draft.sources or destination in draft.chosen:
            continue
        reason = draft.history.obstacle(ids[source], ids[destination], draft.now_s)
        if (source, destination) in draft.pairs:
            reason = "move_open"
        if reason:
            draft.refused[reason] += 1
        else:
            yield destination


def weigh(
    draft: Draft, policy: str, source: int, destination: int, scale: float, mean: float
) -> tuple[Move | None, str]:
    """The move from one to the other, or why it does not pay. `scale`: the load that counts as a full instance."""
    snapshot, config = draft.snapshot, draft.config
    difference = float(draft.load[source] - draft.load[destination])
    if difference < config.balance_threshold:
        return None, "below_threshold"
    selection = _selection(draft, source, destination, mean)
    tokens, requests = _expected(draft, selection, source, destination)
    if tokens > draft.free_tokens[destination]:
        return None, "no_room"
    given, taken = (shift / scale for shift in draft.shifts(source, destination, tokens))
    here, there = float(draft.load[source]) / scale, float(draft.load[destination]) / scale
    gain = config.horizon_s * (here**2 + there**2 - (here - given) ** 2 - (there + taken) ** 2)
    copy_s = tokens * float(snapshot.bytes_per_token[source]) / draft.history.link_bytes_per_s
    cost = copy_s * ((there + taken) ** 2 - there**2) + float(snapshot.stall_s[source]) * given
    if gain <= cost:
        return None, "not_worth_it"
    names = snapshot.ids[source], snapshot.ids[destination]
    limit = _most(draft, source, destination, difference) if config.selection.value == AS_NEEDED else None
    return Move(policy, *names, selection, tokens, requests, gain, cost, limit), ""


def _selection(draft: Draft, source: int, destination: int, mean: float) -> Selection:
    """As configured; AS_NEEDED becomes the tokens that bring one of the two to the mean of all, which may be less than
    one request. More would only have to move on: an empty instance would take half of the hottest one's requests."""
    asked = draft.config.selection
    if asked.value != AS_NEEDED:
        return asked
    wanted = min(float(draft.load[source]) - mean, mean - float(draft.load[destination]))
    tokens = wanted / (draft.shift(source, 1.0) or 1.0)
    return Selection(Unit.TOKEN, asked.order, float(max(round(tokens), 1)))


def _most(draft: Draft, source: int, destination: int, difference: float) -> float:
    """Tokens with which a move leaves Σ load² as it is: half of them lower it the most."""
    given, taken = draft.shifts(source, destination, 1.0)
    return difference * (given + taken) / (given**2 + taken**2) if given > 0 else 0.0


def _expected(draft: Draft, selection: Selection, source: int, destination: int) -> tuple[float, float]:
    """Tokens and requests that the source will choose. At least one request of average length: if none fits the budget,
    the source takes the first one alone."""
    snapshot, mean = draft.snapshot, _mean_tokens(draft, source)
    number, tokens = _candidates(draft, source)
    match selection.unit:
        case Unit.NUM_REQ:
            budget = tokens if selection.value < 0 else selection.value * mean
        case Unit.RATIO:
            budget = selection.value * float(snapshot.total_tokens[source])
        case Unit.TOKEN:
            budget = selection.value
    slots = float(min(draft.out_slots[source], draft.in_slots[destination]))
    requests = min(max(budget // mean, 1.0), slots, max(number, 1.0))
    return requests * mean, requests


def _candidates(draft: Draft, source: int) -> tuple[float, float]:
    """Requests from among which the source chooses, and their tokens."""
    snapshot = draft.snapshot
    if _takes_waiting(draft.config.selection.order) and snapshot.waiting[source] > 0:
        return float(snapshot.waiting[source]), float(snapshot.waiting_tokens[source])
    return float(snapshot.running[source]), float(snapshot.running_tokens[source])


def _mean_tokens(draft: Draft, source: int) -> float:
    """Of a request that moves."""
    number, tokens = _candidates(draft, source)
    return max(tokens / max(number, 1.0), 1.0)
