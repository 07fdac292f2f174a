# SPDX-License-Identifier: Apache-2.0
"""All components: the order of their start and stop, and the meaning of each one's end.

Start: the scheduler first (with CMS and rescheduler), since engines report to it; then engines and gateway together.
The cluster is ready when the gateway lists the model, that is, when a report has passed through all components.

Stop: first the gateway, which refuses new requests and lets streams end; then the engines; last the scheduler, which
both need. A second signal shortens every remaining wait to `HURRY_S`.

Unexpected end: if an engine ends before the cluster is ready, or if the scheduler, the gateway or the last engine ends,
everything is stopped and the exit code says so. Any other engine's end is reported and not repaired, as its cause would
end it again. With an `AutoscalePlan`, `autoscaler` manages the number of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from llumsched.console.exit_codes import ExitCode
from llumsched.up.autoscaler import AutoscalePlan, Autoscaler
from llumsched.up.component import READY_CALL_S, READY_POLL_S, Component, ComponentDied, ComponentSpec
from llumsched.up.race import race, together
from llumsched.up.screen import Screen

HURRY_S = 1.0
SCHEDULER_GRACE_S = 5.0
LISTED_TIMEOUT_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The components to run. `greeting` is printed when all are ready."""

    scheduler: ComponentSpec
    gateway: ComponentSpec
    engines: tuple[ComponentSpec, ...]
    models_url: str
    """URL of the gateway's list of models."""
    model: str
    """The model that appears there when requests can be sent."""
    greeting: str
    drain_s: float = 25.0
    """Time for streams to end when everything stops."""
    autoscale: AutoscalePlan | None = None
    """Plan by which engines come and go. None: `engines` are all, and none is restarted."""

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        return (self.scheduler, self.gateway, *self.engines)


class Fleet:
    """Runs a plan once."""

    def __init__(self, plan: ClusterPlan, screen: Screen) -> None:
        self._plan = plan
        self._screen = screen
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._scheduler = self._component(plan.scheduler)
        self._gateway = self._component(plan.gateway)
        self._engines = [self._component(spec) for spec in plan.engines]

    async def run(self) -> ExitCode:
        """Runs until a signal or a component's end. No process is left then."""
        died = ""
        with self._signals():
            try:
                await race(self._start_and_serve(), self._stopped())
            except ComponentDied as error:
                died = str(error)
                self._screen.say(f"llumnix up: {died}; everything is stopped", bold=True)
            finally:
                await self._stop_all()
        if died:  # once more, below all that the others wrote meanwhile
            self._screen.say(f"llumnix up: {died}", bold=True)
        return ExitCode.COMPONENT_DIED if died else ExitCode.OK

    def _component(self, spec: ComponentSpec) -> Component:
        return Component(spec, lambda text: self._screen.line(spec.name, text))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            return
        self._stop.set()
        what = f"streams may go on for {self._plan.drain_s:g} s, a second signal cuts them"
        self._screen.say(f"llumnix up: stopping; {what}", bold=True)

    async def _stopped(self) -> None:
        await self._stop.wait()

    async def _start_and_serve(self) -> None:
        """Starts all components and watches them. Raises ComponentDied when the rest cannot serve."""
        await race(self._start(), self._first_death(self._scheduler, self._gateway, *self._engines))
        self._screen.say(self._plan.greeting, bold=True)
        await race(self._look_after_engines(), self._first_death(self._scheduler, self._gateway))

    async def _start(self) -> None:
        # `trust_env` is off: the components are on this machine, whatever proxy there is for others.
        async with aiohttp.ClientSession(trust_env=False) as session:
            await self._start_one(self._scheduler, session)
            await together(self._start_one(each, session) for each in (self._gateway, *self._engines))
            await self._listed(session)

    async def _start_one(self, component: Component, session: aiohttp.ClientSession) -> None:
        begun_s = time.monotonic()
        await component.start()
        await component.wait_ready(session)
        self._screen.say(f"llumnix up: {component.spec.name} is ready after {time.monotonic() - begun_s:.1f} s")

    async def _listed(self, session: aiohttp.ClientSession) -> None:
        try:
            async with asyncio.timeout(LISTED_TIMEOUT_S):
                while True:
                    if self._plan.model in await _models(session, self._plan.models_url):
                        return
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            problem = f"the gateway did not list the model {self._plan.model} within {LISTED_TIMEOUT_S:.0f} s"
            raise ComponentDied(problem) from None

    async def _first_death(self, *components: Component) -> None:
        """Raises ComponentDied when one of the components ends."""

        async def death(component: Component) -> None:
            raise ComponentDied(component.end_in_words(await component.wait_ended()))

        await race(*map(death, components))

    async def _look_after_engines(self) -> None:
        if self._plan.autoscale is None:
            await self._engine_deaths()
            return
        await Autoscaler(
            self._plan.autoscale, self._engines, self._component, self._start_one,
            lambda text: self._screen.say(f"llumnix up: {text}", bold=True),
        ).run()  # fmt: skip

    async def _engine_deaths(self) -> None:
        """Reports the ends of engines. Raises ComponentDied with the last one."""
        left, last = len(self._engines), ""

        async def report(engine: Component) -> None:
            nonlocal left, last
            last = engine.end_in_words(await engine.wait_ended())
            left -= 1
            what = f"it is not restarted, {left} of {len(self._engines)} engines go on"
            self._screen.say(f"llumnix up: {last}; {what}", bold=True)

        await together(map(report, self._engines))
        raise ComponentDied(f"no engine is left ({last})")

    async def _stop_all(self) -> None:
        await self._stop_some([self._gateway], self._plan.drain_s)
        await self._stop_some(self._engines, self._plan.drain_s)
        await self._stop_some([self._scheduler], SCHEDULER_GRACE_S)

    async def _stop_some(self, components: list[Component], grace_s: float) -> None:
        running = [each for each in components if each.running]
        if not running:
            return

        def ask(seconds: float) -> None:
            for component in running:
                component.ask_to_stop(seconds)

        async def hurry() -> None:
            await self._hurry.wait()
            ask(HURRY_S)

        ask(grace_s)
        hurrying = asyncio.create_task(hurry())
        await together(each.wait_ended() for each in running)
        hurrying.cancel()
        self._screen.say(f"llumnix up: {', '.join(each.spec.name for each in running)} stopped")


async def _models(session: aiohttp.ClientSession, url: str) -> set[str]:
    """The ids of the models listed there; empty if there is no list."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=READY_CALL_S)) as answer:
            listed = await answer.json(content_type=None)
    except (aiohttp.ClientError, json.JSONDecodeError, TimeoutError):
        return set()
    entries = listed.get("data") if isinstance(listed, dict) else None
    return {str(entry.get("id")) for entry in entries or [] if isinstance(entry, dict)}
