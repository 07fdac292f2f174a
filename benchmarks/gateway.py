# SPDX-License-Identifier: Apache-2.0
"""What does a gateway cost: how many requests a second, and how much later do answers come than from the engine?

    python -m benchmarks.gateway --seconds 5 --rounds 4 --routers /path/to/venv/bin --json gateway.jsonl

Ours, with one and with two workers, beside no gateway at all and beside the routers of others that are installed (`pip
install vllm-router sglang-router`, best in an environment of their own). All stand before the same two mock engines,
which write what vLLM writes at once: 32 tokens, in one piece or as 32 events. All run from the beginning and take turns
in every round, in an order that is reversed in the next (ABBA), so that what else the machine does falls on all alike.

Ours runs in these forms, one worker each, to tell what each costs: plain (round robin, in clear, nobody asked for a
key), with keys, with TLS, in full mode (a real scheduler places each request), and with all three. `one by one` is the
same before two other engines, which write an event every --interval-ms: a stream then arrives in 32 reads, as from a
real engine, and not in one. That load is bound by the engines; its CPU is the answer.

The load is closed: --concurrency connections, each of which asks again when it has its answer. A client that does next
to nothing reads the answers. p50 and p99 are of the whole request; CPU is that of the target's own processes, for each
request: it says what the target would do on cores of its own, for engines, client and target share this machine. The
scheduler of full mode is not in it. `x direct` is p50 over that of no gateway, `x plain` CPU over that of ours, plain.
The routers run with their defaults but for round robin and quiet logs; ours asks for token ids, so that it could
continue the streams, and the others do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from llumsched.up import reaper
from llumsched.up.ports import free_ports
from tests.support import speed
from tests.support.authority import Authority
from tests.support.harness import cpu_seconds
from tests.support.progress import saying
from tests.support.report import add_json, commit, print_json
from tests.support.stats import quantile

_START_S = 60.0


@dataclass
class Target:
    name: str
    workers: int
    port: int
    command: list[str] | None
    """None: nothing to start."""
    is_slow: bool = False
    """True if the events of its engines arrive one by one."""
    tls: ssl.SSLContext | None = None
    key: str = ""
    latencies_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    elapsed_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    cpu_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    pid: int | None = None

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far."""
        pids = [] if self.pid is None else [self.pid, *reaper.descendants(self.pid)]
        return sum(cpu_seconds(pid) for pid in pids)


class _Connection(asyncio.Protocol):
    """Asks again and again, until the end."""

    def __init__(self, request: bytes, stream: bool, end_s: float, latencies: list[float]) -> None:
        self._request = request
        self._stream = stream
        self._end_s = end_s
        self._latencies = latencies
        self._buffer = b""
        self._started_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_whole():
            return
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self._finish(RuntimeError(self._buffer[:300].decode(errors="replace")))
            return
        now_s = time.perf_counter()
        self._latencies.append(now_s - self._started_s)
        if now_s < self._end_s:
            self._ask()
        else:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(ConnectionError("the connection was closed"))

    def _is_whole(self) -> bool:
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at >= 0:
            return len(body) >= int(lower[at + 15 :].split(b"\r\n", 1)[0])
        return self._buffer.endswith(b"0\r\n\r\n")

    def _ask(self) -> None:
        self._buffer = b""
        self._started_s = time.perf_counter()
        self._transport.write(self._request)

    def _finish(self, error: Exception | None) -> None:
        if self.done.done():
            return
        self._transport.close()
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


async def measure(target: Target, *, stream: bool, seconds: float, concurrency: int) -> tuple[list[float], float]:
    """The latencies of all requests, and the time that they took together."""
    messages = [{"role": "user", "content": "What is it like?"}]
    body = json.dumps({"model": "mock", "messages": messages, "max_tokens": 32, "stream": stream}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n" + (f"Authorization: Bearer {target.key}\r\n" if target.key else "") + "\r\n"
    )
    latencies: list[float] = []
    started_s = time.perf_counter()
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(concurrency):
        _, connection = await loop.create_connection(
            lambda: _Connection(head.encode() + body, stream, started_s + seconds, latencies),
            "127.0.0.1",
            target.port,
            ssl=target.tls,
        )
        connections.append(connection)
    async with asyncio.timeout(seconds + 60):
        await asyncio.gather(*(connection.done for connection in connections))
    return latencies, time.perf_counter() - started_s


@contextlib.contextmanager
def running(command: list[str], port: int, path: str, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """The process's pid, from when it answers 200 until the block ends."""
    log = open(f"/tmp/gateway-bench-{port}.log", "wb")  # noqa: SIM115 (closed below)
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"RUST_LOG": "error"})
    try:
        deadline_s = time.monotonic() + _START_S
        while not _answers(port, path, tls):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{' '.join(command)} did not start; see {log.name}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _answers(port: int, path: str, tls: ssl.SSLContext | None) -> bool:
    try:
        url = f"{'https' if tls else 'http'}://127.0.0.1:{port}{path}"
        with urllib.request.urlopen(url, timeout=2, context=tls) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@dataclass
class Secrets:
    """Files for the secured forms, and the client's side of them."""

    keys: Path
    key: str
    certificate: Path
    private_key: Path
    trust: ssl.SSLContext

    @classmethod
    def written(cls, directory: Path) -> Secrets:
        authority = Authority(directory)
        certificate, private_key = authority.issue("gateway")
        key, keys = f"sk-{secrets.token_hex(16)}", directory / "keys.json"
        keys.touch(mode=0o600)
        keys.write_text(json.dumps({"bench": {"keys": [key]}}))
        trust = ssl.create_default_context(cafile=str(authority.path))
        return cls(keys, key, certificate, private_key, trust)


def ours(
    name: str,
    engines: list[int],
    *,
    scheduler: int = 0,
    with_keys: Secrets | None = None,
    with_tls: Secrets | None = None,
    workers: int = 1,
    is_slow: bool = False,
) -> Target:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "llumsched.cli", "gateway", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", str(workers), "--access-log", "off", "--metrics-port", str(free_ports(1)[0])]
    if scheduler:
        command += ["--scheduler-endpoints", f"127.0.0.1:{scheduler}"]
    else:
        command += ["--scheduling-policy", "round-robin", "--llm-backend-endpoints", _endpoints(engines)]
    if with_keys:
        command += ["--api-key-file", str(with_keys.keys)]
    if with_tls:
        command += ["--ssl-certfile", str(with_tls.certificate), "--ssl-keyfile", str(with_tls.private_key)]
    key, tls = with_keys.key if with_keys else "", with_tls.trust if with_tls else None
    return Target(name, workers, port, command, is_slow, tls, key)


def _endpoints(engines: list[int]) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in engines)


def targets(engines: list[int], slow: list[int], schedulers: list[int], known: Secrets) -> list[Target]:
    """Ours in all forms, and no gateway. `schedulers`: of the engines, and of the slow ones."""
    of_all, of_slow = schedulers
    return [
        Target("direct", 1, engines[0], None),
        ours("ours", engines),
        ours("ours", engines, workers=2),
        ours("ours, keys", engines, with_keys=known),
        ours("ours, TLS", engines, with_tls=known),
        ours("ours, full mode", engines, scheduler=of_all),
        ours("ours, all three", engines, scheduler=of_all, with_keys=known, with_tls=known),
        Target("direct", 1, slow[0], None, is_slow=True),
        ours("ours", slow, is_slow=True),
        ours("ours, all three", slow, scheduler=of_slow, with_keys=known, with_tls=known, is_slow=True),
    ]


def others(engines: list[int], routers: Path | None) -> tuple[list[Target], list[str]]:
    """Routers of others, and the names of those that are not installed."""
    found, missing = [], []
    for name, module in (("vllm-router", "vllm_router"), ("sglang-router", "sglang_router")):
        python = routers / "python" if routers else Path(sys.executable)
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            missing.append(name)
            continue
        port, metrics = free_ports(2)
        command = [str(python), "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(metrics)]
        urls = [f"http://127.0.0.1:{port}" for port in engines]
        found.append(Target(name, 1, port, [*command, "--worker-urls", *urls]))
    return found, missing


@contextlib.contextmanager
def scheduler_of(engines: list[int]) -> Iterator[int]:
    """The HTTP port of a scheduler in full mode that knows the engines."""
    port, cms = free_ports(2)
    command = [
        sys.executable,
        "-m",
        "llumsched.cli",
        "scheduler",
        "--port",
        str(port),
        "--cms",
        f"listen://127.0.0.1:{cms}",
    ]
    report = [sys.executable, "-m", "benchmarks.reporting", f"127.0.0.1:{cms}", "mock", ",".join(map(str, engines))]
    with running(command, port, "/healthz"), running(report, port, "/ready"):
        yield port


def _row(target: Target, stream: bool) -> dict[str, Any]:
    latencies = target.latencies_s[stream]
    return {
        "target": target.name,
        "workers": target.workers,
        "stream": stream,
        "events": "one by one" if target.is_slow else "at once",
        "rps": round(len(latencies) / target.elapsed_s[stream], 1),
        "p50_ms": round(quantile(latencies, 0.5) * 1e3, 3),
        "p99_ms": round(quantile(latencies, 0.99) * 1e3, 3),
        "cpu_us": round(target.cpu_s[stream] / len(latencies) * 1e6, 1),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with `p50_to_direct` and `cpu_to_plain`: over those of no gateway, and of ours in its plain form, before the
    same engines."""

    def base(row: dict[str, Any], name: str) -> dict[str, Any]:
        alike = ("stream", "events")
        return next(
            one
            for one in rows
            if one["target"] == name and one["workers"] == 1 and all(one[a] == row[a] for a in alike)
        )

    for row in rows:
        row["p50_to_direct"] = round(row["p50_ms"] / base(row, "direct")["p50_ms"], 3)
        row["cpu_to_plain"] = round(row["cpu_us"] / base(row, "ours")["cpu_us"], 3)
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        say = stack.enter_context(saying("starting the mock engines"))
        known = Secrets.written(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        fast, slow = free_ports(args.engines), free_ports(args.engines)
        for port in (*fast, *slow):
            command = [sys.executable, "-m", "tests.support.mock_api", "--port", str(port)]
            command += ["--interval-ms", str(args.interval_ms)] if port in slow else []
            stack.enter_context(running(command, port, "/health"))
        say("starting the schedulers")
        schedulers = [stack.enter_context(scheduler_of(engines)) for engines in (fast, slow)]
        foreign, missing = others(fast, args.routers)
        found = [*targets(fast, slow, schedulers, known), *foreign]
        for target in found:
            if target.command:
                say(f"starting {target.name}")
                path = "/v1/models" if target in foreign else "/health"
                target.pid = stack.enter_context(running(target.command, target.port, path, target.tls))
        for name in missing:
            print(f"{name}: not installed, not measured", file=sys.stderr)
        for number in range(args.rounds + 1):  # the first only warms up
            for target in found if number % 2 else found[::-1]:
                for stream in (True,) if target.is_slow else (False, True):
                    say(f"round {number} of {args.rounds}: {target.name} x{target.workers}")
                    _measure(target, stream, args, counts=bool(number))
    rows = [_row(target, stream) for stream in (False, True) for target in found if stream or not target.is_slow]
    return with_ratios(sorted(rows, key=lambda row: (row["events"], row["stream"])))


def _measure(target: Target, stream: bool, args: argparse.Namespace, *, counts: bool) -> None:
    seconds = args.seconds if counts else min(1.0, args.seconds)
    cpu_before_s = target.cpu_seconds()
    latencies, elapsed_s = uvloop.run(measure(target, stream=stream, seconds=seconds, concurrency=args.concurrency))
    if counts:
        target.latencies_s[stream] += latencies
        target.elapsed_s[stream] += elapsed_s
        target.cpu_s[stream] += target.cpu_seconds() - cpu_before_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between two events that come one by one")
    parser.add_argument("--routers", type=Path, help="directory of the python that has the other routers installed")
    add_json(parser)
    args = parser.parse_args()
    rows = run(args)
    print(
        f"{'':16} {'workers':>7} {'answer':>18} {'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'x direct':>8} "
        f"{'CPU us':>7} {'x plain':>7}"
    )
    for row in rows:
        answer = f"events {row['events']}" if row["stream"] else "in one piece"
        print(
            f"{row['target']:16} {row['workers']:7} {answer:>18} {row['rps']:10.0f} {row['p50_ms']:8.2f} "
            f"{row['p99_ms']:8.2f} {row['p50_to_direct']:8.2f} {row['cpu_us']:7.0f} {row['cpu_to_plain']:7.2f}"
        )
    machine = speed.measured()
    print(machine)
    print_json(args.json, {"bench": "gateway", "commit": commit(), "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
