# SPDX-License-Identifier: Apache-2.0
"""The production scheduler side, put together on a virtual clock. Everything that this package needs of it is here.

Production code are the view, the account, the dispatcher with its policies, complaints and table; the rescheduler with
its planner, history and executor; the gateway's placement with its queue and its fallback if a scheduler has no
instance. Only HTTP and gRPC between them are left out: `cluster.run` and `cluster.member` model the time of messages.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.addresses import Address
from llumlet.process.tasks import cancel
from llumsched.cluster.providers.account import Account
from llumsched.cluster.view import View
from llumsched.contract import Attaining, Complaining, HostPort, LLMInstance, Report, SchedulingRequest
from llumsched.dispatch.dispatcher import Dispatcher, Knowledge, NotPlaced, NotPlacedKind
from llumsched.foresight.moved_on import Forecast
from llumsched.gateway.backends import Backends
from llumsched.gateway.config import Config as GatewayConfig
from llumsched.gateway.errors import GatewayError, UnknownModel
from llumsched.gateway.outliers import Limits
from llumsched.gateway.placement import Placed
from llumsched.gateway.scheduled import Scheduled
from llumsched.gateway.scheduler_client import NoEndpoint, NotInTime, NotScheduled, SchedulerAnswer, SchedulerWarming
from llumsched.policy.document import Mode, Overrides, load_policy
from llumsched.policy.metrics import BUILT_IN_CONSTANTS
from llumsched.request import Request
from llumsched.rescheduling.executing.executor import Connect
from llumsched.rescheduling.rescheduler import SHARE, Rescheduler
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsim.clock import VirtualLoop
from llumsim.cluster.truth import Foresight, Hindsight

_SCHEDULER: Final = Address("scheduler", 1)
_EXPIRE_S: Final = 0.5
"""Pause between two looks for expired accounts, as in `llumsched.scheduler.process`."""


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    policy: str = "load-balance"
    """The policy of dispatch: a built-in one's name, or the path of a `.yaml` file."""
    top_k: int | None = None
    """Replaces the policy's `top_k`."""
    priority_headroom: float | None = None
    """Headroom for urgent requests in dispatch and rescheduling; None takes the rescheduler's setting."""
    num_schedulers: int = 1
    """Schedulers, which get requests in turn. Each knows the statuses and its own dispatches; the first reschedules."""
    rescheduling: ReschedulingConfig | None = field(default_factory=ReschedulingConfig)
    account: bool = True
    account_staleness_s: float = 10.0
    forward_status: bool = False
    """Forward statuses to the present for dispatch. The rescheduler has its own setting."""
    has_hindsight: bool = False
    """Compare each decision with one on statuses of that moment. This changes nothing but the number of statuses."""
    foresight_s: float | None = None
    """Seconds between two comparisons of the first scheduler's view with the truth; None disables them."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    pass_s: float = 0.0003
    """Duration of a rescheduling pass, …"""
    pass_s_per_instance: float = 6.5e-6
    """… and its increase per instance (`benchmarks/reschedule_pass.py`). No time passes here: only the pause after it
    depends on them."""

    @property
    def looks_ahead(self) -> bool:
        """True if something moves statuses on to now."""
        reschedules_ahead = self.rescheduling is not None and self.rescheduling.forward_status
        return self.forward_status or reschedules_ahead or self.foresight_s is not None

    @property
    def headroom(self) -> float:
        """The headroom of both dispatch and rescheduling."""
        said = self.priority_headroom
        if said is None and self.rescheduling is not None:
            said = self.rescheduling.constants(of_own_file=True).get("priority_headroom")
        return BUILT_IN_CONSTANTS["priority_headroom"] if said is None else said


class Control:
    """Made and used on the loop; ended with `close`. `random` of the standard library is what production draws from:
    seed it before."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: ControlConfig,
        num_instances: int,
        connect: Connect,
        statuses: Callable[[], Iterable[InstanceStatus]],
    ) -> None:
        """`statuses`: of all instances, as they are now; asked for with hindsight only."""
        clock = loop.time
        self.view = View(clock, wall_clock=clock)
        constants = {"priority_headroom": config.headroom}
        overrides = Overrides(top_k=config.top_k, constants=constants, optional=frozenset(constants))
        policy = load_policy(config.policy, Mode.FULL, overrides)
        staleness_s = config.account_staleness_s if config.account else 0.0
        self._account = Account(clock, staleness_s, is_blind=lambda: False)
        self.dispatcher = Dispatcher(
            self.view,
            policy,
            self._account,
            clock,
            random.Random(random.random()),
            Knowledge(forecast=Forecast(clock) if config.looks_ahead else None, forward=config.forward_status),
        )
        self.hindsight: Hindsight | None = None
        if config.has_hindsight:
            self.hindsight = Hindsight(policy, clock, config.account_staleness_s, statuses)
        self.foresight: Foresight | None = None
        if config.foresight_s is not None:
            self.foresight = Foresight(loop, config.foresight_s, self.dispatcher.table, statuses)
        self.rescheduler: Rescheduler | None = None
        self._tasks = [loop.create_task(self._expire())]
        if config.rescheduling is not None:
            pass_s = config.pass_s + config.pass_s_per_instance * num_instances
            debounce_ms = max(config.rescheduling.debounce_ms, 1000 * SHARE * pass_s)
            self.rescheduler = Rescheduler(
                self.view,
                replace(config.rescheduling, debounce_ms=debounce_ms, priority_headroom=config.headroom),
                table=self.dispatcher.table,
                clock=clock,
                connect=connect,
            )
            self._tasks.append(loop.create_task(self.rescheduler.run()))
        self._session = aiohttp.ClientSession()  # required, never used
        self._backends = Backends((), self._session, Limits(config.gateway.max_ejected), {})
        self.placement = Scheduled(config.gateway, self._backends, _InProcess(self.dispatcher, self.hindsight), clock)

    async def close(self) -> None:
        await cancel(*self._tasks)
        if self.rescheduler is not None:
            await self.rescheduler.close()
        self.dispatcher.close()
        await self._session.close()

    async def place(self, request: Request, avoid: Collection[Address]) -> Placed | None:
        """Place a request; None if no instance takes it within the gateway's wait. `avoid`: servers that lost it."""
        excluded = [self._backends.at(address) for address in avoid]
        try:
            return await self.placement.place(request, excluded)
        except GatewayError:
            return None

    def lost(self, placed: Placed) -> None:
        """Report that a request did not reach its place."""
        self.placement.release(placed, completed=False)

    def appeared(self, metadata: InstanceMetadata) -> None:
        self.view.put_metadata(metadata)
        if self.hindsight is not None:
            self.hindsight.appeared(metadata)

    def told(self, status: InstanceStatus) -> None:
        self.view.put_status(status)

    def left(self, instance_id: str, *, in_order: bool) -> None:
        if in_order:
            self.view.remove(instance_id)
        else:
            self.view.lose(instance_id)
        if self.hindsight is not None:
            self.hindsight.left(instance_id)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self._account.expire()


class Controls:
    """The schedulers, each with its gateway."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: ControlConfig,
        num_instances: int,
        connect: Connect,
        statuses: Callable[[], Iterable[InstanceStatus]],
    ) -> None:
        other = replace(config, rescheduling=None, has_hindsight=False, foresight_s=None)
        self._all = [
            Control(loop, other if number else config, num_instances, connect, statuses)
            for number in range(config.num_schedulers)
        ]
        self.first = self._all[0]
        self._turns = itertools.cycle(self._all)

    async def close(self) -> None:
        for one in self._all:
            await one.close()

    async def place(self, request: Request, avoid: Collection[Address]) -> Placed | None:
        return await next(self._turns).place(request, avoid)

    def lost(self, placed: Placed) -> None:
        for one in self._all:  # the others take no notice
            one.lost(placed)

    def appeared(self, metadata: InstanceMetadata) -> None:
        for one in self._all:
            one.appeared(metadata)

    def told(self, status: InstanceStatus) -> None:
        for one in self._all:
            one.told(status)

    def left(self, instance_id: str, *, in_order: bool) -> None:
        for one in self._all:
            one.left(instance_id, in_order=in_order)


class _InProcess:
    """`gateway.scheduled.Scheduler`, without HTTP: what `scheduler.api` does with a request."""

    def __init__(self, dispatcher: Dispatcher, hindsight: Hindsight | None) -> None:
        self._dispatcher, self._hindsight = dispatcher, hindsight

    async def schedule(self, request: SchedulingRequest) -> SchedulerAnswer:
        ids_at, excluded = self._dispatcher.complaints.ids_at, request.excluded_endpoints or ()
        tried = frozenset(name for text in excluded for name in ids_at(Address.parse(text)))
        try:
            (placed,) = self._dispatcher.schedule(request, gateway_id=request.gateway_id, tried=tried)
        except NotPlaced as error:
            raise _REFUSALS.get(error.kind, NotScheduled)(str(error)) from None
        metadata = placed.instance.metadata
        if self._hindsight is not None:
            self._hindsight.placed(request, tried, metadata.instance_id)
        endpoint = HostPort(metadata.ip, metadata.api_server_port)
        chosen = LLMInstance(metadata.instance_id, endpoint, request.model, placed.infer_type)
        return SchedulerAnswer(_SCHEDULER, request, [chosen])

    def release(self, placed: SchedulerAnswer) -> None:
        request = placed.request
        ids = {instance.id for instance in placed.result}
        self._dispatcher.release(request.id, ids, request.gateway_id)
        if self._hindsight is not None:
            self._hindsight.released(request.id, ids)

    async def instances(self) -> list[Address]:
        return [instance.api_server for instance in self._dispatcher.view.values()]

    async def refusal(self) -> str | None:
        return self._dispatcher.refusal()

    def report(self, scheduler: Address, reports: Iterable[Report]) -> None:
        """Lite mode only."""

    def tell(self, path: str, newest: Complaining | Attaining) -> None:
        """Ignored: instances here answer or are gone."""

    async def close(self) -> None:
        return


_REFUSALS: Final[dict[NotPlacedKind, Callable[[str], Exception]]] = {
    NotPlacedKind.ENDPOINT_NOT_FOUND: UnknownModel,
    NotPlacedKind.NO_AVAILABLE_ENDPOINT: NoEndpoint,
    NotPlacedKind.NO_ENDPOINT_IN_TIME: NotInTime,
    NotPlacedKind.NO_MATCH_INFER_TYPE: NoEndpoint,
    NotPlacedKind.MODEL_AWAY: NoEndpoint,
    NotPlacedKind.WARMING: SchedulerWarming,
}
"""Refusals as the scheduler's HTTP says them to its client."""
