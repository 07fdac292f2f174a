# SPDX-License-Identifier: Apache-2.0
"""How loaded one engine is, in counters that change when the load does and are never recounted.

An event names the requests it is about, and what each of them adds to the sums is replaced. A step of the engine is two
events; of a batch of decodes they count the new tokens and nothing else:

    received    a request has reached the process; the loop, perhaps in a long step, knows nothing of it yet
    queued      it waits; also again, after a preemption, and when it arrives from another engine without KV cache
    loading     a KV connector brings its KV cache
    scheduled   a step begins: requests start to run, prefills advance
    computing   a step has ended; what it has produced is gone through
    computed    and has been: tokens
    moving      a move out has begun, or has not happened
    left        finished, aborted, moved away

Only `received` and `settled` come from another thread than the loop's. Everybody may read: `snapshot`.
"""

from __future__ import annotations

import enum
import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

RECENT_SECONDS = 10.0
"""How long the id of a request that has arrived is shown, whatever has become of it."""
MAX_NAMES = 2000
"""In each of the two lists: a scheduler needs to see a name once, and thousands do not arrive between two reports."""
MAX_NAME_CHARACTERS = 128
"""Clients choose names; both lists must fit a report (`llumsched.cms.validation`), of any characters."""
TOKENS_SECONDS = 0.1
"""A change that is only tokens of running requests is made known when the last was so long ago. It adds a fraction of a
percent to what a scheduler knows, and to tell it costs 0.3 to 0.8 ms of CPU in the engine's process."""


_new_tokens = operator.attrgetter("new_token_ids")
_NONE: frozenset[str] = frozenset()


class Countable(Protocol):
    """What is looked at of vLLM's `Request`."""

    request_id: str
    max_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    resumable: bool

    @property
    def num_tokens(self) -> int: ...


class Output(Protocol):
    """What is looked at of vLLM's `EngineCoreOutput`."""

    request_id: str
    new_token_ids: list[int]


class Place(enum.IntEnum):
    """Where its fields begin in `Load`."""

    WAITING = 0
    LOADING = 4
    RUNNING = 6


class Load(NamedTuple):
    """Sums over requests, by place.

    To decode: requests whose work does not end with their first token, and which are not about to leave. Prefill
    tokens: those of which the KV cache is still to be computed, of requests that need more than a decode step.
    """

    num_waiting: int = 0
    waiting_to_decode: int = 0
    waiting_to_decode_tokens: int = 0
    waiting_prefill_tokens: int = 0
    num_loading: int = 0
    loading_tokens: int = 0
    num_running: int = 0
    running_to_decode: int = 0
    running_to_decode_tokens: int = 0
    running_prefill_tokens: int = 0
    running_unallocated_tokens: int = 0
    """Prefill tokens that no step has been given yet: their blocks are still to be allocated."""


class Snapshot(NamedTuple):
    """The load at one moment. `waiting` and `recent` are names of requests, each once, oldest first.

    While what a step has produced is gone through, the sums and the free blocks are those before the step, and what
    has been received since: who is named as recent is counted."""

    version: int
    """Grows with every change."""
    load: Load
    waiting: tuple[str, ...]
    recent: tuple[str, ...]
    num_preemptions: int
    num_free_blocks: int


def share_of(place: Place, request: Countable, cached_tokens: int = 0, *, moving: bool = False) -> tuple[int, ...]:
    """What one request adds to the fields of its place. `cached_tokens`: held by the prefix cache when it began to
    wait."""
    num_tokens = request.num_tokens
    if place is Place.LOADING:
        return 1, num_tokens
    # Tokens of a step in flight are still work.
    final_tokens = request.num_computed_tokens - request.num_in_flight_tokens
    decodes = int(request.max_tokens > 1 and not moving)
    if place is Place.WAITING:
        uncomputed = num_tokens - max(final_tokens, cached_tokens)
        decodes |= int(uncomputed == 1 and not moving)
        return 1, decodes, num_tokens * decodes, uncomputed if uncomputed > 1 else 0
    uncomputed = num_tokens - final_tokens
    if uncomputed <= 1:
        return 1, decodes, num_tokens * decodes, 0, 0
    return 1, decodes, num_tokens * decodes, uncomputed, max(0, num_tokens - request.num_computed_tokens)


class _Entry:
    """One request. `share` is None while it only decodes: it then adds one to the batch, and its tokens."""

    __slots__ = ("cached_tokens", "moving", "name", "place", "request", "share", "shared_at")

    def __init__(self, request: Countable, name: str) -> None:
        self.request = request
        self.name = name
        self.place = Place.WAITING
        self.cached_tokens = 0
        self.moving = False
        self.share: tuple[int, ...] | None = ()
        self.shared_at = Place.WAITING


class LoadCounters:
    """The load of one engine.

    `look_up` says how many leading tokens of a request the prefix cache holds, without side effects; `free_blocks` how
    many blocks are free; `name_of` what a request is called by those who sent it. `one_token_each`: an output of a
    request that decodes, and goes on, has one token. `always_exact` is for engines in which the KV cache of a running
    request can get lost: no request is taken to only decode.
    """

    def __init__(
        self,
        look_up: Callable[[Countable], int],
        free_blocks: Callable[[], int],
        name_of: Callable[[Countable], str],
        *,
        one_token_each: bool = False,
        always_exact: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_change: Callable[[], None] = _nobody
        """Called after a change, on any thread, often; must return at once."""
        self._look_up = look_up
        self._free_blocks = free_blocks
        self._name_of = name_of
        self._one_token_each = one_token_each
        self._always_exact = always_exact
        self._clock = clock
        # Held for microseconds: never while the scheduler or the model works.
        self._lock = threading.Lock()
        self._sums = [0] * len(Load._fields)
        self._num_decodes = 0
        self._decode_tokens = 0
        self._before: Load | None = None
        """While what a step has produced is gone through: the sums before, and what is received meanwhile. Tokens may
        be taken off with their request that have not been added yet."""
        self._entries: dict[str, _Entry] = {}
        self._received: set[str] = set()
        """Not queued yet."""
        self._exact: dict[str, _Entry] = {}
        """Of those that a step may work on, the ones whose share it can change in other ways than by a new token."""
        self._waiting: dict[str, int] = {}
        self._recent: deque[tuple[float, str]] = deque(maxlen=MAX_NAMES)
        self._num_preemptions = 0
        self._num_free_blocks = free_blocks()
        self._version = 0
        self._some_left = False
        """Since a step was last gone through."""
        self._told_at = float("-inf")
        self._untold = False
        """Somebody will be told when the step has been gone through."""

    # Input thread

    def received(self, request: Countable) -> None:
        """A client's request is here, and will be `queued` or `settled`."""
        cached = self._look_up(request)
        with self._lock:
            # Else: more input of one that is here.
            if request.request_id not in self._entries:
                entry = self._enter(request)
                entry.cached_tokens = cached
                self._received.add(request.request_id)
                self._recent.append((self._clock(), entry.name))
                self._count(entry)
                if self._before is not None:
                    self._before = _sum(self._before, entry.shared_at, entry.share or ())
                self._version += 1
        self._tell()

    # Loop thread

    def settled(self, request_id: str) -> None:
        """The loop has dealt with a received request: if it was not queued, it was turned away."""
        with self._lock:
            if request_id not in self._received:
                return
            self._received.discard(request_id)
            self._leave(self._entries[request_id])
            self._version += 1
        self._tell()

    def queued(self, request: Countable) -> None:
        request_id = request.request_id
        if request_id in self._received:
            # Counted as it is.
            with self._lock:
                self._received.discard(request_id)
            return
        cached = self._look_up(request)
        with self._lock:
            entry = self._entries.get(request_id) or self._enter(request)
            # One input session is continued by requests of the same id.
            entry.request = request
            entry.cached_tokens = cached
            self._put(entry, Place.WAITING)
        self._tell()

    def preempted(self, request: Countable) -> None:
        self._num_preemptions += 1
        self.queued(request)

    def loading(self, request: Countable) -> None:
        with self._lock:
            self._put(self._entries.get(request.request_id) or self._enter(request), Place.LOADING)
        self._tell()

    def strangers_among(self, request_ids: Iterable[str]) -> list[str]:
        """Those of which nothing has been told."""
        return [request_id for request_id in request_ids if request_id not in self._entries]

    def scheduled(self, started: Collection[str], step: Collection[str]) -> None:
        """A step over the requests `step` begins; `started` were not running before."""
        with self._lock:
            if self._exact:
                self._recount(step)
            for request_id in started:
                self._put(self._entries[request_id], Place.RUNNING)
            self._note_blocks()
        if started:
            self._tell()

    def computing(self) -> Collection[str]:
        """To be handed to `computed`, for the same step. Between the two, requests may leave and be queued."""
        with self._lock:
            self._before = self._load()
            self._some_left = False
        return frozenset(self._exact) if self._exact else _NONE

    def computed(self, outputs: Iterable[Sequence[Output]], step: Collection[str], exact: Collection[str]) -> None:
        """The step over the requests `step` has ended with these outputs."""
        with self._lock:
            if exact:
                outputs = [[output for output in some if output.request_id not in exact] for some in outputs]
                self._recount(step)
            if exact or self._some_left or not self._one_token_each:
                # Those of a decode that has left are among what was taken off with it.
                self._decode_tokens += sum(sum(map(len, map(_new_tokens, some))) for some in outputs)
            else:
                self._decode_tokens += sum(map(len, outputs))
            self._before = None
            self._note_blocks()
            self._version += 1
            untold, self._untold = self._untold, False
        if exact or untold or self._clock() - self._told_at >= TOKENS_SECONDS:
            self._tell()

    def moving(self, request_id: str, moving: bool) -> None:
        """Whether the request is about to leave for another engine."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            entry.moving = moving
            self._put(entry, entry.place)
        self._tell()

    def left(self, request_id: str) -> None:
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            self._leave(entry)
            self._note_blocks()
            self._version += 1
        self._tell()

    def blocks_changed(self) -> None:
        """Blocks may have been taken or given back otherwise than by a step."""
        if self._free_blocks() != self._num_free_blocks:
            with self._lock:
                self._note_blocks()
                self._version += 1
            self._tell()

    # Any thread

    def touch(self) -> None:
        """Something else has changed that belongs to the status."""
        with self._lock:
            self._version += 1
        self._tell()

    def snapshot(self) -> Snapshot:
        with self._lock:
            expired = self._clock() - RECENT_SECONDS
            while self._recent and self._recent[0][0] < expired:
                self._recent.popleft()
            return Snapshot(
                version=self._version,
                load=self._before or self._load(),
                waiting=tuple(itertools.islice(self._waiting, MAX_NAMES)),
                recent=tuple(dict.fromkeys(name for _, name in self._recent)),
                num_preemptions=self._num_preemptions,
                num_free_blocks=self._num_free_blocks,
            )

    def cached_tokens(self, request_id: str) -> int:
        """What the prefix cache held of a request when it began to wait."""
        return self._entries[request_id].cached_tokens

    # With the lock

    def _enter(self, request: Countable) -> _Entry:
        entry = self._entries[request.request_id] = _Entry(request, self._name_of(request)[:MAX_NAME_CHARACTERS])
        self._waiting[entry.name] = self._waiting.get(entry.name, 0) + 1
        return entry

    def _leave(self, entry: _Entry) -> None:
        self._some_left = True
        self._set_share(entry, ())
        if entry.place is Place.WAITING:
            self._wait_no_more(entry)
        request_id = entry.request.request_id
        del self._entries[request_id]
        self._exact.pop(request_id, None)
        self._received.discard(request_id)

    def _put(self, entry: _Entry, place: Place) -> None:
        if (entry.place is Place.WAITING) is not (place is Place.WAITING):
            if place is Place.WAITING:
                self._waiting[entry.name] = self._waiting.get(entry.name, 0) + 1
            else:
                self._wait_no_more(entry)
        entry.place = place
        self._count(entry)
        self._note_blocks()
        self._version += 1

    def _wait_no_more(self, entry: _Entry) -> None:
        left = self._waiting[entry.name] - 1
        if left:
            # Several requests can have one name: n > 1, and several prompts.
            self._waiting[entry.name] = left
        else:
            del self._waiting[entry.name]

    def _recount(self, step: Collection[str]) -> None:
        for entry in [entry for request_id, entry in self._exact.items() if request_id in step]:
            self._count(entry)

    def _count(self, entry: _Entry) -> None:
        """Replace what the request adds."""
        request, place = entry.request, entry.place
        share = share_of(place, request, entry.cached_tokens, moving=entry.moving)
        if place is Place.RUNNING and share[1] and not (share[3] or request.resumable or self._always_exact):
            self._exact.pop(request.request_id, None)
            self._set_share(entry, None)
            return
        # A step can only change it if it runs, or ran when a step began that is still in flight.
        if place is Place.RUNNING or request.num_in_flight_tokens:
            self._exact[request.request_id] = entry
        else:
            self._exact.pop(request.request_id, None)
        self._set_share(entry, share)

    def _set_share(self, entry: _Entry, share: tuple[int, ...] | None) -> None:
        sums = self._sums
        if entry.share is None:
            self._num_decodes -= 1
            self._decode_tokens -= entry.request.num_tokens
        else:
            for field, number in enumerate(entry.share, entry.shared_at):
                sums[field] -= number
        if share is None:
            self._num_decodes += 1
            self._decode_tokens += entry.request.num_tokens
        else:
            for field, number in enumerate(share, entry.place):
                sums[field] += number
        entry.share, entry.shared_at = share, entry.place

    def _load(self) -> Load:
        sums = self._sums.copy()
        sums[Place.RUNNING] += self._num_decodes
        sums[Place.RUNNING + 1] += self._num_decodes
        sums[Place.RUNNING + 2] += self._decode_tokens
        return Load._make(sums)

    def _note_blocks(self) -> None:
        if self._before is None:
            self._num_free_blocks = self._free_blocks()

    # Without the lock

    def _tell(self) -> None:
        if self._before is not None:
            with self._lock:
                # Else the step has been gone through just now, and nobody was told of this.
                if self._before is not None:
                    self._untold = True
                    return
        self._told_at = self._clock()
        self.on_change()


def recount(requests: Iterable[tuple[Place, Countable, int, bool]]) -> Load:
    """The slow way to the same sums: place, request, tokens that were cached, whether it is about to leave."""
    sums = [0] * len(Load._fields)
    for place, request, cached_tokens, moving in requests:
        for field, number in enumerate(share_of(place, request, cached_tokens, moving=moving), place):
            sums[field] += number
    return Load._make(sums)


def _sum(load: Load, field: int, share: tuple[int, ...]) -> Load:
    end = field + len(share)
    return Load._make((*load[:field], *map(operator.add, load[field:end], share), *load[end:]))


def _nobody() -> None:
    pass
