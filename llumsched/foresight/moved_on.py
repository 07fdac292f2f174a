# SPDX-License-Identifier: Apache-2.0
"""Estimates the present reports of the instances: the columns of their last statuses, advanced by each one's step
model.

A status is as old as its transport, and as what happens without a report. Until the next one this much is known or
likely, and computed in closed form for all instances at a time:

    the step under way ends when its length says; it had run for `loop_age_ms` when the status was made;
    running prefills get their chunks, in steps that have `max_num_batched_tokens` less one for each decode;
    waiting requests are admitted while there are blocks for them; those that a step has left out before, when others
    have ended;
    requests sent since are admitted by the first step that begins after their arrival, if none waits before them;
    each decode takes a token, and room for it, with each step; the instance has announced the steps in which decodes
    take a block, or end as they may have no more tokens (`coming_blocks`, `coming_ends`);
    others end as often as requests did lately without being foretold (`ends_per_token`).

The number of these that end is the median, not the mean: mostly none does, and taking a part of a request off every
instance would be wrong for nearly all of them.

Values stay between zero and the available room. An instance with unknown step times, or whose step under way has not
ended, stays as reported. All times count from the status itself, so that nothing is carried over to the next one.
`loop_age_ms` and `num_uncomputed_pairs` stay as they were: predictions of latency start from the status as reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from llumlet.contract.coming_steps import NUM_STEPS
from llumsched.cluster.columns import Cluster, IdOrder, Mask, Matrix, Values
from llumsched.cluster.instance import Instance
from llumsched.cluster.snapshot import Snapshot
from llumsched.foresight.outlook import Outlook
from llumsched.foresight.senders import Senders

_MEDIAN: Final = 0.31
"""Added to the mean of a Poisson variable before rounding down, to get its median."""
_FEW_TOKENS: Final = 2048.0
"""Tokens per batch of an instance that does not tell."""
_MOST_S: Final = 60.0
"""Age of a status after which nothing more is expected: the instance then counts as failed or unknown."""
_SHORTEST_S: Final = 1e-6
"""Shortest step; a model that predicts less is invalid."""
_SENT: Final = (
    "sent_requests",
    "sent_prefill_requests",
    "sent_decode_requests",
    "sent_uncomputed_prefill_tokens",
    "sent_uncomputed_prefill_pairs",
    "sent_decode_tokens",
    "sent_tokens",
)
_REPORTED: Final = (
    "num_used_gpu_tokens",
    "num_free_blocks",
    "num_running_requests",
    "scheduler_running_to_decode_requests_num",
    "scheduler_running_to_decode_tokens_num",
    "num_uncomputed_tokens_scheduler_running_prefills",
    "num_unallocated_tokens_scheduler_running_prefills",
    "num_waiting_requests",
    "scheduler_waiting_to_decode_requests_num",
    "scheduler_waiting_to_decode_tokens_num",
    "num_uncomputed_tokens_scheduler_waiting_prefills",
    "num_uncomputed_tokens_all_waiting_prefills",
    "num_unallocated_tokens_all_waiting_requests",
)
MOVED: Final = (*_REPORTED, *_SENT)
"""Columns that `moved_on` estimates."""
_MOVED_NAMES: Final = frozenset(MOVED)


class _Wrapped:
    """A `Cluster` with some columns replaced."""

    def __init__(self, reported: Cluster) -> None:
        self.reported = reported

    def __len__(self) -> int:
        return len(self.reported)

    def __getitem__(self, name: str) -> Values:
        return self.reported[name]

    def consecutive(self, first: str, number: int) -> Matrix:
        return self.reported.consecutive(first, number)

    @property
    def instances(self) -> Sequence[Instance]:
        return self.reported.instances

    @property
    def index(self) -> Mapping[str, int]:
        return self.reported.index

    @property
    def order(self) -> IdOrder:
        return self.reported.order

    def serving(self, model: str) -> Mask:
        return self.reported.serving(model)


class Forward(_Wrapped):
    """A `Cluster` as it would report at `now_s`, on the view's clock. Valid until `reported` changes."""

    def __init__(self, reported: Cluster, now_s: float, senders: float = 1.0) -> None:
        """`senders`: as in `moved_on`."""
        super().__init__(reported)
        self._now_s, self._senders = now_s, senders
        self._moved: Mapping[str, Values] | None = None

    def __getitem__(self, name: str) -> Values:
        if name not in _MOVED_NAMES:
            return self.reported[name]
        if self._moved is None:
            self._moved = moved_on(self.reported, self._now_s, self._senders)
        return self._moved[name]


class Forecast:
    """Estimates the cluster's present report. `outlook` is among the providers of its table; `outlook` and `senders`
    observe the view."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.outlook, self.senders = Outlook(clock), Senders(clock)

    def of(self, reported: Cluster, now_s: float) -> Forward:
        return Forward(reported, now_s, self.senders.number)


def move_on(snapshot: Snapshot, now_s: float) -> None:
    """Writes the estimated report at `now_s`, on the view's clock, into a snapshot. Not to be repeated."""
    for name, values in moved_on(snapshot, now_s).items():
        snapshot[name][:] = values


def moved_on(cluster: Cluster, now_s: float, senders: float = 1.0) -> Mapping[str, Values]:
    """The columns `MOVED` estimated for `now_s`, on the view's clock. `senders`: number of schedulers assumed to have
    sent what this one has, since they see the same statuses and use the same policy."""
    with np.errstate(all="ignore"):
        return _moved_on(cluster if senders == 1.0 else _SentByAll(cluster, senders), now_s)


class _SentByAll(_Wrapped):
    """A cluster to which several schedulers send alike."""

    def __init__(self, cluster: Cluster, senders: float) -> None:
        super().__init__(cluster)
        self._senders = senders

    def __getitem__(self, name: str) -> Values:
        values = self.reported[name]
        return values * self._senders if name in _SENT or name == "dispatched_ms" else values


class _Steps(NamedTuple):
    """Steps since the status, from the status alone. Numbers by instance."""

    has_begun: Mask
    """True if a step has begun since the status; otherwise only `started` is valid."""
    budget: Values
    """Prefill tokens of a step."""
    queued: Values
    """Tokens not yet in a step: of running prefills, and of waiting requests that are admitted."""
    joining: Values
    """Waiting requests to be admitted as soon as a step has budget."""
    room: Values
    """Tokens for which there are blocks, before these requests have theirs."""
    num_prefilling: Values
    """Steps that the queued tokens take."""
    started: Values
    """Steps that have begun since."""
    ago_s: Values
    """Seconds since the last of them began."""
    decoding_s: Values
    """Length of a step with decodes only."""


class _Come(NamedTuple):
    """Sent requests that were admitted since the status."""

    requests: Values
    share: Values
    """Their share of all sent requests."""
    started: Values
    """Steps that have begun since the status, including theirs."""
    decoded: Values
    """Steps that have begun since their prefills were done."""


def _moved_on(cluster: Cluster, now_s: float) -> dict[str, Values]:
    steps = _steps(cluster, now_s)
    come = _come(cluster, now_s, steps)
    has_begun, started = steps.has_begun, come.started
    num_decodes = cluster["scheduler_running_to_decode_requests_num"]
    prefill = cluster["num_uncomputed_tokens_scheduler_running_prefills"]
    left = cluster["num_unallocated_tokens_scheduler_running_prefills"]
    num_waiting = cluster["num_waiting_requests"]
    waiting_prefill = cluster["num_uncomputed_tokens_all_waiting_prefills"]
    waiting_room = cluster["num_unallocated_tokens_all_waiting_requests"]
    total, used = cluster["num_total_gpu_tokens"], cluster["num_used_gpu_tokens"]
    block = np.maximum(total / np.maximum(cluster["num_total_blocks"], 1.0), 1.0)

    # Prefills: given to steps, and computed by those that have ended.
    given = np.minimum(started * steps.budget, steps.queued)
    computed = np.minimum(np.maximum(started - 1.0, 0.0) * steps.budget, steps.queued)
    each = waiting_prefill / np.maximum(num_waiting, 1.0)
    given_waiting = np.maximum(given - left, 0.0)
    joined = np.where(each > 0, np.minimum(np.ceil(given_waiting / each), steps.joining), steps.joining)
    share = joined / np.maximum(num_waiting, 1.0)
    joined_decodes = share * cluster["scheduler_waiting_to_decode_requests_num"]
    joined_prefill = joined * each

    # Decodes: what is foretold of them, and what is not.
    decoding = num_decodes - np.minimum(left > 0, num_decodes)
    foretold = np.minimum(started, cluster["foretold_steps"])
    rows, step = np.arange(len(cluster)), foretold.astype(np.intp)
    blocks = cluster.consecutive("coming_blocks_0", NUM_STEPS + 1)[step, rows]
    ends = np.clip(cluster.consecutive("coming_ends_0", NUM_STEPS + 1)[step, rows], 0.0, decoding)
    likely = np.floor(cluster["ends_per_token"] * started * num_decodes + _MEDIAN)
    others = np.where(has_begun, np.minimum(likely, decoding - ends), 0.0)
    late = (joined_decodes + num_decodes - decoding) * np.maximum(started - steps.num_prefilling, 0.0)
    grown = (decoding - ends) * (started - foretold) + late + come.requests * come.decoded
    half = (block - 1.0) / 2.0  # free in the last block of a request, on average
    foretold_tokens = np.where(ends > 0, blocks * block + ends * half, decoding * foretold)
    gone_tokens = others * cluster["ended_tokens"]

    waiting_allocated = np.where(each > 0, given_waiting / waiting_prefill, share) * waiting_room
    allocated = np.minimum(given, left) + waiting_allocated + come.share * cluster["sent_tokens"]
    more = grown + allocated + half * (joined + come.requests) - gone_tokens - half * others
    most = np.maximum(total, used)
    now_used = np.clip(used + (blocks + np.rint(more / block)) * block, 0.0, most)
    ended = ends + others

    # Who has been left out follows those that have ended, into their room, or into their places in the batch.
    room_each = np.maximum(waiting_room / np.maximum(num_waiting, 1.0), 1.0)
    places = np.where(total - used >= room_each, ended, num_waiting)
    fitting = np.minimum(np.floor((total - now_used) / room_each), places)
    following = np.where(ended > 0, np.clip(fitting, 0.0, num_waiting - steps.joining), 0.0)
    now_used = np.minimum(now_used + np.rint(following * (room_each + half) / block) * block, most)
    joined = joined + following
    share = joined / np.maximum(num_waiting, 1.0)
    still = 1.0 - share
    joined_decodes = share * cluster["scheduler_waiting_to_decode_requests_num"]

    running_prefill = joined_prefill + np.where(has_begun, left, prefill)
    not_computed = np.where(come.decoded > 0, 0.0, come.share) * cluster["sent_uncomputed_prefill_tokens"]
    joined_tokens = share * cluster["scheduler_waiting_to_decode_tokens_num"]
    come_tokens = come.share * cluster["sent_decode_tokens"]
    moved = (
        now_used,
        cluster["num_free_blocks"] + (used - now_used) / block,
        cluster["num_running_requests"] + joined + come.requests - ended,
        num_decodes + joined_decodes + come.share * cluster["sent_decode_requests"] - ended,
        cluster["scheduler_running_to_decode_tokens_num"]
        + joined_tokens + come_tokens + grown + foretold_tokens - gone_tokens,
        running_prefill - computed + not_computed,
        joined_prefill + left - given,
        num_waiting - joined,
        cluster["scheduler_waiting_to_decode_requests_num"] - joined_decodes,
        cluster["scheduler_waiting_to_decode_tokens_num"] - joined_tokens,
        cluster["num_uncomputed_tokens_scheduler_waiting_prefills"] * still,
        waiting_prefill * still,
        waiting_room * still,
    )  # fmt: skip
    not_come = 1.0 - come.share
    columns = dict(zip(_REPORTED, np.maximum(np.stack(moved), 0.0), strict=True))
    return columns | {name: cluster[name] * not_come for name in _SENT}


def _steps(cluster: Cluster, now_s: float) -> _Steps:
    num_decodes = cluster["scheduler_running_to_decode_requests_num"]
    prefill = cluster["num_uncomputed_tokens_scheduler_running_prefills"]
    left = cluster["num_unallocated_tokens_scheduler_running_prefills"]
    num_waiting = cluster["num_waiting_requests"]
    waiting_prefill = cluster["num_uncomputed_tokens_all_waiting_prefills"]
    waiting_room = cluster["num_unallocated_tokens_all_waiting_requests"]
    batch = cluster["max_num_batched_tokens"]
    budget = np.maximum(np.where(batch > 0, batch, _FEW_TOKENS) - num_decodes, 1.0)

    decode_kv = np.maximum(cluster["scheduler_running_to_decode_tokens_num"] - prefill, 0.0)
    decode_s, kv_s = cluster["step_decode_s"], cluster["step_decode_token_s"]
    base_s = cluster["step_s"] + decode_s * num_decodes + kv_s * decode_kv
    pairs_each = cluster["num_uncomputed_pairs"] / np.maximum(prefill + waiting_prefill, 1.0)
    token_s = cluster["step_prefill_token_s"] + cluster["step_pair_s"] * pairs_each
    in_step = np.maximum(prefill - left, 0.0)

    # Since the step that was under way has ended. One that has run for longer than it should ends now.
    elapsed_s = np.clip(now_s - cluster["as_of_s"], 0.0, _MOST_S)
    under_way_s = base_s + token_s * in_step
    rest_s = np.maximum(under_way_s - cluster["loop_age_ms"] / 1e3, 0.0)
    since_s = elapsed_s - np.where(cluster["num_running_requests"] > 0, rest_s, 0.0 * base_s)
    has_begun = (since_s > 0) & (base_s > _SHORTEST_S) & np.isfinite(token_s)

    room = np.maximum(cluster["num_total_gpu_tokens"] - cluster["num_used_gpu_tokens"] - num_decodes - left, 0.0)
    fitting = np.floor(room * num_waiting / np.maximum(waiting_room, 1.0))
    joining = np.where(waiting_room <= room, num_waiting, np.minimum(fitting, num_waiting))
    # Where a prefill goes on, it was the budget of the step that others waited for, not room.
    joining = np.where(has_begun & ((cluster["queue_is_stuck"] == 0) | (left > 0)), joining, 0.0)

    # The steps after it: full ones, one with the rest, and then such as only decode, longer with each token.
    base_s = base_s + kv_s * in_step
    full_s = base_s + token_s * budget
    queued = left + joining * waiting_prefill / np.maximum(num_waiting, 1.0)
    num_full = np.floor(queued / budget)
    remainder = queued - num_full * budget
    has_rest = remainder > 0
    after_s = since_s - num_full * full_s - np.where(has_rest, base_s + token_s * remainder, 0.0)
    decoding_s = base_s + decode_s * joining + kv_s * queued
    decoding_s = decoding_s + kv_s * num_decodes * np.maximum(after_s, 0.0) / decoding_s / 2.0
    num_decoding = np.floor(after_s / decoding_s)
    num_prefilling = num_full + has_rest
    only_decodes = after_s >= 0
    begun = np.where(only_decodes, num_prefilling + num_decoding, np.floor(since_s / full_s)) + 1.0
    ago_s = np.where(only_decodes, after_s - num_decoding * decoding_s, since_s - (begun - 1.0) * full_s)
    started = np.where(has_begun, begun, 0.0)
    return _Steps(has_begun, budget, queued, joining, room, num_prefilling, started, ago_s, decoding_s)


def _come(cluster: Cluster, now_s: float, steps: _Steps) -> _Come:
    """For several requests only the mean time of dispatch is known; they are assumed to have come evenly."""
    num_sent, sent_tokens = cluster["sent_requests"], cluster["sent_tokens"]
    if not num_sent.any():
        none = np.zeros(len(cluster))
        return _Come(none, none, steps.started, none)
    num_waiting, step_s = cluster["num_waiting_requests"], steps.decoding_s
    several = np.maximum(num_sent, 1.0)
    sent_s = np.maximum(now_s - cluster["dispatched_ms"] / 1e3 / several, 1e-6)
    is_idle = (cluster["num_running_requests"] == 0) & (num_waiting == 0)
    ago_s = np.where(is_idle, 0.0, steps.ago_s)
    before = np.rint(num_sent * np.clip(1.0 - ago_s / (2.0 * sent_s), 0.0, 1.0))
    taken = steps.joining * cluster["num_unallocated_tokens_all_waiting_requests"] / np.maximum(num_waiting, 1.0)
    fitting = np.floor((steps.room - taken) * several / np.maximum(sent_tokens, 1.0))
    may_come = steps.has_begun & (steps.joining == num_waiting)
    requests = np.where(may_come, np.clip(fitting, 0.0, before), 0.0)
    share = requests / several

    # They make the step longer that takes them, and all later ones begin so much later.
    own_s = (
        step_s
        + cluster["step_prefill_token_s"] * share * cluster["sent_uncomputed_prefill_tokens"]
        + cluster["step_pair_s"] * share * cluster["sent_uncomputed_prefill_pairs"]
    )
    since = np.floor((sent_s - ago_s) / step_s)
    after_s = np.where(is_idle, sent_s, ago_s + since * step_s) - own_s
    has_come = requests > 0
    decoded = np.where(has_come, np.maximum(np.floor(after_s / step_s) + 1.0, 0.0), 0.0)
    with_theirs = np.where(is_idle, 1.0, np.maximum(steps.started - since, 1.0)) + decoded
    return _Come(requests, share, np.where(has_come, with_theirs, steps.started), decoded)
