# SPDX-License-Identifier: Apache-2.0
"""The engine loop's view of migration: `kvconn.step()` before every schedule, and the seams of the I/O threads.

The state of requests, blocks and queues changes inside `step()` and nowhere else. The bypass thread asks for such a
change with `call()` and is told the result on its own event loop. Between steps the loop is not disturbed: without
migrations a step costs a truth test or two.

    step(), has_work()   loop thread
    on_add(), on_abort() input thread
    divert()             output thread
    call()               bypass thread
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.request import Request

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.trials import Trials
from vllm_llumnix import faults
from vllm_llumnix.engine.claims import Claims
from vllm_llumnix.engine.progress import Progress
from vllm_llumnix.engine.request_state import residence_from, settle_in
from vllm_llumnix.engine.scheduler_port import SchedulerPort
from vllm_llumnix.engine.seams import SEAMS
from vllm_llumnix.step_record import StepRecord

if TYPE_CHECKING:
    from vllm_llumnix.engine.bypass import Bypass

logger = logging.getLogger("vllm.llumnix")

FOREIGN_CLIENT = 1 << 16
"""Client indices from here on stand for relay addresses, one each; vLLM's own clients are numbered from 0."""
NO_CLIENT = FOREIGN_CLIENT - 1
"""Marks a place in the engine's outputs: see `KVConnection.call_behind_outputs`."""

WARM_STEPS = 4
"""Steps until an engine that was idle decodes at its usual speed. Measured on CPU: 1.7, 1.6, 1.4, 1.1 times the usual
duration, and then 1.0; how much memory a step reads makes no difference."""

T = TypeVar("T")


class Departure:
    """A request on its way out, as the loop watches it.

    `on_drained` is called between steps from the freeze on, until it returns True: no step in flight works on the
    request any more. `on_gone` is called once when the request finishes, is aborted or preempted by its own engine.
    """

    __slots__ = ("freezing", "frozen", "num_preemptions", "on_drained", "on_gone", "request")

    def __init__(self, request: Request, on_drained: Callable[[], bool], on_gone: Callable[[str], None]) -> None:
        self.request = request
        self.num_preemptions = request.num_preemptions
        self.freezing = False
        self.frozen = False
        self.on_drained = on_drained
        self.on_gone = on_gone


class KVConnection:
    """One per engine. See the module docstring for which thread calls what."""

    def __init__(
        self, engine: Any, port: SchedulerPort, bypass: Bypass, record: StepRecord, progress: Progress | None = None
    ) -> None:
        self.engine = engine
        self.port = port
        self.bypass = bypass
        self.steps = 0
        self.progress = progress or Progress()
        self.record = record
        self.trials = Trials(record.try_out)
        self.claims = Claims(self)
        self._in_lockstep = isinstance(engine, DPEngineCoreProc)
        """A data-parallel rank of a mixture of experts: no rank computes anything unless all do."""
        self._origins: set[str] = set()
        """Relays of our own front-end; the engine's relay has met them, and keeps to them."""
        self._audit_due = False
        self._commands: deque[Callable[[], None]] = deque()
        self._fences: deque[tuple[list[Any], Callable[[], None]]] = deque()
        """Batches in flight, and what is answered when none of them is any more."""
        self._departures: dict[str, Departure] = {}
        self._aborted: deque[str] = deque(maxlen=4096)
        self._behind_outputs: deque[Callable[[], None]] = deque()

    # Loop thread

    def step(self) -> Iterable[tuple[int, EngineCoreOutputs]]:
        """Apply what migrations ask for. Called before every schedule, and while only migrations have work."""
        self.steps += 1
        self.progress.step()
        faults.hit("loop.step")
        self.trials.look()
        if not self.bypass.takes_requests:
            self.record.leave()
        if self._fences:
            self._pass_fences()
        commands = self._commands
        while commands:
            commands.popleft()()
        port = self.port
        if self._departures:
            port.park_preempted()
            for departure in list(self._departures.values()):
                self._observe(departure)
        if port.short_of_blocks():
            self.bypass.post(self.bypass.revoke_youngest_reservation)
        port.before_step()
        port.load.blocks_changed()
        return ()

    def has_work(self, stock: bool) -> bool:
        """Whether the loop should turn: vLLM's answer, except that frozen requests alone are no work.

        They are while a step in flight still has to drain, and while data-parallel peers step together.
        """
        if self._commands or self._fences:
            return True
        engine = self.engine
        asleep = self.port.only_frozen() and not (engine.batch_queue or engine.engines_running or self._is_draining())
        if stock and not asleep:
            return True
        self.progress.sleep()
        if self._audit_due:
            self._audit()
        return False

    def watch_model(self) -> None:
        """See the engine give its model a batch, and turn to what the model made of it. Called once.

        Steps, executors and the scheduler's methods are attributes; so this needs no patch.
        """
        engine, scheduler, progress, claims = self.engine, self.port.scheduler, self.progress, self.claims
        record, marked = self.record, faults.armed("loop.request")
        execute, update = engine.model_executor.execute_model, scheduler.update_from_output
        process_aborts, step = engine._process_aborts_queue, engine.step_fn

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            progress.execute(scheduler_output, scheduler_output.total_num_scheduled_tokens)
            record.begin(scheduler_output)
            claims.model_begins()
            faults.hit("loop.model")
            if marked:
                requests = (scheduler.requests.get(name) for name in scheduler_output.num_scheduled_tokens)
                faults.hit_tokens("loop.request", (request.prompt_token_ids for request in requests if request))
            return execute(scheduler_output, *args, **kwargs)

        def process_aborts_queue() -> None:
            # The first thing that vLLM does with the scheduler after the model has returned.
            claims.model_ended()
            process_aborts()

        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            progress.returned(scheduler_output)
            outputs = update(scheduler_output, model_runner_output)
            record.end(scheduler_output)
            return outputs

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

        SEAMS.wrap(engine.model_executor, "Executor.execute_model", execute_model)
        SEAMS.wrap(engine, "EngineCore._process_aborts_queue", process_aborts_queue)
        SEAMS.wrap(engine, "EngineCore.step_fn", step_fn)
        SEAMS.wrap(scheduler, "Scheduler.update_from_output", update_from_output)

    def load_adapter(self, request: Request) -> None:
        """Loop thread: have the LoRA adapter of a request that comes here loaded now, if the workers do not hold it.

        The loop stands still for that, as it does for vLLM's own requests; in the request's first step it would be its
        client who waits, and an adapter that cannot be loaded would end the engine there.

        Raises Refused(lora_not_available).
        """
        adapter = request.lora_request
        if adapter is None or adapter.lora_int_id in self.port.running_adapters():
            return
        try:
            with self.progress.busy("add_lora"):
                # Past the engine's own, from which adapters are learnt.
                self.engine.model_executor.add_lora(adapter)
        except Exception as error:
            logger.exception("llumlet: adapter %s cannot be loaded", adapter.lora_name)
            problem = f"adapter {adapter.lora_name!r} cannot be loaded here: {type(error).__name__}"
            raise Refused(Reason.LORA_NOT_AVAILABLE, problem) from error

    def admit(self, request: Request, computed_tokens: int) -> None:
        """Loop thread: hand an expected request to the scheduler. Raises Refused, see `SchedulerPort.admit`."""
        if self._in_lockstep and computed_tokens and self.port.paused and not self.engine.engines_running:
            # Paused schedulers go on with requests that have KV, but these ranks have agreed to stand still.
            raise Refused(Reason.DESTINATION_PAUSED, "the destination's data-parallel ranks are paused")
        self.port.admit(request, computed_tokens)
        self.wake_group()

    def wake_group(self) -> None:
        """Loop thread: a request has entered past vLLM's front door. Ranks that step together start together.

        What `DPEngineCoreProc.add_request` does for a request that finds its group idle: alone, this rank would wait in
        the first forward pass for ranks that sleep.
        """
        engine = self.engine
        if not self._in_lockstep or not engine.has_coordinator or engine.engines_running or self.port.paused:
            return
        engine.engines_running = True
        engine.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=engine.current_wave)))

    def _is_draining(self) -> bool:
        return any(departure.freezing for departure in self._departures.values())

    def _audit(self) -> None:
        """Nothing runs and nothing moves: every block must be free."""
        self._audit_due = False
        for fault in self.port.audit_idle():
            logger.error("llumlet: KV blocks are not conserved: %s", fault)

    def watch(self, departure: Departure) -> None:
        """Loop thread: observe a request that is about to leave."""
        self._departures[departure.request.request_id] = departure
        self.port.load.moving(departure.request.request_id, True)

    def require_out_of_flight(self, request_id: str) -> None:
        """Loop thread: raises Refused(handover_open) while a step computes a token for a former life of the request.

        vLLM would give that token to the life that is here when the step ends.
        """
        batches = self.engine.batch_queue or ()
        if any(request_id in scheduled.num_scheduled_tokens for _, scheduled, _ in batches):
            raise Refused(Reason.HANDOVER_OPEN, "a step in flight still works on a former life of the request")

    def unwatch(self, request_id: str) -> None:
        if self._departures.pop(request_id, None) is not None:
            self.port.load.moving(request_id, False)

    def freeze(self, departure: Departure) -> None:
        """Loop thread: stop scheduling the request; `on_drained` follows, at once if no step is in flight."""
        self.port.freeze(departure.request)
        departure.freezing = True

    def _observe(self, departure: Departure) -> None:
        request = departure.request
        if request.is_finished():
            kind = "aborted" if request.request_id in self._aborted else "finished"
            self.port.forget(request)
        elif not departure.frozen and request.num_preemptions != departure.num_preemptions:
            kind = "preempted"
            self.port.unfreeze(request)
        else:
            if departure.freezing and departure.on_drained():
                departure.freezing = False
                departure.frozen = True
            return
        self.unwatch(request.request_id)
        departure.on_gone(kind)

    def _step_idly(self) -> bool:
        """Loop thread: one forward pass without a request. False, and nothing done, unless the engine is idle."""
        engine = self.engine
        if self._in_lockstep:
            return False  # the other ranks take no part: this one would wait for them, and they for it ever after
        if self.port.paused or self.port.has_runnable() or engine.batch_queue or engine.engines_running:
            return False
        if self.port.scheduler.lora_config is not None:
            return False  # vLLM's pass without a request ends by removing all adapters, that of the newcomer too
        engine.execute_dummy_batch()
        return True

    # Input thread

    def on_add(self, core_request: EngineCoreRequest, request: Request) -> None:
        residence = residence_from(core_request)
        settle_in(request, residence)
        self.port.load.received(request)
        if residence.origin is not None and residence.origin not in self._origins:
            self._origins.add(residence.origin)
            self.bypass.post(self.bypass.meet_origin, residence.origin)
        if core_request.lora_request is not None:
            self.bypass.post(self.bypass.learn_adapter, core_request.lora_request, False)

    def on_abort(self, request_ids: list[str]) -> None:
        self.note_aborted(request_ids)
        self.bypass.post(self.bypass.forward_aborts, list(request_ids))

    # Output thread

    def divert(self, client_index: int, outputs: EngineCoreOutputs) -> bool:
        """Take outputs of requests whose origin is another API server, or which have moved. True if taken."""
        if client_index < FOREIGN_CLIENT:
            if client_index == NO_CLIENT:
                self._behind_outputs.popleft()()
            return client_index == NO_CLIENT
        if outputs.scheduler_stats is not None:
            # vLLM hangs the step's statistics on the first client's outputs; they belong to our own front-end.
            stats = EngineCoreOutputs(scheduler_stats=outputs.scheduler_stats)
            self.engine.output_queue.put_nowait((0, stats))
        self.bypass.post(self.bypass.relay_outputs, client_index, outputs)
        return True

    # Any thread

    def note_aborted(self, request_ids: list[str]) -> None:
        """These requests are about to be ended from outside: should they vanish, they were aborted, not finished."""
        self._aborted.extend(request_ids)

    def audit_when_idle(self) -> None:
        """A migration has ended: account for the blocks the next time that the engine has nothing to do."""
        self._audit_due = True

    def call(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run `function` on the loop, before its next step; await the result on the bypass thread's event loop."""
        return self._call(function, args, _at_once)

    def call_behind_outputs(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """As `call`, but the result comes behind the outputs of all steps before: they have been posted to `bypass`.

        Outputs name a request, not which of its lives here they are of.
        """
        return self._call(function, args, self._queue)

    def call_for_blocks(
        self, function: Callable[..., T], *args: Any, behind_outputs: bool = False
    ) -> asyncio.Future[T]:
        """As `call`, of what takes blocks out of the pool to be written by others than the model.

        With several batches in flight vLLM gives the blocks of a request back while a step still writes them: whoever
        gets them next through the model writes them behind that step. Movers do not wait for the model, so the result
        comes when all steps that were in flight as the blocks were taken have been processed. Later ones know of no
        former owner. `behind_outputs` as in `call_behind_outputs`.
        """
        return self._call(function, args, functools.partial(self._fence, self._queue if behind_outputs else _at_once))

    def _fence(self, deliver: Callable[[Callable[[], None]], None], answer: Callable[[], None]) -> None:
        in_flight = list(self.engine.batch_queue or ())
        if in_flight:
            self._fences.append((in_flight, functools.partial(deliver, answer)))
        else:
            deliver(answer)

    def _pass_fences(self) -> None:
        """Batches leave the queue in order, and have been processed when they have."""
        in_flight = {id(batch) for batch in self.engine.batch_queue}
        while self._fences and in_flight.isdisjoint(map(id, self._fences[0][0])):
            self._fences.popleft()[1]()

    def _queue(self, answer: Callable[[], None]) -> None:
        """Have the output thread answer, behind the outputs that are on their way."""
        self._behind_outputs.append(answer)
        self.engine.output_queue.put_nowait((NO_CLIENT, EngineCoreOutputs()))

    def _call(
        self, function: Callable[..., T], args: tuple[Any, ...], deliver: Callable[[Callable[[], None]], None]
    ) -> asyncio.Future[T]:
        result: Future[T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                answer = functools.partial(result.set_result, function(*args))
            except Exception as error:  # noqa: BLE001 - crosses to the awaiting thread
                answer = functools.partial(result.set_exception, error)
            # Before anybody who asks for the status can know that it was done.
            self.port.load.blocks_changed()
            deliver(answer)

        self._commands.append(run)
        self.kick()
        return asyncio.wrap_future(result)

    async def warm_up(self) -> None:
        """Run an idle engine a few steps, one at a time, until it has something to do. Bypass thread.

        After a second of idleness the caches have lost the weights and the clocks have fallen, and the first steps take
        half as long again as later ones: here they would be the client's.
        """
        for _ in range(WARM_STEPS):
            if not await self.call(self._step_idly):
                return

    def kick(self) -> None:
        """Make an idle loop turn."""
        self.engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _at_once(answer: Callable[[], None]) -> None:
    answer()
