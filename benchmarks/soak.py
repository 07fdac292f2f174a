# SPDX-License-Identifier: Apache-2.0
"""Does anything get lost in the long run?

    python -m benchmarks.soak --minutes 10 --json soak.json
    python -m benchmarks.soak --minutes 10 --gateway

Three instances that are each other's peers, under a steady mixed load, while requests are moved at random, clients
leave, and engines are stopped and killed, one at a time; all but the first, which lives through it all, so that what
grows without end has the time to. Every stream that ends is compared, token for token, with the
same request on a quiet engine. In float32: a request that an engine's death interrupts is computed again, by other
kernels. With `--gateway` all of them go through a real gateway, round robin over the three, which has to find out by
itself who is ill.

Afterwards, what the instances hold is compared with what they held at the start: blocks, requests, sockets, threads.
The slope of the first one's memory is taken over the last half. The last line is one JSON object; the exit code is 0
only if no stream differed or was cut short and nothing is held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from llumlet.contract.client import IDLE_SECONDS, LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from tests.support.client import Client, Stream, StreamFailed
from tests.support.control import start
from tests.support.harness import Command, Fleet, Server, ServerSpec, command_line, free_port
from tests.support.model import PRESETS, build
from tests.support.moves import migrate, requests
from tests.support.progress import saying
from vllm_llumnix.kv.mover.mover_thread import PROBE_THREAD

MIB = 1 << 20
LENGTH = 300
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 11, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4},
    "logprobs": {"logprobs": 2},
    "regex": {"structured_outputs": {"regex": "[a-zA-Z]{280,}"}, "ignore_eos": False},
}
SURVIVOR = "a"
WARM_UP_S = 20.0
SAMPLE_S = 2.0
SILENCE_S = 6.0
"""Longer than an owner is waited for."""
NUM_BLOCKS = 700
"""Few: all of the cache's memory has been touched before its growth is measured."""
REST_S = 15.0
SETTLE_S = 90.0
"""Time for the last doubts, leases and dead origins to be over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One kind of request, and the tokens it has on a quiet engine."""

    name: str
    prompt: list[int]
    parameters: dict[str, Any]
    expected: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """What an idle instance holds. Sockets and threads are summed over its processes."""

    free_blocks: int
    requests: int
    sockets: int
    threads: int
    names: Counter[str] = dataclasses.field(compare=False, default_factory=Counter)
    """What the sockets and threads are, for people."""

    def numbers(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in NUMBERS}


NUMBERS = tuple(field.name for field in dataclasses.fields(Footprint) if field.compare)


class Soak:
    """One run. `counts` are of what was done and of what came of it."""

    def __init__(
        self, fleet: Fleet, model: Path, random_: random.Random, streams: int, gateway_log: Path | None = None
    ) -> None:
        """`gateway_log`: there is a gateway, which writes it."""
        self.fleet = fleet
        self.random = random_
        self.num_streams = streams
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []
        self.longest_pause = 0.0
        self.sizes: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        """Sizes of the survivor's processes: when, how many bytes are resident, and how many of these in no other
        process."""
        self._ill: set[str] = set()
        ports = {name: free_port() for name in "abc"}
        self._specs = {
            name: ServerSpec(
                model,
                name=name,
                instance_id=name,
                max_model_len=2048,
                max_num_seqs=8,
                num_kv_blocks=NUM_BLOCKS,
                core=index % 2,
                port=free_port() if gateway_log is not None else 0,
                flags=(
                    *("--dtype", "float32", "--llumlet-port", str(port), "--llumlet-lease-seconds", "5"),
                    *("--llumlet-peers", ",".join(f"127.0.0.1:{p}" for n, p in ports.items() if n != name)),
                ),
            )
            for index, (name, port) in enumerate(ports.items())
        }
        self.servers: dict[str, Server] = dict(zip(self._specs, fleet.start(*self._specs.values()), strict=True))
        self.gateway: Command | None = None
        self._gateway_url = ""
        if gateway_log is not None:
            port = free_port()
            self._gateway_url = f"http://127.0.0.1:{port}"
            endpoints = ",".join(f"127.0.0.1:{spec.port}" for spec in self._specs.values())
            where = ("--port", str(port), "--llm-backend-endpoints", endpoints)
            self.gateway = start("gateway", "--scheduling-policy", "round-robin", *where, log=gateway_log)

    async def tasks(self) -> list[Task]:
        """The requests, with what they produce on an engine that does nothing else."""
        tasks = []
        async with Client(self.servers["a"].base_url) as client:
            for (name, parameters), length in itertools.product(KINDS.items(), (60, 400)):
                prompt = [100 + index * (7 + len(name)) % 900 for index in range(length)]
                stream = await self._begin(client, prompt, parameters)
                tasks.append(Task(f"{name}-{length}", prompt, parameters, (await stream.result()).token_ids))
        return tasks

    async def warm_up(self, tasks: list[Task]) -> None:
        """Moves, load, and doubts between all of them: every connection and thread that will be there is there."""
        await self._meet()
        until = time.monotonic() + WARM_UP_S
        await asyncio.gather(
            *(self._client(until, tasks) for _ in range(2 * self.num_streams)), self._move_things(until)
        )
        for name in self.servers:
            await self._fall_silent(name)
        await self._meet()

    async def _meet(self) -> None:
        """Moves between any two instances, two at a time."""
        for source, destination in itertools.permutations(self.servers.values(), 2):
            async with Client(source.base_url) as client:
                streams = [await self._begin(client, list(range(start, start + 60)), {}) for start in (100, 200)]
                for stream in streams:
                    await stream.wait_for(20)
                await self._move_all(source, destination)
                for stream in streams:
                    await stream.result()

    async def _move_all(self, source: Server, destination: Server) -> None:
        while stayed := [m for m in await migrate(source, destination, rule=("NUM_REQ", "SR", -1)) if not m.moved]:
            # One that was started anew is found again within a second: the time until gRPC tries once more. And vLLM's
            # queue between engine and worker can lose a wake-up to a stop: its requests go on elsewhere meanwhile.
            if any(move.reason != "peer_unreachable" and move.phase != "gone" for move in stayed):
                raise RuntimeError(f"{source.name} to {destination.name}: {stayed}")
            await asyncio.sleep(0.1)

    async def _fall_silent(self, name: str) -> None:
        """Every API server has a stream there, and asks its llumlet what has become of it."""
        silent = self.servers[name]
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for origin in self.servers.values():
                client = await stack.enter_async_context(Client(origin.base_url))
                streams.append(await self._begin(client, list(range(100, 160)), {}))
                await streams[-1].wait_for(20)
                if origin is not silent:
                    await self._move_all(origin, silent)
            await self._stop(name, psutil.Process(silent.process("EngineCore")), "EngineCore", SILENCE_S)
            for stream in streams:
                await stream.result()

    async def run(self, seconds: float, tasks: list[Task]) -> None:
        """The load and the trouble, side by side."""
        until = time.monotonic() + seconds
        trouble = [
            asyncio.create_task(self._move_things(until)),
            asyncio.create_task(self._break_things(until)),
            asyncio.create_task(self._measure(until)),
        ]
        await asyncio.gather(*(self._client(until, tasks) for _ in range(self.num_streams)), *trouble)

    async def _begin(self, client: Client, prompt: list[int], parameters: dict[str, Any]) -> Stream:
        return await client.complete(prompt, LENGTH, **{"ignore_eos": True, **parameters})

    # The load

    async def _client(self, until: float, tasks: list[Task]) -> None:
        while time.monotonic() < until:
            async with Client(self._gateway_url or self._one_that_is_well().base_url) as client:
                task = self.random.choice(tasks)
                try:
                    stream = await self._begin(client, task.prompt, task.parameters)
                except Exception:  # noqa: BLE001 - the instance has just been killed: it takes nothing new
                    self.counts["refused"] += 1
                    await asyncio.sleep(0.5)
                    continue
                if self.random.random() < 0.1:
                    with contextlib.suppress(StreamFailed):
                        await stream.wait_for(self.random.randrange(1, LENGTH // 2))
                    await stream.disconnect()
                    self.counts["left"] += 1
                    continue
                self._judge(task, stream, await self._end_of(stream))

    def _one_that_is_well(self) -> Server:
        return self.random.choice([server for name, server in self.servers.items() if name not in self._ill])

    async def _end_of(self, stream: Stream) -> str:
        try:
            await stream.result(timeout_s=120.0)
        except Exception as error:  # noqa: BLE001 - whatever the client sees is counted
            return f"{type(error).__name__}: {error}"
        return ""

    def _judge(self, task: Task, stream: Stream, error: str) -> None:
        self.counts["streams"] += 1
        self.longest_pause = max([self.longest_pause, *stream.gaps])
        got, expected = stream.token_ids, task.expected
        if got == expected and not error and stream.finish_reason in ("length", "stop"):
            return
        if got == expected[: len(got)]:
            self.counts["truncated"] += 1
        else:
            self.counts["differed"] += 1
        first = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
        self.differences.append(
            f"{task.name} {stream.request_id}: {len(got)} of {len(expected)} tokens, equal up to {first}, "
            f"finish {stream.finish_reason}; {error}"
        )

    # The trouble

    async def _move_things(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(self.random.uniform(0.2, 1.0))
            source, destination = self.random.sample(list(self.servers.values()), 2)
            try:
                running = [info.request_id for info in await requests(source)]
                if not running:
                    continue
                chosen = self.random.sample(running, self.random.randint(1, min(2, len(running))))
                for move in await migrate(source, destination, request_ids=chosen, deadline_s=60.0):
                    self.counts[f"moves {move.phase}"] += 1
            except LlumletCallFailed:
                self.counts["moves unanswered"] += 1

    async def _break_things(self, until: float) -> None:
        while time.monotonic() < until - 20:
            await asyncio.sleep(self.random.uniform(4, 12))
            name = self.random.choice(list(self.servers))
            title = self.random.choice(["EngineCore", "Worker"])
            process = psutil.Process(self.servers[name].process(title))
            if name != SURVIVOR and self.random.random() < 0.45:
                await self._kill(name, process, title)
            else:
                await self._stop(name, process, title, self.random.choice([0.3, 2.0, 7.0]))

    async def _kill(self, name: str, process: psutil.Process, title: str) -> None:
        self.counts[f"killed {title}"] += 1
        async with self._illness(name):
            process.kill()
            server = self.servers[name]
            async with asyncio.timeout(180.0):
                while server.alive():  # noqa: ASYNC110 - a process, not a task
                    await asyncio.sleep(0.2)
            await asyncio.to_thread(self.fleet.stop, server)
            self.servers[name] = (await asyncio.to_thread(self.fleet.start, self._specs[name]))[0]

    async def _stop(self, name: str, process: psutil.Process, title: str, seconds: float) -> None:
        self.counts[f"stopped {title}"] += 1
        async with self._illness(name):
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            process.send_signal(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def _illness(self, name: str) -> AsyncIterator[None]:
        """Clients do not choose an instance that is known to be ill, as no load balancer would. A gateway does not know
        by itself."""
        self._ill.add(name)
        try:
            yield
        finally:
            self._ill.discard(name)

    # What is held

    async def _measure(self, until: float) -> None:
        while time.monotonic() < until:
            resident: Counter[str] = Counter()
            private: Counter[str] = Counter()
            for pid in self.servers[SURVIVOR].pids():
                memory = psutil.Process(pid).memory_info()
                resident[_title(pid)] += memory.rss
                private[_title(pid)] += memory.rss - memory.shared
            for title, size in resident.items():
                self.sizes[title].append((time.monotonic(), size, private[title]))
            await asyncio.sleep(SAMPLE_S)

    def rss_slopes(self) -> dict[str, float]:
        """Growth of the survivor's processes, in MiB a minute over the last half."""
        slopes = {}
        for title, points in self.sizes.items():
            seconds, sizes, _ = np.array(points[len(points) // 2 :]).T
            slopes[title] = round(float(np.polyfit(seconds - seconds[0], sizes, 1)[0]) * 60 / MIB, 2)
        return slopes

    def sizes_by_minute(self) -> dict[str, dict[str, list[float]]]:
        """Sizes of the survivor's processes, in MiB: whether they grow in steps or all the time, and what grows."""
        every = round(60 / SAMPLE_S)
        return {
            title: {
                "resident": [round(resident / MIB, 1) for _, resident, _ in points[::every]],
                "private": [round(private / MIB, 1) for _, _, private in points[::every]],
            }
            for title, points in self.sizes.items()
        }

    async def footprints(self) -> dict[str, Footprint]:
        """The footprint of every instance, once it is idle."""
        return {name: await self._footprint(server) for name, server in self.servers.items()}

    async def _footprint(self, server: Server) -> Footprint:
        assert server.llumlet is not None
        async with LlumletClient(str(server.llumlet)) as client:
            status = await client.get_instance_status()
            listed = await client.list_requests()
        sockets, threads = (Counter(name for pid in server.pids() for name in of(pid)) for of in (_sockets, _threads))
        return Footprint(
            free_blocks=status.num_free_blocks,
            requests=len(listed.requests) + status.num_migrate_in_reqs + status.num_migrate_out_reqs,
            sockets=sockets.total(),
            threads=threads.total(),
            names=sockets + threads,
        )

    async def at_rest(self) -> dict[str, Footprint]:
        """The footprints when connections for calls are closed: who has called whom is a matter of chance."""
        await asyncio.sleep(IDLE_SECONDS + REST_S)
        return await self.footprints()

    async def settled(self, before: dict[str, Footprint]) -> dict[str, Footprint]:
        """The footprints when they are what they were, or at the latest after `SETTLE_S`."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            after = await self.footprints()
            if after == before or time.monotonic() > deadline:
                return after
            await asyncio.sleep(2.0)


def _sockets(pid: int) -> Iterator[str]:
    """Every socket of a process: where it leads, if it is one of TCP."""
    process = psutil.Process(pid)
    tcp = {connection.fd: connection for connection in process.net_connections("tcp")}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if not str(link.readlink()).startswith("socket:"):
                continue
            connection = tcp.get(int(link.name))
            kind = f"tcp {connection.status} {connection.raddr or ''}" if connection else "not tcp"
            yield f"socket of {_title(pid)}: {kind}"


def _threads(pid: int) -> Iterator[str]:
    """Threads but for those of pools that grow when more is asked at once than ever before: gRPC's, and the probes of
    peers."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        if not name.startswith(("event_engine", PROBE_THREAD)):
            yield f"thread of {_title(pid)}: {name}"


def _title(pid: int) -> str:
    word = command_line(pid).split()[0]
    return word.removeprefix("VLLM::") if word.startswith("VLLM::") else "APIServer"


async def _soak(arguments: argparse.Namespace, fleet: Fleet) -> tuple[dict[str, Any], list[str]]:
    with contextlib.ExitStack() as stack:
        log = None
        if arguments.gateway:
            logs = arguments.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llumnix-soak-")))
            log = logs / "gateway.log"
        soak = Soak(fleet, build(PRESETS["tiny"]), random.Random(arguments.seed), arguments.streams, log)
        if soak.gateway is not None:
            stack.callback(soak.gateway.stop)
        return await _measured(soak, arguments)


async def _measured(soak: Soak, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    with saying("the same requests on a quiet engine") as say:
        tasks = await soak.tasks()
        await soak.warm_up(tasks)
        say("until nobody calls anybody any more")
        before = await soak.at_rest()
        began = time.monotonic()
        running = asyncio.create_task(soak.run(arguments.minutes * 60, tasks))
        while not running.done():
            await asyncio.wait([running], timeout=10.0)
            minutes = (time.monotonic() - began) / 60
            say(f"{minutes:.1f} of {arguments.minutes:g} minutes: {dict(sorted(soak.counts.items()))}")
        running.result()
        say("what is held afterwards")
        # An instance that was started anew has met nobody.
        await soak.warm_up(tasks)
        await soak.at_rest()
        after = await soak.settled(before)
    counts = soak.counts
    row = {
        "bench": "soak",
        "minutes": arguments.minutes,
        "seed": arguments.seed,
        "gateway": arguments.gateway,
        "refused": counts["refused"],
        "streams": counts["streams"],
        "differed": counts["differed"],
        "truncated": counts["truncated"],
        "left": counts["left"],
        "moves": {key.removeprefix("moves "): n for key, n in sorted(counts.items()) if key.startswith("moves ")},
        "killed": counts["killed EngineCore"] + counts["killed Worker"],
        "stopped": counts["stopped EngineCore"] + counts["stopped Worker"],
        "longest_pause_s": round(soak.longest_pause, 2),
        "before": {name: footprint.numbers() for name, footprint in before.items()},
        "after": {name: footprint.numbers() for name, footprint in after.items()},
        "held": before != after,
        "rss_mib_per_min": round(sum(soak.rss_slopes().values()), 2),
        "rss_mib_per_min_by_process": soak.rss_slopes(),
        "mib_by_minute": soak.sizes_by_minute(),
    }
    notes = [f"{name}: {change}" for name in before for change in _changes(before[name].names, after[name].names)]
    return row, soak.differences + (notes if row["held"] else [])


def _changes(before: Counter[str], after: Counter[str]) -> list[str]:
    return [f"{after[name] - before[name]:+} {name}" for name in sorted(after | before) if after[name] != before[name]]


def _table(row: dict[str, Any]) -> Table:
    table = Table("instance", "", *NUMBERS, title="What each instance holds while idle")
    for name in row["before"]:
        table.add_row(name, "start", *map(str, row["before"][name].values()))
        table.add_row("", "end", *map(str, row["after"][name].values()))
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Does anything get lost?")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=4, help="clients at a time")
    parser.add_argument("--gateway", action="store_true", help="a gateway before the three")
    parser.add_argument("--seed", type=int, default=0, help="of what is done when; the timing is the machine's")
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    arguments = parser.parse_args(argv)
    with Fleet(arguments.logs) as fleet:
        row, differences = asyncio.run(_soak(arguments, fleet))
    console = Console(stderr=True, markup=False)
    console.print(_table(row))
    for difference in differences:
        console.print(difference, highlight=False)
    line = json.dumps(row)
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)
    return int(bool(row["differed"] or row["truncated"] or row["held"]))


if __name__ == "__main__":
    sys.exit(main())
