# SPDX-License-Identifier: Apache-2.0
"""A modelled instance: an engine on a clock, and its status and metadata."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any, Final

from llumlet.contract.coming_steps import coming_steps
from llumlet.contract.types import Health, InstanceMetadata, InstanceStatus
from llumsched.latency.fitting import pairs
from llumsim import PS
from llumsim.clock import Action, Clock
from llumsim.engine.engine import Engine
from llumsim.engine.requests import EngineRequest, Watcher
from llumsim.engine.step_model import Hardware

_RECENT_PS: Final = 10 * PS
"""Time for which the status names an arrival (`vllm_llumnix.engine.load.load_sums`)."""
_OK: Final = Health.OK
_FAR: Final = 1 << 30
"""A limit of tokens that no request reaches."""


class ModelledInstance:
    """An engine whose clock wakes it for its steps. A subclass that reports load extends `changed`."""

    def __init__(self, clock: Clock, hardware: Hardware, metadata: InstanceMetadata, watcher: Watcher) -> None:
        self.clock = clock
        self.hardware = hardware
        self.metadata = metadata
        self.is_alive = True
        self.is_schedulable = True
        self.leaving: dict[EngineRequest, None] = {}
        """Requests on their way out."""
        self.coming: dict[str, int] = {}
        """Tokens of requests on their way in, by migration."""
        self.engine = Engine(hardware.engine, hardware.step, watcher)
        self.engine.shortage.gives_blocks = lambda: any(request.num_blocks for request in self.leaving)
        self.foretold: float | None = None
        """Share of requests whose end is known; None: the status does not describe coming steps."""
        self.num_changes = 0
        """Changes of its load."""
        self._arrivals: deque[tuple[int, str]] = deque()
        self._wake_ps: int | None = None

    @property
    def id(self) -> str:
        return self.metadata.instance_id

    def add(self, request: EngineRequest, now_ps: int) -> None:
        """Take a client's request."""
        self._arrivals.append((now_ps, request.name))
        self.engine.advance(now_ps)
        self.engine.add(request, now_ps)
        self.changed(now_ps)

    def post(self, action: Action, now_ps: int) -> None:
        """Have the engine do something between two steps (`Engine.post`)."""
        self.engine.advance(now_ps)
        self.engine.post(action, now_ps)
        self.changed(now_ps)

    def end(self) -> None:
        """End the instance: it computes and reports nothing any more."""
        self.is_alive = False

    def changed(self, now_ps: int) -> None:
        """Note a change of load, which may also change the end of the step."""
        self.num_changes += 1
        self.wait(now_ps)

    def wait(self, now_ps: int) -> None:
        """Sleep until `next_wake`, instead of an earlier target."""
        wake_ps = self.next_wake(now_ps)
        if wake_ps is not None and wake_ps != self._wake_ps:
            self._wake_ps = wake_ps
            self.clock.at(wake_ps, lambda now_ps: self._wake(wake_ps, now_ps))

    def _wake(self, wake_ps: int, now_ps: int) -> None:
        if wake_ps == self._wake_ps and self.is_alive:  # else it is another time by now
            self._wake_ps = None
            self.woken(now_ps)

    def next_wake(self, now_ps: int) -> int | None:
        """The time of the next event, if any is due."""
        return self.engine.end_ps

    def woken(self, now_ps: int) -> None:
        """Make the steps that are due: it is `next_wake`."""
        self.engine.advance(now_ps)
        self.changed(now_ps)

    def status_at(self, now_ps: int) -> InstanceStatus:
        """The status at a time that the engine has been advanced to."""
        engine = self.engine
        engine.settle(now_ps)
        while self._arrivals and self._arrivals[0][0] < now_ps - _RECENT_PS:
            self._arrivals.popleft()
        prefill_tokens = prefill_pairs = unallocated = 0
        num_to_decode, to_decode_tokens = len(engine.decodes), engine.decodes.num_tokens
        num_urgent = urgent_to_decode = engine.decodes.num_urgent
        for request, in_step in engine.apart():
            left = request.num_tokens - request.num_computed
            uncomputed = left + in_step
            to_decode = request.max_tokens > 1 and not request.is_moving
            num_to_decode += to_decode
            to_decode_tokens += request.num_tokens * to_decode
            num_urgent += request.is_urgent
            urgent_to_decode += to_decode and request.is_urgent
            if uncomputed > 1:
                unallocated += left
                prefill_tokens += uncomputed
                prefill_pairs += pairs(request.num_tokens - uncomputed, uncomputed)
        out_tokens = 0
        for request in self.leaving:
            num_tokens = engine.num_tokens(request)
            out_tokens += num_tokens
            if request in engine.decodes:
                num_to_decode -= 1
                to_decode_tokens -= num_tokens
                urgent_to_decode -= request.is_urgent
        waiting = engine.waiting
        total = engine.config.num_blocks * engine.config.block_size
        status = InstanceStatus(
            instance_id=self.id,
            incarnation=self.metadata.incarnation,
            schedulable=self.is_schedulable,
            timestamp_ms=now_ps // (PS // 1000),
            update_id=self.num_changes,
            step_id=engine.num_steps,
            recent_waiting_requests=[name for _, name in self._arrivals],
            waiting_requests=[request.name for request in waiting],
            num_waiting_requests=len(waiting),
            num_running_requests=len(engine.running),
            scheduler_waiting_to_decode_requests_num=waiting.num_to_decode,
            scheduler_waiting_to_decode_tokens_num=waiting.to_decode_tokens,
            scheduler_running_to_decode_requests_num=num_to_decode,
            scheduler_running_to_decode_tokens_num=to_decode_tokens,
            num_uncomputed_tokens_scheduler_waiting_prefills=waiting.prefill_tokens,
            num_uncomputed_tokens_all_waiting_prefills=waiting.prefill_tokens,
            num_unallocated_tokens_all_waiting_requests=waiting.unallocated_tokens,
            num_unallocated_tokens_first_waiting_request=waiting.first_unallocated_tokens,
            num_urgent_requests=num_urgent + waiting.num_urgent,
            scheduler_running_to_decode_urgent_requests_num=urgent_to_decode,
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
            num_averted_preemptions=engine.shortage.num_averted,
            num_lacking_blocks=engine.shortage.num_blocks,
            num_gone=engine.step_times.num_gone,
            gone_tokens=engine.step_times.gone_tokens,
            num_uncomputed_pairs=waiting.prefill_pairs + prefill_pairs,
            loop_age_ms=engine.step_age_ps(now_ps) / 1e9,
            profiling_id=-1,
            health=_OK,
        )
        engine.step_times.tell(status)
        if self.foretold is not None:
            self._tell_coming_steps(status, self.foretold)
        return status

    def _tell_coming_steps(self, status: InstanceStatus, foretold: float) -> None:
        engine = self.engine
        decoding = [(request, engine.num_tokens(request)) for request in engine.decodes.requests]
        for request, in_step in engine.apart():
            if in_step and request.num_computed == request.num_tokens:
                decoding.append((request, request.num_tokens))
        left = [
            request.num_prompt + request.max_tokens - num_tokens if _is_foretold(request, foretold) else _FAR
            for request, num_tokens in decoding
        ]
        coming = coming_steps([num_tokens for _, num_tokens in decoding], left, engine.config.block_size)
        status.coming_blocks.extend(coming.blocks)
        status.coming_ends.extend(coming.ends)


def _is_foretold(request: EngineRequest, share: float) -> bool:
    return zlib.crc32(request.name.encode()) % 1000 < 1000 * share


def described(hardware: Hardware, *, max_moves: int, **fields: Any) -> InstanceMetadata:
    """Metadata of an instance: its hardware's properties, overridden by `fields`."""
    config = hardware.engine
    made: dict[str, Any] = {
        "instance_type": "neutral",
        "backend_type": "simulated",
        "model": hardware.name,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "block_size": config.block_size,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "num_total_blocks": config.num_blocks,
        "bytes_per_block": hardware.bytes_per_token * config.block_size,
        "transports": ["simulated"],
        "max_migrations_in": max_moves,
        "max_migrations_out": max_moves,
        "stall_budget_ms": 200.0,
    }
    made |= fields
    return InstanceMetadata(**({"served_models": [made["model"]], "compatibility_digest": made["model"]} | made))
