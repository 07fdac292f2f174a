# SPDX-License-Identifier: Apache-2.0
"""Placement by the scheduler, or in turn over the instances it has named while no scheduler answers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Literal, Protocol

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from llumlet.process.addresses import Address
from llumlet.protocol.infer_type import InferType
from llumsched.contract import (
    MOST_EXCLUDED,
    Attained,
    Attaining,
    Avoided,
    Complaining,
    HostPort,
    LLMInstance,
    Report,
    SchedulingRequest,
)
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.config import Config
from llumsched.gateway.errors import NoInstance, Overloaded, UnknownModel
from llumsched.gateway.objectives import Predicted, Tally
from llumsched.gateway.outliers import Ejection
from llumsched.gateway.placement import Placed, Placement, RoundRobin
from llumsched.gateway.scheduler_client import (
    ModelAway,
    NoEndpoint,
    NotInTime,
    NotScheduled,
    SchedulerAnswer,
    SchedulerAway,
    SchedulerWarming,
)
from llumsched.gateway.waiting import Queues, Waiting
from llumsched.model_memory import AWAY_RETRY_S
from llumsched.request import Request

_log = logging.getLogger(__name__)
COMPLAINT_TTL_S = 15.0
"""Seconds after which a scheduler forgets a gateway's complaints."""
_MOST_WHY_CHARACTERS = 500
_PREFILL_REPORT_S = 0.02
"""Time for which reports of first tokens are collected."""


class Scheduler(Protocol):
    """The interface used of `scheduler_client.SchedulerClient`, documented there."""

    async def schedule(self, request: SchedulingRequest) -> SchedulerAnswer: ...

    async def instances(self) -> list[Address]: ...

    async def refusal(self) -> str | None: ...

    def release(self, placed: SchedulerAnswer) -> None: ...

    def report(self, scheduler: Address, reports: Iterable[Report]) -> None: ...

    def tell(self, path: str, newest: Complaining | Attaining) -> None: ...

    async def close(self) -> None: ...


class Scheduled(Placement):
    def __init__(
        self, config: Config, backends: Backends, client: Scheduler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._config = config
        self._backends = backends
        self._client = client
        self._fallback = RoundRobin(backends)
        self._interval_s = config.wait_scheduling_retry_interval_s
        self._queues = Queues(self._ask_for, self._give_back, self._interval_s, clock)
        self.gateway_id = uuid.uuid4().hex
        self._begun: dict[str, tuple[Address, Report]] = {}
        """Reports that go soon, by request."""
        self._is_told = False
        """True once it was logged that late requests are not refused."""
        self._block_sizes: dict[str, int] = {}
        """The block sizes that the scheduler wants named, by model."""

    def block_size(self, model: str) -> int:
        return self._block_sizes.get(model, 0)

    async def place(
        self, asked: Request, excluded: Collection[Backend] = (), shunned: Collection[Backend] = (), key: str = ""
    ) -> Placed:
        waiting = self._waiting(asked, excluded, shunned, key)
        if not self._queues.holds_up(waiting):
            try:
                return await self._ask_for(waiting)
            except NoEndpoint as reason:
                waiting.reason = reason
        if self.num_waiting >= self._config.max_queue_size and not self._queues.make_room(waiting):
            raise Overloaded("Too many requests wait for an instance.", retry_after_s=1)
        try:
            return await self._queues.wait(waiting)
        except NotInTime as reason:
            longest_s = self._queues.longest_wait_s(asked.model)
            raise Overloaded(f"The request's objectives cannot be met now: {reason}", retry_after_s=longest_s) from None
        except NoEndpoint as reason:
            retry_s = AWAY_RETRY_S if isinstance(reason, ModelAway) else self._interval_s
            raise NoInstance(f"No instance takes requests now: {reason}", retry_after_s=retry_s) from None

    @property
    def num_waiting(self) -> int:
        return len(self._queues)

    def _waiting(
        self, asked: Request, excluded: Collection[Backend], shunned: Collection[Backend], key: str
    ) -> Waiting:
        now_s, config = self._clock(), self._config
        waiting = Waiting(asked, excluded, shunned, now_s, now_s + config.wait_scheduling_timeout_s, key)
        if asked.has_objectives:
            in_time_s = waiting.deadline_s
            waiting.is_shed = config.shed_priority is not None and asked.priority >= config.shed_priority
            waiting.in_time_until_s = in_time_s if waiting.is_shed else max(in_time_s, now_s + config.late_wait_s)
        return waiting

    async def _ask_for(self, waiting: Waiting) -> Placed:
        now_s, asked = self._clock(), waiting.asked
        asked = replace(
            asked,
            waited_ms=asked.waited_ms + (now_s - waiting.since_s) * 1e3,
            may_wait=asked.has_objectives and (waiting.is_shed or now_s < waiting.in_time_until_s),
        )
        return await self._place(asked, waiting.excluded, waiting.shunned, waiting.since_s)

    async def _place(
        self, asked: Request, excluded: Collection[Backend], shunned: Collection[Backend], started_s: float
    ) -> Placed:
        """Chooses an instance by the scheduler or without it. Raises NoEndpoint, UnknownModel, NoInstance."""
        named = {*excluded, *shunned}
        try:
            placed = await self._scheduled(asked, named, started_s)
            if placed.backend not in excluded and self._backends.avoids(placed.backend):
                # The scheduler has not heard yet, or has nobody else.
                self.release(placed, completed=False)
                placed = await self._scheduled(asked, {*named, *self._backends.avoided()}, started_s)
        except (SchedulerAway, NotScheduled):
            return await self._without_scheduler(asked, excluded, shunned)
        except SchedulerWarming as warming:
            if not self._backends.any_in_use(asked.model):
                raise NoEndpoint(str(warming)) from None
            return await self._without_scheduler(asked, excluded, shunned)
        except UnknownModel:
            if self._backends.knows(asked.model):
                raise ModelAway(f"no instance serves `{asked.model}`") from None
            raise UnknownModel(f"The model `{asked.model}` does not exist.") from None
        if placed.backend not in excluded:
            return placed
        self.release(placed, completed=False)
        return await self._without_scheduler(asked, excluded, shunned)

    async def _scheduled(self, asked: Request, excluded: Collection[Backend], started_s: float) -> Placed:
        """Asks the scheduler for an instance outside of `excluded`, if it knows one."""
        answer = await self._client.schedule(
            SchedulingRequest(
                **asdict(asked),
                gateway_id=self.gateway_id,
                excluded_endpoints=[str(backend.address) for backend in islice(excluded, MOST_EXCLUDED)],
            )
        )
        return self._placed(asked, answer, self._clock() - started_s)

    async def _without_scheduler(
        self, asked: Request, excluded: Collection[Backend], shunned: Collection[Backend]
    ) -> Placed:
        """Chooses an instance in turn. Raises NoEndpoint while none is known, as the scheduler may answer in time."""
        try:
            placed = await self._fallback.place(asked, excluded, shunned)
        except NoInstance as reason:
            if len(self._backends):
                raise
            raise NoEndpoint(f"no scheduler answers, and no instance is known yet: {reason}") from None
        return Placed(asked, placed.backend, is_fallback=True)

    def _placed(self, asked: Request, answer: SchedulerAnswer, took_s: float) -> Placed:
        result = answer.result
        chosen = next((instance for instance in result if instance.infer_type == InferType.NEUTRAL), result[0])
        if asked.has_objectives and chosen.refuses_late is UNSET:
            self._warn_of_lateness()
        backend = self._backends.at(chosen.endpoint.address)
        if asked.model:
            backend.learn(asked.model)
            self._backends.names.served(asked.model)
        wanted = chosen.prompt_block_size
        self._block_sizes[asked.model] = 0 if isinstance(wanted, UnsetType) else wanted
        rank = None if isinstance(chosen.dp_rank_local, UnsetType) else chosen.dp_rank_local
        return Placed(asked, backend, answer, waited_s=took_s, predicted=_predicted(result), dp_rank=rank)

    def _warn_of_lateness(self) -> None:
        """Warns once if the settings for late requests have no effect with the scheduler's policy."""
        if self._config.lateness and not self._is_told:
            self._is_told = True
            fault = "%s has no effect: the scheduler's policy does not refuse late requests; the policy slo does"
            _log.warning(fault, self._config.lateness)

    def release(self, placed: Placed, *, completed: bool) -> None:
        """Releases what the engine's status does not show: in full mode only requests that it did not take."""
        if placed.answer is not None and (not completed or not self._config.full_mode):
            self._begun.pop(placed.asked.id, None)
            self._client.release(placed.answer)

    def _give_back(self, placed: Placed) -> None:
        self.release(placed, completed=False)

    def begun(self, placed: Placed) -> None:
        """Reports soon that a prompt has been computed."""
        if self._config.full_mode or placed.answer is None:
            return
        if not self._begun:
            asyncio.get_running_loop().call_later(_PREFILL_REPORT_S, self._report_begun)
        report = self._report(placed.asked, placed.answer, placed.asked.prompt_num_tokens, "prefill_done")
        self._begun[placed.asked.id] = (placed.answer.scheduler, report)

    def report_running(self, running: Iterable[tuple[Placed, int]]) -> None:
        """Reports the requests that run, and how many tokens each has, prompt and output."""
        self._send(
            [
                (placed.answer.scheduler, self._report(placed.asked, placed.answer, num_tokens, "state_update"))
                for placed, num_tokens in running
                if placed.answer is not None
            ]
        )

    def _report(
        self, asked: Request, answer: SchedulerAnswer, num_tokens: int, kind: Literal["state_update", "prefill_done"]
    ) -> Report:
        instance = answer.result[0]
        return Report(
            asked.id, instance.id, kind, asked.model, InferType(instance.infer_type), self.gateway_id, num_tokens
        )

    def _report_begun(self) -> None:
        begun, self._begun = self._begun, {}
        self._send(begun.values())

    def _send(self, reports: Iterable[tuple[Address, Report]]) -> None:
        by_scheduler = defaultdict(list)
        for scheduler, report in reports:
            by_scheduler[scheduler].append(report)
        for scheduler, own in by_scheduler.items():
            self._client.report(scheduler, own)

    def attained(self, by_model: Mapping[str, Tally]) -> None:
        models = [Attained(model, tally.num_met, tally.num_missed) for model, tally in by_model.items()]
        self._client.tell("/attainment", Attaining(self.gateway_id, models))

    def complain(self, avoided: Mapping[Backend, Ejection]) -> None:
        now_s = self._clock()
        instances = [
            Avoided(
                HostPort(backend.address.host, backend.address.port),
                ejection.cause,
                ejection.why[:_MOST_WHY_CHARACTERS],
                round(now_s - ejection.since_s, 3),
            )
            for backend, ejection in avoided.items()
        ]
        self._client.tell("/complaints", Complaining(self.gateway_id, instances, COMPLAINT_TTL_S, socket.gethostname()))

    async def learn(self) -> None:
        for address in await self._client.instances():
            self._backends.at(address)

    async def refusal(self) -> str:
        """The scheduler's refusal, if it has one; otherwise a known instance must be healthy."""
        said = await self._client.refusal()
        if said is None or (not said and len(self._backends)):
            return await self._fallback.refusal()
        return said

    async def close(self) -> None:
        await self._queues.close()
        await self._client.close()


def _predicted(result: Iterable[LLMInstance]) -> Predicted:
    """The prediction for a request: its first token where its prompt is computed, the others at the last place."""
    ttft_ms = [one.predicted_ttft for one in result if not isinstance(one.predicted_ttft, UnsetType)]
    tpot_ms = [one.predicted_tpot for one in result if not isinstance(one.predicted_tpot, UnsetType)]
    cached = [one.cached_tokens for one in result if not isinstance(one.cached_tokens, UnsetType)]
    return Predicted(ttft_ms[0] if ttft_ms else 0.0, tpot_ms[-1] if tpot_ms else 0.0, cached[0] if cached else 0)
