# SPDX-License-Identifier: Apache-2.0
"""Inputs that come in parts, while messages of the moves between them are dropped, late, doubled and overtaken: every
part is answered once, and each answer is that of a session that never moved."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason

from llumlet.contract.types import MovePhase
from tests.frontend.fakes import request
from tests.shells.cells import PLAY
from tests.shells.circumstances import slow_copies
from tests.shells.cluster import SECONDS, Cluster, cluster_of, retold, side_by_side, until
from tests.shells.marks import MARKS, both
from tests.shells.model import FIRST_TOKEN, NUM_TOKENS, Reference
from tests.shells.network import Kind

pytestmark = MARKS

SIZES = (60, 5, 1, 33, 20)
TOKENS = (12, 6, 30, 1, 9)
MESSAGES = (
    *("Reserve", "Reserve answer", "CopyRound", "CopyRound answer", "Commit", "Commit answer", "Close", "Close answer"),
    *("HandedOver", "Heartbeat", "HeartbeatAck", "InputPart", "TokenBatch", "Hello"),
)
CALLS = ("Reserve", "CopyRound", "Commit", "Close")
"""They wait for their answers, and so nothing overtakes them."""


class Session:
    """One client's, at A. `request_id` and `left` are what clusters ask a stream for."""

    def __init__(self, cluster: Cluster) -> None:
        self.at = cluster["A"]
        self.request_id = "session"
        self.parts = [[FIRST_TOKEN + cluster.random.randrange(NUM_TOKENS) for _ in range(size)] for size in SIZES]
        self.answers: list[list[int]] = [[]]
        self.reasons: list[FinishReason] = []
        self.said = 0
        self.at.streams[self.request_id] = self  # type: ignore[assignment]  # takes what comes, as a stream does

    def take(self, tokens: list[int], finish: FinishReason | None) -> None:
        self.answers[-1] += tokens
        if finish is not None:
            self.reasons.append(finish)
            self.answers.append([])

    async def say(self) -> None:
        """The next part."""
        number, self.said = self.said, self.said + 1
        params = SamplingParams(max_tokens=TOKENS[number], temperature=0, ignore_eos=True)
        part = request(self.request_id, prompt_token_ids=self.parts[number], sampling_params=params, resumable=True)
        await self.at.client.add_request_async(part)

    async def end(self) -> None:
        await self.at.client.add_request_async(request(self.request_id, prompt_token_ids=[0]))

    async def answered(self) -> None:
        """Until everything that was said is."""
        await until(lambda: len(self.reasons) == self.said, lambda: f"{len(self.reasons)} answers", SECONDS)

    @property
    def expected(self) -> list[list[int]]:
        """vLLM drops the last token of an answer when the next part comes."""
        text: list[int] = []
        answers = []
        for part, count in zip(self.parts[: self.said], TOKENS, strict=False):
            answers.append(Reference(text + part)(count))
            text += part + answers[-1][:-1]
        return answers

    @property
    def faults(self) -> list[str]:
        *answers, rest = self.answers
        faults = [
            f"answer {number} is wrong"
            for number, (one, other) in enumerate(zip(answers, self.expected, strict=True))
            if one != other
        ]
        if rest:
            faults.append(f"{len(rest)} tokens of no answer")
        if {*self.reasons} != {FinishReason.LENGTH}:
            faults.append(f"ended with {self.reasons}")
        return faults


async def begun(cluster: Cluster) -> Session:
    """One with its first part answered."""
    session = Session(cluster)
    await session.say()
    await session.answered()
    return session


async def conversation(cluster: Cluster, session: Session) -> list[str]:
    """A part, then moves with parts before, during and after them; what is wrong in the end."""
    names = itertools.cycle("AB")
    source, destination = next(names), next(names)
    outcomes = []
    await session.say()
    await session.answered()
    while session.said < len(SIZES):
        with slow_copies(cluster[destination], 0.05):
            moving = cluster.begin(cluster.migrate(session, source, destination, force=True))  # type: ignore[arg-type]
            await asyncio.sleep(cluster.random.choice([0.0, 0.03, 0.1, 0.3]))
            await session.say()
            last = await moving
        outcomes.append(MovePhase.Name(last.phase).lower())
        await session.answered()
        (source,) = await owner(cluster, session)
        destination = "B" if source == "A" else "A"
    await session.end()
    return [*session.faults, *await let_go(cluster)]


async def owner(cluster: Cluster, session: Session) -> set[str]:
    """Who has it, when all is calm."""
    calm = lambda: cluster._is_calm() and len(cluster.owners(session)) == 1  # noqa: E731
    await until(calm, lambda: f"not settled: {cluster.owners(session)}", SECONDS)  # type: ignore[arg-type]
    return cluster.owners(session)  # type: ignore[arg-type]


async def let_go(cluster: Cluster) -> list[str]:
    try:
        await until(lambda: not cluster.held(), lambda: "; ".join(cluster.held()), SECONDS)
    except TimeoutError as error:
        return [str(error)]
    return [repr(one.engine.failure) for one in cluster.living if one.engine.failure]


@both
@retold
async def test_without_faults(model_dir: Path, asynchronous: bool) -> list[str]:
    async with cluster_of(model_dir, asynchronous=asynchronous) as cluster:
        found = await conversation(cluster, Session(cluster))
        # A part may be there before its move begins.
        return found + ([] if cluster.outcomes["moved"] else [str(cluster.outcomes)])


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.rest
async def test_message(message: str, model_dir: Path) -> None:
    async def problems(kind: Kind, times: int) -> list[str]:
        async with cluster_of(model_dir, asynchronous=times > 1) as cluster:
            fault = cluster.network.arm(message, kind, times)
            found = await conversation(cluster, Session(cluster))
            if not fault.hits:
                found.append(f"none was hit of {dict(cluster.network.seen)}")
        return [f"{message} {kind} {times}: {problem}" for problem in found]

    is_call = message.partition(" ")[0] in CALLS
    kinds = {Kind.DROPPED, Kind.DELAYED, Kind.TWICE} if is_call else {*Kind}
    if message.endswith("answer"):
        kinds.discard(Kind.TWICE)
    if message == "TokenBatch":
        kinds.discard(Kind.DROPPED)  # what is lost with an answer nobody has: it is no fault of the parts
    stories = [partial(problems, kind, times) for kind in sorted(kinds) for times in ((1,) if is_call else (1, 4))]
    assert not await side_by_side(stories)


@pytest.mark.parametrize("scenario", ["in_doubt", "unheard", "fenced", "fenced_late", "called_off"])
@retold
async def test_in_doubt(scenario: str, model_dir: Path) -> list[str]:
    """What has come meanwhile is answered by who has the session in the end, whatever the others believe."""
    async with cluster_of(model_dir) as cluster:
        session = Session(cluster)
        for _ in range(2):
            await session.say()
        await session.answered()
        played = cluster.begin(PLAY[scenario](cluster, session))  # type: ignore[arg-type]
        for _ in range(2):
            await asyncio.sleep(0.1)
            await session.say()
        await played
        await session.answered()
        await owner(cluster, session)
        await session.say()
        await session.answered()
        await session.end()
        return [*session.faults, *await let_go(cluster)]


@pytest.mark.parametrize("force", [True, False], ids=["forced", "not forced"])
@retold
async def test_a_part_comes_while_blocks_are_copied(force: bool, model_dir: Path) -> list[str]:
    """It waits for a move that is forced. Another makes way for it, also if it is answered before that is noticed."""
    async with cluster_of(model_dir) as cluster:
        session = await begun(cluster)
        with slow_copies(cluster["B"], 0.4):
            moving = cluster.begin(cluster.migrate(session, force=force))  # type: ignore[arg-type]
            await until(lambda: bool(cluster["B"].engine.agent.arrivals.pending()), lambda: "no move", SECONDS)
            await session.say()
            if not force:
                await session.answered()
            phase = MovePhase.Name((await moving).phase)
        await session.answered()
        await session.say()
        await session.answered()
        await session.end()
        found = [] if phase == ("MOVED" if force else "STAYED") else [phase]
        return [*found, *session.faults, *await let_go(cluster)]


@retold
async def test_the_end_of_an_answer_is_late(model_dir: Path) -> list[str]:
    """It comes when the session has left the engine that gave the answer, and the next one is being given."""
    async with cluster_of(model_dir) as cluster:
        session = await begun(cluster)
        await cluster.migrate(session, "A", "B", force=True)  # type: ignore[arg-type]
        ends = lambda batch: batch.outputs[-1].finish_reason is not None  # noqa: E731
        late = cluster.network.arm("TokenBatch", Kind.DELAYED, sender="B", only=ends)
        await session.say()
        await until(lambda: late.hits > 0, lambda: "no answer")
        moved = await cluster.migrate(session, "B", "A", force=True)  # type: ignore[arg-type]
        await session.say()
        await session.answered()
        await session.end()
        found = [] if moved.phase == MovePhase.MOVED else [str(moved)]
        return [*found, *session.faults, *await let_go(cluster)]


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@retold
async def test_the_client_leaves(moment: str, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        session = await begun(cluster)
        with slow_copies(cluster["B"], 0.1):
            moving = cluster.begin(cluster.migrate(session, force=True)) if moment != "before" else None  # type: ignore[arg-type]
            if moment == "during":
                await asyncio.sleep(0.05)
            elif moving is not None:
                await moving
            await session.say()
            await cluster["A"].client.abort_requests_async([session.request_id])
            if moving is not None:
                await moving
        return await let_go(cluster)
