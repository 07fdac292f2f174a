# SPDX-License-Identifier: Apache-2.0
"""What runs: a Redis, two schedulers that also reschedule, two gateways, and the fleet; and how it is done harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from llumsched.up.ports import free_port
from tests.support.control import start
from tests.support.harness import Command

READY_S: Final = 120.0
_SCHEDULER: Final = ("--colocated-rescheduling-mode", "--enable-rescheduling")
_GATEWAY: Final = (
    *("--stall-time", "2s", "--engine-stall-time", "6s"),
    *("--shutdown-delay", "1s", "--shutdown-timeout", "60s"),
)  # fmt: skip


class Part:
    """A process that is started anew at the same port."""

    def __init__(self, name: str, arguments: Sequence[str], logs: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = name
        self._arguments = ("--port", str(self.port), *arguments)
        self._logs = logs
        self._number = 0
        self.is_taken = True
        """Clients may use it."""
        self._begin()

    def _begin(self) -> None:
        log = self._logs / f"{self.name}-{self._number}.log"
        self.command = start(self.name.partition("-")[0], *self._arguments, log=log)
        self._number += 1

    async def kill(self) -> None:
        """Kills it as a crash does, and starts it again."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.command.pid, signal.SIGKILL)
        await asyncio.to_thread(self.command.stop)
        self._begin()

    async def replace(self) -> None:
        """Replaces it as a rolling update does: out of the load balancer, its streams end, another one begins."""
        self.is_taken = False
        await asyncio.to_thread(self.command.stop, 90.0)
        self._begin()
        await self.until_up()
        self.is_taken = True

    async def until_up(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/healthz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)

    def size(self) -> tuple[int, int]:
        """Resident bytes and descriptors of its processes."""
        found = [0, 0]
        for pid in self.command.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                found[0] += process.memory_info().rss
                found[1] += process.num_fds()
        return found[0], found[1]


class Gateway(Part):
    def __init__(self, name: str, schedulers: str, logs: Path) -> None:
        port = free_port()
        self.metrics_url = f"http://127.0.0.1:{port}"
        super().__init__(name, ("--metrics-port", str(port), "--scheduler-endpoints", schedulers, *_GATEWAY), logs)


class Redis:
    def __init__(self, logs: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise SystemExit("chaos: redis-server is needed (apt-get install redis-server)")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._logs = logs
        self._line = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        self.command = Command.start("redis", self._line, self._logs / f"redis-{self._number}.log")
        self._number += 1

    async def stand_still(self, seconds: float) -> None:
        os.kill(self.command.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(self.command.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """Kills it, so that it forgets everything."""
        os.kill(self.command.pid, signal.SIGKILL)
        await asyncio.to_thread(self.command.stop)
        self._begin()


class FleetProcess:
    def __init__(self, process: asyncio.subprocess.Process, ids: list[str]) -> None:
        self._process = process
        self.ids = ids
        self._turn = asyncio.Lock()

    async def do(self, what: str, instance_id: str = "") -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        async with self._turn, asyncio.timeout(READY_S):
            stdin.write(json.dumps({"do": what, "id": instance_id}).encode() + b"\n")
            await stdin.drain()
            answer: dict[str, Any] = json.loads(await stdout.readline())
            return answer


@contextlib.asynccontextmanager
async def fleet_of(size: int, cms: str, log: Path) -> AsyncIterator[FleetProcess]:
    command = (sys.executable, "-m", "benchmarks.chaos.fleet", "--instances", str(size), "--cms", cms)
    with log.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=err
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await process.stdout.readline()
        if not line:
            raise SystemExit(f"chaos: the fleet did not start: see {log}")
        yield FleetProcess(process, json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@dataclass
class Cluster:
    redis: Redis
    schedulers: list[Part]
    gateways: list[Gateway]
    fleet: FleetProcess
    sizes: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)
    """Sizes by part that lived through it all: when, resident bytes, descriptors."""

    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways if gateway.is_taken]

    def measure(self) -> None:
        for part in (*self.schedulers, *self.gateways):
            self.sizes.setdefault(f"{part.name}/{part.command.pid}", []).append((time.monotonic(), *part.size()))

    async def known(self) -> list[int]:
        """Instances that take requests, by scheduler."""
        async with aiohttp.ClientSession() as session:
            found = []
            for scheduler in self.schedulers:
                async with session.get(f"{scheduler.url}/debug/view") as answer:
                    view = await answer.json()
                statuses = [one["status"] for one in view["instances"].values()]
                found.append(sum(bool(status and status["schedulable"]) for status in statuses))
            return found

    async def until_whole(self) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if all(number == len(self.fleet.ids) for number in await self.known()):
                        return
                await asyncio.sleep(0.2)

    async def held(self) -> dict[str, float]:
        """What is in flight anywhere: all of it 0 when the last client has left."""
        async with aiohttp.ClientSession() as session:
            at_gateways = sum(
                [await _gauge(session, one.metrics_url, "gateway_current_requests") for one in self.gateways]
            )
            in_accounts = 0
            for scheduler in self.schedulers:
                async with session.get(f"{scheduler.url}/debug/view") as answer:
                    view = await answer.json()
                in_accounts += sum(one["in_flight"]["num_requests"] for one in view["instances"].values())
        return {"gateways": at_gateways, "accounts": in_accounts, **await self.fleet.do("state")}


async def _gauge(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [sample.value for family in families for sample in family.samples if sample.name == name]
    if not samples:
        raise LookupError(f"{url}/metrics has no {name}")
    return float(sum(samples))


@contextlib.asynccontextmanager
async def cluster_of(size: int, logs: Path) -> AsyncIterator[Cluster]:
    redis = Redis(logs)
    parts: list[Part] = []
    try:
        schedulers = [Part(f"scheduler-{n}", ("--cms", redis.url, *_SCHEDULER), logs) for n in range(2)]
        parts += schedulers
        addresses = ",".join(f"127.0.0.1:{one.port}" for one in schedulers)
        gateways = [Gateway(f"gateway-{n}", addresses, logs) for n in range(2)]
        parts += gateways
        async with fleet_of(size, redis.url, logs / "fleet.log") as fleet:
            for part in parts:
                await part.until_up()
            cluster = Cluster(redis, schedulers, gateways, fleet)
            await cluster.until_whole()
            yield cluster
    finally:
        for part in parts:
            await asyncio.to_thread(part.command.stop, 1.0)
        await asyncio.to_thread(redis.command.stop)
