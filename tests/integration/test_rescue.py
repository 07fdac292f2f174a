# SPDX-License-Identifier: Apache-2.0
"""The loop of an engine hangs; its requests go on elsewhere, with their KV cache where that can still be read.

One victim with a fault for every way to hang, each set off by a file; it wakes up between the tests. In float32, so
that the tokens are those of an undisturbed run also where a request is computed again, and in whatever company.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import Health, InstanceStatus
from tests.integration.test_lost_owner import STOPPED_S, assert_goes_on, stopped, worker_of
from tests.support.client import Client, Stream
from tests.support.conservation import assert_conserved, wait_idle
from tests.support.failures import failure
from tests.support.faults import with_faults
from tests.support.harness import Fleet, Server, ServerSpec, free_port
from tests.support.moves import migrate
from vllm_llumnix.kv.mover.mover_thread import TIDY_SECONDS

pytestmark = pytest.mark.asyncio

LENGTH = 400
AT = 40
"""Tokens that have arrived when the victim begins to hang."""
HANG_S = 10.0
"""Longer than a rescue takes."""
HANGS: dict[str, dict[str, Any]] = {
    "worker": {"point": "worker.model", "action": "hold"},
    "execute": {"point": "loop.model", "action": "delay"},
    "schedule": {"point": "loop.step", "action": "delay"},
    "interpreter": {"point": "loop.model", "action": "hold"},
}
FLOAT32 = ("--dtype", "float32")
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "seed": 11, "top_p": 0.9, "frequency_penalty": 0.3}


class Pair:
    """`haven` is where requests go on; `hang` makes the victim's loop hang from the next step on.

    Of its mover, the thread ends; that is not to be repaired.
    """

    def __init__(self, haven: Server, victim: Server, triggers: dict[str, Path]) -> None:
        self.haven = haven
        self.victim = victim
        self._triggers = triggers

    def hang(self, how: str) -> None:
        self._triggers[how].touch()


@pytest.fixture(scope="module")
def pair(model_dir: Path, log_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("hangs")
    triggers = {how: directory / how for how in HANGS}
    faults = [{**fault, "seconds": HANG_S, "file": str(triggers[how])} for how, fault in HANGS.items()]
    triggers["mover"] = directory / "mover"
    faults.append({"point": "mover.turn", "action": "raise", "file": str(triggers["mover"])})
    with Fleet(log_dir / "rescue") as fleet:
        port = free_port()
        specs = [
            ServerSpec(model_dir, name="haven", instance_id="haven", flags=(*FLOAT32, "--llumlet-port", str(port))),
            ServerSpec(
                model_dir,
                name="victim",
                instance_id="victim",
                flags=(*FLOAT32, "--llumlet-peers", f"127.0.0.1:{port}"),
                env=with_faults(faults),
                executor="mp",
            ),
        ]
        haven, victim = fleet.start(*specs)
        yield Pair(haven, victim, triggers)


@pytest_asyncio.fixture
async def conserved(pair: Pair) -> AsyncIterator[None]:
    """Afterwards both hold what they held before, the victim once it is awake."""
    before = {server: await wait_idle(server) for server in (pair.haven, pair.victim)}
    yield
    await awake(pair.victim)
    await assert_conserved(before)


async def awake(server: Server, timeout_s: float = 4 * HANG_S) -> None:
    deadline = time.monotonic() + timeout_s
    async with LlumletClient(str(server.llumlet)) as client:
        while True:
            with contextlib.suppress(LlumletCallFailed):
                if (await client.get_instance_status(deadline_s=1.0)).health == Health.OK:
                    return
            assert time.monotonic() < deadline, f"{server.name} does not wake up"
            await asyncio.sleep(0.1)


async def begin(client: Client, prompt: int, sampling: dict[str, Any]) -> Stream:
    """`prompt` numbers the prompts: no two of them begin alike."""
    tokens = [100 + (prompt * 131 + index * 7) % 900 for index in range(200)]
    return await client.complete(tokens, LENGTH, ignore_eos=True, cache_salt=uuid.uuid4().hex, **sampling)


async def undisturbed(server: Server, prompt: int, sampling: dict[str, Any]) -> Stream:
    async with Client(server.base_url) as client:
        return await (await begin(client, prompt, sampling)).result()


async def status_of(server: Server) -> InstanceStatus:
    async with LlumletClient(str(server.llumlet)) as client:
        return await client.get_instance_status()


async def rescued(before: InstanceStatus, server: Server) -> tuple[int, int]:
    """Requests that `server` took on since `before`, and how many with their KV cache."""
    after = await status_of(server)
    return after.num_adopted - before.num_adopted, after.num_rescued - before.num_rescued


@failure(
    "the worker hangs in C, holding its interpreter lock",
    "in a model step",
    "suspect, hung 3 s later; a peer goes on with the KV cache, one token computed",
)
@failure(
    "the loop hangs in execute",
    "in a model step",
    "the same",
)
@pytest.mark.parametrize(
    ("how", "sampling"),
    [("worker", SEEDED), pytest.param("execute", GREEDY, marks=pytest.mark.full)],
    ids=["worker", "execute"],
)
@pytest.mark.usefixtures("conserved")
async def test_the_cache_is_brought(pair: Pair, how: str, sampling: dict[str, Any]) -> None:
    expected = await undisturbed(pair.haven, 1, sampling)
    before = await status_of(pair.haven)
    async with Client(pair.victim.base_url) as client:
        stream = await begin(client, 1, sampling)
        await stream.wait_for(AT)
        pair.hang(how)
        await stream.wait_for(len(stream.token_ids) + AT)
        async with LlumletClient(str(pair.victim.llumlet)) as operator:
            listed = (await operator.list_requests()).requests
        result = await stream.result()
    assert [stream.is_engine_id(request.request_id) for request in listed] == [True]
    assert await rescued(before, pair.haven) == (1, 1)
    assert_goes_on(result, expected, STOPPED_S)
    assert max(result.gaps) > 1.0


@failure(
    "SIGSTOP of the worker, with several requests",
    "in a model step",
    "each goes on at a peer with its KV cache; on waking up nothing is published, every block is given back",
)
@pytest.mark.usefixtures("conserved")
@pytest.mark.rest
async def test_several_requests_and_a_worker_that_is_stopped(pair: Pair) -> None:
    samplings = {2: GREEDY, 3: SEEDED, 4: GREEDY}
    expected = [await undisturbed(pair.haven, number, sampling) for number, sampling in samplings.items()]
    before = await status_of(pair.haven)
    async with Client(pair.victim.base_url) as client:
        streams = [await begin(client, number, sampling) for number, sampling in samplings.items()]
        for stream in streams:
            await stream.wait_for(AT)
        async with stopped(worker_of(pair.victim)):
            for stream in streams:
                await stream.wait_for(len(stream.token_ids) + AT)
        results = [await stream.result() for stream in streams]
    assert await rescued(before, pair.haven) == (3, 3)
    for result, alone in zip(results, expected, strict=True):
        assert_goes_on(result, alone, STOPPED_S)


@failure(
    "the loop hangs outside of the model (as in schedule())",
    "not in a model step",
    "the scheduler's state is half made: no KV cache is taken, the origin replays",
)
@failure(
    "the engine hangs with the interpreter lock",
    "in a model step",
    "none of its threads answers: lost after 4.5 s, replayed",
)
@pytest.mark.parametrize("how", [pytest.param("schedule", marks=pytest.mark.full), "interpreter"])
@pytest.mark.usefixtures("conserved")
@pytest.mark.rest
async def test_the_cache_cannot_be_had(pair: Pair, how: str) -> None:
    expected = await undisturbed(pair.haven, 5, SEEDED)
    before = await status_of(pair.haven)
    async with Client(pair.victim.base_url) as client:
        stream = await begin(client, 5, SEEDED)
        await stream.wait_for(AT)
        pair.hang(how)
        result = await stream.result()
    assert await rescued(before, pair.haven) == (1, 0)
    assert_goes_on(result, expected, STOPPED_S)


@pytest.mark.usefixtures("conserved")
@pytest.mark.rest
async def test_the_victim_serves_again(pair: Pair) -> None:
    """Requests that were taken away have left nothing behind that disturbs new ones."""
    expected = await undisturbed(pair.haven, 6, SEEDED)
    result = await undisturbed(pair.victim, 6, SEEDED)
    assert result.token_ids == expected.token_ids
    assert pair.victim.alive()


@failure(
    "the thread of a mover ends alone",
    "between two moves",
    "the status says so; requests leave and come with their tokens alone",
)
@pytest.mark.usefixtures("conserved")
@pytest.mark.rest
async def test_the_victim_loses_its_mover(pair: Pair) -> None:
    """The last: it does not come back."""
    expected = await undisturbed(pair.haven, 7, SEEDED)
    pair.hang("mover")
    # An idle mover has a turn every few seconds.
    deadline = time.monotonic() + 4 * TIDY_SECONDS
    while not (lost := (await status_of(pair.victim)).kv_unsupported):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert "has gone" in lost
    async with Client(pair.haven.base_url) as client:
        stream = await begin(client, 7, SEEDED)
        for source, destination in ((pair.haven, pair.victim), (pair.victim, pair.haven)):
            await stream.wait_for(len(stream.token_ids) + AT)
            (move,) = await migrate(source, destination, rule=("NUM_REQ", "SR", 1), method="auto")
            assert (move.phase, move.mode) == ("moved", "recompute"), move.detail
            assert lost in move.tokens_alone
        result = await stream.result()
    assert result.token_ids == expected.token_ids
