# SPDX-License-Identifier: Apache-2.0
"""The modelled engine beside vLLM's own scheduler, on the same requests, step by step."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from llumlet.contract.types import StepSample
from llumsim import PS
from llumsim.clock import VirtualLoop
from llumsim.cluster.member import Cadence, Member
from llumsim.engine.queue import QueuePlace
from llumsim.engine.requests import EngineRequest, Watcher
from llumsim.engine.step_model import EngineConfig, StepModel, load_hardware
from tests.engine.rig import BLOCK_SIZE, new_request, new_scheduler
from vllm_llumnix.engine.blocks.scheduler_port import SchedulerPort
from vllm_llumnix.engine.load.load_sums import NOTHING, Place, share_of
from vllm_llumnix.engine.load.step_times import sample_of
from vllm_llumnix.engine.queue.shortage import Shortage
from vllm_llumnix.engine.queue.turns import queue_in_turn

STEP = StepModel(a=1000, b=7, c=1, d=5, e=1)
SLOW = StepModel(a=20 * 10**9, b=10**8, c=0, d=10**8, e=0)
"""Steps of some 20 ms: what is waited for is a matter of seconds."""
NUM_REQUESTS = 60
_tokens = itertools.count(1000)


class Coming(NamedTuple):
    """A request that arrives; `is_moved`, from another engine, where it came so many steps ago, and made so many tokens
    of its output. `waited`: for room, there; else that engine is lost."""

    name: str
    prompt: list[int]
    num_output: int
    priority: int
    is_moved: bool = False
    num_steps_ago: int = 0
    num_made: int = 0
    waited: bool = False


class Both:
    """One scheduler of vLLM's and one modelled engine, in step."""

    def __init__(self, model: Path, config: EngineConfig, *, step: StepModel = STEP) -> None:
        self.vllm: Scheduler
        self.vllm, self._hasher = new_scheduler(
            model, False, config.num_blocks + 1, max_num_seqs=config.max_num_seqs, max_model_len=4096,
            max_num_batched_tokens=config.max_num_batched_tokens, enable_prefix_caching=config.prefix_caching,
            scheduling_policy="priority" if config.by_priority else "fcfs",
        )  # fmt: skip
        self._port = SchedulerPort(self.vllm)
        hardware = replace(load_hardware("a10-llama-7b"), engine=config, step=step)
        self.loop = VirtualLoop()
        self.member = Member(
            self.loop, 0, hardware, Cadence(), Watcher(), lambda status: None,
            model="", max_moves=4,
        )  # fmt: skip
        self.engine = self.member.engine
        self.now_ps = 0
        self.is_moving = False
        """Blocks are on their way."""
        self.engine.shortage.asks = False
        self.engine.shortage.gives_blocks = lambda: self.is_moving
        self.shortage = Shortage(self.vllm, self._port.load.num_preemptions, holds=True, clock=lambda: self.now_ps / PS)
        self.num_compared = self.num_held = 0
        self._output: Any = None

    def step(self, arriving: list[Coming]) -> bool:
        """False when both are idle."""
        requests = []
        for number, coming in enumerate(arriving):
            prompt = coming.prompt
            arrived_ps = (self.num_compared - coming.num_steps_ago) * 1000 + number
            theirs = new_request(
                coming.name, prompt, coming.num_output, block_hasher=self._hasher, priority=coming.priority
            )
            theirs.arrival_time = float(arrived_ps)
            theirs.append_output_token_ids([next(_tokens) for _ in range(coming.num_made)])
            if coming.waited:
                self._port.reservations.make(theirs, use_prefix_cache=True, queued=True)
                self._port.reservations.admit(theirs, 0)
            else:
                self.vllm.add_request(theirs)
            if coming.is_moved and not coming.waited:
                self.vllm.waiting.remove_requests([theirs])
                queue_in_turn(self.vllm, theirs)
            content = [tuple(prompt[: index + BLOCK_SIZE]) for index in range(0, len(prompt), BLOCK_SIZE)]
            content = content[: len(prompt) // BLOCK_SIZE]
            ours = EngineRequest(
                coming.name, len(prompt), coming.num_output, coming.priority, content=content, arrived_ps=arrived_ps
            )
            ours.num_tokens += coming.num_made
            requests.append((ours, QueuePlace.LAST if coming.waited and coming.num_made else QueuePlace.IN_TURN))
        end_ps = self.engine.next_end_after(self.now_ps)
        if requests:
            self.engine.post(
                lambda now_ps: [self.engine.add(one, now_ps, place) for one, place in requests], self.now_ps
            )
        if end_ps is not None:
            self.now_ps = end_ps
            self.engine.advance(end_ps)
        self.engine.settle(self.now_ps)
        if (scheduled := self._schedule()) is None:
            assert self.engine.end_ps is None
            return False
        assert self.engine.scheduled() == scheduled
        assert bool(self.engine.shortage.num_blocks) == bool(self.shortage.num_blocks)
        assert self.engine.shortage.num_averted == self.shortage.num_averted
        batch = self.engine.batch  # of the first step of those that are alike
        batch = batch._replace(decode_kv=batch.decode_kv + len(self.engine.decodes) * self.engine._span.num_settled)
        assert StepSample(**batch._asdict()) == sample_of(self._output)
        assert self.engine.blocks.num_free == self.vllm.kv_cache_manager.block_pool.get_num_free_blocks()
        assert [one.id for one in self.engine.running] == [one.request_id for one in self.vllm.running]
        assert [one.id for one in self.engine.waiting] == [one.request_id for one in self.vllm.waiting]
        theirs = sum(request.num_preemptions for request in self.vllm.requests.values())
        assert sum(one.num_preemptions for one in (*self.engine.running, *self.engine.waiting)) == theirs
        self._compare_status()
        self.num_compared += 1
        self.num_held += self.engine.shortage.has_held
        return True

    def close(self) -> None:
        self.loop.close()

    def _compare_status(self) -> None:
        """With what production counts of vLLM's scheduler."""
        load, status = NOTHING, self.member.status_at(self.now_ps)
        for place, requests in ((Place.RUNNING, self.vllm.running), (Place.WAITING, self.vllm.waiting)):
            for one in requests:
                load = load.plus(share_of(place, one, urgent=one.priority < 0))
        assert status.num_waiting_requests == load.num_waiting
        assert status.num_running_requests == load.num_running
        assert status.scheduler_running_to_decode_requests_num == load.running_to_decode
        assert status.scheduler_running_to_decode_tokens_num == load.running_to_decode_tokens
        assert status.num_uncomputed_tokens_scheduler_running_prefills == load.running_prefill_tokens
        assert status.num_unallocated_tokens_scheduler_running_prefills == load.running_unallocated_tokens
        assert status.num_urgent_requests == load.num_urgent
        assert status.scheduler_running_to_decode_urgent_requests_num == load.urgent_running_to_decode
        if not self.engine.config.prefix_caching:
            first = share_of(Place.WAITING, self.vllm.waiting.peek_request()) if self.vllm.waiting else NOTHING
            assert status.num_unallocated_tokens_first_waiting_request == first.waiting_unallocated_tokens
            assert status.scheduler_waiting_to_decode_requests_num == load.waiting_to_decode
            assert status.scheduler_waiting_to_decode_tokens_num == load.waiting_to_decode_tokens
            assert status.num_uncomputed_tokens_all_waiting_prefills == load.waiting_prefill_tokens
            assert status.num_unallocated_tokens_all_waiting_requests == load.waiting_unallocated_tokens
            assert status.num_uncomputed_pairs == load.prefill_pairs

    def _schedule(self) -> dict[str, int] | None:
        """The next step of vLLM's that computes something, and what comes of it."""
        while self.vllm.has_unfinished_requests():
            self.shortage.before_step(moving=self.is_moving)
            output = self.vllm.schedule()
            ids, self._output = list(output.num_scheduled_tokens), output
            self._sample = lambda output=output, ids=ids: self.vllm.update_from_output(
                output,
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={name: index for index, name in enumerate(ids)},
                    sampled_token_ids=[
                        [] if self.vllm.requests[name].is_prefill_chunk else [next(_tokens)] for name in ids
                    ],
                    logprobs=None,
                    prompt_logprobs_dict={},
                    pooler_output=[],
                ),
            )
            if ids or self.engine.shortage.has_held:
                return dict(output.num_scheduled_tokens)
            self._sample()
        return None

    def sample(self) -> None:
        self._sample()


def documents(draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(1, 90) for _ in range(draw.randint(20, 200))] for _ in range(4)]


def unshared(draw: random.Random) -> list[int]:
    return [next(_tokens) for _ in range(draw.randint(1, 400))]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.rest) for seed in range(1, 4))])
@pytest.mark.parametrize("kind", ["shared", "unique", "uncached", "priority", "moved", "pressed"])
def test_batches_preemptions_and_statuses_equal_vllms(model_dir: Path, kind: str, seed: int) -> None:
    draw = random.Random(f"{kind} {seed}")
    config = EngineConfig(
        num_blocks=draw.randint(16, 40), block_size=BLOCK_SIZE, max_num_seqs=draw.choice([3, 8, 16]),
        max_num_batched_tokens=draw.choice([64, 200, 1024]), prefix_caching=kind != "uncached",
        by_priority=kind == "priority",
    )  # fmt: skip
    step = SLOW if kind == "pressed" else STEP
    both = Both(model_dir, config, step=step)
    both.engine.shortage.asks = both.shortage.asks = kind == "pressed"
    stock = documents(draw)
    most = config.num_blocks * BLOCK_SIZE
    arriving: list[Coming] = []
    num_come = 0
    for number in range(NUM_REQUESTS):
        prompt = unshared(draw)
        if kind in ("shared", "priority") and draw.random() < 0.8:
            prompt = [token for part in draw.choices(stock, k=draw.randint(1, 3)) for token in part]
            prompt += unshared(draw)[: draw.randint(1, 60)]
        prompt = prompt[: most * 3 // 4]
        num_output = min(draw.choice([1, 3, 40, 400]), most - len(prompt))
        coming = Coming(f"r{number:03}", prompt, num_output, draw.randint(-1, 1))
        if kind == "moved" and draw.random() < 0.5:
            num_made = draw.choice([0, min(num_output - 1, 7)])
            coming = coming._replace(
                is_moved=True, num_steps_ago=draw.randint(0, 300), num_made=num_made, waited=draw.random() < 0.5
            )
        arriving.append(coming)
    while True:
        if kind == "pressed" and draw.random() < 0.2:
            both.is_moving = not both.is_moving
        come = []
        while num_come < NUM_REQUESTS and draw.random() < 0.2:
            come.append(arriving[num_come])
            num_come += 1
        if not both.step(come):
            if num_come == NUM_REQUESTS:
                break
            continue
        both.sample()
    assert both.num_compared > 500
    assert both.engine.num_preemptions >= 2
    assert both.engine.blocks.num_free == config.num_blocks
    assert (both.num_held > 10) == (kind == "pressed")
    both.close()
