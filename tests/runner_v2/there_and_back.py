# SPDX-License-Identifier: Apache-2.0
"""A stream that moves between two engines with the V2 runner and back, and one that stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tests.exactness.test_matrix import held_by, outcome
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.harness import Server
from tests.support.moves import migrate

LENGTH = 64
"""Tokens of the streams."""
AT = (12, 30)
"""Tokens that have arrived before each move."""


async def assert_as_unmoved(pair: Sequence[Server], begin: Callable[[Client], Awaitable[Stream]]) -> None:
    """With its KV cache each time, and with the tokens and log probabilities of an unmoved run. `begin` asks for
    `LENGTH` tokens, whose log probabilities it wants, and shares no cached block with its other calls."""
    a, b = pair
    for server in pair:
        assert "behind AsyncScheduler, steps in flight: 2" in server.log_text()
    async with Client(a.base_url) as client:
        unmoved = await (await begin(client)).result()
        stream = await begin(client)
        await stream.wait_for(1)
        moves = []
        for count, source, destination in zip(AT, (a, b), (b, a), strict=True):
            held = await held_by(source, stream, count)
            moves += await migrate(source, destination, request_ids=[held.request_id])
        moved = await stream.result()
        if outcome(moved) != outcome(unmoved):
            again = await (await begin(client)).result()
            assert outcome(unmoved) == outcome(again), "void: two unmoved runs differ"
    assert [(it.phase, it.mode, it.recomputed_tokens) for it in moves] == [("moved", "live", 0)] * 2, moves
    assert outcome(moved) == outcome(unmoved)
    assert len(set(moved.token_ids)) > LENGTH / 3, "a loop: too little depends on what came before"
    for server in pair:
        await wait_idle(server)
