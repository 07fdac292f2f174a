# SPDX-License-Identifier: Apache-2.0
"""A pause, a reset of the caches and a change of the weights end all moves, in both directions.

vLLM does these things between two steps, on the loop's thread. Two of them need every block of the KV cache back, and
moves hold blocks for requests that vLLM does not know, or does not know any more. All three end what a KV cache that
was copied before is good for.

    call off    Reservations that were made so far are never admitted: a Commit is answered BARRED, and the source goes
                on. That has happened when `call_off` returns. Then the llumlet's thread cancels the moves out of this
                engine, revokes those into it, stops their movers and ends claims; what it is told by the loop
                afterwards comes behind that.
    wait        A pause is complete when no request is frozen and no block is held any more. The loop sleeps meanwhile.
                Copies end with their current chunk; for a peer that is silent a pause waits `QUIET_SECONDS`.
    set aside   A reset does not see blocks that are held all the same. Their bytes stay; their names in the prefix
                cache go with all others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.core.sched.interface import PauseState

from llumlet.protocol.errors import Reason
from vllm_llumnix.engine.blocks.scheduler_port import SchedulerPort
from vllm_llumnix.engine.engine_port import CallOff
from vllm_llumnix.engine.vllm_types import Engine
from vllm_llumnix.seams import ENGINE

QUIET_SECONDS: Final = 5.0
"""Seconds that a pause waits for blocks that peers may still read, or movers write."""

READ_ONLY: Final = frozenset({"check_health", "compute_weight_checksums", "list_loras", "synchronize_device"})
"""Methods of vLLM's workers that leave the weights as they are."""


PAUSED: Final = CallOff(Reason.SOURCE_PAUSED, Reason.DESTINATION_PAUSED, "was paused meanwhile")
RESET: Final = CallOff(Reason.CANCELLED, Reason.CANCELLED, "reset its KV cache meanwhile")
CHANGED: Final = CallOff(Reason.OTHER_WEIGHTS, Reason.OTHER_WEIGHTS, "may have other weights since")


class Pauses:
    """Pauses of one engine. `tell` has the llumlet's thread end all moves. Loop thread only."""

    def __init__(self, port: SchedulerPort, tell: Callable[[CallOff], None]) -> None:
        self._port = port
        self._tell = tell
        self._quiet_at = 0.0
        self.num_changes = 0
        """Calls that may have changed the weights since they were last given a new name. Engines whose weights have one
        name but different counts exchange no KV cache: a trainer may have come to only one of them so far. Any thread
        may read it."""
        scheduler = port.scheduler
        reset = scheduler.reset_prefix_cache

        def pause(state: PauseState) -> None:
            if state != PauseState.UNPAUSED:
                self._quiet_at = time.monotonic() + QUIET_SECONDS
                self.call_off(PAUSED)

        def reset_prefix_cache(reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
            self.call_off(RESET)
            if reset_running_requests:
                port.reservations.start_newcomers_over()
            with port.held_aside():
                return bool(reset(reset_running_requests, reset_connector))

        port.events.on_pause = pause
        ENGINE.wrap(scheduler, "Scheduler.reset_prefix_cache", reset_prefix_cache)

    def watch(self, engine: Engine) -> None:
        """Have pauses of this engine wait for its moves to end, and its moves end when its weights may change."""
        complete, notify = engine._pause_complete, engine._notify_idle_state_callbacks

        def pause_complete() -> bool:
            is_complete = complete()
            return is_complete and not self._must_wait()

        def notify_idle_state_callbacks() -> None:
            if not self._must_wait():
                notify()

        ENGINE.wrap(engine, "EngineCoreProc._pause_complete", pause_complete)
        ENGINE.wrap(engine, "EngineCoreProc._notify_idle_state_callbacks", notify_idle_state_callbacks)
        ENGINE.wrap(engine, "EngineCore.collective_rpc", self._changing_weights(engine.collective_rpc))
        ENGINE.wrap(engine, "EngineCore.set_weight_version", self._naming_weights(engine, engine.set_weight_version))

    def call_off(self, why: CallOff) -> None:
        self._port.reservations.void(why.at_destination, f"the destination {why.what}")
        self._tell(why)

    def _must_wait(self) -> bool:
        port = self._port
        return port.has_frozen or (port.holds_blocks and time.monotonic() < self._quiet_at)

    def _changing_weights(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Workers are called by name: `update_weights`, `reload_weights`, or what somebody's extension calls it."""

        # vLLM decodes a utility's arguments by its signature.
        @functools.wraps(stock)
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method not in READ_ONLY:
                self.num_changes += 1
                self.call_off(CHANGED)
            return stock(method, *args, **kwargs)

        return collective_rpc

    def _naming_weights(self, engine: Engine, stock: Callable[[str], None]) -> Callable[[str], None]:
        """A new name says which weights these are, whatever was called before."""

        @functools.wraps(stock)
        def set_weight_version(weight_version: str) -> None:
            self.call_off(CHANGED)
            is_new = weight_version != engine.get_weight_version()
            stock(weight_version)
            if is_new:
                self.num_changes = 0

        return set_weight_version
