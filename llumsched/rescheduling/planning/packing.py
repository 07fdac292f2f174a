# SPDX-License-Identifier: Apache-2.0
"""Selectors that pack: requests go to the fullest instance that stays below the limit with them.

    binPackingMitigationSelector      one request of the fullest source, the last that came
    binPackingConsolidationSelector   all that run at the emptiest source, so that it is free for others, or may go

The names, and at most one source in a pass, are those of Llumnix: each move changes what the next is to go by, and a
pass comes soon. There only what a destination has before the move is looked at; here what it has with it, so that a
consolidation leaves nothing to mitigate. For the same reason as many are asked for as were counted, and never `ALL`:
that would take what waits, too, for which no room was looked for; who waits is prefilled where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llumlet.protocol.move.selection import Order, Unit
from llumsched.cluster.columns import Rows, Values
from llumsched.cluster.providers.status import Cargo
from llumsched.policy.metrics import Metric
from llumsched.rescheduling.planning.draft import Draft
from llumsched.rescheduling.planning.moves import Move, Purpose, Selection
from llumsched.rescheduling.planning.pairs import Ends, Reasons, Unfit, sorted_rows

_MOST_DESTINATIONS = 32
"""Destinations tried per source, fullest first: a full cluster has no room anywhere."""
_MOST_SOURCES = 8
"""Sources tried in a pass."""


@dataclass(frozen=True, slots=True)
class PackingPairs:
    metric: Metric
    """The load: less is better."""
    limit: float
    """Destinations stay below this load."""
    empties: bool
    """True if the emptiest source gives all its running requests; otherwise the fullest gives one."""
    purpose: ClassVar[Purpose] = Purpose.PACK

    @property
    def name(self) -> str:
        return "binPackingConsolidationSelector" if self.empties else "binPackingMitigationSelector"

    def pair(self, draft: Draft, policy: str, ends: Ends) -> tuple[int, int]:
        load = self.metric.values(draft.projected)
        left = ends.without(self.unfit(draft))
        fullest = sorted_rows(-load, left.destinations)
        sources = sorted_rows(load if self.empties else -load, left.sources)
        for source in sources[:_MOST_SOURCES].tolist():
            if draft.room <= 0 or self._give(draft, policy, load, source, fullest):
                break
        return len(sources), len(fullest)

    def unfit(self, draft: Draft) -> Unfit:
        snapshot, load = draft.snapshot, self.metric.values(draft.projected)
        carries_kv = (snapshot["movable"] > 0) & (snapshot["carries_kv"] > 0)
        of_both: Reasons = [
            ("its load is not known", ~np.isfinite(load)),
            ("has a move of this pass already", draft.mask(draft.chosen)),
        ]
        sources = [
            *of_both,
            ("has as many moves away from it as it may have", ~(draft.out_slots >= 1)),
            ("takes requests itself", draft.mask(draft.destinations)),
            ("has no request that could move", ~(carries_kv & (draft.running > 0))),
        ]
        if self.empties:
            urgent = snapshot["scheduler_running_to_decode_urgent_requests_num"]
            sources.append(("has urgent requests, which stay", urgent > 0))
        destinations = [
            *of_both,
            (f"its load is not below {self.limit:g}", ~(load < self.limit)),
            ("has as many moves to it as it may have", ~(draft.in_slots >= 1)),
            ("gives requests itself", draft.mask(draft.sources)),
            ("takes no requests with their KV cache", ~carries_kv),
        ]
        return Unfit(sources, destinations)

    def _give(self, draft: Draft, policy: str, load: Values, source: int, fullest: Rows) -> bool:
        """Chooses a move from the source to the fullest instance that stays below the limit with all of the cargo."""
        ids, groups = draft.snapshot.ids, draft.snapshot["cache_group"]
        if draft.history.source_avoided(ids[source], draft.now_s):
            draft.refused["source_avoided"] += 1
            return False
        requests = float(draft.running[source]) if self.empties else 1.0
        each = float(draft.running_tokens[source]) / max(float(draft.running[source]), 1.0)
        able = fullest[(groups[fullest] == groups[source]) & (fullest != source)]
        if self.empties:
            able = able[load[able] >= load[source]]  # an emptier instance would be emptied itself next
        if not len(able):
            draft.refused["no_destination"] += 1
        for destination in able[:_MOST_DESTINATIONS].tolist():
            if fault := self._fault(draft, source, destination, Cargo(requests, requests * each)):
                draft.refused[fault] += 1
                continue
            number = float(int(min(requests, draft.out_slots[source], draft.in_slots[destination])))
            cargo, selection = Cargo(number, number * each), Selection(Unit.NUM_REQ, Order.LCR, number)
            move = Move(policy, self.purpose, ids[source], ids[destination], selection, cargo.tokens, number)
            draft.choose(source, destination, move, cargo)
            return True
        return False

    def _fault(self, draft: Draft, source: int, destination: int, cargo: Cargo) -> str:
        """The reason against a move between the two; "" if there is none."""
        if obstacle := draft.obstacle(source, destination):
            return obstacle
        if cargo.tokens > draft.free_tokens[destination]:
            return "no_room"
        return "" if self.metric.at(draft.projected, destination, cargo.weight) < self.limit else "above_limit"
