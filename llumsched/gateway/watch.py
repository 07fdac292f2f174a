# SPDX-License-Identifier: Apache-2.0
"""Gives up engines that neither answer nor disconnect, and has `clients` do the same with clients.

All awaited answers are checked periodically; none has a timer of its own. The watch gives up

* an answer that is silent for `stall_s` while its instance fails two health checks in a row,
* all answers of an instance that sent no token for `engine_stall_s`, if it was in the middle of a stream or its engine
  core is found to stand still: it hangs behind a healthy API server,
* an answer that is silent for longer than its own limit.

Two kinds of instances get no new requests but lose none: one that is silent for half of `stall_s` while several
requests wait for it and most others answer, if a probe shows that it computes nothing (long prefills and long answers
in one piece are silent too); and one whose tokens come many times slower than others'.

Time in which the gateway itself was stopped or too busy to look is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from llumlet.process.tasks import cancel
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.clients import Clients
from llumsched.gateway.config import Config
from llumsched.gateway.upstream import Upstream

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 1.0
_SEVERAL = 3
"""Waiting requests that make a silent instance suspicious."""


class Watch:
    def __init__(self, config: Config, backends: Backends, upstream: Upstream, clients: Clients) -> None:
        self._config = config
        self._backends = backends
        self._upstream = upstream
        self._clients = clients
        self._health_probes: dict[Backend, asyncio.Task[None]] = {}
        self._engine_probes: dict[Backend, asyncio.Task[None]] = {}
        self._silence_probes: dict[Backend, asyncio.Task[None]] = {}
        self._trials: dict[Backend, asyncio.Task[None]] = {}
        shortest_s = min(config.stall_s, config.engine_stall_s, clients.shortest_s)
        self._pause_s = min(_LONGEST_PAUSE_S, shortest_s / 4)

    async def run(self) -> None:
        try:
            while True:
                due_s = time.monotonic() + self._pause_s
                await asyncio.sleep(self._pause_s)
                now_s = time.monotonic()
                self._forgive(now_s - due_s, now_s)
                self._look(now_s)
                self._compare(now_s)
                for backend in self._backends.outliers.due():
                    _start(self._trials, backend, self._backends.try_ejected)
                self._clients.look(now_s)
                self._upstream.sweep()
        finally:
            probes = (self._health_probes, self._engine_probes, self._silence_probes, self._trials)
            await cancel(*(task for tasks in probes for task in tasks.values()))

    def _forgive(self, late_s: float, now_s: float) -> None:
        """Extends all limits by `late_s` seconds in which this process could not read."""
        for call in self._upstream.calls:
            call.moved_s = min(now_s, call.moved_s + late_s)
        self._clients.forgive(late_s, now_s)

    def _look(self, now_s: float) -> None:
        config = self._config
        silent = [
            call for call in self._upstream.calls if not call.is_writing and now_s - call.moved_s > config.stall_s
        ]
        for call in silent:
            limit_s = config.read_timeout_s if call.is_stream else config.response_timeout_s
            if now_s - call.moved_s > limit_s:
                call.give_up(f"sent nothing for {limit_s:g} s", timed_out=True)
        for backend in {call.backend for call in silent}:
            _start(self._health_probes, backend, self._probe_health)
            if now_s - backend.last_token_s <= config.engine_stall_s:
                continue
            calls = [
                call for call in silent if call.backend is backend and now_s - call.moved_s > config.engine_stall_s
            ]
            if any(call.is_stream for call in calls):
                self._stalled(backend, f"sent nothing on any stream for {config.engine_stall_s:g} s")
            elif calls:
                _start(self._engine_probes, backend, self._probe_engine)

    def _compare(self, now_s: float) -> None:
        """Compares instances: finds the silent and the slow ones."""
        outliers, pace = self._backends.outliers, self._backends.pace
        for backend in [one for one, ejection in outliers.ejected.items() if ejection.since_s < one.last_token_s]:
            outliers.moved(backend)
        since_s = now_s - self._config.stall_s / 2
        waiting = Counter(call.backend for call in self._upstream.calls if not call.is_writing)
        silent = Counter(
            call.backend
            for call in self._upstream.calls
            if not call.is_writing and max(call.moved_s, call.backend.last_token_s) < since_s
        )
        if 2 * len(silent) < len(waiting):
            for backend, number in silent.items():
                if number >= _SEVERAL and not outliers.is_out(backend):
                    _start(self._silence_probes, backend, self._probe_silence)
        by_models = defaultdict(list)
        for backend in self._backends:
            by_models[frozenset(backend.models or ())].append(backend)
        for backends in by_models.values():
            for backend, why in pace.slow_among(backends).items():
                if not outliers.is_out(backend):
                    pace.forget(backend)
                    outliers.slow(backend, why)

    async def _probe_health(self, backend: Backend) -> None:
        for _ in range(2):
            if await self._backends.is_healthy(backend, self._config.health_timeout_s):
                return
        backend.is_down = True
        self._give_up(backend, "fails its health check", silent_s=self._config.stall_s)

    async def _probe_engine(self, backend: Backend) -> None:
        if await self._backends.stands_still(backend, self._config.engine_stall_s):
            self._stalled(backend, "is asked for one token and computes nothing")

    async def _probe_silence(self, backend: Backend) -> None:
        waiting = [call for call in self._upstream.calls if call.backend is backend]
        has_streams = sum(call.wants_stream for call in waiting) >= _SEVERAL
        if await self._backends.stands_still(backend, self._config.stall_s / 2, if_uncounted=has_streams):
            self._backends.outliers.silent(backend, f"{len(waiting)} requests wait, and it computes nothing")

    def _stalled(self, backend: Backend, reason: str) -> None:
        backend.is_stalled = True
        self._give_up(backend, reason)

    def _give_up(self, backend: Backend, reason: str, *, silent_s: float = 0.0) -> None:
        _log.warning("instance %s %s", backend, reason)
        now_s = time.monotonic()
        for call in list(self._upstream.calls):
            if call.backend is backend and not call.is_writing and now_s - call.moved_s > silent_s:
                call.give_up(reason)


def _start(
    probes: dict[Backend, asyncio.Task[None]], backend: Backend, probe: Callable[[Backend], Coroutine[Any, Any, None]]
) -> None:
    """Starts a probe, one at a time per instance."""
    if backend not in probes:
        task = probes[backend] = asyncio.create_task(probe(backend))
        task.add_done_callback(lambda _: probes.pop(backend))
