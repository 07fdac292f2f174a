# SPDX-License-Identifier: Apache-2.0
"""Parts that origins send: one by one, each to the request it is for, and none that the engine could not run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llumlet.protocol import wire
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import Epoch
from tests.engine.rig import Rig
from tests.engine.test_lockstep import Rank
from tests.engine.test_sessions import OWNED, answered, arrive, part_of, say
from vllm_llumnix.engine.requests.input_parts import InputParts
from vllm_llumnix.engine.requests.request_state import Residence

pytestmark = pytest.mark.asyncio
ORIGIN = "tcp://127.0.0.1:1"


class Parts:
    """Of one request, of this origin. A part's state is its number, or `bad`; the first takes longest to build."""

    def __init__(self) -> None:
        self.given: list[tuple[int, Any]] = []
        self.ended: list[str] = []
        residence = Residence(ORIGIN, "s", None, OWNED, num_parts=1)
        port = SimpleNamespace(sessions=SimpleNamespace(take_part=self._take), has_runnable=lambda: False)
        context: Any = SimpleNamespace(
            loop=SimpleNamespace(call=self._call, port=port),
            relay=SimpleNamespace(residence_of={"s": residence}.get),
        )
        builder: Any = SimpleNamespace(build_part=self._build)
        self.parts = InputParts(context, builder, self.ended.extend)

    async def _build(self, state: bytes, request_id: str) -> str:
        if state == b"bad":
            raise Refused(Reason.INVALID_REQUEST, "bad")
        await asyncio.sleep(0.02 if state == b"1" else 0.0)
        return f"{request_id}: {state.decode()}"

    async def _call(self, function: Any, *args: Any) -> None:
        function(*args)

    def _take(self, request_id: str, epoch: Epoch, number: int, part: Any) -> None:
        assert (request_id, epoch) == ("s", OWNED)
        self.given.append((number, part))

    async def settled(self) -> None:
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def part(number: int, state: bytes | None, *, request_id: str = "s", epoch: Epoch = OWNED) -> wire.InputPart:
    return wire.InputPart(request_id, epoch, number, state)


async def test_they_are_given_in_order() -> None:
    it = Parts()
    for number, state in ((1, b"1"), (2, b"2"), (3, None)):
        it.parts.take(ORIGIN, part(number, state))
    await it.settled()
    assert it.given == [(1, "s: 1"), (2, "s: 2"), (3, None)]


@pytest.mark.parametrize(
    ("origin", "other"),
    [("tcp://127.0.0.1:2", {}), (ORIGIN, {"request_id": "another"}), (ORIGIN, {"epoch": Epoch(1, 0)})],
    ids=["another origin", "no such request", "another epoch"],
)
async def test_for_nobody(origin: str, other: dict[str, Any]) -> None:
    it = Parts()
    it.parts.take(origin, part(1, b"1", **other))
    await it.settled()
    assert (it.given, it.ended) == ([], [])


async def test_refused_part_ends_the_request() -> None:
    """Its origin would send it again and again."""
    it = Parts()
    it.parts.take(ORIGIN, part(1, b"bad"))
    await it.settled()
    assert (it.given, it.ended) == ([], ["s"])


async def test_a_part_wakes_the_ranks_that_step_together(model_dir: Path) -> None:
    source, destination = Rig(model_dir), Rig(model_dir)
    rank = Rank(destination)
    say(source, 0)
    answered(source)
    arrive(source, destination)
    assert rank.told_coordinator() == []
    context: Any = SimpleNamespace(loop=rank.kvconn, relay=None)
    given = InputParts(context, SimpleNamespace(), lambda ids: None)._give_on_loop  # type: ignore[arg-type]
    given(part(7, b""), part_of(destination, 1))
    assert rank.told_coordinator() == [], "it is not the next one"
    given(part(1, b""), part_of(destination, 1))
    assert rank.told_coordinator() == [7]
