# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV cache is of several kinds, moved between two of vLLM's real schedulers. Instead of bytes it is
written down of each block what lies there: which group's, of which request, and which place in its block table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheGroupSpec, KVCacheSpec, RSWASpec
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from tests.engine.rig import Rig, compressed, full, latent_window, output_window, ring, states, window
from vllm_llumnix.engine.blocks.block_rows import NULL_ID, GroupKind, kind_of

WINDOW = 64
GROUPS: dict[str, list[KVCacheSpec]] = {
    "windows": [window(WINDOW)],
    "windows of the output": [output_window(WINDOW)],
    "a window beside": [full(), window(WINDOW), window(WINDOW)],
    "blocks of two sizes": [full(64), window(WINDOW, 16)],
    "a state beside": [full(), states("none", 2048)],
    "states that are kept": [full(), states("align", 32), states("align", 32)],
    "larger states": [full(32), states("align", 64), window(WINDOW)],
    "compressed tokens": [latent_window(WINDOW, 64), compressed(256, 4), latent_window(8, 4), latent_window(128, 8)],
    "rings": [compressed(256, 4), ring(8), ring(16), latent_window(WINDOW, 64, is_replayed=True)],
    "a window computed again": [compressed(256, 4), latent_window(WINDOW, 64, is_replayed=True)],
    "a ring beside": [compressed(256, 4), ring(8), latent_window(WINDOW, 64)],
    "rings and states": [full(), ring(16), states("align", 32)],
    "states alone": [states("align", 32)],
}
REPLAYED = "the window behind a cached prefix is being computed again"
SHAPES = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


class Place(NamedTuple):
    group: int
    index: int


class Memory:
    """What lies in the blocks of one engine."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.content: dict[int, Place] = {}

    def compute(self, request: Any) -> None:
        """As if its engine had computed all that the scheduler says is computed."""
        for group, table in enumerate(self._tables(request)):
            self.content.update({block: Place(group, at) for at, block in enumerate(table) if block != NULL_ID})

    def lacks(self, request: Any) -> Iterator[Place]:
        """Places which the next step looks at and which are not there."""
        computed = request.num_computed_tokens
        managers = self.rig.scheduler.kv_cache_manager.coordinator.single_type_managers
        for group, (table, manager) in enumerate(zip(self._tables(request), managers, strict=True)):
            first = max(0, manager.get_num_skipped_tokens(computed)) // manager.block_size
            end = -(-computed // manager.block_size)
            seen = range(first, end)
            if isinstance(manager.kv_cache_spec, CircularBufferSpec):
                seen = range(1)
            if isinstance(manager.kv_cache_spec, RSWASpec):
                of_prompt = -(-request.num_prompt_tokens // manager.block_size)
                seen = [at for at in seen if at < of_prompt or (at + 1) * manager.block_size > computed - WINDOW]
            for at in seen:
                if self.content.get(table[at]) != Place(group, at):
                    yield Place(group, at)

    def publishes(self) -> Iterator[int]:
        """Blocks in the prefix cache in which nothing has arrived."""
        for block in self.rig.port.block_pool.blocks:
            if block.block_hash is not None and block.block_id not in self.content:
                yield block.block_id

    def _tables(self, request: Any) -> Sequence[list[int]]:
        return [
            self.rig.block_ids(request, group)
            for group in range(len(self.rig.port.kv_cache_manager.get_blocks(request.request_id).blocks))
        ]


class Move:
    """One request from one engine to another, by the steps of a live move."""

    def __init__(self, source: Rig, destination: Rig, *, use_prefix_cache: bool = False) -> None:
        self.source, self.destination = source, destination
        self.there, self.here = Memory(source), Memory(destination)
        self.old = source.scheduler.requests["a"]
        self.new = destination.request("a", num_prompt=self.old.num_prompt_tokens, max_tokens=self.old.max_tokens)
        self.known = 0
        self._learn()
        computed = self.old.num_computed_tokens - self.old.num_in_flight_tokens
        self.held = destination.port.reservations.make(
            self.new, use_prefix_cache=use_prefix_cache, computed_tokens=computed
        )
        self.copied = self.held.num_hits

    def _learn(self) -> None:
        self.new.append_output_token_ids(list(self.old.output_token_ids)[self.known :])
        self.known = self.old.num_output_tokens

    def round(self) -> None:
        """What is final now is copied; meanwhile the source goes on."""
        frontier = self.source.port.frontier(self.old, self.copied, self.known)
        self._learn()
        self.there.compute(self.old)
        at_source = dict(self.there.content)
        self.held = self.destination.port.reservations.grow(
            self.new, self.new.num_tokens + 2 * self.source.port.rows.size
        )
        self.source.turns(7)
        self._copy(frontier.block_ids, self.copied, at_source)
        self.copied = frontier.frontier_blocks
        self.source.port.unpin(frontier.pin)

    def finish(self) -> None:
        source, destination = self.source, self.destination
        source.port.freeze(self.old)
        while (frozen := source.port.drained(self.old, self.known)) is None:
            source.turn()
        self._learn()
        self.there.compute(self.old)
        if frozen.num_blocks > self.held.num_rows:
            self.held = destination.port.reservations.grow(self.new, self.new.num_tokens)
        rows = source.port.rows
        from_row = min(self.copied, frozen.num_blocks - bool(rows.num_states))
        self._copy(frozen.block_ids[rows.width * from_row :], from_row, self.there.content)
        for at_source, here in zip(frozen.state_ids, self.held.state_ids, strict=True):
            self.here.content[here] = self.there.content[at_source]
        destination.port.reservations.admit(self.new, frozen.computed_tokens)
        source.port.release(self.old)
        source.port.unpin(frozen.pin)

    def _copy(self, block_ids: Sequence[int], from_row: int, content: dict[int, Place]) -> None:
        width = self.source.port.rows.width
        blocks_here = self.held.block_ids[width * from_row :][: len(block_ids)]
        for at_source, here in zip(block_ids, blocks_here, strict=True):
            if NULL_ID not in (at_source, here):
                self.here.content[here] = content[at_source]


def rigs(model_dir: Path, groups: Sequence[KVCacheSpec], **more: Any) -> tuple[Rig, Rig]:
    return tuple(Rig(model_dir, num_blocks=512, groups=groups, **more) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.rest), True], ids=["sync", "async"])
@pytest.mark.parametrize("prompt", [20, 330, *(pytest.param(length, marks=pytest.mark.rest) for length in (64, 200))])
@pytest.mark.parametrize("rounds", [0, pytest.param(1, marks=pytest.mark.rest), 3])
@SHAPES
def test_all_that_is_looked_at_has_arrived(
    model_dir: Path, groups: Sequence[KVCacheSpec], rounds: int, prompt: int, asynchronous: bool
) -> None:
    source, destination = rigs(model_dir, groups, asynchronous=asynchronous)
    free = source.free_blocks, destination.free_blocks
    source.add("a", num_prompt=prompt)
    source.turns(12)
    move = Move(source, destination)
    for _ in range(rounds):
        move.round()
    move.finish()
    new = move.new
    assert new.num_computed_tokens == new.num_tokens - 1
    assert not list(move.here.lacks(new))
    assert not list(move.here.publishes())
    computed = new.num_computed_tokens
    output = destination.begin()
    assert output.num_scheduled_tokens == {"a": 1}
    arrived = {block for block, place in move.here.content.items() if place.index * 16 < computed}
    zeroed = set(output.new_block_ids_to_zero or ())
    assert not arrived & zeroed, "what has arrived is filled with zeros"
    managers = destination.scheduler.kv_cache_manager.coordinator.single_type_managers
    for group, manager in enumerate(managers):
        if manager.records_new_block_ids:
            behind = destination.block_ids(new, group)[-(-computed // manager.block_size) :]
            assert set(behind) - {NULL_ID} <= zeroed, "what is behind it is not"
    destination.drain_one()
    destination.turns(150)
    assert new.num_output_tokens > 100
    source.turns(3)
    for rig in (source, destination):
        if "a" in rig.scheduler.requests:
            rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        rig.turns(3)
    assert (source.free_blocks, destination.free_blocks) == free
    assert source.port.audit_idle() == destination.port.audit_idle() == []


def test_of_a_row_that_is_held_every_block_is_there(model_dir: Path) -> None:
    """A destination that has the rows which a source commits asks for no more, however much has been computed in the
    last of them since."""
    source, destination = rigs(model_dir, GROUPS["blocks of two sizes"])
    source.add("a", num_prompt=4)
    source.turns(3)
    move = Move(source, destination)
    assert move.held.num_rows == 1
    source.turns(50)
    move.finish()
    assert 48 < move.new.num_computed_tokens < 64
    assert not list(move.here.lacks(move.new))


@SHAPES
def test_a_cancelled_reservation_holds_nothing(model_dir: Path, groups: Sequence[KVCacheSpec]) -> None:
    source, destination = rigs(model_dir, groups)
    free = destination.free_blocks
    source.add("a", num_prompt=200)
    source.turns(12)
    move = Move(source, destination)
    assert destination.free_blocks < free
    move.round()
    destination.port.reservations.cancel(move.new)
    assert destination.free_blocks == free
    assert destination.port.audit_idle() == []


def test_no_window_is_reserved_that_nobody_looks_at(model_dir: Path) -> None:
    source, destination = rigs(model_dir, GROUPS["a window beside"])
    free = destination.free_blocks
    source.add("a", num_prompt=1000, max_tokens=1000)
    source.turns(12)
    move = Move(source, destination)
    rows = -(-1012 // 32)
    assert free - destination.free_blocks <= rows + 2 * (WINDOW // 32 + 2)
    move.round()
    move.finish()
    assert not list(move.here.lacks(move.new))


@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("windows", 10),
        ("a window beside", 10),
        ("compressed tokens", 1),
        ("rings", 0),
        ("a ring beside", 0),
        ("a window computed again", 0),
    ],
)
def test_cached_blocks_are_not_copied(model_dir: Path, name: str, hits: int) -> None:
    """But where the window behind it is not cached, or something is left to be copied while the request is frozen."""
    source, destination = rigs(model_dir, GROUPS[name])
    destination.add("b", num_prompt=330)
    destination.turns(4)
    source.add("a", num_prompt=330)
    source.turns(12)
    move = Move(source, destination, use_prefix_cache=True)
    assert move.held.num_hits == hits
    move.here.compute(destination.scheduler.requests["b"])
    move.round()
    move.finish()
    assert not list(move.here.lacks(move.new))


@pytest.mark.parametrize("name", ["windows", "a window beside", "compressed tokens", "windows of the output"])
@pytest.mark.parametrize("rounds", [0, 2])
def test_missing_blocks_do_not_become_cache(model_dir: Path, name: str, rounds: int) -> None:
    """What was in the window when it was reserved, and is not any more when it is copied, is not there."""
    for steps in range(40, 90, 7):
        source, destination = rigs(model_dir, GROUPS[name])
        source.add("a", num_prompt=440)
        source.turns(12)
        move = Move(source, destination)
        for _ in range(rounds):
            move.round()
        source.turns(steps)
        move.finish()
        assert not list(move.here.lacks(move.new))
        assert not list(move.here.publishes())
        assert any(block.block_hash for block in destination.port.block_pool.blocks), "nothing is: void"


@pytest.mark.parametrize("name", ["compressed tokens", "windows of the output", "blocks of two sizes"])
def test_moved_request_holds_as_many_blocks_as_before(model_dir: Path, name: str) -> None:
    """Blocks of a whole row are held for who comes; nobody needs those behind its last token afterwards, nor ever those
    that a window has left behind."""
    source, destination = rigs(model_dir, GROUPS[name])
    old = source.add("a", num_prompt=440)
    source.turns(260)
    held = source.port.rows.num_held(old)
    move = Move(source, destination)
    assert move.held.num_blocks <= held + source.port.rows.width
    move.round()
    move.finish()
    assert move.held.num_blocks == sum(map(bool, [*move.held.block_ids, *move.held.state_ids]))
    assert destination.port.rows.num_held(move.new) <= held + 2 * len(GROUPS[name])


def test_a_last_row_has_no_more_than_windows_span(model_dir: Path) -> None:
    rows = Rig(model_dir, groups=GROUPS["compressed tokens"]).port.rows
    assert (rows.width, rows.most_in_last) == (4 + 1 + 64 + 32, 2 + 1 + 3 + 17)


def replaying(model_dir: Path) -> tuple[Rig, Any]:
    """A request that has found a prefix in the cache, and computes the window behind it again, step by step."""
    rig = Rig(model_dir, groups=GROUPS["rings"], num_blocks=512, max_num_batched_tokens=32)
    rig.add("b", num_prompt=600)
    rig.turns(30)
    request = rig.add("a", num_prompt=600)
    rig.turn()
    return rig, request


def test_request_that_lost_its_blocks_during_a_window_replay_waits_for_no_step(model_dir: Path) -> None:
    rig, request = replaying(model_dir)
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, 0.0)
    assert request.replay_start
    assert rig.port.why_not_now(request) is None


def test_a_window_that_is_being_computed_again_is_waited_for(model_dir: Path) -> None:
    """The source holds nothing before it, and the destination would look at what is not there."""
    rig, request = replaying(model_dir)
    assert request.replay_start == 512 - WINDOW
    assert rig.port.why_not_now(request) == (Reason.PREFILL_RUNNING, REPLAYED)
    rig.turns(6)
    assert request.num_output_tokens
    assert rig.port.why_not_now(request) is None


def test_a_request_does_not_come_with_less_than_it_had(model_dir: Path) -> None:
    source, destination = rigs(model_dir, GROUPS["a window beside"])
    source.add("a", num_prompt=300)
    source.turns(12)
    move = Move(source, destination)
    with pytest.raises(Refused, match="fewer than it had") as refusal:
        destination.port.reservations.admit(move.new, 200)
    assert refusal.value.reason is Reason.INVALID_REQUEST
    destination.port.reservations.admit(move.new, 0)


def test_more_computed_than_there_is(model_dir: Path) -> None:
    rig = Rig(model_dir, groups=GROUPS["a window beside"])
    with pytest.raises(Refused, match="computed") as refusal:
        rig.port.reservations.make(rig.request("a", num_prompt=100), use_prefix_cache=False, computed_tokens=101)
    assert refusal.value.reason is Reason.INVALID_REQUEST


def test_a_request_that_starts_over_leaves_its_state_as_it_is(model_dir: Path) -> None:
    """Whoever may be reading it, in doubt whose the request is."""
    rig = Rig(model_dir, groups=GROUPS["states that are kept"], num_blocks=128)
    request = rig.add("a", num_prompt=100)
    rig.turns(12)
    output = list(request.output_token_ids)
    rig.port.freeze(request)
    frozen = rig.port.drained(request, 0)
    assert frozen is not None
    rig.port.unfreeze(request)
    rig.port.start_over(request)
    rig.turns(8)
    assert list(request.output_token_ids)[: len(output)] == output
    assert request.num_output_tokens > len(output)
    now = {block for group in range(3) for block in rig.block_ids(request, group)}
    assert not now & {*frozen.block_ids, *frozen.state_ids} - {NULL_ID}
    rig.port.unpin(frozen.pin)


def test_rows_are_blocks_of_all_groups(model_dir: Path) -> None:
    rig = Rig(model_dir, groups=GROUPS["blocks of two sizes"], num_blocks=128)
    request = rig.add("a", num_prompt=200)
    rig.turns(3)
    large, small = rig.block_ids(request, 0), rig.block_ids(request, 1)
    rows = rig.port.rows
    assert (rows.size, rows.width, rows.num_states) == (64, 5, 0)
    ids = [block.block_id for block in rows.blocks(request, 150, 1)]
    assert ids == [large[1], *small[4:8], large[2], *small[8:10], NULL_ID, NULL_ID]
    assert small[4] == NULL_ID, "a window has gone on"


def test_kinds() -> None:
    groups = [KVCacheGroupSpec(["layer"], spec) for spec in (full(), window(64), states("none", 64), ring(8))]
    assert [kind_of(group) for group in groups] == [GroupKind.ALL, GroupKind.WINDOW, GroupKind.STATE, GroupKind.RING]
