# SPDX-License-Identifier: Apache-2.0
"""Engines with KV caches of several kinds: sliding windows beside full attention (Gemma 3; gpt-oss, with experts and
sinks), linear attention, Mamba or convolutions beside it (Qwen3-Next, Nemotron-H, LFM 2), or one of them in all layers.

Whoever moves with its KV cache goes on with the tokens of an unmoved run, in any data type. So does, in float32, who
was computed again from its tokens. Qwen3-Next computes in bfloat16 on CPUs, where streams part in time, and LFM 2's
prefill and decoding do in float32: there, each token of such a stream must be the one that an engine finds best behind
all those before it, up to `NOISE`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llumlet.contract.types import RequestInfo
from tests.integration.test_any_state import in_phase
from tests.integration.test_command_line import lines, llumnix
from tests.integration.test_drain import exit_code
from tests.integration.test_lost_owner import KILLED_S, STOPPED_S, ends, engine_of, has_engine
from tests.integration.test_rescue import HANG_S, awake, rescued, status_of
from tests.integration.test_sensitivity import arm
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.faults import with_faults
from tests.support.harness import SERVED_NAME, Fleet, Server, ServerSpec, free_port
from tests.support.moves import migrate, move_stream
from tests.support.other_models import OTHER, build

pytestmark = pytest.mark.asyncio

PROMPT = [100 + index * 41 % 900 for index in range(270)]
"""Longer than four windows."""
LENGTH = 240
AT = 30
"""Tokens that have arrived when the story begins."""
MOVE_S = 3.0
COMPARED = 160
"""Tokens of a stream that are held against what a prefill finds: the further, the more a state's roundings add up."""
NOISE = 0.5
"""Difference of two log probabilities, in nats, that bfloat16 may make. A token out of place has 3 to 12 less."""
GROUPS = {
    "gemma3": 4,
    "gpt-oss": 2,
    "qwen3-next": 4,
    "nemotron-h": 3,
    "windows": 1,
    "mamba2": 1,
    "olmo3": 4,
    "cohere2": 4,
    "llama4": 4,
    "lfm2": 4,
    "granite4": 4,
    "falcon-h1": 2,
}
"""KV cache groups of each model. Each has one block of the last row, or a state."""
WITH_STATES = {"qwen3-next", "nemotron-h", "mamba2", "lfm2", "granite4", "falcon-h1"}


class Pair:
    """`roomy`, and `small`, which runs two requests at a time, knows `roomy` and is started again when it has ended.
    `faults`: what is corrupted when it arrives in `small`, of the last copy and of each group; none until its file is
    there, and once."""

    def __init__(self, fleet: Fleet, name: str, directory: Path) -> None:
        self._fleet = fleet
        self.faults: list[dict[str, Any]] = [
            {"point": "mover.pulled", "action": "corrupt", "final": True, "layer": 0, "which": -1 - number,
             "offset": 0, "bytes": 8192, "file": str(directory / f"{name}-{number}")}
            for number in range(GROUPS[name])
        ]  # fmt: skip
        self.model, self.has_states = OTHER[name], name in WITH_STATES
        self._hang = directory / f"{name}-hangs"
        self._triggers = [self._hang, *(Path(fault["file"]) for fault in self.faults)]
        hangs = {"point": "worker.model", "action": "hold", "seconds": HANG_S, "file": str(self._hang)}
        port = free_port()
        self._small_spec = self._spec(
            f"{name}-small",
            *("--llumlet-peers", f"127.0.0.1:{port}", "--llumlet-drain-seconds", "600", "--max-num-seqs", "2"),
            env=with_faults([*self.faults, hangs]),
            executor="mp",
        )
        self.roomy, self._small = fleet.start(
            self._spec(f"{name}-roomy", "--llumlet-port", str(port)), self._small_spec
        )

    def hang(self) -> None:
        """The worker of `small` hangs from its next step on, for `HANG_S`; once."""
        self._hang.touch()

    @property
    def small(self) -> Server:
        if not (self._small.alive() and has_engine(self._small)):
            self._fleet.stop(self._small)
            for trigger in self._triggers:
                trigger.unlink(missing_ok=True)
            (self._small,) = self._fleet.start(self._small_spec)
        return self._small

    def _spec(self, name: str, *flags: str, **fields: Any) -> ServerSpec:
        return ServerSpec(
            build(self.model),
            name=name,
            instance_id=name,
            max_model_len=4096,
            flags=(*self.model.flags, *flags),
            **fields,
        )


def models(*few: str, first: Sequence[str] = ()) -> pytest.MarkDecorator:
    """All of them: `first` in `make test`, the other `few` in `make test-rest`, what is left in the large suite."""
    later = {name: pytest.mark.rest if name in few else pytest.mark.full for name in GROUPS if name not in first}
    names = [pytest.param(name, marks=later[name]) if name in later else name for name in GROUPS]
    return pytest.mark.parametrize("pair", names, indirect=True, scope="module")


WINDOW, STATE = "gemma3", "qwen3-next"
ALL = models("gpt-oss", "nemotron-h", first=(WINDOW, STATE))
MOST = models("gpt-oss", STATE, "nemotron-h", first=(WINDOW,))
FEW = models(WINDOW, STATE)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, log_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Fleet(log_dir / request.param) as fleet:
        yield Pair(fleet, request.param, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Stream:
    """The unmoved stream."""

    async def run() -> Stream:
        async with Client(pair.roomy.base_url) as client:
            return await (await begin(client)).result()

    stream = asyncio.run(run())
    assert len(set(stream.token_ids)) > 80, "a loop: too little depends on what came before"
    return stream


async def begin(client: Client, prompt: list[int] = PROMPT, length: int = LENGTH) -> Stream:
    """A greedy stream that shares no cached block with any other."""
    return await client.complete(prompt, length, temperature=0, ignore_eos=True, cache_salt=uuid.uuid4().hex)


async def assert_as_unmoved(
    pair: Pair, stream: Stream, expected: Stream, longest_s: float = MOVE_S, *, is_exact: bool = False
) -> None:
    """is_exact: nothing was computed again."""
    await stream.result()
    assert stream.finish_reason == "length"
    assert stream.usage == expected.usage
    assert max(stream.gaps) < longest_s
    await assert_tokens(pair, stream.token_ids, expected, is_exact=is_exact)


async def assert_tokens(pair: Pair, token_ids: list[int], expected: Stream, *, is_exact: bool = False) -> None:
    if is_exact or not (pair.model.is_rough or pair.model.dtype == "bfloat16"):
        assert token_ids == expected.token_ids
        return
    assert len(token_ids) == len(expected.token_ids)
    assert token_ids[:AT] == expected.token_ids[:AT]
    behind = (await behind_the_best(pair.roomy, PROMPT, token_ids))[:COMPARED]
    assert max(behind) < NOISE, f"token {behind.index(max(behind))} is not the model's"


async def behind_the_best(server: Server, prompt: list[int], output: list[int]) -> list[float]:
    """By how much the log probability of each token is below that of the best one in its place."""
    body = {"model": SERVED_NAME, "prompt": prompt + output, "max_tokens": 1, "prompt_logprobs": 1}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.base_url}/v1/completions", json=body) as answer,
    ):
        places = (await answer.json())["choices"][0]["prompt_logprobs"][len(prompt) :]
    own = [place[str(token)]["logprob"] for token, place in zip(output, places, strict=True)]
    return [max(it["logprob"] for it in place.values()) - mine for mine, place in zip(own, places, strict=True)]


@ALL
async def test_mid_stream_there_and_back(pair: Pair, expected: Stream) -> None:
    """The way back finds blocks of the request's own in the cache, of every group or of none."""
    roomy, small = pair.roomy, pair.small
    async with Client(roomy.base_url) as client:
        stream = await begin(client)
        moves = []
        for source, destination in ((roomy, small), (small, roomy)):
            await stream.wait_for(len(stream.token_ids) + AT)
            moves.append(await move_stream(source, destination, stream, method="auto"))
        await assert_as_unmoved(pair, stream, expected, is_exact=True)
    assert [(it.phase, it.mode, it.tokens_alone) for it in moves] == [("moved", "live", "")] * 2, moves
    assert all(it.copied_bytes > 0 for it in moves)
    assert all(it.recomputed_tokens == 0 for it in moves)
    await wait_idle(roomy)
    await wait_idle(small)


@MOST
async def test_corrupted_bytes_of_any_group_change_the_tokens(pair: Pair, expected: Stream) -> None:
    unchanged = []
    async with Client(pair.roomy.base_url) as client:

        async def moved() -> list[int]:
            stream = await begin(client)
            await stream.wait_for(AT)
            move = await move_stream(pair.roomy, pair.small, stream, method="live")
            assert move.live, f"{move.phase} {move.reason} {move.detail}"
            return (await stream.result()).token_ids

        for fault in pair.faults:
            arm(fault)
            if await moved() == expected.token_ids:
                unchanged.append(fault)
        # Each fault fires once.
        assert await moved() == expected.token_ids
    assert not unchanged, f"went unnoticed: {unchanged}"


@FEW
async def test_with_its_tokens_alone(pair: Pair, expected: Stream) -> None:
    roomy, small = pair.roomy, pair.small
    async with Client(roomy.base_url) as client:
        stream = await begin(client)
        await stream.wait_for(AT)
        move = await move_stream(roomy, small, stream, method="recompute")
        await assert_as_unmoved(pair, stream, expected)
    assert (move.phase, move.mode, move.copied_bytes) == ("moved", "recompute", 0), move
    assert move.recomputed_tokens == move.context_tokens - 1 > len(PROMPT)
    await wait_idle(roomy)
    await wait_idle(small)


@FEW
async def test_waiting(pair: Pair, expected: Stream) -> None:
    """There is no KV cache yet. `llumnix ps` says how each would go."""
    async with Client(pair.small.base_url) as client:
        hogs = [await begin(client, list(range(300 + n, 340 + n)), 3000) for n in range(2)]
        await asyncio.gather(*(hog.wait_for(1) for hog in hogs))
        stream = await begin(client)
        waits = await in_phase(pair.small, RequestInfo.WAITING)
        code, text = await llumnix("ps", "--llumlet", str(pair.small.llumlet), "--json")
        (move,) = await migrate(pair.small, pair.roomy, request_ids=[waits])
        await assert_as_unmoved(pair, stream, expected)
        assert not any(hog.done for hog in hogs), "it had not waited for long"
        for hog in hogs:
            await hog.disconnect()
    assert code == 0, text
    (shown,) = lines(text)
    ways = [(it["movable"], it["moves_as"], it.get("detail", "")) for it in shown["requests"]]
    assert sorted(ways) == [(True, "live", "")] * 2 + [(True, "waiting", "")]
    assert (move.phase, move.mode, move.recomputed_tokens, move.copied_bytes) == ("moved", "waiting", 0, 0), move
    await wait_idle(pair.small)


@FEW
async def test_its_engine_hangs(pair: Pair, expected: Stream) -> None:
    """What windows keep is read from it; a state may be in the middle of a step."""
    roomy, small = pair.roomy, pair.small
    before = await status_of(roomy)
    async with Client(small.base_url) as client:
        stream = await begin(client)
        await stream.wait_for(AT)
        pair.hang()
        await assert_as_unmoved(pair, stream, expected, STOPPED_S)
    assert await rescued(before, roomy) == (1, int(not pair.has_states))
    await awake(small)
    await wait_idle(small)
    await wait_idle(roomy)


@FEW
async def test_drain(pair: Pair, expected: Stream) -> None:
    """Two that run and one that waits."""
    leaver = pair.small
    async with Client(leaver.base_url) as client:
        streams = [await begin(client) for _ in range(3)]
        await asyncio.gather(*(stream.wait_for(AT) for stream in streams[:2]))
        assert not streams[2].token_ids
        os.kill(leaver.pid, signal.SIGTERM)
        for stream in streams:
            await assert_as_unmoved(pair, stream, expected)
    assert await exit_code(leaver) == 0
    assert "3 moved away" in leaver.log_text()
    await wait_idle(pair.roomy)


@models("qwen3-next")
async def test_the_owner_is_killed(pair: Pair, expected: Stream) -> None:
    """A guest is replayed by its origin, a request of its own by its API server."""
    victim = pair.small
    async with Client(victim.base_url) as client, Client(pair.roomy.base_url) as elsewhere:
        # Longer than the first move to an engine that was started just now takes.
        guest = await begin(elsewhere, length=4 * LENGTH)
        await guest.wait_for(AT)
        assert (await move_stream(pair.roomy, victim, guest, method="auto")).moved
        own = await begin(client)
        await asyncio.gather(own.wait_for(AT), guest.wait_for(2 * AT))
        engine_of(victim).kill()
        await assert_as_unmoved(pair, own, expected, KILLED_S)
        await guest.wait_for(LENGTH)
        await guest.disconnect()
    assert max(guest.gaps) < KILLED_S
    await assert_tokens(pair, guest.token_ids[:LENGTH], expected)
    await ends(victim)
    await wait_idle(pair.roomy)
