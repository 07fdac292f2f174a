# SPDX-License-Identifier: Apache-2.0
"""Starts engines and drains others as the scheduler recommends (`GET /scale`).

A leaving engine gets SIGTERM: it refuses new requests, its requests move to the others, and it ends when it is empty,
which frees its cores or GPUs. Its API server lives as long as its clients' streams; only the stop of the whole cluster
limits that.

An engine that dies or does not come up is reported and replaced while it is needed: at once, then after pauses that
double. After several failures in a row with no engine left, the cluster ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

import aiohttp
import msgspec

from llumlet.process.tasks import cancel
from llumsched.scaling.scaling_config import Bounds
from llumsched.up.component import READY_CALL_S, Component, ComponentDied, ComponentSpec
from llumsched.up.race import race

POLL_S: Final = 0.5
LEAVE_S: Final = 7 * 24 * 3600.0
"""Limit of a departure, longer than any stream."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
MOST_FAILURES: Final = 5
"""Failures in a row that end the cluster if no engine is left."""


@dataclass(frozen=True, slots=True)
class AutoscalePlan:
    bounds: Bounds
    engine: Callable[[int, int], ComponentSpec]
    """Makes the engine of a place (0, 1, …: its cores or GPUs), given the number of its life there; each has its own
    name and port."""
    scale_url: str
    """URL of the scheduler's recommendation."""
    instances_url: str
    """URL of the list of instances."""


class _Advice(msgspec.Struct):
    """The fields read of `/scale`."""

    wanted: int
    leave: list[str]
    reason: str


class _EngineState(Enum):
    STARTING = auto()
    SERVING = auto()
    LEAVING = auto()


@dataclass(slots=True, eq=False)
class _Engine:
    component: Component
    place: int
    state: _EngineState
    rising: asyncio.Task[None] | None = None
    known: bool = field(default=True)
    """True while the scheduler knows it: for a leaving one, while its engine lives."""

    @property
    def name(self) -> str:
        return self.component.spec.name


class Autoscaler:
    """Manages the engines that serve at its beginning and those that it starts. `raise_up` starts a component and
    returns when it is ready; `engines` holds all whose processes may live."""

    def __init__(
        self,
        plan: AutoscalePlan,
        engines: list[Component],
        make: Callable[[ComponentSpec], Component],
        raise_up: Callable[[Component, aiohttp.ClientSession], Any],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._make, self._raise_up, self._say = plan, make, raise_up, say
        self._components = engines
        self._engines = [_Engine(one, place, _EngineState.SERVING) for place, one in enumerate(engines)]
        self._lives = {place: itertools.count(1 if place < len(engines) else 0) for place in range(plan.bounds.most)}
        self._num_failures = 0
        self._not_before_s = 0.0

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ComponentDied when no engine is left and none comes up."""
        async with aiohttp.ClientSession(trust_env=False) as session:
            try:
                while True:
                    self._bury()
                    if self._num_failures >= MOST_FAILURES and not self._serving():
                        raise ComponentDied(
                            f"no engine is left, and {self._num_failures} in a row died or never served"
                        )
                    await self._look(session)
                    await asyncio.sleep(POLL_S)
            finally:
                await cancel(*(one.rising for one in self._engines if one.rising is not None))

    async def _look(self, session: aiohttp.ClientSession) -> None:
        advice = await self._asked(session, self._plan.scale_url, _Advice)
        if any(one.state is _EngineState.LEAVING for one in self._engines):
            known = await self._asked(session, self._plan.instances_url, dict[str, Any])
            if known is not None:
                ids = {one.get("id") for one in known.get("instances", ())}
                for one in self._engines:
                    one.known = one.name in ids
        there = [one for one in self._engines if one.state is not _EngineState.LEAVING]
        # Who is not told anything keeps what there is.
        wanted = self._plan.bounds.clamp(advice.wanted if advice is not None else len(there))
        if len(there) < wanted:
            self._start(wanted - len(there), advice.reason if advice is not None else "too few", session)
        elif advice is not None:
            self._dismiss(advice, len(there) - wanted)

    def _start(self, number: int, reason: str, session: aiohttp.ClientSession) -> None:
        if time.monotonic() < self._not_before_s:
            return
        for place in itertools.islice(self._free_places(), number):
            component = self._make(self._plan.engine(place, next(self._lives[place])))
            self._components.append(component)
            engine = _Engine(component, place, _EngineState.STARTING)
            self._engines.append(engine)
            self._say(f"{engine.name} is started: {reason}")
            engine.rising = asyncio.create_task(self._rise(engine, session))

    def _free_places(self) -> Iterator[int]:
        taken = {one.place for one in self._engines if one.state is not _EngineState.LEAVING or one.known}
        return (place for place in range(self._plan.bounds.most) if place not in taken)

    async def _rise(self, engine: _Engine, session: aiohttp.ClientSession) -> None:
        async def death() -> None:
            raise ComponentDied(engine.component.end_in_words(await engine.component.wait_ended()))

        try:
            await race(self._raise_up(engine.component, session), death())
        except ComponentDied as error:
            engine.component.ask_to_stop(0.0)
            self._failed(f"{error}, and never served")
            engine.state = _EngineState.LEAVING
        else:
            engine.state = _EngineState.SERVING
            self._num_failures = 0

    def _dismiss(self, advice: _Advice, number: int) -> None:
        serving = {one.name: one for one in self._serving()}
        spare = len(serving) - self._plan.bounds.least
        for name in [name for name in advice.leave if name in serving][: max(min(number, spare), 0)]:
            self._say(f"{name} leaves, its requests move to the others: {advice.reason}")
            serving[name].state = _EngineState.LEAVING
            serving[name].component.ask_to_stop(LEAVE_S)

    def _serving(self) -> list[_Engine]:
        return [one for one in self._engines if one.state is _EngineState.SERVING]

    def _bury(self) -> None:
        """Removes engines whose processes have ended."""
        for engine in [one for one in self._engines if not one.component.running]:
            if engine.rising is not None and not engine.rising.done():
                continue
            self._engines.remove(engine)
            self._components.remove(engine.component)
            if engine.state is _EngineState.LEAVING:
                self._say(f"{engine.name} has left")
            else:
                self._failed(f"{engine.name} ended by itself")

    def _failed(self, what: str) -> None:
        pause_s = min(FIRST_PAUSE_S * 2**self._num_failures, LONGEST_PAUSE_S)
        self._num_failures += 1
        self._not_before_s = time.monotonic() + pause_s
        self._say(f"{what}; the next one is started in {pause_s:g} s at the earliest")

    async def _asked(self, session: aiohttp.ClientSession, url: str, kind: type[Any]) -> Any:
        """The answer; None if it cannot be read."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, json.JSONDecodeError, msgspec.ValidationError):
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=READY_CALL_S)) as answer:
                if answer.status == 200:
                    return msgspec.convert(await answer.json(content_type=None), kind)
        return None
