# SPDX-License-Identifier: Apache-2.0
"""Pauses, resets of the caches and changes of the weights, on vLLM's own schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Reason, Refused
from tests.engine.loop import Loop, new_loop
from tests.engine.rig import Rig, full, window
from vllm_llumnix.engine.engine_port import CallOff, WatchedRequest
from vllm_llumnix.engine.pauses import CHANGED, Pauses

EVENTS: dict[str, Callable[[Rig, Pauses], Any]] = {
    "pause": lambda rig, pauses: rig.scheduler.set_pause_state(PauseState.PAUSED_ALL),
    "reset": lambda rig, pauses: rig.scheduler.reset_prefix_cache(),
    "weights": lambda rig, pauses: pauses.call_off(CHANGED),
}


def watched(rig: Rig) -> tuple[Pauses, list[CallOff]]:
    """Its pauses, and what the llumlet is told."""
    told: list[CallOff] = []
    return Pauses(rig.port, told.append), told


def mid_stream(rig: Rig, name: str, num_prompt: int = 100) -> Request:
    """A request that has put out a token elsewhere."""
    request = rig.request(name, num_prompt=num_prompt)
    request.append_output_token_ids([7])
    return request


@pytest.mark.parametrize("event", EVENTS)
def test_earlier_reservation_is_not_admitted(event: str, model_dir: Path) -> None:
    rig = Rig(model_dir)
    pauses, told = watched(rig)
    reservations = rig.port.reservations
    before, queued, later = (mid_stream(rig, name) for name in ("before", "queued", "later"))
    reservations.make(before, use_prefix_cache=False)
    reservations.make(queued, use_prefix_cache=False, queued=True)
    EVENTS[event](rig, pauses)
    assert len(told) == 1
    for request, computed in ((before, 0), (before, before.num_tokens - 1), (queued, 0)):
        for use in (partial(reservations.grow, request, 200), partial(reservations.admit, request, computed)):
            with pytest.raises(Refused) as refusal:
                use()
            assert refusal.value.reason is told[0].at_destination
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    reservations.make(later, use_prefix_cache=False)
    reservations.admit(later, later.num_tokens - 1)
    reservations.cancel(before)
    reservations.make(before, use_prefix_cache=False)
    reservations.admit(before, before.num_tokens - 1)


def pinned_by_a_round(rig: Rig) -> Callable[[], object]:
    request = rig.add("a", num_prompt=100)
    rig.turns(4)
    return partial(rig.port.unpin, rig.port.frontier(request, 0, 0).pin)


def pinned_after_an_abort(rig: Rig) -> Callable[[], object]:
    unpin = pinned_by_a_round(rig)
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    return unpin


def frozen(rig: Rig) -> Callable[[], object]:
    request = rig.add("a", num_prompt=100)
    rig.turns(4)
    while (held := rig.port.drained(request, 0)) is None:
        rig.turn()
    return partial(rig.port.unpin, held.pin)


def reserved(rig: Rig) -> Callable[[], object]:
    """With hits, which others share."""
    rig.add("b", num_prompt=100)
    rig.turns(4)
    requests = [rig.request(name, num_prompt=100) for name in ("one", "other")]
    for request in requests:
        rig.port.reservations.make(request, use_prefix_cache=True)
    return lambda: [rig.port.reservations.cancel(request) for request in requests]


def admitted(rig: Rig) -> Callable[[], object]:
    request = mid_stream(rig, "new")
    rig.port.reservations.make(request, use_prefix_cache=False)
    rig.port.reservations.admit(request, request.num_tokens - 1)
    return lambda: None


HOLDERS = [pinned_by_a_round, pinned_after_an_abort, frozen, reserved, admitted]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("groups", [[full()], [full(), window(64)]], ids=["one-group", "window"])
@pytest.mark.parametrize("hold", HOLDERS)
def test_reset_succeeds_whatever_a_move_holds(hold: Any, groups: Any, asynchronous: bool, model_dir: Path) -> None:
    rig = Rig(model_dir, asynchronous=asynchronous, groups=groups, num_blocks=128)
    free = rig.free_blocks
    watched(rig)
    let_go = hold(rig)
    pool = rig.port.block_pool
    held = {block.block_id for pin in rig.port._pins for block in pin.blocks}
    held |= {block.block_id for blocks in rig.port.reservations.blocks() for block in blocks}
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not len(pool.cached_block_hash_to_block)
    assert rig.free_blocks == free - len(held), "what a move holds stays held"
    assert not held & {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    let_go()
    assert rig.free_blocks == free
    for request in list(rig.scheduler.requests.values()):
        rig.port.unfreeze(request)
    rig.turns(8)
    assert all(request.num_output_tokens > 1 for request in rig.scheduler.requests.values())


def test_reset_still_fails_for_requests_that_run(model_dir: Path) -> None:
    rig = Rig(model_dir)
    watched(rig)
    rig.add("a", num_prompt=100)
    rig.turns(3)
    assert not rig.scheduler.reset_prefix_cache()


class Frozen(WatchedRequest):
    """On its way out, for as long as the test wants."""

    def __init__(self, loop: Loop, request: Request) -> None:
        super().__init__(request)
        self._port = loop.rig.port
        loop.kvconn.watch(self)
        loop.kvconn.freeze(self)

    def on_drained(self) -> bool:
        return self._port.drained(self.request, 0) is not None

    def on_gone(self, kind: str) -> None:
        raise AssertionError(kind)


def loop_with_a_frozen_request(model_dir: Path, depth: int) -> Loop:
    loop = Loop(Rig(model_dir), 1) if depth == 1 else new_loop(model_dir, depth)
    request = loop.rig.add("a", num_prompt=100)
    loop.turns(4)
    leaving = Frozen(loop, request)
    while not leaving.frozen:
        loop.turn()
    return loop


def test_request_that_ends_in_the_turn_in_which_its_move_ends_is_not_frozen(model_dir: Path) -> None:
    loop = loop_with_a_frozen_request(model_dir, 2)
    loop.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    loop.kvconn.unwatch("a")
    assert not loop.rig.port.has_frozen


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_engine_with_frozen_requests_alone_sleeps(depth: int, model_dir: Path) -> None:
    loop = loop_with_a_frozen_request(model_dir, depth)
    for _ in range(3):
        has_work = loop.kvconn.has_work(loop.scheduler.has_requests() or bool(loop.batch_queue))
        if not has_work:
            return
        loop.turn()
    raise AssertionError("it spins")


@pytest.mark.parametrize("depth", [1, 2])
def test_engine_does_not_end_before_its_frozen_requests(depth: int, model_dir: Path) -> None:
    loop = loop_with_a_frozen_request(model_dir, depth)
    loop.is_running = lambda: False  # type: ignore[method-assign]
    assert loop.kvconn.has_work(loop.scheduler.has_requests())


def test_pause_waits_for_frozen_requests_and_for_blocks_not_for_ever(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(model_dir)
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pauses, _ = watched(rig)
    notified: list[int] = []
    engine = SimpleNamespace(
        _pause_complete=lambda: True,
        _notify_idle_state_callbacks=lambda: notified.append(1),
        collective_rpc=lambda method: [method],
        set_weight_version=lambda version: None,
    )
    pauses.watch(engine)
    assert engine._pause_complete()
    frozen(rig)
    rig.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    now[0] += 1000.0
    assert not engine._pause_complete(), "a frozen request is not over"
    rig.port.unfreeze(rig.scheduler.requests["a"])
    assert engine._pause_complete(), "a peer that is silent is not waited for"
    rig.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine._notify_idle_state_callbacks()
    assert not notified
    now[0] += 1000.0
    engine._notify_idle_state_callbacks()
    assert notified


@pytest.mark.parametrize("call", [("collective_rpc", "update_weights"), ("set_weight_version", "7")])
def test_calls_that_may_change_weights_end_moves(call: tuple[str, str], model_dir: Path) -> None:
    rig = Rig(model_dir)
    pauses, told = watched(rig)
    engine = SimpleNamespace(
        _pause_complete=lambda: True,
        _notify_idle_state_callbacks=lambda: None,
        collective_rpc=lambda method: [method],
        get_weight_version=lambda: "default",
        set_weight_version=lambda version: None,
    )
    pauses.watch(engine)
    name, argument = call
    getattr(engine, name)(argument)
    assert told == [CHANGED]
    assert told[0].at_destination is Reason.OTHER_WEIGHTS


def test_changes_of_weights_are_counted_until_they_have_a_new_name(model_dir: Path) -> None:
    pauses, told = watched(Rig(model_dir))
    names = ["default"]
    engine = SimpleNamespace(
        _pause_complete=lambda: True,
        _notify_idle_state_callbacks=lambda: None,
        collective_rpc=lambda method, *args: [method],
        get_weight_version=lambda: names[-1],
        set_weight_version=names.append,
    )
    pauses.watch(engine)
    assert engine.collective_rpc("list_loras") == ["list_loras"]
    assert (pauses.num_changes, told) == (0, []), "it changes nothing"
    engine.collective_rpc("update_weights", None)
    engine.collective_rpc("reload_weights")
    engine.set_weight_version("default")
    assert pauses.num_changes == 2, "the same name says nothing new"
    engine.set_weight_version("7")
    assert (pauses.num_changes, names[-1]) == (0, "7")
