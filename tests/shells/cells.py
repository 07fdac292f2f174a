# SPDX-License-Identifier: Apache-2.0
"""The matrix of faults: every message of the protocol, and what can happen to it on its way.

A cell names a message, what happens to it, and a scenario in which the message is sent; then what becomes of the
request. `PLAY` are the scenarios.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from llumlet.contract.types import Handover, Mode, MovePhase, SettleRequest
from llumlet.protocol.origin.replay import Replay
from tests.shells.circumstances import before_copies, hanging, slow_copies
from tests.shells.cluster import MAX_TOKENS, SECONDS, Cluster, Stream, until
from tests.shells.network import Kind
from vllm_llumnix.engine.recovery import claims

Play = Callable[[Cluster, Stream], Awaitable[str]]
SOON_SECONDS = 0.15
"""A deadline of the source's state: shorter than a delayed answer takes."""
ANSWER_SECONDS = 2.0
DEADLINE_OF = {"Reserve": "reserve_s", "CopyRound": "round_s", "Commit": "commit_s", "Withdraw": "withdraw_s"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """`outcome`: what becomes of the request, as `Migrate` reports it; `replayed`: whether the origin starts it again.

    `times`: of how many messages in a row. `sender`: of whom.
    """

    message: str
    kind: Kind
    scenario: str
    outcome: str
    replayed: bool = False
    times: int = 1
    sender: str = ""

    @property
    def id(self) -> str:
        return f"{self.message}-{self.kind}-{self.scenario}".replace(" ", "-")

    @property
    def result(self) -> str:
        """For the table of failures."""
        return f"{self.outcome}, replayed" if self.replayed else self.outcome


# Scenarios


async def moves(cluster: Cluster, stream: Stream) -> str:
    """A move from A to B."""
    return await _migrate(cluster, stream)


async def in_doubt(cluster: Cluster, stream: Stream) -> str:
    """Commit is lost: A withdraws it."""
    cluster.network.arm("Commit", Kind.DROPPED)
    return await _migrate(cluster, stream)


async def unheard(cluster: Cluster, stream: Stream) -> str:
    """B commits, and its answer is lost: A withdraws what cannot be withdrawn."""
    cluster.network.arm("Commit answer", Kind.DROPPED)
    return await _migrate(cluster, stream)


async def fenced(cluster: Cluster, stream: Stream) -> str:
    """Commit and Withdraw are lost: A asks the origin, which bars the epoch."""
    cluster["A"].engine.agent.departures.deadline_s = 0.3
    cluster.network.arm("Withdraw", Kind.DROPPED)
    return await in_doubt(cluster, stream)


async def fenced_late(cluster: Cluster, stream: Stream) -> str:
    """B commits, and neither its answer nor Withdraw arrives: A asks the origin, which has heard of B."""
    cluster["A"].engine.agent.departures.deadline_s = 0.3
    cluster.network.arm("Withdraw", Kind.DROPPED)
    return await unheard(cluster, stream)


async def called_off(cluster: Cluster, stream: Stream) -> str:
    """A round is lost: A calls the move off."""
    cluster.network.arm("CopyRound", Kind.DROPPED)
    return await _migrate(cluster, stream)


async def left(cluster: Cluster, stream: Stream) -> str:
    """The client leaves after the move."""
    outcome = await _migrate(cluster, stream)
    await stream.reaches(len(stream.tokens) + 10)
    await cluster.leave(stream)
    return outcome


async def left_in_doubt(cluster: Cluster, stream: Stream) -> str:
    """The client leaves while Commit, which is late, is on its way."""
    commit = cluster.network.arm("Commit", Kind.DELAYED)
    outcome = cluster.begin(_migrate(cluster, stream))
    await until(lambda: commit.hits > 0, lambda: "no Commit")
    await cluster.leave(stream)
    return await outcome


async def asked(cluster: Cluster, stream: Stream) -> str:
    """Somebody asks B for the state of a move that is on its way, again and again."""
    cluster.network.arm("CopyRound answer", Kind.DELAYED)
    outcome = cluster.begin(_migrate(cluster, stream))
    arrivals = cluster["B"].engine.agent.arrivals
    await until(lambda: bool(arrivals.moves), lambda: "no Reserve")
    migration_id = next(iter(arrivals.moves))
    for _ in range(3):
        named = Handover(migration_id=migration_id, request_id=stream.request_id, src_incarnation="somebody")
        question = SettleRequest(handover=named)
        await cluster.try_call(cluster.llumlet("B").query(question))
    return await outcome


async def loses_tokens(cluster: Cluster, stream: Stream) -> str:
    """After the move tokens of B are lost: the origin starts the request again from those that have arrived."""
    outcome = await _migrate(cluster, stream)
    await stream.reaches(len(stream.tokens) + 10)
    cluster.network.arm("TokenBatch", Kind.DROPPED, sender="B")
    origin = stream.at.client.origin.core
    await until(lambda: bool(origin.num_replayed or stream.finish), lambda: "not replayed")
    return outcome


async def loses_a_long_one(cluster: Cluster, stream: Stream) -> str:
    """The same, of so many tokens that the origin asks first who has how many of them cached."""
    await stream.reaches(Replay.compares_from)
    return await loses_tokens(cluster, stream)


async def given_up(cluster: Cluster, stream: Stream) -> str:
    """The mover takes longer for a round than A waits: the blocks stay B's until the mover is quiet."""
    cluster.deadlines["round_s"] = 0.1
    with slow_copies(cluster["B"], 0.3):
        outcome = await _migrate(cluster, stream)
        await until(lambda: not cluster["B"].engine.agent.arrivals.draining_blocks(), lambda: "draining for ever")
    return outcome


async def preempted(cluster: Cluster, stream: Stream) -> str:
    """A's scheduler preempts the frozen request while B copies its blocks."""
    engine = cluster["A"].engine
    moves = engine.agent.departures.moves

    def preempt() -> None:
        scheduler = engine.scheduler
        frozen = scheduler.requests[stream.request_id]
        scheduler.running.remove(frozen)
        scheduler._preempt_request(frozen, time.monotonic())

    with slow_copies(cluster["B"], 0.2):
        outcome = cluster.begin(_migrate(cluster, stream, method=Mode.BLOCKING))
        await until(lambda: any(move.leaving.frozen for move in moves.values()), lambda: "not frozen")
        cluster.on_loop("A", preempt)
        return await outcome


async def alone(cluster: Cluster, stream: Stream) -> None:
    """Returns when its engine has no other request: what is lost there, claimed or copied is this one."""
    others = [other for other in cluster.streams if other.at is stream.at and other is not stream]
    await until(lambda: all(other.finish for other in others), lambda: f"{stream.at.name} has other requests")


async def hangs(cluster: Cluster, stream: Stream) -> str:
    """A's loop hangs in a model step: another engine goes on, with the KV cache or without."""
    await alone(cluster, stream)
    with hanging(cluster["A"]):
        return await goes_on(cluster, stream)


async def wakes_up(cluster: Cluster, stream: Stream) -> str:
    """A's loop hangs and wakes up while another engine copies the KV cache: it fills every block that it has free."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(SECONDS)

    source = cluster["A"]
    await alone(cluster, stream)
    with before_copies(cluster["B"], wait), before_copies(cluster["C"], wait):
        with hanging(source):
            await until(begun.is_set, lambda: "nobody copies")
        await until(lambda: "A" not in cluster.owners(stream), lambda: "A goes on with the request")
        fillers = [await cluster.stream("A", num_prompt=600, max_tokens=5) for _ in range(3)]
        for filler in fillers:
            await filler.reaches(1)
        go_on.set()
        return await goes_on(cluster, stream)


async def too_late(cluster: Cluster, stream: Stream) -> str:
    """The same, and A keeps the blocks for less long than the copy takes."""
    with mock.patch.object(claims, "LEASE_SECONDS", 0.05):
        return await wakes_up(cluster, stream)


async def goes_on(cluster: Cluster, stream: Stream) -> str:
    """Returns when another engine has the lost request: how much of it was brought there."""
    client = stream.at.client
    known = client.origin.core.streams.get(stream.request_id)
    assert known is not None
    await until(lambda: bool(known.replays), lambda: "not replayed")
    assert known.owner is not None
    await stream.reaches(len(stream.tokens) + 20)
    return "rescued" if cluster[known.owner.instance].engine.agent.adoptions.num_rescued else "computed again"


PLAY: dict[str, Play] = {
    play.__name__: play
    for play in (
        moves,
        in_doubt,
        unheard,
        fenced,
        fenced_late,
        called_off,
        left,
        left_in_doubt,
        asked,
        loses_tokens,
        loses_a_long_one,
        given_up,
        preempted,
        hangs,
        wakes_up,
        too_late,
    )
}


@dataclasses.dataclass(frozen=True)
class Played:
    """What became of the request, and of the fault; `faults` is what is wrong."""

    outcome: str
    replayed: bool
    hits: int
    faults: list[str]


async def play(cluster: Cluster, cell: Cell) -> Played:
    """The cell, beside two requests whose clients are in the way of nobody."""
    fault = cluster.network.arm(cell.message, cell.kind, cell.times, sender=cell.sender)
    call, _, answer = cell.message.partition(" ")
    if answer and cell.kind is Kind.DELAYED and call in DEADLINE_OF:
        cluster.deadlines[DEADLINE_OF[call]] = SOON_SECONDS
    stream = await company(cluster)
    outcome = await PLAY[cell.scenario](cluster, stream)
    faults = await cluster.verdict(stream)
    with contextlib.suppress(TimeoutError):
        # An answer that nobody waits for may come after everything else.
        await until(lambda: fault.hits >= cell.times, lambda: "not sent", seconds=ANSWER_SECONDS)
    return Played(outcome, bool(stream.at.client.origin.core.num_replayed), fault.hits, faults)


async def company(cluster: Cluster, num_others: int = 1, max_tokens: int = MAX_TOKENS) -> Stream:
    """A stream at A that has begun, beside others at A and at B."""
    for at in "AB" * num_others:
        await cluster.stream(at, num_prompt=40, max_tokens=120)
    stream = await cluster.stream(max_tokens=max_tokens)
    await stream.reaches(20)
    return stream


async def _migrate(cluster: Cluster, stream: Stream, **more: Any) -> str:
    last = await cluster.migrate(stream, **more)
    return MovePhase.Name(last.phase).lower()


def _calls(name: str, scenario: str, outcomes: dict[str, str], **more: Any) -> list[Cell]:
    """Cells of a call and its answer. `outcomes` by fault: `dropped`, `twice`, `answer dropped` and so on."""
    cells = []
    for fault, outcome in outcomes.items():
        answer, _, kind = fault.rpartition(" ")
        message = f"{name} {answer}".strip()
        outcome, _, replayed = outcome.partition(", ")
        cells.append(Cell(message, Kind(kind), scenario, outcome, bool(replayed), **more))
    return cells


def _all(outcome: str, **changes: str) -> dict[str, str]:
    faults = dict.fromkeys(("dropped", "delayed", "twice", "answer dropped", "answer delayed"), outcome)
    return faults | {fault.replace("_", " "): other for fault, other in changes.items()}


def _told(name: str, scenario: str, outcome: str, *, times: int = 1, sender: str = "", **changes: str) -> list[Cell]:
    """Cells of a message of the relay."""
    kinds = {kind: changes.get(kind, outcome) for kind in Kind}
    cells = []
    for kind, result in kinds.items():
        outcome, _, replayed = result.partition(", ")
        cells.append(Cell(name, kind, scenario, outcome, bool(replayed), times, sender))
    return cells


IN_TIME = {"twice": "rescued, replayed", "answer_delayed": "rescued, replayed"}
ADOPTED = _all("computed again, replayed", **IN_TIME)
del ADOPTED["twice"]  # of two that come at once, each may be the first to add the request, or to claim its KV cache
CELLS: list[Cell] = [
    *_calls("Reserve", "moves", _all("stayed", twice="moved")),
    *_calls("CopyRound", "moves", _all("stayed", twice="moved")),
    *_calls("Commit", "moves", _all("moved", dropped="stayed", delayed="stayed")),
    *_calls("Withdraw", "in_doubt", _all("stayed")),
    *_calls("Withdraw", "unheard", _all("moved")),
    *_calls("Cancel", "called_off", _all("stayed")),
    *_calls("Abort", "fenced", _all("stayed")),
    *_calls("Abort", "left_in_doubt", _all("gone")),
    *_calls("Close", "moves", _all("moved")),
    *_calls("Query", "asked", _all("moved")),
    *_calls("CachedPrefix", "loses_a_long_one", _all("moved, replayed")),
    *_calls("Adopt", "loses_tokens", _all("moved, replayed")),
    *_calls("Adopt", "hangs", ADOPTED),
    *_calls("Claim", "hangs", _all("computed again, replayed", **IN_TIME)),
    *_calls("EndClaim", "hangs", _all("computed again, replayed", **IN_TIME)),
    *_calls("Llumlet.Abort", "left", _all("moved")),
    *_told("TokenBatch", "moves", "moved", sender="B", dropped="moved, replayed", delayed="moved, replayed"),
    *_told("Hello", "moves", "moved", times=2),
    *_told("Heartbeat", "moves", "moved", times=5),
    *_told("HeartbeatAck", "moves", "moved", times=5),
    *_told("HandedOver", "moves", "moved"),
    *_told("FenceQuestion", "fenced", "stayed"),
    *_told("FenceAnswer", "fenced", "stayed"),
    *_told("FenceQuestion", "fenced_late", "moved"),
    *_told("FenceAnswer", "fenced_late", "moved"),
    *_told("Dismissal", "left", "moved"),
]
