# SPDX-License-Identifier: Apache-2.0
"""Moves between running servers, and what one of them cost the client.

A move is asked for through the source's llumlet, the way a scheduler does it. Its cost is read off
the client's own clock: the time between the last token computed at the source and the first one
computed at the destination.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import cast

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import (
    OUTCOMES,
    MigrateRequest,
    MigrationReqPolicy,
    MigrationType,
    Mode,
    MovePhase,
    MoveProgress,
    RequestInfo,
    reason_word,
    word,
)
from tests.support.client import Stream
from tests.support.harness import LlumletAddress, Server
from tests.support.stats import median

STALL_BUDGET_MS: float | None = None
"""Of moves for which none is given; None: the engine's own."""
HANDOVER_GAPS = 3
"""The stall is the longest of this many gaps from the hand-over on: what is held back is also
counted if it is the second token of the destination, or the third, that comes late.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One settled move. Words are lower case, as in the llumlet's messages; times are
    `time.monotonic()` seconds.
    """

    request_id: str
    phase: str
    reason: str
    detail: str
    mode: str
    rounds: int
    copied_bytes: int
    recomputed_tokens: int
    context_tokens: int
    hit_tokens: int
    epoch: tuple[int, int]
    transport: str
    tokens_alone: str
    phase_ms: dict[str, float]
    phases: tuple[tuple[str, float], ...]
    asked_at: float
    settled_at: float

    @property
    def moved(self) -> bool:
        return self.phase == "moved"

    @property
    def live(self) -> bool:
        """Whether the request was moved with its cache while it ran, at most one token computed for
        the hand-over.
        """
        return self.moved and self.mode == "live" and self.recomputed_tokens <= 1


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """What one move did to a stream, in seconds. `index` is the first token of the destination."""

    index: int
    stall: float
    itl: float
    """Median of `steady`."""
    steady: tuple[float, ...]
    """Gaps of the same stream just before and after the move: the same length and neighbours."""

    @property
    def excess(self) -> float:
        return self.stall - self.itl


async def migrate(
    source: Server,
    destination: Server,
    *,
    request_ids: Sequence[str] = (),
    rule: tuple[str, str, float] | None = None,
    method: str = "live",
    force: bool = False,
    stall_budget_ms: float | None = None,
    deadline_s: float = 120.0,
) -> list[Move]:
    """Move requests and wait until every one is settled. With method `auto`, what cannot bring its KV cache along goes
    without.

    Give the engine's `request_ids`, or a `rule` such as `("NUM_REQ", "SR", 1)`. `force` moves even
    where the stall budget would refuse. Raises LlumletError if the source refuses the call,
    LlumletUnreachable if it does not answer.
    """
    assert source.llumlet is not None
    assert destination.llumlet is not None
    async with LlumletClient(str(source.llumlet)) as client:
        return await migrate_through(
            client,
            source.llumlet,
            destination.llumlet,
            request_ids=request_ids,
            rule=rule,
            method=method,
            force=force,
            stall_budget_ms=stall_budget_ms,
            deadline_s=deadline_s,
        )


async def migrate_through(
    client: LlumletClient,
    source: LlumletAddress,
    destination: LlumletAddress,
    *,
    request_ids: Sequence[str] = (),
    rule: tuple[str, str, float] | None = None,
    method: str = "live",
    force: bool = False,
    stall_budget_ms: float | None = None,
    deadline_s: float = 120.0,
) -> list[Move]:
    """The same over an open connection to the source."""
    request = MigrateRequest(
        src_engine_id=source.instance_id,
        dst_engine_id=destination.instance_id,
        dst_engine_ip=destination.host,
        dst_engine_port=destination.port,
        request_ids=request_ids,
        method=Mode.MODE_UNSPECIFIED if method == "auto" else method.upper(),
        force=force,
        trigger_policy="benchmark",
        stall_budget_ms=STALL_BUDGET_MS if stall_budget_ms is None else stall_budget_ms,
    )
    if rule is not None:
        kind, order, value = rule
        request.migration_type = cast(MigrationType, MigrationType.Value(kind))
        request.migration_req_policy = cast(MigrationReqPolicy, MigrationReqPolicy.Value(order))
        match kind:
            case "NUM_REQ":
                request.num_reqs = int(value)
            case "TOKEN":
                request.num_tokens = int(value)
            case _:
                request.kv_cache_usage_ratio = value
    asked_at = time.monotonic()
    seen: dict[str, list[tuple[MoveProgress, float]]] = {}
    async for event in client.migrate(request, deadline_s=deadline_s):
        if event.WhichOneof("event") == "progress":
            now = time.monotonic()
            seen.setdefault(event.progress.request_id, []).append((event.progress, now))
    return [_move(events, asked_at) for events in seen.values()]


def _move(events: list[tuple[MoveProgress, float]], asked_at: float) -> Move:
    last, settled_at = events[-1]
    if last.phase not in OUTCOMES:
        phase = word(MovePhase, last.phase)
        raise RuntimeError(f"the move of {last.request_id} ended without an outcome, in {phase}")
    return Move(
        request_id=last.request_id,
        phase=word(MovePhase, last.phase),
        reason=reason_word(last.reason),
        detail=last.detail,
        mode=word(Mode, last.mode),
        rounds=last.rounds,
        copied_bytes=last.copied_bytes,
        recomputed_tokens=last.recomputed_tokens,
        context_tokens=last.context_tokens,
        hit_tokens=last.hit_tokens,
        epoch=(last.epoch.term, last.epoch.hop),
        transport=last.transport,
        tokens_alone=last.tokens_alone,
        phase_ms=dict(last.phase_ms),
        phases=tuple((word(MovePhase, event.phase), at) for event, at in events),
        asked_at=asked_at,
        settled_at=settled_at,
    )


async def requests(server: Server) -> list[RequestInfo]:
    """What the instance holds, in the order of its queues."""
    assert server.llumlet is not None
    async with LlumletClient(str(server.llumlet)) as client:
        return list((await client.list_requests()).requests)


async def describe(servers: Sequence[Server]) -> str:
    """What each instance holds, one line a request, for the text of an error."""
    lines = []
    for server in servers:
        try:
            held = await requests(server)
        except LlumletCallFailed as error:
            lines.append(f"{server.name}: {error}")
            continue
        lines += [
            f"{server.name}: {info.request_id} {word(RequestInfo.Phase, info.phase)} epoch {info.epoch.term}."
            f"{info.epoch.hop}, {info.output_tokens} output tokens, {info.num_blocks} blocks"
            for info in held
        ] or [f"{server.name}: no request"]
    return "\n".join(lines)


async def engine_id(server: Server, stream: Stream, timeout_s: float = 10.0) -> str:
    """The engine's id of `stream`, once `server` holds it. Raises LookupError."""
    deadline = time.monotonic() + timeout_s
    while True:
        for info in await requests(server):
            if stream.is_engine_id(info.external_request_id) or stream.is_engine_id(info.request_id):
                return info.request_id
        if time.monotonic() > deadline or stream.done:
            raise LookupError(f"{server.name} holds no request of stream {stream.request_id}")
        await asyncio.sleep(0.05)


async def move_stream(
    source: Server,
    destination: Server,
    stream: Stream,
    *,
    method: str = "live",
    force: bool = False,
    stall_budget_ms: float | None = None,
) -> Move:
    """Move the request behind `stream` and wait until that is settled."""
    stream.engine_id = stream.engine_id or await engine_id(source, stream)
    moves = await migrate(
        source,
        destination,
        request_ids=[stream.engine_id],
        method=method,
        force=force,
        stall_budget_ms=stall_budget_ms,
    )
    if len(moves) != 1:
        raise RuntimeError(f"one request was asked for, {len(moves)} were reported")
    return moves[0]


def stall_of(
    times: Sequence[float],
    index: int,
    quiet_until: float = math.inf,
    quiet_from: float = -math.inf,
    around: int = 12,
) -> Stall:
    """The stall at output token `index`, the first one of the destination.

    `times` are the arrivals of a stream's tokens. The gap to compare with is the median of up to
    `around` gaps on either side, without the hand-over and without what lies between `quiet_until`
    (the move was asked for) and `quiet_from` (it was settled): copying slows the source down, and
    that must not flatter the stall. Raises ValueError if the stream is too short for that.
    """
    gaps = [after - before for before, after in itertools.pairwise(times)]
    first = index - 1  # gaps[i] ends with token i + 1
    handover = gaps[first : first + HANDOVER_GAPS] if first >= 0 else []
    before = [gap for at, gap in enumerate(gaps[: max(0, first)]) if times[at + 1] <= quiet_until]
    later = range(first + HANDOVER_GAPS, len(gaps))
    after = [gaps[at] for at in later if times[at] >= quiet_from]
    steady = before[-around:] + after[:around]
    if not handover or not steady:
        raise ValueError(f"no gaps around token {index} of {len(times)}")
    return Stall(
        index=index,
        stall=max(handover),
        itl=median(steady),
        steady=tuple(steady),
    )


def stall_of_move(stream: Stream, move: Move) -> Stall:
    """The stall that `move` was to `stream`, which must have gone on for some tokens since."""
    index = first_index(move, len(stream.prompt_token_ids))
    return stall_of(stream.times, index, move.asked_at, move.settled_at)


def first_index(move: Move, num_prompt_tokens: int) -> int:
    """The output index of the first token the destination computes: at the freeze the source knew
    all before it.
    """
    return move.context_tokens - num_prompt_tokens
