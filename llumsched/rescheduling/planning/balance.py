# SPDX-License-Identifier: Apache-2.0
"""`metricBalanceSelector`: moves from the hottest to the coldest instances, as long as that pays.

Sources by descending load are paired with destinations by ascending load until a destination is no lower than its
source. If a pair cannot be used (cool-down, recent refusal, no room, no gain), the source's next destination is tried.

Gain: a move lowers Σ load² by 2·x·(difference - x) for the moved load x, counted for `horizon_s`. Cost, in the same
unit: both ends hold the copied bytes during the copy, and the moved requests stall. Blocks in the destination's prefix
cache need no copy; of the first destinations that pay, the best one is taken. A balance is never worth a prefill: only
waiting requests move without their KV cache, and they are charged for the prefix hits that they lose.

The metric itself tells the moved load: its value with the requests less its value without. If they make no difference
to it, nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import ClassVar

import numpy as np

from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.columns import Mask, Rows, Values
from llumsched.cluster.providers.status import Cargo
from llumsched.policy.metrics import Metric
from llumsched.rescheduling.planning.draft import Draft
from llumsched.rescheduling.planning.moves import AS_NEEDED, Move, Purpose, Selection
from llumsched.rescheduling.planning.pairs import Ends, Unfit, sorted_rows
from llumsched.rescheduling.rescheduling_config import SHORTEST_AS_NEEDED, Scope

_TRIES_PER_MOVE = 4
"""Sources tried per move that a pass may make: if the hottest do not pay, others hardly do."""
_DESTINATIONS_PER_SOURCE = 4
"""Destinations tried per source."""
_OF_THE_SOURCE = frozenset({"below_threshold", "not_worth_it"})
"""Faults with the coldest permitted destination that less cold ones almost always share, unless prefix caches
differ."""
_MOST_IN_VAIN = 8
"""Sources in a row without a move that pays, after which the search ends."""


@dataclass(frozen=True, slots=True)
class MetricBalancePairs:
    metric: Metric
    """The load: less is better."""
    threshold: float = 0.0
    """Sources have at least this load, destinations less; 0 sets no limit."""
    difference: float = 0.0
    """Smallest difference of load between the ends of a move."""
    scope: Scope = Scope.CLUSTER
    selection: Selection = SHORTEST_AS_NEEDED
    name: ClassVar[str] = "metricBalanceSelector"
    purpose: ClassVar[Purpose] = Purpose.BALANCE

    @property
    def takes_waiting(self) -> bool:
        return self.selection.order in (Order.FCW, Order.FCWSR)

    def pair(self, draft: Draft, policy: str, ends: Ends) -> tuple[int, int]:
        load = self.metric.values(draft.projected).copy()
        able = (ends.sources | ends.destinations) & np.isfinite(load)
        left = ends.without(self._unfit(draft, load))
        for part in self._parts(draft, able):
            mean = float(load[part].mean())
            _Balancing(self, draft, policy, load, mean).between(left.sources & part, left.destinations & part)
        return int(left.sources.sum()), int(left.destinations.sum())

    def unfit(self, draft: Draft) -> Unfit:
        of_load = self._unfit(draft, self.metric.values(draft.projected))
        rest = [("has a move of this pass already", draft.mask(draft.chosen))]
        if self.scope is Scope.UNIT:
            rest.append(("is in no unit", draft.snapshot["unit"] < 0))
        return Unfit(
            [*of_load.sources, ("takes requests itself", draft.mask(draft.destinations - draft.chosen)), *rest],
            [*of_load.destinations, ("gives requests itself", draft.mask(draft.sources - draft.chosen)), *rest],
        )

    def _unfit(self, draft: Draft, load: Values) -> Unfit:
        """Instances that cannot be in any pair of this pass."""
        snapshot = draft.snapshot
        unknown = ("its load is not known", ~np.isfinite(load))
        carries_kv = (snapshot["movable"] > 0) & (snapshot["carries_kv"] > 0)
        waiting = (snapshot["movable"] > 0) & self.takes_waiting
        holding = (carries_kv & (draft.running > 0)) | (waiting & (draft.waiting > 0))
        sources = [
            unknown,
            ("has as many moves away from it as it may have", ~(draft.out_slots >= 1)),
            ("has no request that could move", ~holding),
        ]
        destinations = [
            unknown,
            ("has as many moves to it as it may have", ~(draft.in_slots >= 1)),
            ("takes no requests with their KV cache", ~(carries_kv | waiting)),
        ]
        if self.threshold > 0 and self.scope is Scope.CLUSTER:
            sources.append((f"its load is below {self.threshold:g}", ~(load >= self.threshold)))
            destinations.append((f"its load is not below {self.threshold:g}", ~(load < self.threshold)))
        return Unfit(sources, destinations)

    def _parts(self, draft: Draft, able: Mask) -> list[Mask]:
        """Sets of instances that may exchange requests with their KV caches."""
        groups, units = draft.snapshot["cache_group"], draft.snapshot["unit"]
        parts = [able & (groups == group) for group in np.unique(groups[able])]
        if self.scope is Scope.CLUSTER:
            return parts
        return [part & (units == unit) for part in parts for unit in np.unique(units[part]) if unit >= 0]


@dataclass(slots=True)
class _Balancing:
    """The balancing of instances that may exchange requests."""

    rule: MetricBalancePairs
    draft: Draft
    policy: str
    load: Values
    """Projected load by row, updated for the chosen instances."""
    mean: float
    """The load that instances are brought to."""
    scale: float = field(init=False, default=1.0)
    """The load of a full instance."""

    def between(self, sources: Mask, destinations: Mask) -> None:
        draft, load = self.draft, self.load
        hottest = sorted_rows(-load, sources).tolist()
        coldest = self._in_use(sorted_rows(load, destinations))
        if not self.rule.metric.is_share:
            self.scale = max(float(load[sources].max(initial=0.0)), 1.0)
        most_room = float(draft.free_tokens[coldest].max(initial=0.0))
        tries, in_vain = draft.room * _TRIES_PER_MOVE, 0
        for source in hottest:
            if draft.room <= 0 or tries <= 0:
                break
            tries -= 1
            if source in draft.chosen or source in draft.destinations:
                continue
            if draft.history.source_avoided(draft.snapshot.ids[source], draft.now_s):
                draft.refused["source_avoided"] += 1
                continue
            if self._mean_request(source).tokens > most_room:
                draft.refused["no_room"] += int(np.count_nonzero(load[coldest] < load[source]))
                continue
            in_vain = in_vain + 1 if self._find_one_for(source, coldest) else 0
            if in_vain >= _MOST_IN_VAIN:
                break

    def _find_one_for(self, source: int, coldest: Rows) -> str:
        """Looks for a destination. Returns the fault of the source; "" if it has none."""
        shares = self.draft.shares(self.draft.snapshot.ids[source])
        best: _Offer | None = None
        fault = ""
        for destination in islice(self._permitted(source, coldest), _DESTINATIONS_PER_SOURCE):
            offer = self._offer(source, destination, shares)
            if isinstance(offer, _Offer):
                best = max(best or offer, offer, key=_worth)  # of equal ones, the coldest
                if not shares:
                    break
                continue
            if best is None:
                self.draft.refused[offer] += 1
                fault = offer
            if offer in _OF_THE_SOURCE and not shares:
                break
        if best is None:
            return fault if fault in _OF_THE_SOURCE else ""
        self._take(source, best)
        return ""

    def _take(self, source: int, offer: _Offer) -> None:
        """Chooses a move."""
        self.draft.choose(source, offer.destination, offer.move, offer.cargo)
        for row in (source, offer.destination):
            self.load[row] = self.rule.metric.at(self.draft.projected, row)

    def _in_use(self, destinations: Rows) -> Rows:
        """Destinations without those to be avoided by all."""
        draft = self.draft
        avoided = draft.history.avoided_destinations(draft.now_s)
        if not avoided:
            return destinations
        kept = [row for row in destinations.tolist() if draft.snapshot.ids[row] not in avoided]
        draft.refused["destination_avoided"] += len(destinations) - len(kept)
        return np.array(kept, dtype=np.intp)

    def _permitted(self, source: int, coldest: Rows) -> Iterator[int]:
        """Destinations below the source, permitted and with room for a request, coldest first.

        A full cluster has hundreds without room for each of as many sources, which cost only a comparison each.
        """
        draft = self.draft
        lower = coldest[self.load[coldest] < self.load[source]]
        fits = draft.free_tokens[lower] >= self._mean_request(source).tokens
        if not fits.all():
            draft.refused["no_room"] += int((~fits).sum())
        for destination in lower[fits].tolist():
            if destination == source or destination in draft.sources or destination in draft.chosen:
                continue
            if reason := draft.obstacle(source, destination):
                draft.refused[reason] += 1
            else:
                yield destination

    def _offer(self, source: int, destination: int, shares: Mapping[str, float] | None) -> _Offer | str:
        """A move between the two, or the reason why it does not pay."""
        draft, rule = self.draft, self.rule
        difference = float(self.load[source] - self.load[destination])
        if difference < rule.difference:
            return "below_threshold"
        each = self._mean_request(source)
        given, taken = -self._shift(source, each.negative), self._shift(destination, each)
        if given <= 0:
            return "not_worth_it"
        selection = self._selection(source, destination, given / each.tokens)
        cargo = self._cargo(selection, source, destination)
        if cargo.tokens > draft.free_tokens[destination]:
            return "no_room"
        share = None if shares is None else shares.get(draft.snapshot.ids[destination], 0.0)
        gain, cost = self._weigh(source, destination, cargo, share)
        if gain <= cost:
            return "not_worth_it"
        limit = None
        if rule.selection.value == AS_NEEDED:
            # Tokens with which a move leaves Σ load² as it is: half of them lower it the most.
            limit = each.tokens * difference * (given + taken) / (given**2 + taken**2)
        ends = draft.snapshot.ids[source], draft.snapshot.ids[destination]
        move = Move(self.policy, Purpose.BALANCE, *ends, selection, cargo.tokens, cargo.requests, gain, cost, limit)
        return _Offer(destination, move, cargo)

    def _weigh(self, source: int, destination: int, cargo: Cargo, share: float | None) -> tuple[float, float]:
        """Gain and cost of a move. Waiting requests have nothing to copy and no stream to stall, but lose cached blocks
        that the destination lacks. `share` of the copied or cached blocks is there already; None: unknown, and no loss
        is assumed."""
        draft, scale = self.draft, self.scale
        here, there = float(self.load[source]) / scale, float(self.load[destination]) / scale
        given = -self._shift(source, cargo.negative) / scale
        taken = self._shift(destination, cargo) / scale
        gain = draft.config.horizon_s * (here**2 + there**2 - (here - given) ** 2 - (there + taken) ** 2)
        if cargo.waiting:
            recompute_s = 0.0 if share is None else self._recompute_s(source, destination, cargo, share)
            return gain, recompute_s * ((there + taken) ** 2 - there**2)
        snapshot = draft.snapshot
        num_bytes = (1.0 - (share or 0.0)) * cargo.tokens * float(snapshot["bytes_per_token"][source])
        copy_s = num_bytes / draft.history.link_bytes_per_s
        stall_s = float(snapshot["stall_budget_s"][source])
        return gain, copy_s * ((there + taken) ** 2 - there**2) + stall_s * given

    def _recompute_s(self, source: int, destination: int, cargo: Cargo, share: float) -> float:
        """Seconds for the destination to compute the cached part of waiting requests that it lacks. 0 while its step
        times are unknown."""
        draft, snapshot = self.draft, self.draft.snapshot
        cached = float(draft.waiting_cached_tokens[source] / draft.waiting[source])
        lost = (1.0 - share) * cached
        pairs = lost * (cached + (cached - lost) + 1.0) / 2.0
        token_s, pair_s = (float(snapshot[name][destination]) for name in ("step_prefill_token_s", "step_pair_s"))
        seconds = cargo.requests * (token_s * lost + pair_s * pairs)
        return seconds if math.isfinite(seconds) else 0.0

    def _shift(self, row: int, cargo: Cargo) -> float:
        """The growth of an instance's load by the cargo."""
        return self.rule.metric.at(self.draft.projected, row, cargo.weight) - float(self.load[row])

    def _selection(self, source: int, destination: int, load_per_token: float) -> Selection:
        """The rule's selection. AS_NEEDED becomes the tokens that bring one end to the mean of all, possibly less than
        one request; more would have to move on."""
        asked = self.rule.selection
        if asked.value != AS_NEEDED:
            return asked
        wanted = min(float(self.load[source]) - self.mean, self.mean - float(self.load[destination]))
        return Selection(Unit.TOKEN, asked.order, float(max(round(wanted / load_per_token), 1)))

    def _cargo(self, selection: Selection, source: int, destination: int) -> Cargo:
        """The requests that the source will choose, at least one of average length: if none fits the budget, the source
        takes the first one alone."""
        draft, each, all_there = self.draft, self._mean_request(source), self._held(source)
        match selection.unit:
            case Unit.NUM_REQ:
                budget = all_there.tokens if selection.value < 0 else selection.value * each.tokens
            case Unit.RATIO:
                budget = selection.value * float(draft.snapshot["num_total_gpu_tokens"][source])
            case Unit.TOKEN:
                budget = selection.value
        slots = float(min(draft.out_slots[source], draft.in_slots[destination]))
        requests = min(max(budget // each.tokens, 1.0), slots, max(all_there.requests, 1.0))
        return replace(each, requests=requests, tokens=requests * each.tokens)

    def _held(self, source: int) -> Cargo:
        """All requests that the source chooses from."""
        draft = self.draft
        if self.rule.takes_waiting and draft.waiting[source] > 0:
            return Cargo(float(draft.waiting[source]), float(draft.waiting_tokens[source]), waiting=True)
        running = float(draft.running[source]), float(draft.running_tokens[source])
        return Cargo(*running, urgent=bool(draft.only_urgent[source]))

    def _mean_request(self, source: int) -> Cargo:
        held = self._held(source)
        return replace(held, requests=1.0, tokens=max(held.tokens / max(held.requests, 1.0), 1.0))


@dataclass(frozen=True, slots=True)
class _Offer:
    """A move that pays."""

    destination: int
    move: Move
    cargo: Cargo


def _worth(offer: _Offer) -> float:
    return offer.move.gain - offer.move.cost
