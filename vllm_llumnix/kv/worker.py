# SPDX-License-Identifier: Apache-2.0
"""Start and stop a vLLM worker's mover: called in its main thread, through `collective_rpc`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from vllm_llumnix import faults
from vllm_llumnix.kv.data_plane import DataPlane
from vllm_llumnix.kv.fingerprint import common_fingerprint, fingerprint, text_config_of
from vllm_llumnix.kv.memory.vllm_cache import arrangement_of, backends_of, caches_of, has_states
from vllm_llumnix.kv.mover import messages
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.serving.grants import CAPTURES
from vllm_llumnix.kv.settings import WorkerSettings
from vllm_llumnix.kv.vllm_worker_types import ModelRunner, SchedulerOutput, Sleeper, Worker, WorkerWrapper
from vllm_llumnix.seams import WORKER
from vllm_llumnix.steps.thinking_budget import BudgetHolder, sync_with_history

logger = logging.getLogger(__name__)

_KV_TAG = "kv_cache"
"""Name of the KV memory in vLLM's sleep mode."""


_running: DataPlane | None = None


def worker_of(called: Worker | WorkerWrapper) -> Worker:
    """The worker of a call through `collective_rpc`, which gives its wrapper."""
    return called.worker if isinstance(called, WorkerWrapper) else called


def start_mover(called: Worker | WorkerWrapper, packed_settings: bytes) -> bytes:
    """Start this worker's mover, in place of an earlier one; returns msgpack of `MoverInfo`.

    packed_settings: msgpack of `WorkerSettings`. A cache whose blocks cannot be carried is no error: the description
    says so (`memory.unavailable`). Raises what `DataPlane` does.
    """
    global _running
    settings = msgspec.msgpack.decode(packed_settings, type=WorkerSettings)
    worker = worker_of(called)
    stop_mover(called)
    device = str(worker.device.type)
    if device == "cpu":
        _permit_amx()
    tensor_parallel = worker.vllm_config.parallel_config.tensor_parallel_size
    layers = worker.vllm_config.compilation_config.static_forward_context
    weights, common_weights, out_of_memory = "", 0, None
    try:
        weights = fingerprint(worker.model_runner.model)
        common_weights = common_fingerprint(worker.model_runner.model, worker.rank % tensor_parallel)
    except torch.OutOfMemoryError as error:
        out_of_memory = error
    plane = DataPlane(worker, settings, out_of_memory)
    if device == "cuda":
        _watch_sleep(worker)
        _watch_captures(worker)
    if has_states(worker.model_runner):
        _forget_former_lives(worker)
    if (budgets := thinking_budgets_of(worker.model_runner)) is not None:
        WORKER.wrap(budgets, "ThinkingBudgetStateHolder.sync_batch", sync_with_history(budgets))
    faults.hit("worker.started", worker=worker)
    _running = plane
    return messages.encode(
        MoverInfo(
            rank=worker.rank,
            endpoint=plane.mover.endpoint,
            thread=plane.mover.thread,
            memory=plane.description,
            isa=arrangement_of(worker, device),
            device=device,
            weights=weights,
            common_weights=common_weights,
            config=text_config_of(worker.vllm_config.model_config),
            caches=caches_of(worker.model_runner, layers),
            attention=backends_of(layers),
            copied_by=plane.choice.backend if plane.choice else "",
            passed_over=plane.choice.passed_over if plane.choice else (),
        )
    )


def stop_mover(called: Worker | WorkerWrapper) -> None:
    """End the mover, if one runs, for shutdown. Peers that still read will fail."""
    global _running
    if _running is not None:
        running, _running = _running, None
        running.close()


def before_kv_goes(owner: Sleeper, call: Callable[[], None]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Replacements of vLLM's `sleep` and `discard` of an executor or a worker: they `call` first, if the KV memory
    loses its content."""
    stock_sleep, stock_discard = owner.sleep, owner.discard

    def sleep(level: int = 1) -> None:
        call()
        stock_sleep(level)

    def discard(tags: tuple[str, ...]) -> None:
        if _KV_TAG in tags:
            call()
        stock_discard(tags)

    return sleep, discard


def _watch_sleep(worker: Worker) -> None:
    """While vLLM's sleep mode has taken the KV memory away nobody touches it: on a GPU that would end the worker."""
    stock_wake_up = worker.wake_up
    sleep, discard = before_kv_goes(worker, _suspend)

    def wake_up(tags: list[str] | None = None) -> None:
        stock_wake_up(tags)
        if tags is None or _KV_TAG in tags:
            _resume()

    WORKER.wrap(worker, "Worker.sleep", sleep)
    WORKER.wrap(worker, "Worker.discard", discard)
    WORKER.wrap(worker, "Worker.wake_up", wake_up)


def _watch_captures(worker: Worker) -> None:
    """While CUDA graphs are captured nobody else touches the GPU: what another thread allocates or asks of it voids the
    graph. That is over when movers start, but comes again when elastic expert parallelism changes the number of ranks.
    """
    stock = worker.compile_or_warm_up_model

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> object:
        mover = _running.mover if _running is not None else None
        if mover is None or mover.suspended:
            return stock(*args, **kwargs)
        mover.suspend(CAPTURES, tidies=False)
        try:
            return stock(*args, **kwargs)
        finally:
            mover.resume()

    WORKER.wrap(worker, "Worker.compile_or_warm_up_model", compile_or_warm_up_model)


def _suspend() -> None:
    if _running is not None:
        _running.mover.suspend()


def _resume() -> None:
    if _running is not None:
        _running.mover.resume()


def thinking_budgets_of(runner: ModelRunner) -> BudgetHolder | None:
    """Where the V1 runner counts thinking tokens; None for others, and without a reasoning parser."""
    holder: BudgetHolder | None = getattr(getattr(runner, "input_batch", None), "thinking_budget_state_holder", None)
    return holder


def _forget_former_lives(worker: Worker) -> None:
    """The V1 runner remembers in which block the state of a request lies, until a step that computes something says
    that the request is over. Where it left in another, and has come back, it lies elsewhere now."""
    execute = worker.execute_model

    def execute_model(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> object:
        places: dict[str, int] = getattr(worker.model_runner, "mamba_state_idx", {})
        for new in scheduler_output.scheduled_new_reqs:
            places.pop(new.req_id, None)
        return execute(scheduler_output, *args, **kwargs)

    WORKER.wrap(worker, "Worker.execute_model", execute_model)


def _permit_amx() -> None:
    """Ask the kernel for AMX tiles: without, a first forward pass of few tokens dies of SIGILL."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning("the kernel does not permit AMX tiles; vLLM's CPU kernels may crash")
