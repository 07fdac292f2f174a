# SPDX-License-Identifier: Apache-2.0
"""One instance of the simulated cluster: an engine, its place in time, and what it tells of itself.

It tells its load as production instances do (`llumlet.reporter`): with every change, one push at a time and never more
often than the link allows; tokens of running requests alone after a tenth of a second; an idle one repeats itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llumlet.types import Address, Health, InstanceMetadata, InstanceStatus
from llumsched.simulator import PS
from llumsched.simulator.blocks import Blocks, SharedBlocks, UniqueBlocks
from llumsched.simulator.clock import Action, VirtualLoop
from llumsched.simulator.engine import Engine
from llumsched.simulator.requests import EngineRequest, Watcher
from llumsched.simulator.step_model import Hardware

_RECENT_PS: Final = 10 * PS
"""How long an arrival is named in the status (`vllm_llumnix.engine.load`)."""
_PORT: Final = 1
_OK: Final = Health.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """When statuses are sent, and how long messages take. Seconds."""

    hop_s: float = 0.0005
    """One way, between any two processes."""
    push_interval_s: float = 0.005
    """Between two pushes of one instance: of a gRPC link (`llumlet.report_links`)."""
    tokens_s: float = 0.1
    """After which a change that is only tokens is told."""
    keepalive_s: float = 1.0
    late_s: float = 0.0
    """How much longer than a hop a status is on its way: the scheduler sees what was so long ago."""


class Member:
    def __init__(
        self,
        loop: VirtualLoop,
        number: int,
        hardware: Hardware,
        cadence: Cadence,
        watcher: Watcher,
        tell: Callable[[InstanceStatus], None],
        *,
        model: str,
        shares_prefixes: bool,
        max_moves: int,
        life: int = 0,
    ) -> None:
        """`tell`: the store that takes statuses. `life`: how often an instance of this number has come back."""
        self.id = f"i{number:04}"
        self.number = number
        self.hardware = hardware
        self.node = f"n{number // hardware.instances_per_node:04}"
        self.loop = loop
        self.is_alive = True
        self.is_schedulable = True
        self.leaving: dict[EngineRequest, None] = {}
        """Requests on their way out."""
        self.coming: dict[str, int] = {}
        """Tokens of those on their way in, by migration."""
        self.began_ps = loop.now_ps
        config = hardware.engine
        kind: Callable[..., Blocks] = SharedBlocks if shares_prefixes else UniqueBlocks
        blocks = kind(config.num_blocks, config.block_size, caching=config.prefix_caching)
        self.engine = Engine(config, hardware.step, blocks, watcher)
        self.metadata = _metadata(self, model, max_moves, life)
        self.llumlet = Address(self.metadata.ip, self.metadata.llumlet_port)
        self._tell = tell
        self._hop_ps = round(cadence.hop_s * PS)
        self._push_interval_ps = max(round(cadence.push_interval_s * PS), 2 * self._hop_ps)
        self._tokens_ps = round(cadence.tokens_s * PS)
        self._keepalive_ps = round(cadence.keepalive_s * PS)
        self._arrivals: deque[tuple[int, str]] = deque()
        self._wake_ps = -1
        self._pushed_ps = loop.now_ps
        self._push_waits = False
        self._told_after_ps = self._hop_ps
        self.num_statuses = 0
        """That were made, and sent."""
        self._push(loop.now_ps)
        # What was said so far is not late: it is what puts an instance into service.
        self._told_after_ps += round(cadence.late_s * PS)
        self._tick(loop.now_ps)

    def add(self, request: EngineRequest, now_ps: int) -> None:
        """A request of a client has arrived."""
        self._arrivals.append((now_ps, request.id))
        self.engine.advance(now_ps)
        self.engine.add(request, now_ps)
        self.changed(now_ps)

    def post(self, action: Action, now_ps: int) -> None:
        """Of `Engine`."""
        self.engine.advance(now_ps)
        self.engine.post(action, now_ps)
        self.changed(now_ps)

    def end(self) -> None:
        """It is gone: nothing is computed or told any more."""
        self.is_alive = False

    def changed(self, now_ps: int) -> None:
        """Its load has: it is told, now or as soon as the link allows, and the engine's next end is waited for."""
        end_ps = self.engine.end_ps
        if end_ps is not None and end_ps != self._wake_ps:
            self._wake_ps = end_ps
            self.loop.at(end_ps, self._woken)
        if self._push_waits or not self.is_alive:
            return
        due_ps = self._pushed_ps + self._push_interval_ps
        if due_ps <= now_ps:
            self._push(now_ps)
        else:
            self._push_waits = True
            self.loop.at(due_ps, self._push)

    def _woken(self, now_ps: int) -> None:
        if now_ps == self._wake_ps and self.is_alive:  # else it ends at another time by now
            self._wake_ps = -1
            self.engine.advance(now_ps)
            self.changed(now_ps)

    def _push(self, now_ps: int) -> None:
        self._push_waits = False
        if not self.is_alive:
            return
        self._pushed_ps = now_ps
        self.engine.advance(now_ps)
        status = self.status(now_ps)
        self.loop.at(now_ps + self._told_after_ps, lambda _: self._tell(status))

    def _tick(self, now_ps: int) -> None:
        if not self.is_alive:
            return
        interval_ps = self._tokens_ps if self.engine.decodes else self._keepalive_ps
        if now_ps - self._pushed_ps >= interval_ps:
            self._push(now_ps)
        self.loop.at(self._pushed_ps + interval_ps, self._tick)

    def status(self, now_ps: int) -> InstanceStatus:
        engine = self.engine
        engine.settle(now_ps)
        while self._arrivals and self._arrivals[0][0] < now_ps - _RECENT_PS:
            self._arrivals.popleft()
        self.num_statuses += 1
        prefill_tokens = unallocated = 0
        num_to_decode, to_decode_tokens = len(engine.decodes), engine.decodes.num_tokens
        for request, in_step in engine.apart():
            left = request.num_tokens - request.num_computed
            uncomputed = left + in_step
            to_decode = request.max_tokens > 1 and not request.is_moving
            num_to_decode += to_decode
            to_decode_tokens += request.num_tokens * to_decode
            if uncomputed > 1:
                unallocated += left
                prefill_tokens += uncomputed
        out_tokens = 0
        for request in self.leaving:
            num_tokens = engine.num_tokens(request)
            out_tokens += num_tokens
            if request in engine.decodes:
                num_to_decode -= 1
                to_decode_tokens -= num_tokens
        waiting = engine.waiting
        total = engine.config.num_blocks * engine.config.block_size
        return InstanceStatus(
            instance_id=self.id,
            incarnation=self.metadata.incarnation,
            schedulable=self.is_schedulable,
            timestamp_ms=now_ps // (PS // 1000),
            update_id=self.num_statuses,
            step_id=engine.num_steps,
            recent_waiting_requests=[name for _, name in self._arrivals],
            waiting_requests=[request.id for request in waiting],
            num_waiting_requests=len(waiting),
            num_running_requests=len(engine.running),
            scheduler_waiting_to_decode_requests_num=waiting.num_to_decode,
            scheduler_waiting_to_decode_tokens_num=waiting.to_decode_tokens,
            scheduler_running_to_decode_requests_num=num_to_decode,
            scheduler_running_to_decode_tokens_num=to_decode_tokens,
            num_uncomputed_tokens_scheduler_waiting_prefills=waiting.prefill_tokens,
            num_uncomputed_tokens_all_waiting_prefills=waiting.prefill_tokens,
            num_unallocated_tokens_all_waiting_requests=waiting.unallocated_tokens,
            num_uncomputed_tokens_scheduler_running_prefills=prefill_tokens,
            num_unallocated_tokens_scheduler_running_prefills=unallocated,
            num_total_gpu_tokens=total,
            num_used_gpu_tokens=total - engine.blocks.num_free * engine.config.block_size,
            num_total_blocks=engine.config.num_blocks,
            num_free_blocks=engine.blocks.num_free,
            num_migrate_in_reqs=len(self.coming),
            num_migrate_in_tokens=sum(self.coming.values()),
            num_migrate_out_reqs=len(self.leaving),
            num_migrate_out_tokens=out_tokens,
            num_preemptions=engine.num_preemptions,
            profiling_id=-1,
            health=_OK,
        )


def _metadata(member: Member, model: str, max_moves: int, life: int) -> InstanceMetadata:
    hardware, config = member.hardware, member.hardware.engine
    ip = f"10.{member.number >> 16}.{member.number >> 8 & 255}.{member.number & 255}"
    return InstanceMetadata(
        instance_id=member.id,
        instance_type="neutral",
        backend_type="simulated",
        ip=ip,
        api_server_port=_PORT,
        llumlet_port=_PORT + 1,
        node_id=member.node,
        unit_id=member.id,
        data_parallel_size=1,
        tensor_parallel_size=1,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        incarnation=f"{member.id}.{life}",
        model=model or hardware.name,
        served_models=[model or hardware.name],
        max_model_len=config.max_model_len,
        num_total_blocks=config.num_blocks,
        bytes_per_block=hardware.bytes_per_token * config.block_size,
        transports=["simulated"],
        max_migrations_in=max_moves,
        max_migrations_out=max_moves,
        stall_budget_ms=200.0,
        compatibility_digest=model or hardware.name,
    )
