# SPDX-License-Identifier: Apache-2.0
"""Events of vLLM's scheduler, told to everything that follows them.

The scheduler's methods are attributes of the instance and can be wrapped without a patch. It calls them wherever a
request changes its place. `SchedulerPort` and `EngineLoop` tell what only we do to its queues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.request import RequestStatus

from llumlet.protocol.ids import HOME
from vllm_llumnix.engine.blocks.latest_states import LatestStates
from vllm_llumnix.engine.load.computed_tokens import ComputedTokens
from vllm_llumnix.engine.load.load_counters import LoadCounters
from vllm_llumnix.engine.load.load_sums import NO_HIT, Hit
from vllm_llumnix.engine.load.progress import Progress
from vllm_llumnix.engine.requests.request_state import first_holding, residence_of
from vllm_llumnix.engine.vllm_types import Engine, Request, Scheduler
from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput
from vllm_llumnix.seams import ENGINE

logger = logging.getLogger("vllm.llumnix")


def counters_of(scheduler: Scheduler) -> LoadCounters:
    """Counters of `scheduler`, which has no request yet; `SchedulerEvents` changes them."""
    pool = scheduler.kv_cache_manager.block_pool
    return LoadCounters(
        _prefix_cache_of(scheduler),
        pool.get_num_free_blocks,
        _first_waiting_of(scheduler),
        _name_of,
        one_token_each=scheduler.num_spec_tokens == 0 and scheduler.num_sampled_tokens_per_step == 1,
        # A connector's blocks can turn out to be invalid.
        always_exact=scheduler.connector is not None,
    )


def follow_engine(engine: Engine, load: LoadCounters, progress: Progress) -> None:
    """See which of the received requests the loop turns away before its scheduler hears of them, and which calls of the
    engine's utilities keep it from stepping."""
    stock = engine._handle_client_request

    def handle_client_request(request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type == EngineCoreRequestType.UTILITY:
            _, _, method, _ = request
            with progress.busy(method):
                stock(request_type, request)
            return
        stock(request_type, request)
        if request_type == EngineCoreRequestType.ADD:
            load.settled(request[0].request_id)

    ENGINE.wrap(engine, "EngineCoreProc._handle_client_request", handle_client_request)


class SchedulerEvents:
    """Wraps each method of vLLM's scheduler once. Its events change `load` and `tokens`, and `states` if given.

    The engine's loop sets `before_update` and `after_update`, called around the scheduler's look at a step's outputs,
    and `on_pause`.
    """

    def __init__(self, scheduler: Scheduler, load: LoadCounters, states: LatestStates | None = None) -> None:
        self.load = load
        self.tokens = ComputedTokens()
        self.before_update: Callable[[SchedulerOutput], None] = lambda output: None
        self.after_update: Callable[[SchedulerOutput], None] = lambda output: None
        self.on_pause: Callable[[PauseState], None] = lambda state: None
        self._scheduler = scheduler
        self._states = states if states is not None and states.follow else None
        self._follow_requests()
        self._follow_steps()

    def _follow_requests(self) -> None:
        scheduler, load, tokens = self._scheduler, self.load, self.tokens
        enqueue, update_session = scheduler._enqueue_waiting_request, scheduler._update_request_as_session
        preempt, free = scheduler._preempt_request, scheduler._free_request
        set_stage, set_pause_state = scheduler._set_kv_fetch_stage, scheduler.set_pause_state

        def enqueue_waiting_request(request: Request) -> None:
            enqueue(request)
            load.queued(request)

        def update_request_as_session(session: Request, update: Any) -> None:
            if (residence := residence_of(session)) is not None:
                residence.num_earlier += session.num_output_tokens
            update_session(session, update)
            load.queued(session)

        def preempt_request(request: Request, *args: Any, **kwargs: Any) -> None:
            tokens.lost(request, request.num_computed_tokens)
            preempt(request, *args, **kwargs)
            load.preempted(request)

        def free_request(request: Request, *args: Any, **kwargs: Any) -> Any:
            tokens.gone(request.request_id)
            answer = free(request, *args, **kwargs)
            load.left(request.request_id)
            return answer

        def set_kv_fetch_stage(request: Request, stage: str | None) -> None:
            set_stage(request, stage)
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                load.loading(request)

        def pause(state: PauseState) -> None:
            set_pause_state(state)
            load.touch()
            self.on_pause(state)

        ENGINE.wrap(scheduler, "Scheduler._enqueue_waiting_request", enqueue_waiting_request)
        ENGINE.wrap(scheduler, "Scheduler._update_request_as_session", update_request_as_session)
        ENGINE.wrap(scheduler, "Scheduler._preempt_request", preempt_request)
        ENGINE.wrap(scheduler, "Scheduler._free_request", free_request)
        ENGINE.wrap(scheduler, "Scheduler.set_pause_state", pause)
        if scheduler.connector is not None:
            ENGINE.wrap(scheduler, "Scheduler._set_kv_fetch_stage", set_kv_fetch_stage)

    def _follow_steps(self) -> None:
        scheduler, load, tokens, states = self._scheduler, self.load, self.tokens, self._states
        stock_schedule, update = scheduler.schedule, scheduler.update_from_output
        sends_images = not scheduler.use_v2_model_runner

        def schedule(*args: Any, **kwargs: Any) -> SchedulerOutput:
            output = stock_schedule(*args, **kwargs)
            started = [new.req_id for new in output.scheduled_new_reqs]
            started += output.scheduled_cached_reqs.resumed_req_ids
            for request_id in load.strangers_among(started) if started else ():
                # vLLM has no such way: whatever found one must not end the engine, nor have its load forgotten.
                logger.error("llumlet: request %s runs and was not seen to be queued", request_id)
                load.queued(scheduler.requests[request_id])
            load.scheduled(started, output.num_scheduled_tokens)
            tokens.scheduled(scheduler.requests, output)
            if sends_images and output.scheduled_new_reqs:
                send_whole_images(scheduler, output)
            return output

        def update_from_output(
            scheduler_output: SchedulerOutput, model_runner_output: object
        ) -> dict[int, EngineCoreOutputs]:
            self.before_update(scheduler_output)
            stepped = states.stepping(scheduler, scheduler_output) if states else []
            exact = load.computing()
            outputs = update(scheduler_output, model_runner_output)
            load.computed([some.outputs for some in outputs.values()], scheduler_output.num_scheduled_tokens, exact)
            if states:
                states.stepped(scheduler, stepped)
            self.after_update(scheduler_output)
            return outputs

        ENGINE.wrap(scheduler, "Scheduler.schedule", schedule)
        ENGINE.wrap(scheduler, "Scheduler.update_from_output", update_from_output)


def send_whole_images(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Has the V1 runner told of all images of requests that moved here, those that are computed included.

    vLLM sends a runner no image that lies within what is computed when its request starts, and nothing later on: should
    a preemption have the image computed once more, the V1 runner looks for it and ends the engine. V2 is sent the
    request anew.
    """
    for new in output.scheduled_new_reqs:
        if new.mm_features and new.num_computed_tokens:
            request = scheduler.requests[new.req_id]
            residence = residence_of(request)
            if residence is not None and residence.epoch != HOME:
                new.mm_features = request.mm_features


def _prefix_cache_of(scheduler: Scheduler) -> Any:
    """Function that looks up a request's prefix in the cache.

    Past `get_computed_blocks`, which may publish events: nothing is touched, counted or reported. The scheduler asks
    again when the request starts; the answer may be another by then.
    """
    manager = scheduler.kv_cache_manager
    find = manager.coordinator.find_longest_cache_hit

    def look_up(request: Request) -> Hit:
        if request.num_computed_tokens or not manager.prefix_cache_lookup_enabled(request):
            return NO_HIT
        try:
            # One token has to be computed in any case, for its logits.
            blocks, num_cached = find(request.block_hashes, request.num_tokens - 1)[:2]
            num_shared = sum(block.ref_cnt > 0 for block in blocks[0])
            shared_tokens = num_cached * num_shared // max(len(blocks[0]), 1)
            # What a preempted request has left there is free, and those for whom it was preempted take it first.
            return Hit(shared_tokens if request.num_preemptions else num_cached, shared_tokens)
        except Exception:
            # On the input thread, where it would fail the client's request; the loop changes what is looked at.
            # It only reads, also with several kinds of cache: that many tokens more count as work, until the scheduler
            # looks for itself.
            logger.debug("llumlet: the prefix cache changed during a look-up", exc_info=True)
            return NO_HIT

    return look_up


def _first_waiting_of(scheduler: Scheduler) -> Callable[[], Request | None]:
    def first_waiting() -> Request | None:
        if (holding := first_holding(scheduler)) is not None:
            return holding
        return scheduler.waiting.peek_request() if scheduler.waiting else None

    return first_waiting


def _name_of(request: Request) -> str:
    """The request's name in the status: its gateway's, else its client's."""
    residence = residence_of(request)
    return (residence.name or residence.external_request_id) if residence else request.request_id
