# SPDX-License-Identifier: Apache-2.0
"""Requests are built for a destination while others' grammars, or adapters, take for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from llumlet.protocol.errors import Reason, Refused
from tests.engine.rig import new_scheduler
from vllm_llumnix import adapters
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.engine.requests import grammars
from vllm_llumnix.engine.requests.builder import RequestBuilder
from vllm_llumnix.steps.step_record import StepRecord, name_of, read
from vllm_llumnix.wire.addresses import Reach
from vllm_llumnix.wire.request_wire import RequestState, encode, encode_params

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),  # vLLM's call of xgrammar
]

ORIGIN = "tcp://127.0.0.1:1"
INCARNATION = uuid.uuid4().hex
REGEX = "[a-z]+"
SLOW = "(slow|[a-z])+"
AT_ONCE = 5.0
"""Seconds, on a machine that is busy with other things; a grammar that nobody compiles takes `GRAMMAR_SECONDS`."""


@pytest.fixture
def engine(model_dir: Path) -> Iterator[Any]:
    """As much of an EngineCore as a builder wants. On four cores: vLLM compiles two grammars at a time."""
    with mock.patch("multiprocessing.cpu_count", return_value=4):
        scheduler, block_hasher = new_scheduler(model_dir, False, 64)
    manager = scheduler.structured_output_manager
    record = StepRecord(INCARNATION, 4, 2)
    yield SimpleNamespace(
        vllm_config=scheduler.vllm_config,
        structured_output_manager=manager,
        request_block_hasher=block_hasher,
        record=record,
    )
    manager.clear_backend()
    record.close()


@pytest.fixture(autouse=True)
def _one_grammar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "PER_SOURCE", 1)


class Door:
    """Builds what arrives, with one helper thread."""

    def __init__(self, engine: Any) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        self.builder = RequestBuilder(engine, Reach(anywhere=False), Adapters(None), engine.record)

    async def build(self, name: str, source: str, *, patience_s: float = 0.1, **params: Any) -> Request:
        state, residence = await self.builder.read(encode(state_of(name, **params)))
        return await self.builder.build(state, residence, source, patience_s=patience_s)


def state_of(name: str, regex: str = "", **params: Any) -> RequestState:
    if regex:
        params["structured_outputs"] = StructuredOutputsParams(regex=regex)
    return RequestState(
        request_id=name,
        external_request_id=name,
        origin=ORIGIN,
        prompt_token_ids=list(range(10, 80)),
        output_token_ids=[],
        sampling_params=encode_params(SamplingParams(max_tokens=9, **params)),
        arrival_time=0.0,
        structured_backend="xgrammar" if regex else None,
    )


@contextlib.contextmanager
def compiled_slowly(engine: Any) -> Iterator[None]:
    """`SLOW` takes until the end of this."""
    go_on = threading.Event()
    stock = engine.structured_output_manager._create_grammar

    def create(request: Request) -> Any:
        if request.sampling_params.structured_outputs.regex == SLOW:
            go_on.wait()
        return stock(request)

    with mock.patch.object(engine.structured_output_manager, "_create_grammar", create):
        try:
            yield
        finally:
            go_on.set()


async def begun(engine: Any) -> None:
    """Somebody's grammar is being compiled."""
    async with asyncio.timeout(AT_ONCE):
        while not engine.structured_output_manager.executor._threads:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.01)


def whose_grammar() -> frozenset[bytes]:
    """As a process would find it that looks why this one has ended."""
    steps = read(INCARNATION)
    assert steps is not None
    return steps.compiling


async def refusal(building: Any) -> Reason:
    with pytest.raises(Refused) as refused:
        await building
    return refused.value.reason


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({"of_a_later_release": 1}, False),
        ({"structured_outputs": {"regex": REGEX, "of_a_later_release": [1]}}, False),
        ({"structured_outputs": {"regex": REGEX, "of_a_later_release": None}}, True),
        ({"structured_outputs": 7}, None),
        ({}, True),
    ],
)
async def test_parameters_of_another_release(engine: Any, more: dict[str, Any], known: bool | None) -> None:
    """msgspec passes over them: the request would go on without. Grammars name all that they have, whatever it is."""
    door = Door(engine)
    state = state_of("r", regex=REGEX)
    told = msgspec.msgpack.decode(state.sampling_params) | more
    state = msgspec.structs.replace(state, sampling_params=msgspec.Raw(msgspec.msgpack.encode(told)))
    state, residence = await door.builder.read(encode(state))
    building = door.builder.build(state, residence, "A", patience_s=AT_ONCE)
    if known:
        assert (await building).sampling_params.structured_outputs.regex == REGEX
    else:
        refused = Reason.INVALID_REQUEST if known is None else Reason.INCOMPATIBLE_ENGINE
        assert await refusal(building) == refused


async def test_others_pass_grammars_that_are_being_compiled(engine: Any) -> None:
    door = Door(engine)
    with compiled_slowly(engine):
        slow = asyncio.ensure_future(door.build("slow", "A", regex=SLOW))
        await begun(engine)
        names = [f"in line {number}" for number in range(3)]
        in_line = [asyncio.ensure_future(door.build(name, "A", regex=SLOW, patience_s=AT_ONCE)) for name in names]
        async with asyncio.timeout(AT_ONCE):
            assert await refusal(door.build("another", "A", regex=REGEX)) == Reason.DESTINATION_BUSY
            await door.build("plain", "A")
            await door.build("of somebody else", "B", regex=REGEX)
        assert not slow.done()
        assert not any(one.done() for one in in_line)
        assert whose_grammar() == {name_of("slow")}, "should the compiler end the process, this one is why"
    async with asyncio.timeout(AT_ONCE):
        for request in await asyncio.gather(slow, *in_line):
            assert request.structured_output_request.is_grammar_ready
        await door.build("once more", "A", regex=REGEX)
    assert not whose_grammar()


async def test_a_source_has_its_turn_for_as_long_as_it_is_compiled_for(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stops a compilation, so what nobody waits for still counts."""
    monkeypatch.setattr(grammars, "GRAMMAR_SECONDS", 0.3)
    door = Door(engine)
    with compiled_slowly(engine):
        assert await refusal(door.build("slow", "A", regex=SLOW)) == Reason.DEADLINE
        assert await refusal(door.build("next", "A", regex=REGEX)) == Reason.DESTINATION_BUSY
        assert await refusal(door.build("in line", "A", regex=REGEX, patience_s=AT_ONCE)) == Reason.DESTINATION_BUSY
    monkeypatch.setattr(grammars, "GRAMMAR_SECONDS", AT_ONCE)
    await door.build("next", "A", regex=REGEX, patience_s=AT_ONCE)


async def test_a_grammar_that_is_none(engine: Any) -> None:
    door = Door(engine)
    with mock.patch.object(engine.structured_output_manager, "_create_grammar", side_effect=ValueError("no such")):
        assert await refusal(door.build("wrong", "A", regex=REGEX)) == Reason.INVALID_REQUEST
    assert not whose_grammar()
    await door.build("right", "A", regex=REGEX)


async def test_others_pass_an_adapter_that_is_being_read(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def read_contents(*_: Any) -> adapters.Contents:
        go_on.wait()
        return adapters.Contents("digest", ())

    monkeypatch.setattr(adapters, "read_contents", read_contents)
    door = Door(engine)
    known = door.builder._adapters
    for number in (1, 2):
        known.learn(adapters.LoRARequest(f"story-{number}", number, "/nowhere"))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(AT_ONCE):
        await door.build("plain", "A")
    go_on.set()
    assert (await known.resolve("story-2", "digest")).lora_int_id == 2
