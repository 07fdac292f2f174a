# SPDX-License-Identifier: Apache-2.0
"""Builds the llumlet of one engine, at the end of the engine's construction and before its I/O threads start."""

from __future__ import annotations

import functools
import logging
import uuid

import msgspec
from vllm.lora.request import LoRARequest

from vllm_llumnix import config as llumlet_config
from vllm_llumnix.engine.blocks.scheduler_port import SchedulerPort
from vllm_llumnix.engine.compatibility.facts import engine_facts
from vllm_llumnix.engine.compatibility.identity import EngineIdentity
from vllm_llumnix.engine.compatibility.portability import why_engine_unsupported, why_kv_unsupported
from vllm_llumnix.engine.load.model_watch import watch_model
from vllm_llumnix.engine.load.progress import Progress
from vllm_llumnix.engine.load.scheduler_events import follow_engine
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.pauses import CHANGED
from vllm_llumnix.engine.recovery.claims import Claims
from vllm_llumnix.engine.requests.prompts import why_features_stay
from vllm_llumnix.engine.service.agent import LlumletAgent, open_llumlet
from vllm_llumnix.engine.thread import LlumletThread
from vllm_llumnix.engine.vllm_types import Engine
from vllm_llumnix.errors import ConfigError, PatchError
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.vllm_worker_types import Worker, WorkerWrapper
from vllm_llumnix.kv.worker import start_mover, worker_of
from vllm_llumnix.patching import state
from vllm_llumnix.seams import ENGINE, WORKER, require
from vllm_llumnix.steps.compiles import RecordPlace, write_down_compiles
from vllm_llumnix.steps.step_record import StepRecord
from vllm_llumnix.switch import CONFIG_VARIABLE

logger = logging.getLogger("vllm.llumnix")


def attach(engine: Engine) -> EngineLoop:
    """Start movers and the llumlet's thread; returns when the llumlet listens.

    Raises ConfigError when the llumlet cannot run in this process, and whatever stops the gRPC server (a port in use).
    """
    config = llumlet_config.current()
    if config is None:
        raise ConfigError([f"{CONFIG_VARIABLE} is not set"])
    config = config.for_rank(engine.engine_index)
    require(engine)
    _check_workers(engine)
    if not engine.scheduler.use_v2_model_runner:
        engine.model_executor.collective_rpc(_compile_logprobs)
    settings = msgspec.msgpack.encode(config.worker_settings())
    answers = engine.model_executor.collective_rpc(start_mover, args=(settings,))
    movers = [msgspec.msgpack.decode(answer, type=MoverInfo) for answer in answers]
    identity = EngineIdentity(
        instance=config.instance_id,
        incarnation=uuid.uuid4().hex,
        facts=engine_facts(engine, movers, config.accept),
        unsupported=why_engine_unsupported(engine),
        kv_unsupported=why_kv_unsupported(engine, movers),
        device=engine.vllm_config.device_config.device_type,
        model_runner_v2=bool(engine.scheduler.use_v2_model_runner),
        spec_decode=engine.vllm_config.speculative_config is not None,
        features_stay=why_features_stay(engine),
    )
    port = SchedulerPort(engine.scheduler, config.priority_ageing_seconds)
    num_slots = engine.scheduler.max_num_running_reqs
    record = StepRecord(identity.incarnation, num_slots, engine.batch_queue_size, len(movers))
    engine.model_executor.collective_rpc(_write_down_compiles, args=(msgspec.msgpack.encode(record.place_of_workers),))
    progress = Progress(utility_seconds=config.utility_seconds, compiled_at=record.workers.compiled_at)
    if engine.vllm_config.parallel_config.enable_elastic_ep:
        _watch_scaling(progress)
    follow_engine(engine, port.load, progress)
    thread = LlumletThread()
    loop = EngineLoop(engine, port, thread, record, progress)
    claims = Claims(loop)
    watch_model(loop, claims)
    llumlet = thread.start(functools.partial(open_llumlet, config, identity, loop, movers, claims))
    loop.llumlet = llumlet
    _stop_with(engine, thread, record)
    _watch_adapters(engine, loop, llumlet)
    loop.pauses.watch(engine)
    # Utilities are attributes of the engine that its API server may call.
    ENGINE.wrap(engine, "EngineCore.llumlet_drain", llumlet.report_drain)
    ENGINE.wrap(engine, "EngineCore.llumlet_moves", llumlet.report_moves)
    logger.info("llumlet: instance %s listening on %s", config.instance_id, llumlet.context.address)
    logger.info("llumlet: this engine has %s", what_runs(engine))
    if copies := what_copies(movers):
        logger.info("llumlet: KV blocks are copied by %s", copies)
    if identity.unsupported:
        logger.warning("llumlet: this engine's requests cannot be moved: %s", identity.unsupported)
    elif identity.kv_unsupported:
        logger.warning("llumlet: requests leave this engine without their KV cache: %s", identity.kv_unsupported)
    return loop


def _stop_with(engine: Engine, thread: LlumletThread, record: StepRecord) -> None:
    """End the llumlet's thread before the engine takes down what it uses. An engine that ends because it was asked to
    leaves no record; what an error has ended is read later."""
    stock = engine.shutdown

    def shutdown() -> None:
        thread.stop()
        stock()
        if not engine.is_running():
            record.close()

    ENGINE.wrap(engine, "EngineCore.shutdown", shutdown)


def _watch_scaling(progress: Progress) -> None:
    """Elastic expert parallelism changes the number of ranks a part at a time, between two steps of the loop."""
    from vllm.distributed.elastic_ep.elastic_state import ElasticEPScalingState

    stock = ElasticEPScalingState.progress

    def busily(scaling: ElasticEPScalingState) -> bool:
        with progress.busy("elastic expert parallelism"):
            return bool(stock(scaling))

    ENGINE.wrap(ElasticEPScalingState, "ElasticEPScalingState.progress", busily)


def _watch_adapters(engine: Engine, loop: EngineLoop, llumlet: LlumletAgent) -> None:
    """Learn which LoRA adapters the front-end has loaded and removed; `--lora-modules` comes this way too."""
    stock_add, stock_remove, thread = engine.add_lora, engine.remove_lora, loop.thread

    # vLLM decodes a utility's arguments by its signature.
    @functools.wraps(stock_add)
    def add_lora(lora_request: LoRARequest) -> bool:
        if lora_request.load_inplace:
            loop.pauses.call_off(CHANGED)
        added: bool = stock_add(lora_request)
        thread.post(llumlet.learn_adapter, lora_request, lora_request.load_inplace)
        return added

    @functools.wraps(stock_remove)
    def remove_lora(lora_id: int) -> bool:
        thread.post(llumlet.context.adapters.forget, lora_id)
        removed: bool = stock_remove(lora_id)
        return removed

    ENGINE.wrap(engine, "EngineCore.add_lora", add_lora)
    ENGINE.wrap(engine, "EngineCore.remove_lora", remove_lora)


def _check_workers(engine: Engine) -> None:
    """Raises PatchError unless every worker runs the same patch series as this process, and has what it wraps there."""
    ours = state.current().digest
    answers = engine.model_executor.collective_rpc(_examine_worker)
    theirs = [digest for digest, _ in answers]
    if any(digest != ours for digest in theirs):
        raise PatchError(
            f"the workers run patch series {theirs}, the engine {ours}: "
            "install one version of vllm-llumnix for all processes and restart"
        )
    if problems := [problem for _, problem in answers if problem is not None]:
        raise PatchError(problems[0])


def _examine_worker(called: Worker | WorkerWrapper) -> tuple[str | None, str | None]:
    """Runs in the worker: the digest of its series, and what stands against it."""
    try:
        WORKER.require({"Worker": worker_of(called)})
    except PatchError as error:
        return state.current().digest, str(error)
    return state.current().digest, None


def what_runs(engine: Engine) -> str:
    """The runner and the scheduler that are there, whatever flags and fallbacks led to them."""
    runners = sorted(set(engine.model_executor.collective_rpc(_runner_of_worker)))
    depth = 1 if engine.batch_queue is None else engine.batch_queue_size
    return f"{', '.join(runners)} behind {type(engine.scheduler).__qualname__}, steps in flight: {depth}"


def what_copies(movers: list[MoverInfo]) -> str:
    """The backends that the workers' trials led to, and why others were passed over; each once. Empty if none moves."""
    copied_by = sorted({mover.copied_by for mover in movers} - {""})
    reasons = sorted({reason for mover in movers for reason in mover.passed_over})
    return ", ".join(copied_by) + (f" (not by {'; '.join(reasons)})" if reasons else "")


def _runner_of_worker(called: Worker | WorkerWrapper) -> str:
    """Runs in the worker."""
    runner = type(worker_of(called).model_runner)
    return f"{runner.__module__}.{runner.__qualname__}"


def _write_down_compiles(called: Worker | WorkerWrapper, packed: bytes) -> None:
    """Runs in the worker: the engine is told when a kernel is compiled."""
    write_down_compiles(msgspec.msgpack.decode(packed, type=RecordPlace), worker_of(called).rank)


def _compile_logprobs(called: Worker | WorkerWrapper) -> None:
    """Runs in a worker with the V1 runner: have vLLM's kernel for log probabilities compiled now.

    vLLM compiles it when the first request asks for them, for seconds: measured 11 s on two cores. A request that moves
    here must not wait for that. The V2 runner has other kernels, and warms them itself.
    """
    import torch
    from vllm.v1.sample.sampler import Sampler

    worker = worker_of(called)
    try:
        with torch.inference_mode():
            logprobs = torch.zeros(2, worker.vllm_config.model_config.get_vocab_size(), device=worker.device)
            Sampler.gather_logprobs(logprobs, 1, torch.zeros(2, dtype=torch.int64, device=worker.device))
    except (RuntimeError, TypeError, OSError) as error:
        # A compiler that is missing, say. Requests without log probabilities do not need it.
        logger.warning("llumlet: vLLM's kernel for log probabilities cannot be compiled now: %s", error)
