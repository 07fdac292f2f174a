# SPDX-License-Identifier: Apache-2.0
"""Real schedulers and a real gateway around engines, for tests and benchmarks. Engines may outlive them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from llumsched.up.ports import free_port
from tests.support.harness import SERVED_NAME, Command

READY_SECONDS = 60.0
NAMED_SECONDS = 20.0


def start(part: str, *arguments: str, log: Path) -> Command:
    """One part of a cluster, as `llumnix PART ARGUMENTS` does."""
    return Command.start(part, [sys.executable, "-P", "-m", "llumsched.cli", part, *arguments], log)


class Control:
    """All run when it is made; `async with`, or `stop`, ends them."""

    def __init__(
        self,
        logs: Path,
        cms: str = "",
        *,
        model: Path | None = None,
        schedulers: Sequence[Sequence[str]] = ((),),
        gateway: Sequence[str] = (),
        name: str = "",
    ) -> None:
        """`cms`: what the schedulers have as --cms, none in lite mode. `model` is a directory with the tokenizer;
        `schedulers` and `gateway` are further arguments of each."""
        addresses = [f"127.0.0.1:{free_port()}" for _ in schedulers]
        gateway_port = free_port()
        self.gateway_url = f"http://127.0.0.1:{gateway_port}"
        tokenizer = [] if model is None else ["--tokenizer-path", f"{SERVED_NAME}={model}"]
        self.schedulers: list[Command] = []
        """The gateway begins with any of them."""
        for number, (address, arguments) in enumerate(zip(addresses, schedulers, strict=True)):
            where = ["--port", address.rpartition(":")[2], *(["--cms", cms] if cms else [])]
            log = logs / f"{name}scheduler{number or ''}.log"
            self.schedulers.append(start("scheduler", *where, *arguments, log=log))
        listen = ["--port", str(gateway_port), "--scheduler-endpoints", ",".join(addresses)]
        self._gateway = start("gateway", *listen, *tokenizer, *gateway, log=logs / f"{name}gateway.log")
        self._urls = [f"http://{address}" for address in addresses]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        for command in (self._gateway, *self.schedulers):
            command.stop()

    @property
    def _urls_alive(self) -> list[str]:
        return [url for url, command in zip(self._urls, self.schedulers, strict=True) if command.alive()]

    @property
    def scheduler_url(self) -> str:
        """Of the first that lives."""
        return self._urls_alive[0]

    async def knows(self, num_instances: int) -> None:
        """Until every scheduler that lives knows of just so many instances that take requests, each by a report later
        than this call, and places them, and the gateway knows of their model and complains of none."""
        asked_ms = time.time() * 1e3
        async with aiohttp.ClientSession() as session, asyncio.timeout(READY_SECONDS):
            while True:
                try:
                    views = [await _get(session, f"{url}/debug/view") for url in self._urls_alive]
                    models = (await _get(session, f"{self.gateway_url}/v1/models"))["data"]
                except aiohttp.ClientError:
                    views, models = [], []
                reported_ms = [_reported_ms(view) for view in views]
                are_known = all(len(each) == num_instances and min(each.values()) > asked_ms for each in reported_ms)
                are_used = not any(
                    view["warming"] or view["complaints"].keys() & each.keys()
                    for view, each in zip(views, reported_ms, strict=True)
                )
                if views and models and are_known and are_used:
                    return
                await asyncio.sleep(0.2)

    async def num_on_their_way(self) -> int:
        """Requests that the first scheduler that lives has placed and that no status shows yet."""
        async with aiohttp.ClientSession() as session:
            view = await _get(session, f"{self.scheduler_url}/debug/view")
        return sum(instance["in_flight"]["num_requests"] for instance in view["instances"].values())

    async def names(self, request: str) -> None:
        """Until an instance names the request to the first scheduler that lives."""
        named: set[str] = set()
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.timeout(NAMED_SECONDS):
                    while request not in named:
                        await asyncio.sleep(0.05)
                        view = await _get(session, f"{self.scheduler_url}/debug/view")
                        for instance in view["instances"].values():
                            status = instance["status"] or {}
                            named.update(status.get("recent_waiting_requests", ()), status.get("waiting_requests", ()))
            except TimeoutError:
                raise AssertionError(f"no instance names {request}, but {named}") from None

    async def scheduler_in_use(self) -> Command:
        """That has placed the most requests."""
        async with aiohttp.ClientSession() as session:
            placed = [await _num_placed(session, url) for url in self._urls_alive]
        return next(one for one, url in zip(self.schedulers, self._urls, strict=True) if url == max(placed)[1])


async def rescheduling(url: str) -> dict[str, Any]:
    """The last passes and moves of the rescheduler, or of the scheduler that runs one inside, as JSON has them."""
    async with aiohttp.ClientSession() as session:
        return await _get(session, f"{url}/debug/rescheduling")


async def _num_placed(session: aiohttp.ClientSession, url: str) -> tuple[float, str]:
    async with session.get(f"{url}/metrics", raise_for_status=True) as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == "scheduler_scheduling_total"), url


def _reported_ms(view: dict[str, Any]) -> dict[str, int]:
    """When each instance that takes requests said so last, by its clock."""
    statuses = {instance_id: instance["status"] for instance_id, instance in view["instances"].items()}
    return {
        instance_id: int(status["timestamp_ms"])
        for instance_id, status in statuses.items()
        if status and status["schedulable"]
    }


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url, raise_for_status=True) as answer:
        found: dict[str, Any] = await answer.json()
        return found
