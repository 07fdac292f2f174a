# SPDX-License-Identifier: Apache-2.0
"""Streaming input: requests whose input comes in parts go elsewhere between two of them, and their next parts after
them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from llumlet.contract.client import LlumletClient
from tests.integration.conftest import Engines, StartServer
from tests.integration.test_lost_owner import engine_of
from tests.support.conservation import reserved_at, wait_idle
from tests.support.failures import failure
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.input_sessions import FLAGS, Session
from tests.support.moves import Move, migrate

pytestmark = [pytest.mark.asyncio, pytest.mark.rest]

PARTS = [[100 + (n * 7 + k * 31) % 900 for n in range(size)] for k, size in enumerate((300, 40, 3, 170))]
TOKENS = (30, 8, 40, 12)
RATE = 500_000
"""Bytes per second that `b` copies. A token has 4 KiB."""


@pytest.fixture(scope="module")
def talkers(model_dir: Path, log_dir: Path) -> Iterator[Engines]:
    with Fleet(log_dir / "talkers") as fleet:
        a = ServerSpec(model_dir, name="talker-a", instance_id="talker-a", flags=FLAGS)
        b = ServerSpec(model_dir, name="talker-b", instance_id="talker-b", flags=FLAGS, bandwidth_limit=RATE)
        yield Engines(*fleet.start(a, b))


async def engine_id(server: Server, request_id: str) -> str:
    async with LlumletClient(str(server.llumlet)) as client:
        listed = await client.list_requests()
    (found,) = [one.request_id for one in listed.requests if one.external_request_id == request_id]
    return str(found)


async def move(source: Server, destination: Server, session: Session, *, force: bool = True) -> Move:
    named = [await engine_id(source, session.request_id)]
    (moved,) = await migrate(source, destination, request_ids=named, force=force)
    return moved


async def copying_to(destination: Server) -> None:
    """A copy is under way. Who is said something before it has begun stays at once."""
    await reserved_at(destination)
    await asyncio.sleep(0.3)


async def in_one_go(talkers: Engines, name: str) -> list[list[tuple[int, float]]]:
    """What is answered without a move."""
    return (await conversation(talkers.a, talkers.b, name, moves=0)).answers


async def conversation(a: Server, b: Server, name: str, *, moves: int) -> Session:
    """All parts, each when the one before is answered; before each of the next ones a move, there and back."""
    ways = itertools.cycle([(a, b), (b, a)])
    async with Session(a.base_url, name, max_tokens=5) as session:
        for number, (part, tokens) in enumerate(zip(PARTS, TOKENS, strict=True)):
            if 0 < number <= moves:
                moved = await move(*next(ways), session)
                assert (moved.phase, moved.reason, moved.recomputed_tokens) == ("moved", "", 0)
            await session.say(part, tokens)
            await session.answered(number + 1)
        await session.end()
        await session.over()
    return session


async def goes_there_and_back(a: Server, b: Server) -> None:
    """Tokens and log probabilities are those of two sessions that do not move."""
    unmoved, again = [await conversation(a, b, name, moves=0) for name in ("unmoved", "again")]
    assert unmoved.answers == again.answers
    assert [len(answer) for answer in unmoved.answers] == [*TOKENS]
    moved = await conversation(a, b, "moved", moves=3)
    assert moved.answers == unmoved.answers
    assert moved.reasons == unmoved.reasons == ["length"] * 4
    for server in (a, b):
        await wait_idle(server)


async def test_there_and_back(talkers: Engines) -> None:
    await goes_there_and_back(*talkers)


@failure(
    "the next part of a streaming input comes",
    "copying, frozen",
    "it waits at the source, and is sent after the request; of a move that is not forced the request stays for it",
)
async def test_parts_that_come_during_a_move(talkers: Engines) -> None:
    """The copy takes two seconds. What is said meanwhile waits at the source, which lets the request go; it is sent
    again to where that has gone."""
    expected = await in_one_go(talkers, "as-it-was")
    async with Session(talkers.a.base_url, "meanwhile") as session:
        await session.say(PARTS[0], TOKENS[0])
        await session.answered(1)
        moving = asyncio.create_task(move(talkers.a, talkers.b, session))
        await copying_to(talkers.b)
        for part, tokens in zip(PARTS[1:3], TOKENS[1:3], strict=True):
            await session.say(part, tokens)
        assert (await moving).moved
        await session.hear()
        await session.say(PARTS[3], TOKENS[3])
        await session.end()
        await session.over()
    assert session.answers == expected
    for server in talkers:
        await wait_idle(server)


async def test_a_part_goes_before_a_move_that_is_not_forced(talkers: Engines) -> None:
    expected = await in_one_go(talkers, "before")
    async with Session(talkers.a.base_url, "first") as session:
        await session.say(PARTS[0], TOKENS[0])
        await session.answered(1)
        moving = asyncio.create_task(move(talkers.a, talkers.b, session, force=False))
        await copying_to(talkers.b)
        for part, tokens in zip(PARTS[1:], TOKENS[1:], strict=True):
            await session.say(part, tokens)
        await session.answered(2)
        assert not moving.done()
        await session.end()
        await session.over()
        stayed = await moving
    assert stayed.phase != "moved"
    assert session.answers == expected
    for server in talkers:
        await wait_idle(server)


@pytest.mark.parametrize("how", ["the input ends", "the client leaves"])
async def test_an_end_where_it_has_gone(talkers: Engines, how: str) -> None:
    async with Session(talkers.a.base_url, how.replace(" ", "-")) as session:
        await session.say(PARTS[0], TOKENS[0])
        await session.answered(1)
        assert (await move(talkers.a, talkers.b, session)).moved
        if how == "the input ends":
            await session.end()
            await session.over()
    for server in talkers:
        await wait_idle(server)


async def test_it_stays_while_a_part_is_answered(talkers: Engines) -> None:
    async with Session(talkers.a.base_url, "busy") as session:
        await session.say(PARTS[0], 2000)
        await session.hear()
        stayed = await move(talkers.a, talkers.b, session)
    assert (stayed.phase, stayed.reason) == ("stayed", "prefill_running")
    for server in talkers:
        await wait_idle(server)


@failure(
    "the engine is lost that has a request with streaming input",
    "moved on",
    "its client hears of an error: nobody else has what was said and answered",
)
@pytest.mark.full
async def test_its_owner_is_lost(talkers: Engines, start_server: StartServer) -> None:
    """Nobody has what was said and answered, beside the engine: the client is told."""
    third = start_server(name="talker-c")
    async with Session(talkers.a.base_url, "lost") as session:
        await session.say(PARTS[0], TOKENS[0])
        await session.answered(1)
        assert (await move(talkers.a, third, session)).moved
        engine_of(third).kill()
        await session.answered(2)
        assert session.reasons == ["length", "error"]
        await session.end()
        await session.over()
    await wait_idle(talkers.a)
