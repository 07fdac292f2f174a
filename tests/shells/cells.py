# SPDX-License-Identifier: Apache-2.0
"""The matrix of faults: every message of the protocol, and what can happen to it on its way.

A cell names a message, what happens to it, and a scenario in which the message is sent; then what becomes of the
request. `PLAY` are the scenarios.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from llumlet.types import Handover, MovePhase, SettleRequest
from tests.shells.cluster import Cluster, Stream, until
from tests.shells.network import Kind

Play = Callable[[Cluster, Stream], Awaitable[str]]
SOON = {"reserve_s": 0.15, "round_s": 0.15, "commit_s": 0.15, "withdraw_s": 0.15}
"""Deadlines of the source's states, shorter than a delayed answer takes."""


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
    cluster.network.arm("Withdraw", Kind.DROPPED)
    return await in_doubt(cluster, stream)


async def fenced_late(cluster: Cluster, stream: Stream) -> str:
    """B commits, and neither its answer nor Withdraw arrives: A asks the origin, which has heard of B."""
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
        question = SettleRequest(handover=Handover(migration_id=migration_id, request_id=stream.request_id))
        await cluster.try_call(cluster.llumlet("B").query(question))
    return await outcome


async def loses_tokens(cluster: Cluster, stream: Stream) -> str:
    """After the move tokens of B are lost: the origin starts the request again from those that have arrived."""
    outcome = await _migrate(cluster, stream)
    await stream.reaches(len(stream.tokens) + 10)
    cluster.network.arm("TokenBatch", Kind.DROPPED, sender="B")
    origin = stream.at.client._replay
    await until(lambda: bool(origin.replayed or stream.finish), lambda: "not replayed")
    return outcome


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
    )
}


async def _migrate(cluster: Cluster, stream: Stream, **more: Any) -> str:
    last = await cluster.migrate(stream, **more)
    return MovePhase.Name(last.phase).lower()


def _calls(name: str, scenario: str, outcomes: dict[str, str], **more: Any) -> list[Cell]:
    """Cells of a call and its answer. `outcomes` by `dropped`, `delayed`, `twice`, `answer dropped`, `answer delayed`."""
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
    *_calls("Adopt", "loses_tokens", _all("moved, replayed")),
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
    *_told("Release", "left", "moved"),
]
