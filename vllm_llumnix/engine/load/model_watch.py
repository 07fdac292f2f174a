# SPDX-License-Identifier: Apache-2.0
"""Sees vLLM's engine give its model a batch, and turn to what the model made of it."""

from __future__ import annotations

from typing import Any

from vllm_llumnix import faults
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.recovery.claims import Claims
from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput
from vllm_llumnix.seams import ENGINE


def watch_model(loop: EngineLoop, claims: Claims) -> None:
    """Have what is known of the loop's steps, and the claims on its requests, follow the model. Called once.

    Steps, executors and the scheduler's methods are attributes; so this needs no patch.
    """
    engine, scheduler, progress = loop.engine, loop.port.scheduler, loop.progress
    load, record, step_times = loop.port.load, loop.record, loop.step_times
    execute = engine.model_executor.execute_model
    process_aborts, step = engine._process_aborts_queue, engine.step_fn

    def execute_model(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> object:
        progress.execute(scheduler_output, scheduler_output.total_num_scheduled_tokens)
        record.begin(scheduler_output)
        claims.model_begins()
        faults.hit("loop.model", requests=map(scheduler.requests.get, scheduler_output.num_scheduled_tokens))
        return execute(scheduler_output, *args, **kwargs)

    def process_aborts_queue() -> None:
        # The first thing that vLLM does with the scheduler after the model has returned.
        claims.model_ended()
        process_aborts()

    def before_update(scheduler_output: SchedulerOutput) -> None:
        step_times.took(scheduler_output, progress.returned(scheduler_output), *load.decodes)

    def step_fn() -> Any:
        if engine.batch_queue and not scheduler.has_requests():
            # A paused scheduler: nothing is scheduled, and the step only waits for what is in flight.
            claims.model_begins()
        record.scheduling()
        # With several batches in flight a step may end without having waited for the model.
        try:
            outputs = step()
        finally:
            claims.model_ended()
        # Not after an error: it ends the engine, and the record says in what.
        record.idle()
        return outputs

    ENGINE.wrap(engine.model_executor, "Executor.execute_model", execute_model)
    ENGINE.wrap(engine, "EngineCore._process_aborts_queue", process_aborts_queue)
    ENGINE.wrap(engine, "EngineCore.step_fn", step_fn)
    events = loop.port.events
    events.before_update, events.after_update = before_update, record.end
