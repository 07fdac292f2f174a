# SPDX-License-Identifier: Apache-2.0
"""A run: members, clients and what happens to them, around the production control plane.

arrival -> gateway, scheduler (control) -> hop -> member's engine -> tokens -> record
                                                    |  crash: the client goes on elsewhere, from what it has got
"""

from __future__ import annotations

import asyncio
import functools
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TextIO

from llumlet.contract.types import InstanceStatus
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.protocol.move.limits import Limits
from llumsched.gateway.placement import Placed
from llumsched.request import Request
from llumsched.scaling.scaling_config import ScalingConfig
from llumsim import PS
from llumsim.clock import VirtualLoop
from llumsim.cluster.control import ControlConfig, Controls
from llumsim.cluster.member import Cadence, Member
from llumsim.cluster.metrics import Metrics, RequestRecord, Slo, Summary, sampled
from llumsim.cluster.scaling import Fleet, ScalingActor
from llumsim.cluster.workload import Arrival
from llumsim.engine.instance import ModelledInstance
from llumsim.engine.requests import EngineRequest
from llumsim.engine.step_model import Hardware
from llumsim.moves.incoming import Arrivals, copy_of
from llumsim.moves.links import Network
from llumsim.moves.llumlets import Connection, Llumlet
from llumsim.moves.outgoing import Departures, MoveWatcher, OutgoingMove

_ASKING: Final = "neutral_preemption"
"""The policy with which engines ask before they preempt."""
_MOST_RESTARTS: Final = 2
"""Retries of a request, like the gateway's `retry_max_count`."""
_LOOK_PS: Final = PS // 10
"""Interval of checks whether a drained instance is empty."""
_COLLECT: Final = (50_000, 20, 10)
"""Thresholds of Python's collector: the default ones would traverse a large cluster's objects over and over."""


class What(StrEnum):
    FAIL = "fail"
    """The instance dies without a word."""
    STOP = "stop"
    """The instance takes nothing new, its requests move away, and it ends when its engine is empty. The API server, of
    which nothing is counted here, lives on for the streams that it holds."""
    START = "start"
    """An instance is ordered and appears after its cold start."""


@dataclass(frozen=True, slots=True)
class Happening:
    at_s: float
    what: What
    number: int
    """The instance's number."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The cluster of a run. `groups`: model ("" for any), hardware and number of instances."""

    groups: Sequence[tuple[str, Hardware, int]]
    control: ControlConfig = field(default_factory=ControlConfig)
    cadence: Cadence = field(default_factory=Cadence)
    happenings: Sequence[Happening] = ()
    scaling: ScalingConfig | None = None
    """Settings of the scaler, which stops and starts instances of the groups; all are there at first. None keeps them.
    """
    slo: Slo = field(default_factory=Slo)
    """Objectives for `goodput` and `slo_attainment`."""
    tells_slo: bool = False
    """Let requests carry these objectives."""
    max_moves: int = 4
    """Moves in each direction of one instance at a time, …"""
    max_moves_share: float = 0.25
    """… and the share of its KV cache that their tokens may fill; a longer request moves alone."""
    notice_s: float = 1.0
    """Time until the store notices that an instance is gone. Clients' connections break at once."""
    sample_s: float = 1.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class _Client:
    arrival: Arrival
    id: str
    request: EngineRequest | None = None
    member: ModelledInstance | None = None
    origin: Member | None = None
    """The instance whose API server holds the stream, wherever the request runs."""
    instances: list[str] = field(default_factory=list)
    num_moves: int = 0
    num_preemptions_before_move: int = 0
    num_restarts: int = 0
    avoid: list[Address] = field(default_factory=list)

    @property
    def num_preemptions_after_move(self) -> int:
        if self.request is None or not self.num_moves:
            return 0
        return self.request.num_preemptions - self.num_preemptions_before_move


def run(
    config: ClusterConfig,
    arrivals: Sequence[Arrival],
    records: TextIO | None = None,
    progress: Callable[[float, int], None] = lambda at_s, num_ended: None,
) -> tuple[Summary, Metrics]:
    """Play a load until its last request ends. The same arguments give the same result. `progress` is called once a
    virtual second with the time and the number of ended requests."""
    random.seed(config.seed)
    loop = VirtualLoop()
    thresholds = gc.get_threshold()
    gc.set_threshold(*_COLLECT)
    try:
        return loop.run_until_complete(_Run(loop, config, arrivals, records, progress).run())
    except BaseException:
        loop.abandon()
        raise
    finally:
        gc.set_threshold(*thresholds)
        loop.close()


class _Run:
    def __init__(
        self,
        loop: VirtualLoop,
        config: ClusterConfig,
        arrivals: Sequence[Arrival],
        records: TextIO | None,
        progress: Callable[[float, int], None],
    ) -> None:
        self._loop = loop
        self._config = config
        self._arrivals = arrivals
        self._progress = progress
        self._hop_ps = round(config.cadence.hop_s * PS)
        self._hop_s = config.cadence.hop_s
        self.metrics = Metrics(config.slo, records)
        self._objectives = (config.slo.ttft_s * 1e3, config.slo.tpot_s * 1e3) if config.tells_slo else (0.0, 0.0)
        self._network = Network(loop)
        self._kinds = [(model, hardware) for model, hardware, number in config.groups for _ in range(number)]
        self._members: dict[int, Member] = {}
        self._lives: dict[int, int] = {}
        self._by_address: dict[Address, Member] = {}
        self._llumlets: dict[Address, Llumlet] = {}
        self._by_id: dict[str, Llumlet] = {}
        self._clients: dict[str, _Client] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_ended = 0
        self._instance_ps = 0
        self._over = asyncio.Event()
        self._next = 0

    async def run(self) -> tuple[Summary, Metrics]:
        loop, config = self._loop, self._config
        self._control = Controls(loop, config.control, len(self._kinds), self._connect, self._statuses)
        try:
            for number in range(len(self._kinds)):
                self._start(number)
            self._scale()
            for happening in config.happenings:
                loop.at(round(happening.at_s * PS), functools.partial(self._happen, happening))
            loop.at(round(config.sample_s * PS), self._sample)
            self._await_next()
            if self._arrivals:
                await self._over.wait()
        finally:
            await self._control.close()
        if self._control.first.hindsight is not None:
            self.metrics.regrets = self._control.first.hindsight.regrets
        if self._control.first.foresight is not None:
            self.metrics.misses = self._control.first.foresight.misses
        virtual_s = loop.time()
        for member in list(self._members.values()):
            self._end(member)
        last_s = self._arrivals[-1].at_s if self._arrivals else 0.0
        summary = self.metrics.summary(last_arrival_s=last_s, instance_s=self._instance_ps / PS, virtual_s=virtual_s)
        return summary, self.metrics

    def _scale(self) -> None:
        scaling = self._config.scaling
        if scaling is None or scaling.bounds is None:
            return
        pools: dict[str, list[int]] = {}
        for number, (model, hardware) in enumerate(self._kinds):
            pools.setdefault(model or hardware.name, []).append(number)
        fleet = Fleet(
            pools,
            self._members.__contains__,
            number_of=lambda instance_id: next(n for n, one in self._members.items() if one.id == instance_id),
            start=lambda number: self._happen(Happening(0.0, What.START, number), self._loop.now_ps),
            stop=lambda number: self._happen(Happening(0.0, What.STOP, number), self._loop.now_ps),
        )
        ScalingActor(self._loop, scaling, scaling.bounds, self._control.first.dispatcher.table, fleet)

    # Clients

    def _await_next(self) -> None:
        if self._next < len(self._arrivals):
            # A hop later it is the scheduler's.
            self._loop.at(round(self._arrivals[self._next].at_s * PS) + self._hop_ps, self._arrive)

    def _arrive(self, now_ps: int) -> None:
        arrival = self._arrivals[self._next]
        client = _Client(arrival, f"r{self._next}")
        self._next += 1
        self._await_next()
        self._spawn(client)

    def _spawn(self, client: _Client) -> None:
        task = self._loop.create_task(self._place(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _place(self, client: _Client) -> None:
        arrival, request = client.arrival, client.request
        num_tokens = arrival.num_prompt if request is None else request.num_tokens
        name = f"{client.id}-r{client.num_restarts}" if client.num_restarts else client.id
        waited_ms = (self._loop.time() - arrival.at_s) * 1e3
        asked = Request(name, arrival.model, num_tokens, arrival.priority, *self._objectives, waited_ms)
        placed = await self._control.place(asked, client.avoid)
        if placed is None:
            self._ended(client, "refused" if request is None else "lost")
            return
        # To the gateway, from there to the instance, and through its API server.
        there = self._by_address.get(placed.backend.address)
        delay_ps = 2 * self._hop_ps + (round(there.hardware.request_s * PS) if there is not None else 0)
        self._loop.at(self._loop.now_ps + delay_ps, lambda now_ps: self._deliver(client, placed, name, now_ps))

    def _deliver(self, client: _Client, placed: Placed, name: str, now_ps: int) -> None:
        member = self._by_address.get(placed.backend.address)
        if member is None or not member.is_alive:
            self._control.lost(placed)
            self._restart(client, placed.backend.address)
            return
        arrival = client.arrival
        if client.request is None:
            content = arrival.content(member.hardware.engine.block_size)
            request = EngineRequest(
                name, arrival.num_prompt, arrival.num_output, arrival.priority, content, round(arrival.at_s * PS)
            )
        else:
            request = copy_of(client.request)
            request.id = name
        client.request, client.member, client.origin = request, member, member
        client.instances.append(member.id)
        self._clients[name] = client
        member.add(request, now_ps)

    def _restart(self, client: _Client, lost_at: Address, _: int = 0) -> None:
        client.num_restarts += 1
        client.avoid.append(lost_at)
        if client.num_restarts > _MOST_RESTARTS:
            self._ended(client, "lost")
        else:
            self._spawn(client)

    def finished(self, request: EngineRequest, now_ps: int) -> None:
        client = self._clients.pop(request.id, None)
        if client is not None:  # else its last step had begun when its origin died
            self._ended(client, "finished", now_ps)

    def _ended(self, client: _Client, outcome: str, now_ps: int = 0) -> None:
        arrival, request = client.arrival, client.request
        ttft_s = tpot_s = e2e_s = None
        if request is not None and outcome == "finished":
            first_ps = request.first_token_ps or now_ps
            back_s = self._hop_s + (client.origin.hardware.answer_s if client.origin is not None else 0.0)
            ttft_s = first_ps / PS - arrival.at_s + back_s
            e2e_s = now_ps / PS - arrival.at_s + back_s
            if request.max_tokens > 1:
                tpot_s = (now_ps - first_ps) / PS / (request.max_tokens - 1)
        record = RequestRecord(
            client.id, arrival.at_s, arrival.model, arrival.priority, arrival.num_prompt,
            request.num_output if request is not None else 0, outcome, client.instances, ttft_s, tpot_s, e2e_s,
            client.num_moves, client.num_restarts,
        )  # fmt: skip
        if request is not None:
            record = replace(
                record, num_preemptions=request.num_preemptions, preemption_loss_s=request.preemption_loss_ps / PS,
                recomputed_tokens=request.num_recomputed, cached_tokens=request.num_hits,
                num_preemptions_after_move=client.num_preemptions_after_move,
            )  # fmt: skip
        self.metrics.ended(record)
        self._num_ended += 1
        if self._num_ended == len(self._arrivals):
            self._over.set()

    # Members

    def _start(self, number: int, _: int = 0) -> None:
        model, hardware = self._kinds[number]
        life = self._lives[number] = self._lives.get(number, -1) + 1
        watch = _Watch(self)
        member = Member(
            self._loop, number, hardware, self._config.cadence, watch, self._control.told,
            model=model, max_moves=self._config.max_moves, life=life,
        )  # fmt: skip
        rescheduling = self._config.control.rescheduling
        member.engine.shortage.asks = rescheduling is not None and _ASKING in rescheduling.policies
        limits = Limits(max_requests=self._config.max_moves, max_kv_ratio=self._config.max_moves_share)
        departures = Departures(member, self._hop_ps, self._owner, limits)
        arrivals = Arrivals(member, self._network, self._hop_ps, self._owned, limits)
        watch.departures = departures
        llumlet = Llumlet(member, departures, arrivals, self._move_ended)
        self._members[number] = member
        self._by_address[member.api_server] = member
        self._llumlets[member.llumlet] = self._by_id[member.id] = llumlet
        self._control.appeared(member.metadata)

    def _end(self, member: Member) -> None:
        member.end()
        self._instance_ps += self._loop.now_ps - member.began_ps
        self.metrics.num_statuses += member.num_statuses
        del self._members[member.number]
        del self._by_id[member.id]

    def _happen(self, happening: Happening, now_ps: int) -> None:
        member = self._members.get(happening.number)
        match happening.what:
            case What.START:
                if member is None:
                    cold_ps = round(self._kinds[happening.number][1].cold_start_s * PS)
                    self._instance_ps += cold_ps
                    self._loop.at(now_ps + cold_ps, functools.partial(self._start, happening.number))
            case What.FAIL:
                if member is not None:
                    self._fail(member, now_ps)
            case What.STOP:
                if member is not None:
                    member.is_schedulable = False
                    member.changed(now_ps)
                    self._leave_when_empty(member, now_ps)

    def _leave_when_empty(self, member: Member, now_ps: int) -> None:
        if not member.is_alive:
            return
        if member.engine.running or member.engine.waiting or member.leaving or member.coming:
            self._loop.at(now_ps + _LOOK_PS, functools.partial(self._leave_when_empty, member))
            return
        self._end(member)
        self._control.left(member.id, in_order=True)

    def _fail(self, member: Member, now_ps: int) -> None:
        member.engine.advance(now_ps)
        member.engine.settle(now_ps)
        self._end(member)
        for llumlet in self._by_id.values():
            llumlet.departures.lost(member)
            llumlet.arrivals.lost(member)
        notice_ps = round(self._config.notice_s * PS)
        self._loop.at(now_ps + notice_ps, lambda _: self._control.left(member.id, in_order=False))
        for name, client in list(self._clients.items()):
            here, request = client.member, client.request
            if here is not None and request is not None and member in (here, client.origin):
                del self._clients[name]
                if here is not member:
                    self._by_id[here.id].abort(request, now_ps)
                request.num_tokens = here.engine.num_tokens(request)
                self._loop.at(now_ps + self._hop_ps, functools.partial(self._restart, client, member.api_server))

    def _connect(self, address: Address, credentials: Credentials) -> Connection:
        return Connection(address, self._llumlets, self._by_id, self._hop_s)

    def _statuses(self) -> Iterator[InstanceStatus]:
        now_ps = self._loop.now_ps
        for member in self._members.values():
            member.engine.advance(now_ps)
            yield member.status_at(now_ps)

    # Moves

    def _owner(self, request_id: str) -> ModelledInstance | None:
        client = self._clients.get(request_id)
        return client.member if client is not None else None

    def _owned(self, request: EngineRequest, member: ModelledInstance) -> None:
        client = self._clients.get(request.id)
        if client is None:  # its origin has died meanwhile
            member.engine.remove(request)
            return
        client.request, client.member = request, member
        client.instances.append(member.id)
        if not client.num_moves:
            client.num_preemptions_before_move = request.num_preemptions
        client.num_moves += 1

    def _move_ended(self, move: OutgoingMove) -> None:
        outcome = move.machine.outcome
        if outcome is not None and outcome.reason is None:
            self.metrics.move_s.append(move.seconds)
        else:
            self.metrics.num_moves_failed += 1

    # Samples

    def _sample(self, now_ps: int) -> None:
        self.metrics.samples.append(sampled(self._members.values(), now_ps))
        self._progress(now_ps / PS, self._num_ended)
        self._loop.at(now_ps + round(self._config.sample_s * PS), self._sample)


class _Watch(MoveWatcher):
    """The watcher of one member."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def gap(self, ps: int, count: int) -> None:
        self._run.metrics.gaps.gap(ps, count)

    def gaps(self, first_ps: int, growth_ps: int, num_steps: int, count: int) -> None:
        self._run.metrics.gaps.gaps(first_ps, growth_ps, num_steps, count)

    def stalled(self, request: EngineRequest, ps: int) -> None:
        self._run.metrics.move_stalls_s.append(ps / PS)

    def finished(self, request: EngineRequest, now_ps: int) -> None:
        super().finished(request, now_ps)
        self._run.finished(request, now_ps)
