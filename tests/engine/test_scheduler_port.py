# SPDX-License-Identifier: Apache-2.0
"""What a migration does to vLLM's schedulers: the real ones, synchronous and asynchronous, with a fake model runner."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Reason, Refused
from tests.engine.rig import BLOCK_SIZE, Rig, window
from vllm_llumnix.engine.requests.request_state import why_not_now

KINDS = {
    "sync": {"asynchronous": False, "runner_v2": False},
    "async-v1": {"asynchronous": True, "runner_v2": False},
    "async-v2": {"asynchronous": True, "runner_v2": True},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def rig(request: pytest.FixtureRequest, model_dir: Path) -> Rig:
    return Rig(model_dir, **request.param)


def freeze(rig: Rig, name: str = "a"):
    """Freeze and let the step in flight drain."""
    request = rig.scheduler.requests[name]
    rig.port.freeze(request)
    for _ in range(3):
        if (frozen := rig.port.drained(request, 0)) is not None:
            return frozen
        rig.turn()
    raise AssertionError("the frozen request does not drain")


def test_frontier_is_what_has_been_processed(rig: Rig) -> None:
    request = rig.add("a", num_prompt=100)
    rig.turns(8)
    frontier = rig.port.frontier(request, 0, 0)
    assert frontier.frontier_blocks == (request.num_tokens - 1) // BLOCK_SIZE == 3
    assert frontier.output_token_ids == list(request.output_token_ids)
    assert len(frontier.block_ids) == 3
    rig.port.unpin(frontier.pin)


def test_frozen_request_emits_its_last_token_and_then_nothing(rig: Rig) -> None:
    request = rig.add("a")
    rig.add("b")
    rig.turns(6)
    before = request.num_output_tokens
    in_flight = request.num_in_flight_tokens
    rig.port.freeze(request)
    emitted = [output.request_id for output in rig.turns(5)]
    assert emitted.count("a") == in_flight
    assert emitted.count("b") >= 4
    assert request.num_output_tokens == before + in_flight
    assert request.status == RequestStatus.RUNNING
    frozen = rig.port.drained(request, 0)
    assert frozen is not None
    assert frozen.computed_tokens == request.num_tokens - 1
    rig.port.unpin(frozen.pin)


@pytest.mark.parametrize("turns_frozen", range(5))
def test_a_pipeline_keeps_its_cadence(turns_frozen: int, model_dir: Path) -> None:
    """A stage that is not the last gets a sampled token as many steps later as there are stages: a request that was
    decoded before would go on from the token before the last."""
    stages = 3
    rig = Rig(model_dir, asynchronous=True, runner_v2=True)
    scheduler, rig.depth = rig.scheduler, stages + 1
    scheduler.pp_size = scheduler.decode_stagger = stages
    request = rig.add("a")
    decoded = []

    def turn() -> None:
        rig.turn()
        if "a" in rig.scheduled():
            decoded.append(scheduler.current_step)

    while len(decoded) < 4:
        turn()
    rig.port.freeze(request)
    for _ in range(turns_frozen):
        turn()
    # Twice is once.
    rig.port.unfreeze(request)
    rig.port.unfreeze(request)
    while len(decoded) < 7:
        turn()
    gaps = [after - before for before, after in itertools.pairwise(decoded)]
    assert gaps == [stages] * 3 + [max(stages, turns_frozen + 1)] + [stages] * 2


def test_unfrozen_request_goes_on_where_it_stopped(rig: Rig) -> None:
    request = rig.add("a")
    rig.turns(6)
    frozen = freeze(rig)
    rig.port.unpin(frozen.pin)
    count = request.num_output_tokens
    rig.port.unfreeze(request)
    rig.turns(4)
    assert request.num_output_tokens > count
    assert request.num_computed_tokens - request.num_in_flight_tokens == request.num_tokens - 1


def test_only_frozen_requests_are_no_work(rig: Rig) -> None:
    rig.add("a")
    rig.turns(4)
    assert not rig.port.only_frozen()
    frozen = freeze(rig)
    assert rig.port.only_frozen()
    rig.port.unpin(frozen.pin)
    rig.add("b")
    assert not rig.port.only_frozen()


def test_release_frees_blocks_after_the_pin_and_says_nothing(rig: Rig) -> None:
    free = rig.free_blocks
    request = rig.add("a")
    rig.turns(6)
    frozen = freeze(rig)
    rig.port.release(request)
    assert rig.free_blocks < free, "pinned blocks are not free"
    rig.port.unpin(frozen.pin)
    assert rig.free_blocks == free
    assert "a" not in rig.scheduler.requests
    assert not rig.scheduler.finished_req_ids_dict[request.client_index]
    assert [output for output in rig.turns(2) if output.request_id == "a"] == []
    assert "a" in rig.scheduler.finished_req_ids or rig.scheduler.has_requests() is False


def test_pins_outlive_an_abort(rig: Rig) -> None:
    free = rig.free_blocks
    rig.add("a")
    rig.turns(6)
    frozen = freeze(rig)
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert rig.free_blocks == free - len(frozen.block_ids)
    rig.add("b", num_prompt=1500, first=7)
    rig.turns(3)
    blocks_of_b = set(rig.block_ids(rig.scheduler.requests["b"]))
    assert not blocks_of_b & set(frozen.block_ids), "a pinned block was given to another request"
    rig.port.unpin(frozen.pin)


def move(source: Rig, destination: Rig, name: str = "a"):
    """Everything of a move but the bytes."""
    old = source.scheduler.requests[name]
    new = destination.request(name, num_prompt=old.num_prompt_tokens, max_tokens=old.max_tokens)
    new.append_output_token_ids(list(old.output_token_ids))
    new.prefill_stats = None
    held = destination.port.reservations.make(new, use_prefix_cache=True)
    known = old.num_output_tokens
    source.turns(3)
    frozen = freeze(source, name)
    new.append_output_token_ids(list(old.output_token_ids)[known:])
    destination.port.reservations.admit(new, frozen.computed_tokens)
    source.port.release(old)
    source.port.unpin(frozen.pin)
    return old, new, held.num_hits, held.block_ids


def test_admitted_request_computes_one_token_in_the_next_step(rig: Rig, model_dir: Path) -> None:
    destination = Rig(model_dir, asynchronous=rig.depth == 2, runner_v2=rig.scheduler.use_v2_model_runner)
    rig.add("a")
    destination.add("b", first=20)
    rig.turns(6)
    destination.turns(4)
    old, new, hits, _ = move(rig, destination)
    assert hits == 0
    destination.port.before_step()
    output = destination.scheduler.schedule()
    assert output.num_scheduled_tokens["a"] == 1
    (data,) = output.scheduled_new_reqs
    assert data.req_id == "a"
    assert data.prefill_token_ids == list(new.all_token_ids)
    assert data.num_computed_tokens == old.num_tokens - 1


def test_reservation_is_given_back_whole(rig: Rig) -> None:
    free, slots = rig.free_blocks, rig.scheduler.max_num_active_reqs
    request = rig.request("a")
    rig.port.reservations.make(request, use_prefix_cache=True)
    rig.port.reservations.grow(request, 200)
    assert rig.free_blocks < free
    assert rig.scheduler.max_num_active_reqs == slots - 1
    rig.port.reservations.cancel(request)
    rig.port.reservations.cancel(request)
    assert (rig.free_blocks, rig.scheduler.max_num_active_reqs) == (free, slots)


def test_reserve_preempts_nobody(rig: Rig) -> None:
    running = rig.add("b", num_prompt=200)
    rig.turns(3)
    with pytest.raises(Refused) as refusal:
        rig.port.reservations.make(rig.request("a", num_prompt=1990), use_prefix_cache=True)
    assert refusal.value.reason is Reason.DESTINATION_FULL
    assert running.num_preemptions == 0
    assert "a" not in rig.port.reservations


def turns_until_it_starts(rig: Rig, newcomers: bool) -> int:
    """Of a request that waits for the blocks of two others, while small ones come from elsewhere at every moment."""
    for first in (5, 25):
        rig.add(f"r{first}", num_prompt=400, max_tokens=20, first=first)
    rig.turns(6)
    waiting = rig.add("c", num_prompt=900, first=45)
    for turn in range(60):
        rig.turn()
        if waiting.status is RequestStatus.RUNNING:
            return turn
        assert rig.free_blocks >= 5
        newcomer = rig.request(f"n{turn}", num_prompt=150, max_tokens=15)
        with contextlib.suppress(Refused):
            if newcomers:
                rig.port.reservations.make(newcomer, use_prefix_cache=False)
                rig.port.reservations.admit(newcomer, newcomer.num_tokens - 1)
    raise AssertionError("it never starts")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_request_waiting_for_blocks_is_not_overtaken(asynchronous: bool, model_dir: Path) -> None:
    alone, among_newcomers = (
        turns_until_it_starts(Rig(model_dir, asynchronous=asynchronous, num_blocks=41), newcomers)
        for newcomers in (False, True)
    )
    assert among_newcomers == alone > 5


def test_reserve_needs_a_batch_slot(rig: Rig) -> None:
    for index in range(4):
        rig.add(f"r{index}", num_prompt=40)
    rig.turns(4)
    with pytest.raises(Refused) as refusal:
        rig.port.reservations.make(rig.request("a"), use_prefix_cache=True)
    assert refusal.value.reason is Reason.DESTINATION_FULL


@pytest.mark.parametrize("with_kv", [True, False], ids=["with-kv", "tokens-alone"])
def test_batch_slot_of_an_admitted_request_is_not_given_to_the_next(with_kv: bool, model_dir: Path) -> None:
    rig = Rig(model_dir, num_blocks=128)
    for index in range(3):
        rig.add(f"own{index}", num_prompt=40)
    rig.turns(3)
    first, second = mid_stream(rig, "first"), mid_stream(rig, "second")
    reservations = rig.port.reservations
    reservations.make(first, use_prefix_cache=False)
    reservations.admit(first, first.num_tokens - 1 if with_kv else 0)
    with pytest.raises(Refused, match="no free batch slot"):
        reservations.make(second, use_prefix_cache=False)
    rig.turn()
    assert first.status == RequestStatus.RUNNING
    rig.scheduler.finish_requests("own0", RequestStatus.FINISHED_ABORTED)
    reservations.make(second, use_prefix_cache=False)
    reservations.admit(second, second.num_tokens - 1)
    rig.turn()
    assert second.status == RequestStatus.RUNNING


def test_admitted_requests_keep_their_order(model_dir: Path) -> None:
    rig = Rig(model_dir, num_blocks=128)
    waiting = rig.add("own", num_prompt=40)
    names = ["first", "second", "third"]
    for name in names:
        request = mid_stream(rig, name)
        rig.port.reservations.make(request, use_prefix_cache=False)
        rig.port.reservations.admit(request, request.num_tokens - 1)
    rig.port.before_step()
    assert list(rig.scheduler.schedule().num_scheduled_tokens) == [*names, waiting.request_id]


def mid_stream(rig: Rig, name: str) -> Request:
    """A request that has put out a token elsewhere."""
    request = rig.request(name, num_prompt=40)
    request.append_output_token_ids([7])
    return request


def test_same_request_is_not_reserved_twice(rig: Rig) -> None:
    request = rig.request("a")
    rig.port.reservations.make(request, use_prefix_cache=True)
    with pytest.raises(Refused) as refusal:
        rig.port.reservations.make(rig.request("a"), use_prefix_cache=True)
    assert refusal.value.reason is Reason.ALREADY_MIGRATING
    rig.port.reservations.cancel(request)


def test_prefix_cache_hits_are_reserved_not_copied(rig: Rig) -> None:
    rig.add("b", num_prompt=100)
    rig.turns(5)
    request = rig.request("a", num_prompt=100)
    held = rig.port.reservations.make(request, use_prefix_cache=True)
    assert held.num_hits == 3
    assert held.block_ids[:3] == rig.block_ids(rig.scheduler.requests["b"])[:3]
    rig.port.reservations.cancel(request)
    held = rig.port.reservations.make(request, use_prefix_cache=False)
    assert held.num_hits == 0
    assert not set(held.block_ids) & set(rig.block_ids(rig.scheduler.requests["b"]))


def test_newcomer_gets_its_token_beside_a_chunked_prefill(rig: Rig, model_dir: Path) -> None:
    destination = Rig(model_dir, asynchronous=rig.depth == 2, runner_v2=rig.scheduler.use_v2_model_runner)
    rig.add("a")
    rig.turns(6)
    long = destination.add("long", num_prompt=1500, first=30)
    destination.turns(2)
    assert long.is_prefill_chunk
    move(rig, destination)
    stock = destination.scheduler.scheduler_config.long_prefill_token_threshold
    destination.port.before_step()
    output = destination.scheduler.schedule()
    assert output.num_scheduled_tokens["a"] == 1
    assert output.num_scheduled_tokens["long"] >= 200, "the prefill goes on with the rest of the budget"
    destination.port.before_step()
    assert destination.scheduler.scheduler_config.long_prefill_token_threshold == stock


def test_newcomer_is_not_the_first_victim(model_dir: Path) -> None:
    source, destination = Rig(model_dir), Rig(model_dir, num_blocks=20)
    source.add("a")
    source.turns(6)
    for name in ("b", "c"):
        destination.add(name, num_prompt=200, first=20 if name == "b" else 40)
    destination.turns(3)
    _, new, _, _ = move(source, destination)
    for _ in range(120):
        destination.turn()
        victims = [r for r in destination.scheduler.requests.values() if r.num_preemptions]
        if victims:
            break
    else:
        raise AssertionError("nobody was preempted: the cache was too large for this test")
    assert new not in victims


def test_frozen_request_that_is_preempted_stays_out(model_dir: Path) -> None:
    """Commit is out, the engine runs out of blocks and takes the frozen request's: it must not run here again."""
    rig = Rig(model_dir, num_blocks=14)
    request = rig.add("a", num_prompt=100)
    rig.turns(4)
    frozen = freeze(rig)
    rig.scheduler._preempt_request(request, 0.0)
    rig.scheduler.running.remove(request)
    rig.port.park_preempted()
    for _ in range(3):
        rig.turn()
    assert request.num_in_flight_tokens == 0
    assert request not in list(rig.scheduler.waiting)
    rig.port.unpin(frozen.pin)
    rig.port.unfreeze(request)
    rig.turns(3)
    assert request.status == RequestStatus.RUNNING


def test_blocks_are_accounted_for_while_nobody_holds_any(rig: Rig) -> None:
    assert rig.port.audit_idle() == []
    rig.add("a")
    rig.turns(3)
    frozen = freeze(rig)
    rig.port.release(frozen.request)
    rig.turns(2)
    assert rig.port.audit_idle() == [], "a pin may hold blocks"
    rig.port.unpin(frozen.pin)
    assert rig.port.audit_idle() == []
    leaked = rig.port.block_pool.get_new_blocks(2)
    faults = rig.port.audit_idle()
    assert faults == [f"neither free nor owned: {sorted(block.block_id for block in leaked)}"]
    rig.port.block_pool.free_blocks(leaked)
    assert rig.port.audit_idle() == []


def arriving(source: Rig, destination: Rig, name: str = "a", *, queued: bool):
    """The same request as the destination builds it, reserved."""
    old = source.scheduler.requests[name]
    new = destination.request(name, num_prompt=old.num_prompt_tokens, max_tokens=old.max_tokens)
    new.append_output_token_ids(list(old.output_token_ids))
    new.prefill_stats = None
    destination.port.reservations.make(new, use_prefix_cache=True, queued=queued)
    return old, new


def twin(rig: Rig, model_dir: Path) -> Rig:
    return Rig(model_dir, asynchronous=rig.depth == 2, runner_v2=rig.scheduler.use_v2_model_runner)


def test_waiting_request_moves_without_blocks(rig: Rig, model_dir: Path) -> None:
    destination = twin(rig, model_dir)
    for index in range(4):
        rig.add(f"r{index}", num_prompt=40)
    waiting = rig.add("a")
    rig.turns(3)
    assert waiting.status == RequestStatus.WAITING
    assert why_not_now(waiting) is None
    free, slots = destination.free_blocks, destination.scheduler.max_num_active_reqs
    old, new = arriving(rig, destination, queued=True)
    assert (destination.free_blocks, destination.scheduler.max_num_active_reqs) == (free, slots)
    frozen = freeze(rig)
    assert (frozen.computed_tokens, frozen.block_ids, frozen.num_tokens) == (0, [], 70)
    assert old not in list(rig.scheduler.waiting)
    first, later = destination.request("first", first=30), destination.request("later", first=30)
    first.arrival_time, later.arrival_time = new.arrival_time - 1, new.arrival_time + 1
    for other in (first, later):
        destination.scheduler.add_request(other)
    destination.port.reservations.admit(new, frozen.computed_tokens)
    assert list(destination.scheduler.waiting) == [first, new, later], "it keeps its turn"
    rig.port.release(old)
    rig.port.unpin(frozen.pin)
    assert "a" not in rig.scheduler.requests
    destination.turns(4)
    assert new.num_output_tokens
    assert destination.scheduler.max_num_active_reqs == slots


def test_unfrozen_waiting_request_keeps_its_place(rig: Rig) -> None:
    for index in range(4):
        rig.add(f"r{index}", num_prompt=40)
    queue = [rig.add(name) for name in "abc"]
    rig.turns(2)
    frozen = freeze(rig, "b")
    assert list(rig.scheduler.waiting) == [queue[0], queue[2]]
    rig.port.unpin(frozen.pin)
    rig.port.unfreeze(queue[1])
    assert list(rig.scheduler.waiting) == queue


def test_preempted_request_moves_with_its_tokens(rig: Rig, model_dir: Path) -> None:
    destination = twin(rig, model_dir)
    request = rig.add("a")
    rig.turns(6)
    while rig._in_flight:
        rig.drain_one()
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, 0.0)
    old, new = arriving(rig, destination, queued=True)
    frozen = freeze(rig)
    assert (frozen.computed_tokens, frozen.block_ids) == (0, [])
    destination.port.reservations.admit(new, 0)
    rig.port.release(old)
    known = new.num_output_tokens
    destination.turns(3)
    assert known > 0
    assert list(new.output_token_ids)[:known] == list(old.output_token_ids)
    assert new.num_output_tokens > known


def test_half_prefilled_request_goes_on_where_it_was(rig: Rig, model_dir: Path) -> None:
    destination = twin(rig, model_dir)
    request = rig.add("a", num_prompt=1000)
    rig.turns(2)
    assert request.is_prefill_chunk
    old, new = arriving(rig, destination, queued=False)
    frozen = freeze(rig)
    assert 0 < frozen.computed_tokens < 1000
    assert len(frozen.block_ids) == frozen.computed_tokens // BLOCK_SIZE
    destination.port.reservations.admit(new, frozen.computed_tokens)
    rig.port.release(old)
    rig.port.unpin(frozen.pin)
    output = destination.scheduler.schedule()
    (data,) = output.scheduled_new_reqs
    assert data.num_computed_tokens == frozen.computed_tokens
    assert output.num_scheduled_tokens["a"] == 256


def test_waiting_request_that_starts_meanwhile_gets_blocks_and_a_slot(rig: Rig) -> None:
    request = rig.request("a")
    free, slots = rig.free_blocks, rig.scheduler.max_num_active_reqs
    rig.port.reservations.make(request, use_prefix_cache=True, queued=True)
    assert rig.port.reservations.grow(request, 70)
    assert rig.free_blocks < free
    assert rig.scheduler.max_num_active_reqs == slots - 1
    rig.port.reservations.cancel(request)
    assert (rig.free_blocks, rig.scheduler.max_num_active_reqs) == (free, slots)


def test_waiting_request_must_fit_an_empty_cache(model_dir: Path) -> None:
    rig = Rig(model_dir, num_blocks=8)
    with pytest.raises(Refused) as refusal:
        rig.port.reservations.make(rig.request("a", num_prompt=400), use_prefix_cache=True, queued=True)
    assert refusal.value.reason is Reason.DESTINATION_FULL


@pytest.mark.parametrize("queued", [False, True])
def test_where_layers_see_a_window_a_request_needs_no_more(model_dir: Path, queued: bool) -> None:
    """Its KV cache does not come along; vLLM computes it again in as many blocks as the window and a chunk span."""
    rig = Rig(model_dir, num_blocks=16, groups=[window(64)], max_num_batched_tokens=128)
    request = rig.request("a", num_prompt=1000)
    rig.port.reservations.make(request, use_prefix_cache=True, queued=queued)
    rig.port.reservations.admit(request, 0)
    rig.turns(9)
    assert request.num_output_tokens == 2


def test_where_layers_see_a_window_it_needs_that_much(model_dir: Path) -> None:
    rig = Rig(model_dir, num_blocks=5, groups=[window(64)], max_num_batched_tokens=128)
    with pytest.raises(Refused) as refusal:
        rig.port.reservations.make(rig.request("a", num_prompt=1000), use_prefix_cache=True)
    assert refusal.value.reason is Reason.DESTINATION_FULL


def test_prompt_logprobs_must_be_complete(rig: Rig) -> None:
    request = rig.add("a", num_prompt=1000)
    request.sampling_params.prompt_logprobs = 1
    problem = why_not_now(request)
    assert problem is not None
    assert problem[0] is Reason.PREFILL_RUNNING
