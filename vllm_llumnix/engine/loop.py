# SPDX-License-Identifier: Apache-2.0
"""The engine's loop, as migrations see it: what it is asked to do between two steps, and what its threads tell.

The state of requests, blocks and queues changes inside `step()` and nowhere else. The llumlet's thread asks for such a
change with `call()` and is told the result on its own event loop. Between steps the loop is not disturbed: without
migrations a step costs a truth test or two.

    step(), has_work()   loop thread
    on_add(), on_abort() input thread
    divert()             output thread
    call()               llumlet thread

vLLM knows the one object of this module as `engine.kvconn`: that is what the patches call it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.recovery.trials import Trials
from vllm_llumnix import faults
from vllm_llumnix.engine.blocks.block_rows import BlockRows
from vllm_llumnix.engine.blocks.scheduler_port import SchedulerPort
from vllm_llumnix.engine.engine_port import CallOff, Reserved, WatchedRequest
from vllm_llumnix.engine.load.progress import Progress
from vllm_llumnix.engine.load.step_times import StepTimes
from vllm_llumnix.engine.pauses import Pauses
from vllm_llumnix.engine.requests.request_state import residence_from, settle_in
from vllm_llumnix.engine.thread import LlumletThread
from vllm_llumnix.engine.vllm_types import Engine, Request
from vllm_llumnix.steps.step_record import StepRecord
from vllm_llumnix.wire.request_wire import without_name

logger = logging.getLogger("vllm.llumnix")

FOREIGN_CLIENT = 1 << 16
"""Client indices from here on stand for relay addresses, one each; vLLM's own clients are numbered from 0."""
NO_CLIENT = FOREIGN_CLIENT - 1
"""Marks a place in the engine's outputs: see `EngineLoop.call_behind_outputs`."""

WARM_STEPS = 4
"""Steps until an engine that was idle decodes at its usual speed. Measured on CPU: 1.7, 1.6, 1.4, 1.1 times the usual
duration, and then 1.0; how much memory a step reads makes no difference."""

T = TypeVar("T")


class Llumlet(Protocol):
    """Messages of the engine's threads, posted to the llumlet's thread; nobody waits for an answer."""

    def relay_outputs(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Outputs of one step, for the origin that `client_index` stands for."""

    def meet_origin(self, address: str) -> None:
        """An API server sends us requests: let it know who we are and that we live."""

    def forward_aborts(self, request_ids: list[str]) -> None:
        """The front-end aborts requests; those that have moved on from here are ended at their owner."""

    def learn_adapter(self, adapter: LoRARequest, reloaded: bool = False) -> None:
        """The front-end names a LoRA adapter of its own."""

    def revoke_youngest_reservation(self) -> None:
        """The engine's own requests are short of blocks."""

    def call_off_moves(self, why: CallOff) -> None:
        """No move that is under way now may end well."""


@dataclasses.dataclass(eq=False, slots=True)
class _Fence:
    """`answer` is called when the scheduler has made its step number `step`, and all batches that were in flight by
    then have been processed."""

    answer: Callable[[], None]
    step: int
    batches: list[Any] | None = None


class EngineLoop:
    """The loop of one engine. `thread` is the llumlet's. See the module docstring for which thread calls what."""

    llumlet: Llumlet
    """Set once it listens, which is before anything of the engine's runs."""

    def __init__(
        self,
        engine: Engine,
        port: SchedulerPort,
        thread: LlumletThread,
        record: StepRecord,
        progress: Progress | None = None,
    ) -> None:
        self.engine = engine
        self.port = port
        self.thread = thread
        self.steps = 0
        self.progress = progress or Progress()
        self.step_times = StepTimes()
        self.record = record
        self.pauses = Pauses(port, lambda why: self.thread.post(self.llumlet.call_off_moves, why))
        self.trials = Trials(record.try_out)
        self.draining = False
        """The engine is being emptied."""
        self._in_lockstep = isinstance(engine, DPEngineCoreProc)
        """A data-parallel rank of a mixture of experts: no rank computes anything unless all do."""
        self._origins: set[str] = set()
        """Relays of our own front-end; the engine's relay has met them, and keeps to them."""
        self._audit_due = False
        self._commands: deque[Callable[[], None]] = deque()
        self._fences: deque[_Fence] = deque()
        self._leaving: dict[str, WatchedRequest] = {}
        self._aborted: deque[str] = deque(maxlen=4096)
        self._outputs: list[tuple[int, EngineCoreOutputs]] = []
        """Outputs of the step that is being made: what goes out behind the outputs of all steps before."""
        self._behind_outputs: deque[Callable[[], None]] = deque()

    @property
    def takes_requests(self) -> bool:
        """True if new requests and moves may come; False when the engine is on its way out. Any thread."""
        return bool(self.engine.is_running()) and not self.draining

    # Loop thread

    def step(self) -> Sequence[tuple[int, EngineCoreOutputs]]:
        """Apply what migrations ask for. Called before every schedule, and while only migrations have work.

        Returns what is to be put out now, by the client that it is for.
        """
        self.steps += 1
        self.progress.step()
        faults.hit("loop.step")
        self.trials.look()
        if not self.takes_requests:
            self.record.leave()
        if self._fences:
            self._pass_fences()
        commands = self._commands
        while commands:
            commands.popleft()()
        port = self.port
        if self._leaving:
            port.park_preempted()
            for leaving in list(self._leaving.values()):
                self._observe(leaving)
        port.before_step()
        has_reserved = port.reservations.hold_blocks
        port.shortage.before_step(moving=has_reserved or self._gives_blocks())
        if has_reserved and port.shortage.num_blocks:
            self.thread.post(self.llumlet.revoke_youngest_reservation)
        port.load.blocks_changed()
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_work(self, stock: bool) -> bool:
        """True if the loop should turn: vLLM's answer, except that frozen requests alone are no work.

        They are work while a step in flight must drain, while data-parallel peers step together, and when the engine
        would end for want of work. A pause waits for them: see `pauses`.
        """
        if self._commands or self._fences:
            return True
        engine = self.engine
        # In async mode vLLM keeps an empty batch in `batch_queue` while requests exist. Count only batches with tokens.
        computes = engine.engines_running or any(step.total_num_scheduled_tokens for _, step, _ in self._in_flight())
        asleep = self.port.only_frozen() and not (computes or self._is_draining()) and engine.is_running()
        if stock and not asleep:
            return True
        self.progress.sleep()
        if self._audit_due:
            self._audit()
        return False

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

    def reserve(
        self,
        request: Request,
        queued: bool,
        use_prefix_cache: bool,
        computed_tokens: int,
        rows: BlockRows | None = None,
    ) -> Reserved:
        """Loop thread: `Reservations.make`, of a request that no step here still works on, with its adapter loaded.
        Raises Refused."""
        self.require_out_of_flight(request.request_id)
        reserved = self.port.reservations.make(
            request, use_prefix_cache=use_prefix_cache, queued=queued, computed_tokens=computed_tokens, rows=rows
        )
        try:
            self.load_adapter(request)
        except Refused:
            self.port.reservations.cancel(request)
            raise
        return reserved

    def admit(self, request: Request, computed_tokens: int) -> None:
        """Loop thread: hand an expected request to the scheduler. Raises Refused, see `Reservations.admit`."""
        self.port.reservations.admit(request, computed_tokens)
        if not computed_tokens and request.num_output_tokens:
            self.port.tokens.lost(request, request.num_tokens - 1)
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
        self._outputs.append((-1, EngineCoreOutputs(start_wave=engine.current_wave)))

    def _gives_blocks(self) -> bool:
        """True if a request of the batch is on its way out: its blocks come free when it has left."""
        return any(leaving.request.status == RequestStatus.RUNNING for leaving in self._leaving.values())

    def _in_flight(self) -> Sequence[Any]:
        return self.engine.batch_queue or ()

    def _is_draining(self) -> bool:
        return any(leaving.freezing for leaving in self._leaving.values())

    def _audit(self) -> None:
        """Audits the pool where nothing runs and nothing moves: every block must be free."""
        self._audit_due = False
        for fault in self.port.audit_idle():
            logger.error("llumlet: KV blocks are not conserved: %s", fault)

    def watch(self, leaving: WatchedRequest) -> None:
        """Loop thread: observe a request that is about to leave."""
        self._leaving[leaving.request.request_id] = leaving
        self.port.load.moving(leaving.request.request_id, True)

    def require_out_of_flight(self, request_id: str) -> None:
        """Loop thread: raises Refused(handover_open) while a step computes a token for a former life of the request,
        or a KV connector works for that.

        vLLM would give that token to the life that is here when the step ends.
        """
        if any(request_id in step.num_scheduled_tokens for _, step, _ in self._in_flight()):
            raise Refused(Reason.HANDOVER_OPEN, "a step in flight still works on a former life of the request")
        if (why := self.port.connectors.why_not_back(request_id)) is not None:
            raise Refused(Reason.HANDOVER_OPEN, why)

    def unwatch(self, request_id: str) -> None:
        if (leaving := self._leaving.pop(request_id, None)) is not None:
            self.port.load.moving(request_id, False)
            if leaving.request.is_finished():
                # In this turn: nobody looks at it again.
                self.port.forget(leaving.request)
            self.port.sessions.go_on(leaving.request)

    def freeze(self, leaving: WatchedRequest) -> None:
        """Loop thread: stop scheduling the request; `on_drained` follows, at once if no step is in flight."""
        self.port.freeze(leaving.request)
        leaving.freezing = True

    def _observe(self, leaving: WatchedRequest) -> None:
        request = leaving.request
        if request.is_finished():
            kind = "aborted" if request.request_id in self._aborted else "finished"
            self.port.forget(request)
        elif not leaving.frozen and request.num_preemptions != leaving.num_preemptions:
            kind = "preempted"
            self.port.unfreeze(request)
        else:
            if leaving.freezing and leaving.on_drained():
                leaving.freezing = False
                leaving.frozen = True
            return
        self.unwatch(request.request_id)
        leaving.on_gone(kind)

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
        name, request.trace_headers = without_name(core_request.trace_headers)
        residence = residence_from(core_request, name)
        settle_in(request, residence)
        self.port.load.received(request)
        if residence.origin is not None and residence.origin not in self._origins:
            self._origins.add(residence.origin)
            self.thread.post(self.llumlet.meet_origin, residence.origin)
        if core_request.lora_request is not None:
            self.thread.post(self.llumlet.learn_adapter, core_request.lora_request)

    def on_abort(self, request_ids: list[str]) -> None:
        self.note_aborted(request_ids)
        self.thread.post(self.llumlet.forward_aborts, list(request_ids))

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
        self.thread.post(self.llumlet.relay_outputs, client_index, outputs)
        return True

    # Any thread

    def note_aborted(self, request_ids: list[str]) -> None:
        """Notes requests that are about to be ended from outside: should they vanish, they were aborted, not
        finished."""
        self._aborted.extend(request_ids)

    def audit_when_idle(self) -> None:
        """A migration has ended: account for the blocks the next time that the engine has nothing to do."""
        self._audit_due = True

    def call(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run `function` on the loop, before its next step; await the result on the llumlet's event loop."""
        return self._call(function, args, _at_once)

    def call_behind_outputs(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Does what `call` does, but the result comes behind the outputs of all steps before: they have been posted to
        the llumlet.

        Outputs name a request, not which of its lives here they are of.
        """
        return self._call(function, args, self._queue)

    def call_for_blocks(
        self, function: Callable[..., T], *args: Any, behind_outputs: bool = False
    ) -> asyncio.Future[T]:
        """Does what `call` does, for what takes blocks out of the pool to be written by others than the model.

        With several batches in flight vLLM gives the blocks of a request back while a step still writes them: whoever
        gets them next through the model writes them behind that step. Movers do not wait for the model, so the result
        comes when all steps that were in flight as the blocks were taken have been processed, and one more where a KV
        connector is to let go of them. Later ones know of no former owner. `behind_outputs` as in
        `call_behind_outputs`.
        """
        return self._call(function, args, functools.partial(self._fence, self._queue if behind_outputs else _at_once))

    def _fence(self, deliver: Callable[[Callable[[], None]], None], answer: Callable[[], None]) -> None:
        fence = _Fence(functools.partial(deliver, answer), self.port.connectors.quiet_from)
        if self._is_passed(fence):
            fence.answer()
        else:
            self._fences.append(fence)

    def _pass_fences(self) -> None:
        while self._fences and self._is_passed(self._fences[0]):
            self._fences.popleft().answer()

    def _is_passed(self, fence: _Fence) -> bool:
        """Batches leave the queue in order, and have been processed when they have."""
        if fence.batches is None and self.port.scheduler.current_step >= fence.step:
            fence.batches = list(self._in_flight())
        in_flight = {id(batch) for batch in self._in_flight()}
        return fence.batches is not None and in_flight.isdisjoint(map(id, fence.batches))

    def _queue(self, answer: Callable[[], None]) -> None:
        """Have the output thread answer, behind the outputs that are on their way."""
        self._behind_outputs.append(answer)
        self._outputs.append((NO_CLIENT, EngineCoreOutputs()))

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
            # Before anybody who asks can know that it was done.
            self.port.load.blocks_changed()
            self.port.publish_cache_events()
            deliver(answer)

        self._commands.append(run)
        self.kick()
        return asyncio.wrap_future(result)

    async def warm_up(self) -> None:
        """Run an idle engine a few steps, one at a time, until it has something to do. Llumlet thread.

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
