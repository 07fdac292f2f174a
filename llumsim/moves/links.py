# SPDX-License-Identifier: Apache-2.0
"""The network between nodes: every node sends and receives at a given speed, which its transfers share equally.

A transfer is as slow as the fuller one of its two ends lets it be; what it leaves unused at the other is not given to
others there. Within a node, transfers share one more link of the same speed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from llumsim import PS
from llumsim.clock import Action, Clock


@dataclass(slots=True, eq=False)
class _End:
    bytes_per_s: float
    transfers: dict[Transfer, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Transfer:
    num_bytes: int
    done: Action
    began_ps: int
    _ends: tuple[_End, ...]
    _left: float
    _rate: float = 0.0
    """Bytes a second."""
    _since_ps: int = 0
    _done_ps: int = -1


class Network:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[tuple[str, str], _End] = {}
        self.num_bytes = 0
        """Bytes that arrived."""

    def transfer(self, source: str, destination: str, num_bytes: int, bytes_per_s: float, done: Action) -> Transfer:
        """Transfer bytes between two nodes and call `done` when the last one is there. `bytes_per_s`: speed of the
        nodes' links."""
        now_ps = self._clock.now_ps
        kinds = [(source, "within")] if source == destination else [(source, "out"), (destination, "in")]
        ends = tuple(self._ends.setdefault(kind, _End(bytes_per_s)) for kind in kinds)
        made = Transfer(num_bytes, done, now_ps, ends, float(num_bytes), _since_ps=now_ps)
        for end in ends:
            end.transfers[made] = None
        self._share(ends)
        return made

    def cancel(self, transfer: Transfer) -> None:
        """Ends a transfer: its bytes come no more. One that is done stays done."""
        if transfer in transfer._ends[0].transfers:
            self._remove(transfer)

    def _remove(self, transfer: Transfer) -> None:
        transfer._done_ps = -1
        for end in transfer._ends:
            del end.transfers[transfer]
        self._share(transfer._ends)

    def _share(self, ends: tuple[_End, ...]) -> None:
        now_ps = self._clock.now_ps
        for transfer in dict.fromkeys(one for end in ends for one in end.transfers):
            rate = min(end.bytes_per_s / len(end.transfers) for end in transfer._ends)
            if rate != transfer._rate:
                transfer._left -= transfer._rate * (now_ps - transfer._since_ps) / PS
                transfer._rate, transfer._since_ps = rate, now_ps
                transfer._done_ps = now_ps + max(round(transfer._left / rate * PS), 0)
                self._clock.at(transfer._done_ps, functools.partial(self._arrived, transfer, transfer._done_ps))

    def _arrived(self, transfer: Transfer, done_ps: int, now_ps: int) -> None:
        if transfer._done_ps == done_ps:  # else its speed has changed meanwhile, or it was cancelled
            self._remove(transfer)
            self.num_bytes += transfer.num_bytes
            transfer.done(now_ps)
