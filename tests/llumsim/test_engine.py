# SPDX-License-Identifier: Apache-2.0
"""The modelled engine: spans of steps give what every step one by one gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from llumsim.engine.engine import Engine
from llumsim.engine.requests import EngineRequest, Phase
from llumsim.engine.step_model import EngineConfig, StepModel
from tests.llumsim.watchers import Noting

BLOCK_SIZE = 4
NUM_BLOCKS = 30


@dataclass(frozen=True)
class Arrival:
    after_ps: int
    num_prompt: int
    num_output: int
    priority: int


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.sampled_from([0, 0, 7, 90, 800, 5000]),
        st.integers(1, NUM_BLOCKS * BLOCK_SIZE // 2),
        st.integers(1, NUM_BLOCKS * BLOCK_SIZE // 2),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=40,
)
CONFIGS = st.builds(
    EngineConfig,
    num_blocks=st.just(NUM_BLOCKS),
    block_size=st.just(BLOCK_SIZE),
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.sampled_from([12, 40, 200]),
    prefix_caching=st.booleans(),
    by_priority=st.booleans(),
)
STEPS = st.builds(
    StepModel, st.integers(40, 90), st.integers(0, 5), st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)
)


def engine(config: EngineConfig, step: StepModel, *, one_by_one: bool = False) -> Engine:
    return Engine(config, step, Noting(), one_by_one=one_by_one)


def noted(made: Engine) -> Noting:
    assert isinstance(made._watcher, Noting)
    return made._watcher


def play(made: Engine, arrivals: Sequence[Arrival], *, looks: bool = False) -> Noting:
    """All of them, to the end. `looks`: reads the state in the middle of spans."""
    now_ps = 0
    for number, arrival in enumerate(arrivals):
        now_ps += arrival.after_ps
        made.advance(now_ps)
        if looks:
            made.settle(now_ps)
        request = EngineRequest(
            f"r{number:02}", arrival.num_prompt, arrival.num_output, arrival.priority, arrived_ps=now_ps
        )
        made.add(request, now_ps)
    finish(made)
    return noted(made)


def finish(made: Engine) -> int:
    now_ps = 0
    while made.end_ps is not None:
        now_ps = made.end_ps
        made.advance(now_ps)
    assert not made.running
    assert not made.waiting
    assert made.blocks.num_free == made.config.num_blocks
    waiting = made.waiting
    assert (waiting.num_to_decode, waiting.to_decode_tokens, waiting.prefill_tokens) == (0, 0, 0)
    assert (len(made.decodes), made.decodes.num_tokens) == (0, 0)
    return now_ps


@settings(max_examples=150, deadline=None)
@given(config=CONFIGS, step=STEPS, arrivals=ARRIVALS)
def test_spans_end_when_their_steps_do(config: EngineConfig, step: StepModel, arrivals: list[Arrival]) -> None:
    slow = play(engine(config, step, one_by_one=True), arrivals)
    for looks in (False, True):
        fast = play(engine(config, step), arrivals, looks=looks)
        assert fast.events == slow.events
        assert fast.num_gaps == slow.num_gaps


CONFIG = EngineConfig(num_blocks=100, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=32)
STEP = StepModel(a=1000, b=10, c=0, d=100, e=1)


def test_single_request_takes_the_model_s_time() -> None:
    made = engine(CONFIG, STEP)
    end_ps = play(made, [Arrival(0, 40, 3, 0)]).events[-1][2]
    chunks = (1000 + 32 * 10) + (1000 + 8 * 10)
    decodes = (1000 + 100 + 41) + (1000 + 100 + 42)
    assert end_ps == chunks + decodes
    assert noted(made).num_gaps == {1141: 1, 1142: 1}


def test_many_steps_are_one_span() -> None:
    made = engine(CONFIG, STEP)
    play(made, [Arrival(0, 8, 300, 0)])
    assert made.num_steps == 2


def test_posted_action_waits_for_the_step_and_costs_no_other() -> None:
    made = engine(CONFIG, STEP)
    made.add(EngineRequest("a", 8, 100), 0)
    made.advance(1080)
    called: list[int] = []
    made.post(called.append, 3000)
    assert made.next_end_after(3000) == 1080 + 1109 + 1110
    made.advance(4000)
    assert called == [1080 + 1109 + 1110]


def test_frozen_request_holds_its_blocks_and_is_not_scheduled() -> None:
    made = engine(CONFIG, STEP)
    one, other = EngineRequest("a", 8, 20), EngineRequest("b", 8, 30)
    made.post(lambda now_ps: [made.add(each, now_ps) for each in (one, other)], 0)
    made.advance(6000)
    made.post(lambda _: made.freeze(one), 6000)
    made.advance(9000)
    held, tokens = one.num_blocks, one.num_tokens
    assert one.phase is Phase.FROZEN
    assert "a" not in made.scheduled()
    made.advance(20_000)
    assert (one.num_blocks, one.num_tokens) == (held, tokens)
    made.post(lambda _: made.unfreeze(one), 20_000)
    finish(made)
    events = noted(made).events
    assert [event[:2] for event in events if event[0] == "finished"] == [("finished", "b"), ("finished", "a")]
    assert max(noted(made).num_gaps) > 11_000


def test_engine_with_only_frozen_requests_is_idle() -> None:
    made = engine(CONFIG, STEP)
    one = EngineRequest("a", 8, 20)
    made.add(one, 0)
    made.post(lambda _: made.freeze(one), 10)
    made.advance(10**6)
    assert made.end_ps is None
    made.post(lambda _: made.unfreeze(one), 10**6)
    assert made.end_ps is not None
    finish(made)


def test_request_that_arrives_with_its_kv_decodes_at_once_and_is_preempted_last() -> None:
    made = engine(EngineConfig(num_blocks=24, block_size=4, max_num_seqs=8, max_num_batched_tokens=32), STEP)
    made.add(EngineRequest("here", 16, 60), 0)
    made.advance(5000)
    coming = EngineRequest("coming", 16, 50, first_token_ps=1, last_token_ps=2)
    coming.num_tokens, coming.num_computed = 20, 19
    made.post(lambda _: made.reserve(7, slot=True), 5000)
    made.post(lambda _: made.admit(coming, 7), 6500)
    made.advance(8000)
    assert made.scheduled() == {"here": 1, "coming": 1}
    finish(made)
    preempted = [event[1] for event in noted(made).events if event[0] == "preempted"]
    assert set(preempted) == {"here"}


def test_reservation_leaves_blocks_for_the_queue() -> None:
    made = engine(EngineConfig(num_blocks=20, block_size=4, max_num_seqs=8, max_num_batched_tokens=200), STEP)
    made.post(lambda now: [made.add(EngineRequest(name, 60, 2), now) for name in "ab"], 0)
    answers: list[bool] = []
    made.post(lambda _: answers.append(made.reserve(1, slot=True)), 1)
    made.advance(made.end_ps or 0)
    assert answers == [False]
    assert made.num_reserved_slots == 0


def test_preempted_request_hits_what_is_still_cached() -> None:
    made = engine(EngineConfig(num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64), STEP)
    made.post(lambda now: [made.add(EngineRequest(name, 16, 16), now) for name in "abc"], 0)
    finish(made)
    finished = {str(event[1]): event for event in noted(made).events if event[0] == "finished"}
    assert finished["c"][4] >= 1
    assert 0 < finished["c"][6] < 16 + 16
