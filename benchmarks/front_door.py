# SPDX-License-Identifier: Apache-2.0
"""Do strangers at the gateway's door slow the streams of others: is the p99 gap between two events at most 1.1 times
what it is without them, and no turn of the event loop longer than 20 ms?

    python -m benchmarks.front_door

A gateway with 10,000 API keys runs in this process; a mock engine, which writes an event every 20 ms, the clients that
read --streams streams, and the strangers have a process each. Each stranger sends --rate requests a second:

    bombs     bodies of 61 kB that would inflate to 60 MiB, without a key
    heads     requests whose head cannot be read
    keys      wrong keys
    metrics   scrapes of /metrics at the front door, and at the port for operators
    ids       questions for responses that do not exist, with a key

Phases without and with a stranger alternate. The ratio is the median of the rounds', each of a phase and the one before
it, so that other load of the machine hits both. Turns are measured in further phases, in time of the loop's own thread:
measuring them keeps a core busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import gzip
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from benchmarks.gateway import running
from llumlet.process.addresses import Address
from llumsched.gateway.config import AccessLog, Config
from llumsched.gateway.server import Gateway
from llumsched.up.ports import free_port
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json
from tests.support.stats import quantile

MOST_TURN_MS: Final = 20.0
MOST_RATIO: Final = 1.1
KINDS: Final = ("bombs", "heads", "keys", "metrics", "ids")
_NONE: Final = "nobody"
_KEY: Final = "sk-of-the-streams-0123456789"
_NUM_KEYS: Final = 10_000
_INTERVAL_MS: Final = 20.0
_START_S: Final = 3.0
_SETTLED_S: Final = 0.5
_LONG: Final = 2_000
_BOMB: Final = gzip.compress(b" " * (60 << 20))


async def read_streams(port: int, number: int) -> None:
    """The clients: for each line on stdin, a line with the gaps (ms) since the last."""
    gaps: list[float] = []

    async def read(session: aiohttp.ClientSession) -> None:
        body = {"model": "mock", "prompt": [1, 2], "max_tokens": _LONG, "stream": True}
        headers = {"Authorization": f"Bearer {_KEY}"}
        while True:
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                last_s = 0.0
                async for _ in answer.content.iter_any():
                    now_s = time.perf_counter()
                    if last_s:
                        gaps.append((now_s - last_s) * 1e3)
                    last_s = now_s

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        reading = [asyncio.create_task(read(session)) for _ in range(number)]
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(gaps), flush=True)
            gaps.clear()
            for one in reading:
                if one.done():
                    one.result()
        for one in reading:
            one.cancel()


def _request(head: str, body: bytes = b"") -> bytes:
    return f"{head}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _sent(kind: str) -> bytes:
    post = "POST /v1/completions HTTP/1.1"
    match kind:
        case "bombs":
            return _request(f"{post}\r\nContent-Encoding: gzip", _BOMB)
        case "heads":
            return _request(f"{post}\r\nAuthorization: Bearer {'a' * 9000}\x00")
        case "keys":
            return _request(f"{post}\r\nAuthorization: Bearer sk-{os.urandom(16).hex()}", b"{}")
        case "ids":
            wanted = f"resp_{'a' * 24}_{os.urandom(16).hex()}"
            return _request(f"GET /v1/responses/{wanted} HTTP/1.1\r\nAuthorization: Bearer {_KEY}")
        case _:
            return _request("GET /metrics HTTP/1.1")


async def attack(kind: str, ports: list[int], rate: float) -> None:
    """A stranger, until it is killed."""

    async def send(port: int) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_sent(kind))
            while await reader.read(1 << 16):
                pass
            writer.close()

    sending: set[asyncio.Task[None]] = set()
    due_s = time.monotonic()
    number = 0
    print("begun", flush=True)
    while True:
        number += 1
        task = asyncio.create_task(send(ports[number % len(ports)] if kind == "metrics" else ports[0]))
        sending.add(task)
        task.add_done_callback(sending.discard)
        due_s = max(due_s, time.monotonic() - 1 / rate) + 1 / rate  # it may have stood still
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


@contextlib.asynccontextmanager
async def child(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.front_door", *words, stdin=pipe, stdout=pipe, limit=1 << 26
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _gaps(clients: asyncio.subprocess.Process) -> list[float]:
    assert clients.stdin is not None
    assert clients.stdout is not None
    clients.stdin.write(b"\n")
    found: list[float] = json.loads(await clients.stdout.readline())
    return found


async def _longest_turn_ms(seconds: float) -> float:
    longest_s, before_s, end_s = 0.0, time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        await asyncio.sleep(0)
        now_s = time.thread_time()
        longest_s, before_s = max(longest_s, now_s - before_s), now_s
    return longest_s * 1e3


def _write_keys(directory: str) -> str:
    path = Path(directory, "keys.json")
    others = {f"name-{number}": {"keys": [f"sk-of-{number:020}"]} for number in range(_NUM_KEYS)}
    path.write_text(json.dumps({"streams": {"keys": [_KEY]}} | others))
    path.chmod(0o600)
    return str(path)


async def measure(args: argparse.Namespace, engine: int, say: Say) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        keys = _write_keys(directory)
        config = Config(
            port=0, metrics_port=0, scheduling_policy="round-robin", backend_endpoints=(Address("127.0.0.1", engine),),
            api_key_file=keys, access_log=AccessLog.OFF, shutdown_timeout_s=0.0,
        )  # fmt: skip
        async with Gateway(config) as gateway:
            ports = [gateway.port, gateway.metrics_port]
            async with child("--read", str(gateway.port), "--streams", str(args.streams)) as clients:
                await asyncio.sleep(_START_S)
                return await _phases(args, ports, clients, say)


async def _phases(
    args: argparse.Namespace, ports: list[int], clients: asyncio.subprocess.Process, say: Say
) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        gaps: dict[str, list[float]] = {_NONE: [], kind: []}
        ratios = []
        turns_ms = dict.fromkeys(gaps, 0.0)
        words = ("--attack", kind, "--ports", *map(str, ports), "--rate", str(args.rate))
        async with child(*words) as stranger:
            assert stranger.stdout is not None
            await stranger.stdout.readline()  # it has begun, and need not do so while gaps are measured
            for number in range(args.rounds):
                p99s_ms = []
                for who in gaps:
                    say(f"{kind}, round {number + 1}: {who}")
                    stranger.send_signal(signal.SIGCONT if who == kind else signal.SIGSTOP)
                    await asyncio.sleep(_SETTLED_S)
                    await _gaps(clients)
                    await asyncio.sleep(args.seconds)
                    found = await _gaps(clients)
                    gaps[who] += found
                    p99s_ms.append(quantile(found, 0.99))
                    turns_ms[who] = max(turns_ms[who], await _longest_turn_ms(args.seconds / 2))
                ratios.append(p99s_ms[1] / p99s_ms[0])
        quiet, loud = gaps[_NONE], gaps[kind]
        rows.append(
            {
                "bench": "front_door",
                "kind": kind,
                "gap_p50_ms": round(quantile(loud, 0.5), 2),
                "gap_p99_ms": round(quantile(loud, 0.99), 2),
                "quiet_p99_ms": round(quantile(quiet, 0.99), 2),
                "ratio_p99": round(quantile(ratios, 0.5), 3),
                "longest_turn_ms": round(turns_ms[kind], 1),
                "quiet_turn_ms": round(turns_ms[_NONE], 1),
            }
        )
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    port = free_port()
    with saying("starting the mock engine") as say:
        command = [sys.executable, "-m", "tests.support.mock_api", "--port", str(port)]
        with running([*command, "--interval-ms", str(_INTERVAL_MS)], port, "/health"), _frozen():
            return uvloop.run(measure(args, port, say))


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Keeps the collector off the objects that are there already, as a gateway's worker does: going through all modules
    of a process of tests takes a turn of hundreds of milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rate", type=float, default=40.0, help="requests of a stranger a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each phase")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="+", help=argparse.SUPPRESS)
    add_json(parser)
    args = parser.parse_args()
    if args.read:
        asyncio.run(read_streams(args.read, args.streams))
        return
    if args.attack:
        asyncio.run(attack(args.attack, args.ports, args.rate))
        return
    rows = run(args)
    print(
        f"{'stranger':9} {'gap p50':>8} {'p99':>8} {'p99 quiet':>10} {'ratio':>6} {'longest turn':>13} {'quiet':>6} ms"
    )
    for row in rows:
        print(
            f"{row['kind']:9} {row['gap_p50_ms']:8.1f} {row['gap_p99_ms']:8.1f} {row['quiet_p99_ms']:10.1f} "
            f"{row['ratio_p99']:6.2f} {row['longest_turn_ms']:13.1f} {row['quiet_turn_ms']:6.1f}"
        )
    print(f"bars: ratio {MOST_RATIO}, longest turn {MOST_TURN_MS:.0f} ms")
    print_json(args.json, *rows)


if __name__ == "__main__":
    main()
