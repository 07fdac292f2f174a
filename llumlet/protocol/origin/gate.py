# SPDX-License-Identifier: Apache-2.0
"""The gate at the origin: every token of a request reaches its client once and in order, over any number of owners.

Outputs of one request arrive over several sockets, with no order between them: its home engine's over vLLM's own path,
everybody else's over the relay. Each carries its epoch, the index at which that epoch begins (`base`), and the index of
its first token. The rules, for an arrival of epoch e with tokens [first, end):

1. A finished request wants nothing more: stale.
2. A barred epoch is stale, for ever. So is a term that this gate has not raised.
3. An epoch that is seen for the first time is adopted, unless it is the highest and its base lies below what was
   already delivered: then it continues a text that the client has not seen, and is barred. One that comes after a later
   epoch is a former owner whose output was held up: it is no less valid for that, even if all of it was repeated since.
4. An epoch owns indices below the base of the next adopted epoch. What a sender emits beyond that is cut off, and it is
   told that it is stale: it has lost the request without knowing. Indices below an epoch's own base are fine: they
   repeat, from the history that came with the request, what the last owner may have failed to send.
5. Delivered is what begins at the next index. What begins before it loses the tokens that were delivered already; what
   begins after it waits in a bounded buffer; if that is full, the caller has to replay (`overflow`).
6. An end without tokens counts only at the next index. Where an input comes in parts, each has an end; that of the
   last one finishes the request (`ends_left`). The end of a part that is seen again is stale.
7. `fence(e)` answers "started" if e, or any later epoch, was adopted: accepted or waiting in the buffer is the same.
   Otherwise it bars e and every other epoch of the present term from e on (e's owner may have handed on already),
   raises the term and names the epoch that the asker goes on under. Epochs below e stay valid: what the asker sent
   before it froze is still on its way. A question asked again gets the same answer.
8. `depose()` bars every epoch there was and raises the term: the owner is lost, and whoever goes on must start from
   exactly what was delivered.

Nothing here waits, sends or reads a clock: a caller that offers, and enqueues what is delivered, without an `await` in
between, cannot reorder tokens.
"""

from __future__ import annotations

import dataclasses

from llumlet.protocol.ids import HOME, Epoch

MAX_BARRED = 32
"""Ranges of barred epochs. A request's honest history has a few: one for each time that an owner was lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens `[first, first + count)` of the request's output, from the owner of `epoch`, which begins at `base`."""

    epoch: Epoch
    base: int
    first: int
    count: int
    finished: bool
    payload: object

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """Deliver tokens `[skip, skip + count)` of the payload, with its finish only if `finished`."""

    payload: object
    skip: int
    count: int
    finished: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """`stale`: answer the sender with Dismissal. `overflow`: the buffer is full and nothing was taken."""

    deliver: tuple[Delivery, ...] = ()
    stale: bool = False
    overflow: bool = False


class Gate:
    """The gate of one request at its origin."""

    def __init__(self, max_buffered: int = 256) -> None:
        self.next_index = 0
        self.finished = False
        self.ends_left: int | None = 1
        """Ends until the one that finishes the request; None: more input may come."""
        self._ended_at = -1
        """Index behind the token with which the last part ended."""
        self._max_buffered = max_buffered
        self._term = 0
        self._bases: dict[Epoch, int] = {HOME: 0}
        self._barred: list[tuple[Epoch, Epoch]] = []
        self._raised: dict[Epoch, Epoch] = {}
        self._buffer: list[Arrival] = []

    @property
    def highest(self) -> Epoch:
        """The highest epoch adopted."""
        return max(self._bases)

    @property
    def num_buffered(self) -> int:
        """Arrivals that wait for earlier tokens: while there are any, something is missing."""
        return len(self._buffer)

    def offer(self, arrival: Arrival) -> Verdict:
        """Take what an owner sent. Never raises: whatever makes no sense is stale."""
        if self.finished or not self._adopt(arrival):
            return Verdict(stale=True)
        bound = self._bound(arrival.epoch)
        if arrival.first >= bound:
            return Verdict(stale=True)
        stale = arrival.end > bound
        if arrival.first > self.next_index:
            if len(self._buffer) >= self._max_buffered:
                return Verdict(stale=stale, overflow=True)
            self._buffer.append(arrival)
            return Verdict(stale=stale)
        delivered = self._deliver(arrival)
        if delivered is None:
            return Verdict(stale=stale)
        return Verdict(deliver=(delivered, *self._drain()), stale=stale)

    def fence(self, epoch: Epoch) -> Epoch | None:
        """Answers the owner before `epoch`: None if that epoch has started or the request is `finished`; otherwise it
        is barred, and the answer is the epoch under which the asker continues."""
        if self.finished:
            return None
        raised = self._raised.get(epoch)
        if raised is None and epoch.term == self._term and epoch > self.highest:
            raised = self._raised[epoch] = self._raise_term(since=epoch)
        return None if raised is None or self.is_barred(raised) else raised

    def depose(self) -> Epoch:
        """Bars every epoch so far, as the owner is lost. Returns the epoch that continues from `next_index`."""
        self._buffer.clear()
        self._bases.clear()
        raised = self._raise_term(since=HOME)
        self._bases[raised] = self.next_index
        return raised

    def finish(self) -> None:
        """The client left, or a stop string was found: everything later is stale."""
        self.finished = True
        self._buffer.clear()

    def _raise_term(self, since: Epoch) -> Epoch:
        raised = Epoch(self._term + 1, 0)
        self._term += 1
        self._bar(since, raised)
        return raised

    def _bar(self, since: Epoch, until: Epoch) -> None:
        """Adds a range, joined with those that it touches. Past `MAX_BARRED`, which takes a peer that invents epochs, a
        range absorbs the one before it if no epoch was adopted between them."""
        kept = []
        for first, last in self._barred:
            if last < since or until < first:
                kept.append((first, last))
            else:
                since, until = min(since, first), max(until, last)
        if len(kept) >= MAX_BARRED:
            below = max((barred for barred in kept if barred[1] < since), default=None)
            if below is not None and not any(below[1] <= epoch < since for epoch in self._bases):
                kept.remove(below)
                since = below[0]
        self._barred = [*kept, (since, until)]

    def is_barred(self, epoch: Epoch) -> bool:
        """True if everything of this epoch is stale."""
        return any(since <= epoch < until for since, until in self._barred)

    def _adopt(self, arrival: Arrival) -> bool:
        epoch = arrival.epoch
        if epoch.term > self._term or arrival.first < 0 or arrival.count < 0 or self.is_barred(epoch):
            return False
        known = self._bases.get(epoch)
        if known is not None:
            return known == arrival.base
        if arrival.base < self.next_index and epoch > self.highest:
            self._bar(epoch, epoch.next_hop())
            return False
        self._bases[epoch] = arrival.base
        self._buffer = [early for early in self._buffer if early.first < self._bound(early.epoch)]
        return True

    def _bound(self, epoch: Epoch) -> int:
        """Index from which a later epoch owns the request."""
        return min((base for other, base in self._bases.items() if other > epoch), default=1 << 62)

    def _deliver(self, arrival: Arrival) -> Delivery | None:
        """The next part in this arrival; None if there is none."""
        end = min(arrival.end, self._bound(arrival.epoch))
        skip = max(0, self.next_index - arrival.first)
        count = end - arrival.first - skip
        finished = arrival.finished and end == arrival.end
        if count == 0 and end == self._ended_at:
            finished = False
        if arrival.first > self.next_index or count < 0 or (count == 0 and not finished):
            return None
        self.next_index = end
        if finished:
            self._ended_at = end
            if self.ends_left is not None:
                self.ends_left -= 1
                if not self.ends_left:
                    self.finish()
        return Delivery(arrival.payload, skip, count, finished)

    def _drain(self) -> list[Delivery]:
        """Buffered arrivals that are next now."""
        deliveries = []
        waiting = sorted(self._buffer, key=lambda early: (early.first, early.end))
        self._buffer = []
        for early in waiting:
            if self.finished:
                break
            if early.first > self.next_index:
                self._buffer.append(early)
            elif (delivery := self._deliver(early)) is not None:
                deliveries.append(delivery)
        return deliveries
