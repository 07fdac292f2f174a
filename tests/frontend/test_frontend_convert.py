# SPDX-License-Identifier: Apache-2.0
"""Outputs survive the relay, and vLLM's own output processor takes what comes out."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, PrefillStats, RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from llumlet.protocol import wire
from llumlet.protocol.errors import RemoteProtocolError
from llumlet.protocol.ids import Epoch
from tests.frontend.conftest import NewPeer
from tests.frontend.fakes import VOCAB_SIZE, FakeEngine, FakePeer, next_outputs, output, request
from vllm_llumnix.wire.relay_convert import (
    ExpertsForm,
    OutputForm,
    check,
    engine_output_from,
    sliced,
    token_output_from,
)


def logprobs(rows: int, width: int = 3, seed: int = 0) -> LogprobsLists:
    """As the sampler makes them."""
    draw = np.random.default_rng(seed)
    values = -draw.exponential(3.0, (rows, width)).astype(np.float32)
    return LogprobsLists(
        draw.integers(0, VOCAB_SIZE, (rows, width)).astype(np.int32), values, draw.integers(1, 50, rows)
    )


def over_the_wire(token: wire.TokenOutput) -> wire.TokenOutput:
    message = wire.decode_to_origin(wire.encode(wire.TokenBatch("i", "1", "a", [token])))
    assert isinstance(message, wire.TokenBatch)
    return message.outputs[0]


def assert_same_logprobs(left: LogprobsLists | None, right: LogprobsLists | None) -> None:
    assert left is not None
    assert right is not None
    for ours, theirs in zip(left[:3], right[:3], strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()
    assert left.cu_num_generated_tokens is None


def test_an_output_survives_the_round_trip() -> None:
    sent = output("r", 5, 6, finish=FinishReason.STOP, stop_reason="x", new_logprobs=logprobs(2), num_nans_in_logits=3)
    token = over_the_wire(token_output_from(sent, Epoch(2, 3), base=4, first=7))
    assert (token.epoch, token.base, token.first) == (Epoch(2, 3), 4, 7)
    got = engine_output_from(token, 0, 2, True)
    assert_same_logprobs(got.new_logprobs, sent.new_logprobs)
    assert isinstance(got.finish_reason, FinishReason)
    assert msgspec.structs.replace(got, new_logprobs=None) == msgspec.structs.replace(sent, new_logprobs=None)


def test_drafts_counted_by_one_engine_are_left_out() -> None:
    """They are a part of what a request that has moved has seen."""
    counted = RequestSpecDecodeMetrics.new(2)
    counted.observe(num_draft_tokens=2, num_accepted=1)
    sent = output("r", 5, 6, finish=FinishReason.STOP, spec_decode_metrics=counted)
    token = over_the_wire(token_output_from(sent, Epoch(0, 1), base=0, first=0))
    assert engine_output_from(token, 0, 2, True).spec_decode_metrics is None


@pytest.mark.parametrize("value", [-np.inf, np.nan, -0.0, np.float32(1e-45), np.finfo(np.float32).min])
def test_every_float_arrives_unchanged(value: float) -> None:
    rows = logprobs(1)
    rows.logprobs[0, 1] = value
    token = over_the_wire(token_output_from(output("r", 5, new_logprobs=rows), Epoch(0, 1), 0, 0))
    assert_same_logprobs(engine_output_from(token, 0, 1, False).new_logprobs, rows)


@pytest.mark.parametrize(("skip", "count"), [(0, 3), (1, 2), (2, 1), (0, 2), (1, 1), (3, 0)])
def test_ids_and_logprobs_are_cut_together(skip: int, count: int) -> None:
    sent = output("r", 5, 6, 7, finish=FinishReason.STOP, stop_reason=9, new_logprobs=logprobs(3))
    finished = skip + count == 3
    relayed = engine_output_from(over_the_wire(token_output_from(sent, Epoch(0, 1), 0, 0)), skip, count, finished)
    for got in (relayed, sliced(sent, skip, count, finished)):
        assert got.new_token_ids == [5, 6, 7][skip : skip + count]
        assert got.new_logprobs is not None
        assert got.new_logprobs.sampled_token_ranks.tolist() == (
            sent.new_logprobs.sampled_token_ranks[skip : skip + count].tolist()
        )
        assert got.new_logprobs.logprobs.shape[0] == count
        assert (got.finish_reason, got.stop_reason) == ((FinishReason.STOP, 9) if finished else (None, None))


def test_a_home_output_that_is_taken_whole_is_not_copied() -> None:
    whole = output("r", 5, finish=FinishReason.STOP)
    assert sliced(whole, 0, 1, True) is whole


def test_prefill_statistics_stay_with_the_first_token() -> None:
    events = [EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)]
    first = output("r", 5, 6, events=events, prefill_stats=PrefillStats())
    assert sliced(first, 0, 1, False).prefill_stats is not None
    assert sliced(first, 0, 1, False).events == events
    assert sliced(first, 1, 1, False).prefill_stats is None
    assert sliced(first, 1, 1, False).events is None


PLAIN, MASKED = OutputForm(VOCAB_SIZE), OutputForm(VOCAB_SIZE, has_masks=True)
MASKS = [[3, 5, 9], [6], [7, 8]]


def masks_of(output: EngineCoreOutput) -> list[list[int]] | None:
    mask = output.new_sampling_mask
    return None if mask is None else mask.to_nested_list()


@pytest.mark.parametrize(("skip", "count"), [(0, 3), (1, 2), (2, 1), (0, 2), (1, 1), (0, 1)])
def test_sampling_masks_travel_with_tokens(skip: int, count: int) -> None:
    """In vLLM's form: of one position without offsets."""
    ids = np.array([3, 5, 9, 6, 7, 8], dtype=np.int32)
    sent = output("r", 5, 6, 7, new_sampling_mask=SamplingMaskLists(ids, np.array([0, 3, 4, 6])))
    relayed = engine_output_from(over_the_wire(token_output_from(sent, Epoch(0, 1), 0, 0)), skip, count, False)
    for got in (relayed, sliced(sent, skip, count, False)):
        assert masks_of(got) == MASKS[skip : skip + count]
        assert (got.new_sampling_mask is sent.new_sampling_mask) or (
            (got.new_sampling_mask.offsets is None) is (count == 1)
        )
        assert got.new_sampling_mask.token_ids.dtype == np.int32


def test_sampling_masks_that_do_not_fit_are_refused() -> None:
    token = wire.TokenOutput("r", Epoch(0, 1), 0, 0, [5, 6, 7], sampling_masks=MASKS)
    check(token, MASKED, wants_logprobs=False)
    check(wire.TokenOutput("r", Epoch(0, 1), 0, 0, []), MASKED, wants_logprobs=False)
    for masks in (None, MASKS[:2], [*MASKS[:2], [VOCAB_SIZE]], [*MASKS[:2], [-1]]):
        broken = msgspec.structs.replace(token, sampling_masks=masks)
        with pytest.raises(RemoteProtocolError):
            check(broken, MASKED, wants_logprobs=False)
    with pytest.raises(RemoteProtocolError, match="were not to be"):
        check(token, PLAIN, wants_logprobs=False)


FORM = ExpertsForm(num_layers=2, num_per_token=3, num_experts=300)
ROUTED = OutputForm(VOCAB_SIZE, experts=FORM)


def routed(num_rows: int, num_tokens: int = 3, start: int = 0) -> EngineCoreOutput:
    """Of a step that has brought so many tokens and told of so many where they went."""
    rows = (start + np.arange(num_rows * 6) % 300).astype(FORM.dtype).reshape(num_rows, 2, 3)
    return output("r", *range(5, 5 + num_tokens), routed_experts=rows)


@pytest.mark.parametrize(("skip", "count"), [(0, 3), (1, 2), (2, 1), (0, 2), (1, 1), (0, 1)])
@pytest.mark.parametrize("num_rows", [3, 7, 2], ids=["decoding", "behind a prompt", "without the prompt's"])
def test_experts_go_with_their_tokens(num_rows: int, skip: int, count: int) -> None:
    """A token's are those of the one before it; the prompt's go with the first."""
    sent = routed(num_rows)
    assert sent.routed_experts is not None
    token = over_the_wire(token_output_from(sent, Epoch(0, 1), 0, 0))
    check(token, ROUTED, wants_logprobs=False)
    behind = num_rows - 3 + skip + count
    expected = sent.routed_experts[0 if skip == 0 else num_rows - 3 + skip : behind]
    for got in (engine_output_from(token, skip, count, False, FORM), sliced(sent, skip, count, False)):
        assert got.routed_experts is not None
        assert got.routed_experts.dtype == FORM.dtype
        assert got.routed_experts.tolist() == expected.tolist()


def test_parts_of_an_output_have_all_its_experts() -> None:
    sent = routed(7)
    parts = [sliced(sent, skip, count, False).routed_experts for skip, count in ((0, 1), (1, 2))]
    assert np.concatenate([part for part in parts if part is not None]).tolist() == sent.routed_experts.tolist()


@pytest.mark.parametrize("form", [FORM, FORM._replace(num_experts=256)], ids=["two bytes", "a byte"])
def test_experts_that_do_not_fit_are_refused(form: ExpertsForm) -> None:
    token = wire.TokenOutput("r", Epoch(0, 1), 0, 0, [5, 6, 7], routed_experts=bytes(form.dtype.itemsize * 18))
    known = OutputForm(VOCAB_SIZE, experts=form)
    check(token, known, wants_logprobs=False)
    check(wire.TokenOutput("r", Epoch(0, 1), 0, 0, []), known, wants_logprobs=False)
    for data in (None, b"", bytes(17), bytes(form.dtype.itemsize * 6)):
        with pytest.raises(RemoteProtocolError):
            check(msgspec.structs.replace(token, routed_experts=data), known, wants_logprobs=False)
    with pytest.raises(RemoteProtocolError, match="were not to be"):
        check(token, PLAIN, wants_logprobs=False)


def test_an_expert_that_there_is_not() -> None:
    token = wire.TokenOutput("r", Epoch(0, 1), 0, 0, [5], routed_experts=b"\xff\xff" * 6)
    with pytest.raises(RemoteProtocolError, match="outside"):
        check(token, ROUTED, wants_logprobs=False)


GOOD = wire.Logprobs([[5, 1], [6, 2]], [[-0.1, -2.0], [-0.2, -1.0]], [1, 2])


@pytest.mark.parametrize(
    "broken",
    [
        msgspec.structs.replace(GOOD, token_ids=GOOD.token_ids[:1]),
        msgspec.structs.replace(GOOD, logprobs=GOOD.logprobs[:1]),
        msgspec.structs.replace(GOOD, ranks=[1]),
        msgspec.structs.replace(GOOD, ranks=[1, 2**40]),
        msgspec.structs.replace(GOOD, logprobs=[[-0.1, -2.0], [-0.2]]),
        msgspec.structs.replace(GOOD, token_ids=[[5, 1], [6, VOCAB_SIZE]]),
        wire.Logprobs([[], []], [[], []], [1, 2]),
        wire.Logprobs([], [], []),
        None,
    ],
)
def test_logprobs_that_do_not_fit_are_refused(broken: wire.Logprobs | None) -> None:
    token = wire.TokenOutput("r", Epoch(0, 1), 0, 0, [5, 6], logprobs=broken)
    with pytest.raises(RemoteProtocolError):
        check(token, PLAIN, wants_logprobs=True)
    check(msgspec.structs.replace(token, logprobs=GOOD), PLAIN, wants_logprobs=True)


def test_an_end_without_tokens_needs_no_logprobs() -> None:
    for logprobs in (None, wire.Logprobs([], [], [])):
        token = wire.TokenOutput("r", Epoch(0, 1), 0, 0, [], finish_reason=0, logprobs=logprobs)
        check(token, PLAIN, wants_logprobs=True)
        assert engine_output_from(token, 0, 0, True).finished


# The whole way, into vLLM's output processor


async def process(client: Any, processor: OutputProcessor, count: int, stats: IterationStats) -> None:
    """What vLLM's output handler does, until `count` tokens were processed."""
    while count:
        outputs: EngineCoreOutputs = await next_outputs(client)
        count -= sum(len(part.new_token_ids) for part in outputs.outputs)
        processor.process_outputs(outputs.outputs, outputs.timestamp, stats, outputs.weight_version)


async def run_stream(client: Any, engine: FakeEngine, peer: FakePeer | None, steps: list[EngineCoreOutput]) -> Any:
    """Six tokens; with a `peer`, the last four over the relay. Returns the last RequestOutput and statistics."""
    params = SamplingParams(max_tokens=6, logprobs=2, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE)
    # vLLM sets the external id before the request reaches its output processor.
    asked = request("r", sampling_params=params, external_req_id="external")
    processor = OutputProcessor(None, log_stats=True)
    collector = RequestOutputCollector(params.output_kind, "r")
    processor.add_request(asked, None, None, 0, collector)
    await client.add_request_async(asked)
    stats = IterationStats()
    for index, step in enumerate(steps):
        if peer is None or index < 2:
            await engine.send(step, timestamp=time.monotonic())
        else:
            await peer.tokens(token_output_from(step, Epoch(0, 1), 2, index))
        await process(client, processor, 1, stats)
    return collector.get_nowait(), stats


@pytest.mark.asyncio
async def test_a_moved_stream_looks_like_one_that_stayed(client: Any, engine: FakeEngine, new_peer: NewPeer) -> None:
    steps = [output("r", 10 + index, new_logprobs=logprobs(1, seed=index)) for index in range(6)]
    steps[0].prefill_stats = PrefillStats()
    steps[-1].finish_reason = FinishReason.LENGTH
    stayed, stayed_stats = await run_stream(client, engine, None, steps)
    moved, moved_stats = await run_stream(client, engine, new_peer(), steps)
    assert moved.finished
    assert moved.outputs[0].token_ids == [10, 11, 12, 13, 14, 15]
    assert moved.outputs == stayed.outputs
    assert moved.num_cached_tokens == stayed.num_cached_tokens
    assert moved_stats.num_generation_tokens == stayed_stats.num_generation_tokens == 6
    assert len(moved_stats.time_to_first_tokens_iter) == len(stayed_stats.time_to_first_tokens_iter) == 1
    assert len(moved_stats.inter_token_latencies_iter) == len(stayed_stats.inter_token_latencies_iter) == 5
    assert all(0 <= latency < 5 for latency in moved_stats.inter_token_latencies_iter)
    assert [done.finish_reason for done in moved_stats.finished_requests] == [FinishReason.LENGTH]
    assert moved_stats.finished_requests[0].num_generation_tokens == 6
