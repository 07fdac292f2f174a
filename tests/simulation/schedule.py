# SPDX-License-Identifier: Apache-2.0
"""Random schedules of a `Cluster`. A schedule is its seed: the same seed, the same events, in every process."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from llumlet.protocol.events import Call
from llumlet.protocol.move.plan import Method
from llumlet.protocol.recovery.claim import LEASE_SECONDS

from .adopting import Attempt
from .cluster import HUNG_S, RELAY, Cluster
from .serving import Finish, HomeWord

Action = tuple[Callable[..., object], tuple[Any, ...]]
METHODS = (Method.LIVE, Method.LIVE, Method.BLOCKING, Method.RECOMPUTE)
KINDS = (None, None, None, (8, False), (None, True), (6, True))
"""Windows and states that a world has beside the KV cache of all tokens, or none."""
LENGTHS = (30, 60, 120)
RARITIES = (5, 12, 30)
"""One event in so many is a fault."""


@dataclasses.dataclass
class Played:
    """What came of a schedule."""

    seed: int
    faults: list[str]
    reached: Counter[str]
    """How often what was reached, so that schedules which never get anywhere are seen."""
    cluster: Cluster


def play(seed: int, cluster_class: type[Cluster] = Cluster, *, traced: bool = False) -> Played:
    """Run one schedule. An illegal event, or an illegal change of the ledger, is a violation like any other."""
    dice = random.Random(seed)
    if (kinds := dice.choice(KINDS)) is not None and cluster_class.window is None and not cluster_class.has_states:
        cluster_class = type("Kind", (cluster_class,), {"window": kinds[0], "has_states": kinds[1]})
    cluster = cluster_class("ABC"[: dice.choice((2, 3, 3))], requests=dice.choice((1, 2, 2, 3)))
    cluster.traced = traced
    cluster.answers_get_lost = cluster.answers_get_lost or dice.random() < 0.2
    cluster.hosts = dice.choice((1, 1, 2))
    cluster.moves_while_open = dice.random() < 0.3 or cluster.answers_get_lost
    try:
        faults = _play(cluster, dice)
    except Exception as error:  # noqa: BLE001 - whatever it is, the schedule is wanted
        faults = [f"{type(error).__name__}: {error}"]
    reached = Counter(str(outcome) for outcome in cluster.outcomes)
    reached["replays"] = cluster.origin.num_replayed
    reached["tried"] = cluster.num_tried
    reached["guilty"] = cluster.num_guilty
    reached["rescued"] = cluster.num_rescued
    reached["streams"] = len(cluster.clients)
    reached["left"] = sum(client.left for client in cluster.clients.values())
    reached["errors"] = sum(cluster.client(request_id).ended is Finish.ERROR for request_id in cluster.clients)
    return Played(seed, faults, reached, cluster)


def _play(cluster: Cluster, dice: random.Random) -> list[str]:
    one_rare_in, aborts = dice.choice(RARITIES), dice.random() < 0.2
    losses = dice.random() < 0.6
    """Whether engines are lost in this schedule: moves that nothing kills are worth schedules of their own."""
    if losses and dice.random() < 0.2:
        hang_for_long(cluster, "A")
    for _ in range(dice.choice(LENGTHS)):
        possible = [] if dice.randrange(one_rare_in) == 0 else list(usual(cluster, dice))
        if not possible:
            faults = lost_answers(cluster) if cluster.answers_get_lost else ()
            possible = list(faults) or list(rare(cluster, dice, aborts=aborts, losses=losses))
        act, arguments = possible[dice.randrange(len(possible))]
        if cluster.traced:
            what = getattr(act, "func", act).__name__  # type: ignore[attr-defined]
            cluster.note(f"> {what} {' '.join(str(argument) for argument in arguments)}")
        act(*arguments)
        if faults := cluster.wrong_tokens_or_owners():
            return faults
    wake_last = dice.random() < 0.5
    cluster.note(f"> settle, {'stopped engines wake up last' if wake_last else 'everybody runs'}")
    cluster.settle(wake_last=wake_last)
    for engine in cluster.engines.values():
        engine.ledger.check()
    return cluster.wrong_tokens_or_owners() + cluster.left_at_rest()


def hang_for_long(cluster: Cluster, name: str) -> None:
    """The engine hangs, and says so: seldom would a schedule get so far, and do anything after that."""
    for _ in range(6):
        cluster.turn(name)
    cluster.hang(name)
    cluster.advance(HUNG_S + cluster.step_s)
    for other in cluster.engines:
        cluster.beat(other)
    for message in list(cluster.network):
        if message.receiver == "O":
            cluster.deliver(message)
    cluster.look()


def usual(cluster: Cluster, dice: random.Random) -> Iterator[Action]:
    """What moves things on."""
    for message in cluster.deliverable():
        yield cluster.deliver, (message,)
    for name, engine in cluster.engines.items():
        if cluster.runs(name):
            if engine.commands:
                yield cluster.loop, (name,)
            if engine.requests:
                yield cluster.turn, (name,)
        if name in cluster.stopped:
            continue
        if engine.up:
            for request_id in engine.requests:
                if not cluster._leaves(engine, request_id):
                    to = dice.choice([other for other in cluster.engines if other != name])
                    yield cluster.move, (name, to, dice.choice(METHODS), request_id)
        for move, into in engine.into.items():
            if into.job is not None:
                yield cluster.pull_block, (name, move)
                yield cluster.pull_block, (name, move)
    for attempt in cluster.copying():
        yield cluster.rescue_block, (attempt,)
        yield cluster.rescue_block, (attempt,)
        # This is what makes a rescue worth watching: its holder wakes up, and needs its blocks.
        assert attempt.holder is not None
        holder = attempt.holder.name
        yield (cluster.wake if holder in cluster.hanging else cluster.churn), (holder,)
    for attempt in cluster.building():
        yield cluster.build, (attempt,)
    for due in cluster.due():
        yield cluster.fire, due
    if cluster._is_busy():
        for what, who in cluster.attentions():
            yield cluster.attend, (what, who)


def rare(cluster: Cluster, dice: random.Random, *, aborts: bool, losses: bool) -> Iterator[Action]:
    """What gets in the way."""
    engines = list(cluster.engines)
    name = dice.choice(engines)
    engine = cluster.engines[name]
    for message in cluster.network:
        if message.kind not in RELAY:
            yield cluster.drop, (message,)
    for message in cluster.deliverable():
        if not isinstance(message.body, HomeWord):
            yield cluster.duplicate, (message,)
    yield cluster.churn, (name,)
    yield cluster.hog, (name,)
    # A loop that hangs does nothing of its own.
    for request_id in engine.requests if name not in cluster.hanging else ():
        yield cluster.preempt, (name, request_id)
        if losses:
            yield cluster.gives_up, (name, request_id)
    for move, out in engine.out.items():
        yield cluster.cancel, (name, move)
        for call in sorted(out.calls):
            yield cluster.unreachable, (name, move, call)
    for move, into in engine.into.items():
        yield cluster.revoke, (name, move)
        if into.job is not None and not into.job.stopping:
            yield cluster.fail_pull, (name, move)
    yield cluster.cut_way, (name, dice.choice([*(other for other in engines if other != name), "O"]))
    yield cluster.cut_way, (dice.choice([*(other for other in engines if other != name), "O"]), name)
    for seconds in (0.3, 1.0, 6.0, 31.0):
        yield cluster.advance, (seconds,)
    if losses:
        for attempt in cluster.copying():
            yield oversleep, (cluster, attempt)
            yield oversleep, (cluster, attempt)
        yield from _losses(cluster, name, dice)
    if aborts:
        yield cluster.client_leaves, (dice.choice(list(cluster.clients)),)


def oversleep(cluster: Cluster, attempt: Attempt) -> None:
    """The engine is stopped for longer than what it copies is kept for it."""
    name, holder = attempt.engine.name, attempt.holder
    assert holder is not None
    cluster.stop(name)
    cluster.advance(LEASE_SECONDS + 1.0)
    for what, who in list(cluster.attentions()):
        if what == "lease":
            cluster.attend(what, who)
    cluster.wake(holder.name)
    cluster.loop(holder.name)
    cluster.churn(holder.name)
    cluster.wake(name)


def lost_answers(cluster: Cluster) -> Iterator[Action]:
    """Sources that are left in doubt."""
    for message in cluster.network:
        if message.kind in ("commit answer", "withdraw", "withdraw answer"):
            yield cluster.drop, (message,)
    for name, engine in cluster.engines.items():
        for move, out in engine.out.items():
            for call in sorted(out.calls & {Call.COMMIT, Call.WITHDRAW}):
                yield cluster.unreachable, (name, move, call)


def _losses(cluster: Cluster, name: str, dice: random.Random) -> Iterator[Action]:
    if name in cluster.stopped or name in cluster.hanging:
        yield cluster.wake, (name,)
        yield cluster.wake, (name,)
    elif not cluster.engines[name].up:
        yield cluster.start, (name,)
        yield cluster.start, (name,)
    else:
        yield cluster.stop, (name,)
        yield cluster.hang, (name,)
        in_step = dice.random() < 0.4
        yield functools.partial(cluster.crash, in_step=in_step), (name, dice.randrange(4))
        yield functools.partial(cluster.kill, in_step=in_step), (name, dice.randrange(4))
