# SPDX-License-Identifier: Apache-2.0
"""The changes that each reader of `/events` has not seen yet.

A reader gets states, not changes: the newest state of everything that changed while it was slow. Its backlog is bounded
by the number of instances and `NUM_MOVES`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from llumsched.cluster.instance import Instance
from llumsched.cluster.view import View
from llumsched.rescheduling.executing.records import MoveRecord, Records
from llumsched.scheduler.overview import UNKNOWN, Overview, PredictedTimes
from llumsched.summary import summary

NUM_MOVES: Final = 100
PREDICTIONS_S: Final = 0.05
"""Validity of predictions: half an event, so that all readers of one share them."""
AT_ONCE: Final = 50
"""Instances converted to JSON before the event loop runs other tasks; half a millisecond."""


class PageReader:
    """A connection's part of the feed."""

    def __init__(self, instances: Iterable[str], moves: Iterable[MoveRecord]) -> None:
        self.instances = set(instances)
        """Ids of instances that changed."""
        self.told: set[str] = set()
        """Ids of instances that the reader has."""
        self.num_newest = 0
        """Number of instances in its last event."""
        self.moves = {record.number: record for record in moves}
        self.woken = asyncio.Event()


class Feed:
    """Observes a view and the rescheduler's moves on their event loop, while there are readers."""

    def __init__(self, view: View, records: Records | None, overview: Overview | None = None) -> None:
        self._view = view
        self._overview = overview
        self._records = records
        self._readers: set[PageReader] = set()
        self._texts: dict[str, tuple[Instance, bytes]] = {}
        """The JSON of instances without their age and the closing brace, shared by all readers."""
        self._stops: list[Callable[[], None]] = []
        self._predictions: tuple[float, Mapping[str, PredictedTimes]] = -math.inf, {}
        """The newest, and of when they are."""

    def __len__(self) -> int:
        return len(self._readers)

    def join(self) -> PageReader:
        """Adds a reader."""
        if not self._readers:
            self._stops = [self._view.observe(self)]
            if self._records is not None:
                self._stops.append(self._records.observe_moves(self._moved))
        reader = PageReader(self._view, list(self._records.moves)[-NUM_MOVES:] if self._records is not None else ())
        self._readers.add(reader)
        return reader

    def leave(self, reader: PageReader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            for stop in self._stops:
                stop()
            self._stops.clear()
            self._texts.clear()

    async def take(self, reader: PageReader) -> bytes:
        """The reader's backlog as JSON, which is then empty. Lets the event loop run in between."""
        changed, moves = sorted(reader.instances), list(reader.moves.values())
        left = sorted(name for name in reader.told if name not in self._view)
        reader.instances.clear()
        reader.moves.clear()
        reader.woken.clear()
        reader.told.difference_update(left)
        reader.num_newest = len(changed)
        predicted = self._predicted() if changed else {}
        instances = []
        for number, name in enumerate(changed, 1):
            if name in self._view:
                reader.told.add(name)
                instances.append(self._text(self._view[name], predicted.get(name, UNKNOWN)))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        document = {
            "at_s": time.time(),
            "connected": self._view.connected,
            "age_s": self._view.age_s,
            "instances": instances,
            "left": left,
            "moves": [record.to_dict() for record in moves],
            "rescheduling": self._records is not None,
            "overview": None if self._overview is None else self._overview.of_cluster(),
        }
        # Which writes null for an infinity.
        return msgspec.json.encode(document)

    def _predicted(self) -> Mapping[str, PredictedTimes]:
        """Predictions by instance, shared by all readers of the same moment."""
        now_s = time.monotonic()
        if self._overview is not None and now_s - self._predictions[0] > PREDICTIONS_S:
            self._predictions = now_s, self._overview.of_instances()
        return self._predictions[1]

    def _text(self, instance: Instance, predicted: PredictedTimes) -> msgspec.Raw:
        known = self._texts.get(instance.id)
        if known is None or known[0] is not instance:
            shown = summary(instance)
            del shown["received_s"]
            known = self._texts[instance.id] = instance, msgspec.json.encode(shown)[:-1]
        age_s, told = instance.age_s(time.monotonic()), msgspec.json.encode(predicted)
        return msgspec.Raw(b'%b,"age_s":%.3f,"predicted_ms":%b}' % (known[1], age_s, told))

    # Observer of the view

    def appeared(self, instance: Instance) -> None:
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        for reader in self._readers:
            reader.instances.add(instance.id)
            reader.woken.set()

    def left(self, instance: Instance) -> None:
        for reader in self._readers:
            reader.instances.discard(instance.id)
            reader.woken.set()
        self._texts.pop(instance.id, None)

    def _moved(self, record: MoveRecord) -> None:
        for reader in self._readers:
            # The newest last, and the oldest gives way.
            reader.moves.pop(record.number, None)
            reader.moves[record.number] = record
            if len(reader.moves) > NUM_MOVES:
                del reader.moves[next(iter(reader.moves))]
            reader.woken.set()
