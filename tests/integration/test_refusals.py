# SPDX-License-Identifier: Apache-2.0
"""A move that is refused or fails leaves the request running at its source, with the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError
from llumlet.contract.types import AbortRequest, AbortResponse, MigrateRequest, Mode, Reason
from tests.exactness.test_matrix import held_by
from tests.integration.conftest import Engines
from tests.integration.test_command_line import llumnix
from tests.support.client import Client
from tests.support.conservation import reserved_at, wait_idle
from tests.support.failures import failure
from tests.support.harness import Fleet, Server, ServerSpec
from tests.support.model import fine_tuned
from tests.support.moves import Move, migrate, move_stream
from tests.support.offload_on_cpu import offload_on_cpu

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 180))
CONNECTOR = "a KV connector of which moves know nothing (--kv-transfer-config)"
LONG = [100 + index * 7 % 900 for index in range(900)]
GREEDY: dict[str, Any] = {"ignore_eos": True}
UNHURT_S = 4.0
"""Longest pause of a stream that was never frozen: less than any deadline of the protocol."""


class Odd(NamedTuple):
    """Destinations that take little."""

    small: Server
    """35 blocks, two batch slots, 1024 tokens a request; can be paused."""
    slow: Server
    """A megabyte a second, and 300 tokens at a time."""


HUGE = 4128
"""Tokens of a block; a row would have as many."""


class Strange:
    """Instances that are not alike, each started when a test asks for it."""

    def __init__(self, fleet: Fleet, model: Path, directory: Path) -> None:
        self._fleet, self._model, self._directory = fleet, model, directory

    @cached_property
    def weights(self) -> Server:
        """A server of a fine-tune."""
        return self._start("weights", model=fine_tuned(self._model, self._directory / "tuned", "v_proj"))

    @cached_property
    def blocks(self) -> Server:
        """With blocks so large that there are no rows of which either side has a whole number of blocks."""
        return self._start("blocks", block_size=HUGE, max_model_len=4096)

    @cached_property
    def larger(self) -> Server:
        """With blocks for more tokens."""
        return self._start("larger", block_size=64, max_model_len=4096)

    @cached_property
    def connector(self) -> Server:
        """With a KV connector of its own."""
        connector = {
            "kv_connector": "OwnConnector",
            "kv_connector_module_path": "offload_on_cpu",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._directory / "kv")},
        }
        flags = ("--kv-transfer-config", json.dumps(connector))
        return self._start("connector", flags=flags, env=offload_on_cpu.ENVIRONMENT)

    def _start(self, name: str, **fields: Any) -> Server:
        return self._fleet.start(ServerSpec(**{"model": self._model, **fields}, name=name, instance_id=name))[0]


async def stays_and_goes_on(source: Server, destination: Server, prompt: list[int] = PROMPT, length: int = 400) -> Move:
    """Try the move and check that the stream is what it would have been without."""
    async with Client(source.base_url) as client:
        expected = await (await client.complete(prompt, length, **GREEDY, cache_salt="unmoved")).result()
        stream = await client.complete(prompt, length, **GREEDY, cache_salt="moved")
        await stream.wait_for(30)
        move = await move_stream(source, destination, stream)
        result = await stream.result()
    assert move.phase == "stayed", f"{move.phase} {move.reason}"
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == expected.finish_reason
    assert max(result.gaps) < UNHURT_S
    await wait_idle(source)
    return move


@pytest.fixture(scope="module")
def odd(model_dir: Path, log_dir: Path) -> Iterator[Odd]:
    spec = partial(ServerSpec, model_dir)
    small = spec(
        name="small",
        instance_id="small",
        num_kv_blocks=36,
        max_model_len=1024,
        max_num_seqs=2,
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    flags = ("--llumlet-max-migration-tokens-in", "300")
    slow = spec(name="slow", instance_id="slow", bandwidth_limit=1_000_000, flags=flags)
    with Fleet(log_dir / "odd") as fleet:
        yield Odd(*fleet.start(small, slow))


@failure(
    "the request may grow longer than the destination's max_model_len",
    "reserving",
    "request_too_long: goes on at the source; the destination takes others",
)
async def test_destination_too_short(engines: Engines, conserved: object, odd: Odd) -> None:
    move = await stays_and_goes_on(engines.a, odd.small, LONG, length=200)
    assert move.reason == "request_too_long"
    await wait_idle(odd.small)


@failure(
    "the destination has no blocks left",
    "reserving",
    "refused, destination_full: the request goes on at the source",
)
async def test_destination_without_blocks(engines: Engines, conserved: object, odd: Odd) -> None:
    """29 blocks are needed; 35 exist, and a request there holds ten of them and more."""
    async with Client(odd.small.base_url) as client:
        hog = await client.complete(list(range(300, 600)), 700, **GREEDY)
        await hog.wait_for(2)
        move = await stays_and_goes_on(engines.a, odd.small, LONG, length=100)
        assert not hog.done, "the destination was free again before the move"
        await hog.disconnect()
    assert (move.reason, "batch slot" in move.detail) == ("destination_full", False)
    await wait_idle(odd.small)


async def test_unknown_request(engines: Engines, conserved: object) -> None:
    (move,) = await migrate(engines.a, engines.b, request_ids=["no-such-request"])
    assert (move.phase, move.reason) == ("stayed", "unknown_request")


async def test_same_instance(engines: Engines) -> None:
    with pytest.raises(LlumletError) as refusal:
        await migrate(engines.a, engines.a, rule=("NUM_REQ", "SR", 1))
    assert refusal.value.reason == Reason.SAME_INSTANCE


async def test_wrong_instance_id(engines: Engines) -> None:
    assert engines.a.llumlet is not None
    assert engines.b.llumlet is not None
    request = MigrateRequest(
        src_engine_id="somebody-else",
        dst_engine_id=engines.b.llumlet.instance_id,
        dst_engine_ip=engines.b.llumlet.host,
        dst_engine_port=engines.b.llumlet.port,
        request_ids=["x"],
    )
    async with LlumletClient(str(engines.a.llumlet)) as client:
        with pytest.raises(LlumletError) as refusal:
            async for _ in client.migrate(request):
                pass
    assert refusal.value.reason == Reason.WRONG_INSTANCE


async def test_finished_request(engines: Engines, conserved: object) -> None:
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(PROMPT, 3, **GREEDY)
        await stream.result()
    assert await migrate(engines.a, engines.b, rule=("NUM_REQ", "SR", 1)) == []


async def test_prompt_logprobs_before_its_prefill(engines: Engines, conserved: object, odd: Odd) -> None:
    """They do not travel: it stays, and is queued for its prefill as long as two others have the batch slots."""
    async with Client(odd.small.base_url) as client:
        hogs = [await client.complete(list(range(start, start + 100)), 900, **GREEDY) for start in (300, 500)]
        for hog in hogs:
            await hog.wait_for(2)
        stream = await client.complete(PROMPT, 3, prompt_logprobs=1, stream=False, **GREEDY)
        move = await move_stream(odd.small, engines.a, stream)
        assert not any(hog.done for hog in hogs), "a slot was free again before the move"
        for hog in hogs:
            await hog.disconnect()
        result = await stream.result()
    assert (move.phase, move.reason) == ("stayed", "prefill_running")
    assert len(result.prompt_logprobs) == len(PROMPT)
    await wait_idle(odd.small)


@failure(
    "the request ends by itself",
    "copying",
    "gone; the destination frees what it holds",
)
async def test_request_finishes_while_it_is_copied(engines: Engines, conserved: object, odd: Odd) -> None:
    """The copy takes twelve seconds, so that the request ends before it: gone, and nothing is left behind."""
    async with Client(engines.a.base_url) as client:
        stream = await client.complete([100 + n * 7 % 900 for n in range(3000)], 150, **GREEDY)
        await stream.wait_for(5)
        move = await move_stream(engines.a, odd.slow, stream, force=True)
        result = await stream.result()
    assert (move.phase, move.reason) == ("gone", "request_finished")
    assert len(result.token_ids) == 150
    await wait_idle(odd.slow)


@failure(
    "the client disconnects",
    "before, during, after a move",
    "the request ends wherever it is, and everything is freed",
)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_client_leaves(engines: Engines, conserved: object, odd: Odd, moment: str) -> None:
    """The client disconnects before, during or after a move: both engines end up with nothing."""
    destination = odd.slow if moment == "during" else engines.b
    async with Client(engines.a.base_url) as client:
        stream = await client.complete([100 + n * 7 % 900 for n in range(2000)], 3000, **GREEDY)
        await stream.wait_for(10)
        if moment == "before":
            await stream.disconnect()
        else:
            moving = asyncio.create_task(move_stream(engines.a, destination, stream, force=True))
            if moment == "after":
                assert (await moving).moved
                tokens = len(stream.token_ids)
                await stream.wait_for(tokens + 5)
            else:
                await reserved_at(odd.slow)
            await stream.disconnect()
            if moment == "during":
                move = await moving
                assert (move.phase, move.reason) == ("gone", "request_aborted")
    await wait_idle(engines.a)
    await wait_idle(destination)


@failure(
    "an operator aborts the request",
    "moved on",
    "followed to its owner",
)
async def test_abort_by_an_operator_follows_the_request(engines: Engines, conserved: object) -> None:
    """An abort sent to the former owner reaches the present one."""
    assert engines.a.llumlet is not None
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(PROMPT, 5000, **GREEDY)
        await stream.wait_for(20)
        move = await move_stream(engines.a, engines.b, stream)
        assert move.moved
        async with LlumletClient(str(engines.a.llumlet)) as llumlet:
            answer = await llumlet.abort(AbortRequest(request_ids=[move.request_id]))
        assert answer.results[0].outcome == AbortResponse.FORWARDED
        await wait_idle(engines.b)
        await stream.disconnect()


@failure(
    "more tokens are on their way than may be",
    "reserving",
    "refused, destination_busy: the request goes on at the source; a longer one goes alone",
)
async def test_limits_at_the_destination(engines: Engines, conserved: object, odd: Odd) -> None:
    """Two requests of 200 tokens are sent to where 300 tokens may be on their way, and both arrive, one by one."""
    async with Client(engines.a.base_url) as client:
        streams = [await client.complete(list(range(start, start + 200)), 5000, **GREEDY) for start in (100, 400)]
        for stream in streams:
            await stream.wait_for(5)
        # Frozen while they are copied: a request that decodes as fast as that would be copied for ever.
        frozen: dict[str, Any] = {"method": "blocking", "force": True}
        moves = await migrate(engines.a, odd.slow, rule=("NUM_REQ", "SR", 2), **frozen)
        assert sorted(move.phase for move in moves) == ["moved", "stayed"]
        assert {move.reason for move in moves if not move.moved} == {"destination_busy"}
        late = [stream for stream in streams if not any(m.moved and stream.is_engine_id(m.request_id) for m in moves)]
        assert (await move_stream(engines.a, odd.slow, late[0], **frozen)).moved
        for stream in streams:
            await stream.disconnect()
    await wait_idle(odd.slow)


@failure(
    "the destination has no free batch slot",
    "reserving",
    "refused, destination_full: the request goes on at the source",
)
@failure(
    "the destination is paused, or sleeps",
    "reserving",
    "refused, destination_paused: the request goes on at the source",
)
async def test_destination_without_a_slot_and_paused(engines: Engines, conserved: object, odd: Odd) -> None:
    async with Client(odd.small.base_url) as client:
        hogs = [await client.complete(list(range(start, start + 100)), 900, **GREEDY) for start in (300, 500)]
        for hog in hogs:
            await hog.wait_for(2)
        move = await stays_and_goes_on(engines.a, odd.small, length=200)
        assert not any(hog.done for hog in hogs), "a slot was free again before the move"
        for hog in hogs:
            await hog.disconnect()
    assert (move.reason, "batch slot" in move.detail) == ("destination_full", True)
    await wait_idle(odd.small)
    async with aiohttp.ClientSession(odd.small.base_url) as operator:
        # Deeper levels of sleep pause first, and do not exist on CPUs.
        for stop, go_on in (("/pause?mode=keep", "/resume"), ("/sleep?level=0&mode=keep", "/wake_up")):
            async with operator.post(stop, raise_for_status=True):
                pass
            move = await stays_and_goes_on(engines.a, odd.small, length=200)
            assert move.reason == "destination_paused"
            async with operator.post(go_on, raise_for_status=True):
                pass
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(PROMPT, 800, **GREEDY)
        await stream.wait_for(20)
        assert (await move_stream(engines.a, odd.small, stream)).moved
        await stream.disconnect()
    await wait_idle(odd.small)


@pytest.fixture(scope="module")
def strange(model_dir: Path, log_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strange]:
    with Fleet(log_dir / "strange") as fleet:
        yield Strange(fleet, model_dir, tmp_path_factory.mktemp("strange"))


@failure(
    "the destination has a fine-tune of the model, of which its layers' values alone differ",
    "reserving",
    "incompatible_engine: goes on at the source",
)
@pytest.mark.rest
async def test_a_fine_tune(engines: Engines, conserved: object, strange: Strange) -> None:
    move = await stays_and_goes_on(engines.a, strange.weights)
    assert (move.reason, move.detail) == ("incompatible_engine", "checkpoint files differ")
    await wait_idle(strange.weights)


@failure(
    "the destination keeps its KV cache in another way, as in blocks that have nothing to do with the source's",
    "reserving",
    "the request goes with its tokens alone; incompatible_engine if it must not",
)
@pytest.mark.rest
async def test_blocks_of_quite_another_size(engines: Engines, conserved: object, strange: Strange) -> None:
    """And another length: the KV cache stays, the tokens go; unless the request might become too long."""
    other = strange.blocks
    move = await stays_and_goes_on(engines.a, other)
    assert move.reason == "incompatible_engine"
    assert f"block size: {HUGE} here, 32 at the source" in move.detail
    async with Client(engines.a.base_url) as client:
        expected = await (await client.complete(PROMPT, 300, **GREEDY, cache_salt="unmoved")).result()
        stream = await client.complete(PROMPT, 300, **GREEDY, cache_salt="moved")
        moves = []
        for source, destination in ((engines.a, other), (other, engines.a)):
            await held_by(source, stream, 20)
            moves.append(await move_stream(source, destination, stream, method="auto"))
        assert (await stream.result()).token_ids == expected.token_ids
        assert [(move.phase, move.mode) for move in moves] == [("moved", "recompute")] * 2
        assert f"block size: 32 here, {HUGE} at the source" in moves[1].tokens_alone
        long = await client.complete(PROMPT, 6000, **GREEDY)
        await held_by(engines.a, long, 20)
        refused = await move_stream(engines.a, other, long, method="auto")
        await long.disconnect()
    assert (refused.phase, refused.reason) == ("stayed", "request_too_long")
    await wait_idle(other)


async def test_another_block_size(engines: Engines, conserved: object, strange: Strange) -> None:
    """Live, there and back, each token's part of a block copied to its place in another, in rounds and at the end."""
    small, large = engines.a, strange.larger
    async with Client(small.base_url) as client:
        prompt = list(range(100, 400))
        expected = await (await client.complete(prompt, 700, **GREEDY, cache_salt="unmoved")).result()
        stream = await client.complete(prompt, 700, **GREEDY, cache_salt="moved")
        moves = []
        for number, (source, destination) in enumerate(((small, large), (large, small)), 1):
            await held_by(source, stream, 60 * number)
            moves.append(await move_stream(source, destination, stream, method="live"))
        result = await stream.result()
    assert [(move.phase, move.mode, move.recomputed_tokens) for move in moves] == [("moved", "live", 0)] * 2, moves
    assert moves[0].rounds, "the other way back hits in the prefix cache"
    assert all(move.copied_bytes for move in moves)
    assert result.token_ids == expected.token_ids
    await wait_idle(large)


@pytest.mark.rest
async def test_request_beside_a_custom_kv_connector_moves_as_tokens(
    engines: Engines, conserved: object, strange: Strange
) -> None:
    """Its KV cache stays where it is; said in the answer of `Migrate` and in `llumnix ps`. Its tokens move."""
    source, why = strange.connector, CONNECTOR
    async with Client(source.base_url) as client:
        expected = await (await client.complete(PROMPT, 200, **GREEDY, cache_salt="unmoved")).result()
        stream = await client.complete(PROMPT, 6000, **GREEDY, cache_salt="moved")
        held = await held_by(source, stream, 20)
        code, shown = await llumnix("ps", "--llumlet", str(source.llumlet), "--json")
        refused = await move_stream(source, engines.b, stream)
        await stream.wait_for(max(len(stream.token_ids) + 50, 200))
        moves = [await move_stream(source, engines.b, stream, method="auto")]
        await stream.wait_for(len(stream.token_ids) + 50)
        await stream.disconnect()
    # Another one: of one that comes back, vLLM's example connector counts what is cached beyond the prompt as negative.
    async with Client(engines.b.base_url) as client:
        other = await client.complete([*PROMPT, 7], 6000, **GREEDY)
        await held_by(engines.b, other, 20)
        moves.append(await move_stream(engines.b, source, other, method="auto"))
        await other.wait_for(len(other.token_ids) + 50)
        await other.disconnect()
    assert (refused.phase, refused.reason, refused.detail) == ("stayed", "not_portable", why)
    assert (held.movable, held.moves_as) == (True, Mode.RECOMPUTE)
    assert (code, why in shown) == (0, True), shown
    assert stream.token_ids[:200] == expected.token_ids
    assert [(move.phase, move.mode) for move in moves] == [("moved", "recompute")] * 2, moves
    assert [move.tokens_alone for move in moves] == [why, f"at the destination: {why}"]
    await wait_idle(source)
