# SPDX-License-Identifier: Apache-2.0
"""Counters of an engine's load that change when the load does and are never recounted.

An event names the requests it is about, and what each of them adds to the sums is replaced. A step of the engine is two
events; of a batch of decodes they count the new tokens and nothing else:

    received    a request has reached the process; the loop, perhaps in a long step, knows nothing of it yet
    queued      it waits, or stands; also again, after a preemption, and when it arrives from another engine
    loading     a KV connector brings its KV cache
    scheduled   a step begins: requests start to run, prefills advance
    computing   a step has ended; what it has produced is gone through
    computed    and has been: tokens
    moving      a move out has begun, or has not happened
    left        finished, aborted, moved away

Only `received` and `settled` come from another thread than the loop's. Everybody may read: `snapshot`.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from llumlet.protocol.urgency import is_urgent
from vllm_llumnix.engine.load.load_sums import NO_HIT, NOTHING, Hit, Load, Output, Place, Snapshot, share_of
from vllm_llumnix.engine.requests.request_state import BETWEEN_PARTS
from vllm_llumnix.engine.vllm_types import Request

RECENT_SECONDS = 10.0
"""Seconds for which the id of an arrived request is shown, whatever has become of it."""
MAX_NAMES = 2000
"""Names in each of the two lists: a scheduler needs to see a name once, and thousands do not arrive between two
reports."""
MAX_NAME_CHARACTERS = 128
"""Clients choose names; both lists must fit a report (`llumsched.cms.validation`), of any characters."""
TOKENS_SECONDS = 0.1
"""A change that is only tokens of running requests is made known when the last was so long ago. It adds a fraction of a
percent to what a scheduler knows, and to tell it costs 0.3 to 0.8 ms of CPU in the engine's process."""

_new_tokens = operator.attrgetter("new_token_ids")
_NONE: frozenset[str] = frozenset()


class _Entry:
    """Entry of one request. `share` is None while it only decodes: it then adds one to the batch, and its tokens."""

    __slots__ = ("hit", "moving", "name", "place", "request", "share", "urgent")

    def __init__(self, request: Request, name: str) -> None:
        self.request = request
        self.name = name
        self.place = Place.WAITING
        self.hit = NO_HIT
        self.moving = False
        self.urgent = is_urgent(request.priority)  # as it came: who waits for long gets another priority
        self.share: Load | None = NOTHING


class LoadCounters:
    """The load of one engine.

    `look_up` says what the prefix cache holds of a request, without side effects; `free_blocks` how many blocks are
    free; `first_waiting` who is first in the queue; `name_of` what a request is called by those who sent it.
    `one_token_each`: an output of a request that decodes, and goes on, has one token. `always_exact` is for engines in
    which the KV cache of a running request can get lost: no request is taken to only decode.
    """

    def __init__(
        self,
        look_up: Callable[[Request], Hit],
        free_blocks: Callable[[], int],
        first_waiting: Callable[[], Request | None],
        name_of: Callable[[Request], str],
        *,
        one_token_each: bool = False,
        always_exact: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_change: Callable[[], None] = _nobody
        """Called after a change, on any thread, often; must return at once."""
        self._look_up = look_up
        self._free_blocks = free_blocks
        self._first_waiting = first_waiting
        self._name_of = name_of
        self._one_token_each = one_token_each
        self._always_exact = always_exact
        self._clock = clock
        # Held for microseconds: never while the scheduler or the model works.
        self._lock = threading.Lock()
        self._sums = NOTHING
        """Sums over all requests but those that only decode."""
        self._num_decodes = 0
        self._decode_tokens = 0
        self._num_urgent_decodes = 0
        self._before: Load | None = None
        """While what a step has produced is gone through: the sums before, and what is received meanwhile. Tokens may
        be taken off with their request that have not been added yet."""
        self._entries: dict[str, _Entry] = {}
        self._received: set[str] = set()
        """Requests that are received and not queued yet."""
        self._exact: dict[str, _Entry] = {}
        """Requests that a step may work on and whose share it can change in other ways than by a new token."""
        self._waiting: dict[str, int] = {}
        self._recent: deque[tuple[float, str]] = deque(maxlen=MAX_NAMES)
        self._num_preemptions = self._num_gone = self._gone_tokens = 0
        self._num_free_blocks = free_blocks()
        self._first_waiting_tokens = 0
        self._version = 0
        self._some_left = False
        """Since a step was last gone through."""
        self._told_at = float("-inf")
        self._untold = False
        """Somebody will be told when the step has been gone through."""

    # Input thread

    def received(self, request: Request) -> None:
        """A client's request is here, and will be `queued` or `settled`."""
        hit = self._look_up(request)
        with self._lock:
            # Else: more input of one that is here.
            if request.request_id not in self._entries:
                entry = self._enter(request)
                entry.hit = hit
                self._received.add(request.request_id)
                self._recent.append((self._clock(), entry.name))
                self._count(entry)
                if self._before is not None:
                    self._before = self._before.plus(entry.share or NOTHING)
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

    def queued(self, request: Request) -> None:
        request_id = request.request_id
        if request_id in self._received:
            # Counted as it is.
            with self._lock:
                self._received.discard(request_id)
                self._note_scheduler()
            return
        hit = self._look_up(request)
        with self._lock:
            entry = self._entries.get(request_id) or self._enter(request)
            # One input session is continued by requests of the same id.
            entry.request = request
            entry.hit = hit
            self._put(entry, Place.IDLE if request.status == BETWEEN_PARTS else Place.WAITING)
        self._tell()

    def preempted(self, request: Request) -> None:
        self._num_preemptions += 1
        self.queued(request)

    def loading(self, request: Request) -> None:
        with self._lock:
            self._put(self._entries.get(request.request_id) or self._enter(request), Place.LOADING)
        self._tell()

    def strangers_among(self, request_ids: Iterable[str]) -> list[str]:
        """Requests among them of which nothing has been told."""
        return [request_id for request_id in request_ids if request_id not in self._entries]

    def scheduled(self, started: Collection[str], step: Collection[str]) -> None:
        """A step over the requests `step` begins; `started` were not running before."""
        with self._lock:
            if self._exact:
                self._recount(step)
            for request_id in started:
                self._put(self._entries[request_id], Place.RUNNING)
            self._note_scheduler()
        if started:
            self._tell()

    def computing(self) -> Collection[str]:
        """Sums of what a step computes, to be handed to `computed`, for the same step. Between the two, requests may
        leave and be queued."""
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
            self._note_scheduler()
            self._version += 1
            untold, self._untold = self._untold, False
        if exact or untold or self._clock() - self._told_at >= TOKENS_SECONDS:
            self._tell()

    def moving(self, request_id: str, moving: bool) -> None:
        """Notes whether the request is about to leave for another engine."""
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
            if entry.place in (Place.RUNNING, Place.IDLE):
                self._num_gone += 1
                self._gone_tokens += entry.request.num_tokens
            self._leave(entry)
            self._note_scheduler()
            self._version += 1
        self._tell()

    def blocks_changed(self) -> None:
        """Blocks may have been taken or given back, or somebody taken off the queue, otherwise than by a step."""
        with self._lock:
            noted = self._num_free_blocks, self._first_waiting_tokens
            self._note_scheduler()
            has_changed = noted != (self._num_free_blocks, self._first_waiting_tokens)
            self._version += has_changed
        if has_changed:
            self._tell()

    def num_preemptions(self) -> int:
        """Since the start."""
        return self._num_preemptions

    @property
    def decodes(self) -> tuple[int, int]:
        """Requests that run and only decode, and their tokens."""
        return self._num_decodes, self._decode_tokens

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
                num_gone=self._num_gone,
                gone_tokens=self._gone_tokens,
                num_free_blocks=self._num_free_blocks,
                first_waiting_tokens=self._first_waiting_tokens or self._received_tokens(),
            )

    # With the lock

    def _enter(self, request: Request) -> _Entry:
        entry = self._entries[request.request_id] = _Entry(request, self._name_of(request)[:MAX_NAME_CHARACTERS])
        self._waiting[entry.name] = self._waiting.get(entry.name, 0) + 1
        return entry

    def _leave(self, entry: _Entry) -> None:
        self._some_left = True
        self._set_share(entry, NOTHING)
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
        self._note_scheduler()
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
        share = share_of(place, request, entry.hit, moving=entry.moving, urgent=entry.urgent)
        only_decodes = share.running_to_decode and not share.running_prefill_tokens
        if only_decodes and not (request.resumable or self._always_exact):
            self._exact.pop(request.request_id, None)
            self._set_share(entry, None)
            return
        # A step can only change it if it runs, or ran when a step began that is still in flight.
        if place is Place.RUNNING or request.num_in_flight_tokens:
            self._exact[request.request_id] = entry
        else:
            self._exact.pop(request.request_id, None)
        self._set_share(entry, share)

    def _set_share(self, entry: _Entry, share: Load | None) -> None:
        if entry.share is None:
            self._num_decodes -= 1
            self._num_urgent_decodes -= entry.urgent
            self._decode_tokens -= entry.request.num_tokens
        elif entry.share is not NOTHING:
            self._sums = self._sums.minus(entry.share)
        if share is None:
            self._num_decodes += 1
            self._num_urgent_decodes += entry.urgent
            self._decode_tokens += entry.request.num_tokens
        elif share is not NOTHING:
            self._sums = self._sums.plus(share)
        entry.share = share

    def _load(self) -> Load:
        count, tokens, urgent = self._num_decodes, self._decode_tokens, self._num_urgent_decodes
        decodes = Load(
            num_running=count,
            running_to_decode=count,
            running_to_decode_tokens=tokens,
            num_urgent=urgent,
            urgent_running_to_decode=urgent,
        )
        return self._sums.plus(decodes)

    def _note_scheduler(self) -> None:
        """Note how many blocks are free, and what the first of the queue needs. Loop thread."""
        if self._before is None:
            self._num_free_blocks = self._free_blocks()
            first = self._first_waiting()
            entry = None if first is None else self._entries.get(first.request_id)
            self._first_waiting_tokens = entry.share.waiting_unallocated_tokens if entry and entry.share else 0

    def _received_tokens(self) -> int:
        """Tokens that requests on their way to an empty queue will allocate."""
        shares = (self._entries[request_id].share for request_id in self._received)
        return sum(share.waiting_unallocated_tokens for share in shares if share)

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


def _nobody() -> None:
    pass
