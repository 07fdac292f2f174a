# SPDX-License-Identifier: Apache-2.0
"""A model whose next token depends on every byte of the KV cache, and a worker that computes it.

A cell of the cache is a hash of the cell before it, as found in memory, and of the token at its position; the next
token is a hash of all cells of the request. One foreign byte anywhere, or one wrong token, changes all that follows.
The worker keeps its requests as vLLM's own does, from what the scheduler tells it step by step, and its memory is
ordinary memory that movers read and write.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput

from tests.kv.fakes import FakeWorker, Memory
from vllm_llumnix.engine import attach
from vllm_llumnix.kv import worker as kv_worker

BLOCK_SIZE = 16
NUM_BLOCKS = 129
NUM_LAYERS = 2
PAGE_BYTES = BLOCK_SIZE * 8
FIRST_TOKEN, NUM_TOKENS = 10, 900
"""Tokens are `[FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS)`: every front-end and vocabulary of the tests has them."""
PACE_SECONDS = 0.004
"""Of one step."""


DOES_NOTHING = frozenset(
    ["execute_dummy_batch", "synchronize_device", "reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up", "update"]
)
"""Methods of a worker for which this one has nothing to compile, to warm or to let go of."""


def cell(before: int, token: int, layer: int) -> int:
    # Hashes of tuples of integers are the same in every process.
    return hash((before, token, layer))


def next_token(cells: Sequence[bytes]) -> int:
    """`cells`: all of a request, a layer at a time."""
    checksum = 0
    for layer in cells:
        checksum = zlib.crc32(layer, checksum)
    return FIRST_TOKEN + checksum % NUM_TOKENS


def cells_of(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the cache should hold of `tokens`: [layer, position]."""
    cells = np.zeros((NUM_LAYERS, len(tokens)), np.int64)
    for layer in range(NUM_LAYERS):
        before = 0
        for position, token in enumerate(tokens):
            before = cell(before, token, layer)
            cells[layer, position] = before
    return cells


class Reference:
    """The output of a request that never moves, as far as it is asked for."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self.output: list[int] = []
        self._layers = [bytearray(layer.tobytes()) for layer in cells_of(prompt)]
        self._last = [int(layer[-1]) for layer in cells_of(prompt)]

    def __call__(self, num_output: int) -> list[int]:
        while len(self.output) < num_output:
            token = next_token([bytes(layer) for layer in self._layers])
            self.output.append(token)
            for layer, cells in enumerate(self._layers):
                self._last[layer] = cell(self._last[layer], token, layer)
                cells += self._last[layer].to_bytes(8, "little", signed=True)
        return self.output[:num_output]


@dataclasses.dataclass
class _Known:
    """A request as the worker knows it."""

    tokens: list[int]
    blocks: list[int]


@dataclasses.dataclass
class _Step:
    """What the scheduler said, copied: it goes on changing its lists, and a worker is another process."""

    finished: list[str]
    new: list[tuple[str, list[int], list[int], int]]
    cached: list[tuple[str, bool, list[int], list[int] | None, int]]
    num_scheduled: dict[str, int]

    @classmethod
    def of(cls, output: SchedulerOutput) -> _Step:
        cached = output.scheduled_cached_reqs
        return cls(
            finished=list(output.finished_req_ids),
            new=[
                (
                    new.req_id,
                    list(new.prefill_token_ids or new.prompt_token_ids or ()),
                    list(new.block_ids[0]),
                    new.num_computed_tokens,
                )
                for new in output.scheduled_new_reqs
            ],
            cached=[
                (
                    request_id,
                    request_id in cached.resumed_req_ids,
                    list(blocks[0]) if blocks else [],
                    list(tokens) if (tokens := cached.all_token_ids.get(request_id)) is not None else None,
                    computed,
                )
                for request_id, blocks, computed in zip(
                    cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
                )
            ],
            num_scheduled=dict(output.num_scheduled_tokens),
        )


class Runner:
    """The model runner: writes cells, reads all of them, samples."""

    def __init__(self, memory: Memory) -> None:
        shape = (NUM_LAYERS, memory.num_blocks, BLOCK_SIZE)
        self.cells = memory.bytes.view(np.int64).reshape(shape)
        self._known: dict[str, _Known] = {}

    def run(self, step: _Step) -> ModelRunnerOutput:
        for request_id in step.finished:
            self._known.pop(request_id, None)
        starts = {}
        for request_id, tokens, blocks, computed in step.new:
            self._known[request_id] = _Known(tokens, blocks)
            starts[request_id] = computed
        for request_id, resumed, blocks, tokens_now, computed in step.cached:
            known = self._known[request_id]
            known.blocks = blocks if resumed else known.blocks + blocks
            if tokens_now is not None:
                known.tokens = tokens_now
            starts[request_id] = computed
        ids = list(step.num_scheduled)
        sampled = [self._forward(self._known[one], starts[one], step.num_scheduled[one]) for one in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _forward(self, known: _Known, start: int, count: int) -> list[int]:
        end = start + count
        for layer in range(NUM_LAYERS):
            cells = self.cells[layer]
            before = int(cells[known.blocks[(start - 1) // BLOCK_SIZE], (start - 1) % BLOCK_SIZE]) if start else 0
            for position in range(start, end):
                before = cell(before, known.tokens[position], layer)
                cells[known.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = before
        if end < len(known.tokens):
            return []  # a chunk of a prefill
        token = next_token([self.cells[layer][known.blocks].tobytes()[: end * 8] for layer in range(NUM_LAYERS)])
        known.tokens.append(token)
        return [token]


class FakeExecutor(Executor):
    """vLLM's executor with one worker, a thread. `pace` is the least duration of a step, in seconds.

    Steps wait while `turns` is not set, and `stuck` says that one does.
    """

    _weights = torch.nn.Linear(8, 8)
    """Of all workers: their requests can change places."""

    def _init_executor(self) -> None:
        self.memory = Memory(shapes=[(NUM_LAYERS, PAGE_BYTES)], num_blocks=NUM_BLOCKS, seed=id(self) & 0xFFFF)
        self.worker = FakeWorker(self.memory)
        self.worker.model_runner.model = self._weights
        self.runner = Runner(self.memory)
        self.pace = PACE_SECONDS
        self.turns = threading.Event()
        self.turns.set()
        self.stuck = threading.Event()
        self.mover: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fake-worker")
        self._last: Future[Any] | None = None

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        if method in (attach._compile_logprobs, attach._write_down_compiles) or method in DOES_NOTHING:
            return [None]
        assert callable(method), method
        with _of_process:
            # What is a worker process's own in production is this worker's here.
            kv_worker._running, outer = self.mover, kv_worker._running
            try:
                return [method(self.worker, *args, **(kwargs or {}))]
            finally:
                kv_worker._running, self.mover = outer, kv_worker._running

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        step = _Step.of(scheduler_output)
        self._last = self._thread.submit(self._run, step)
        return self._last if non_block else self._last.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        assert self._last is not None
        return self._last if non_block else self._last.result()

    def _run(self, step: _Step) -> ModelRunnerOutput:
        while not self.turns.is_set():
            self.stuck.set()
            self.turns.wait()
        if step.num_scheduled and self.pace:
            time.sleep(self.pace)
        return self.runner.run(step)

    def check_health(self) -> None:
        """It is well."""

    def shutdown(self) -> None:
        self.collective_rpc(kv_worker.stop_mover)
        self._thread.shutdown()


_of_process = threading.RLock()
