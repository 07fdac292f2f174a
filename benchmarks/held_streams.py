# SPDX-License-Identifier: Apache-2.0
"""What does a held stream cost a gateway in memory: do 10,000 with prompts of 8k tokens fit in 2 GB?

    python -m benchmarks.held_streams --streams 10000 --prompt-tokens 8192

One gateway process stands before mock engines in processes of their own. Streams are opened a few at a time, and held:
each gets its first event at once and another one every --interval seconds, as users have it who read along. The prompts
are token ids, so that body and ids are about equally long, and the gateway asks for the ids to be able to continue.

RSS is the gateway's: idle and warmed up, and the most while all streams were held. Bytes a stream are the difference.
Each stream takes two of the gateway's descriptors: the hard limit is printed if it is too low for all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import sys
import time
from typing import Any

import psutil
import uvloop

from benchmarks.gateway import running
from llumsched.up.ports import free_ports
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json
from tests.support.stats import quantile

BAR_MB = 2000.0
"""The most memory that 10,000 streams of 8k tokens may take."""
_FIRST_EVENT_S = 120.0
_LOOK_S = 0.5
_SPARE_DESCRIPTORS = 200


class Held:
    """One stream: open from `open` to `close`."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port = port
        self._request = request
        self.first_event_s = 0.0
        self.num_bytes = 0

    async def open(self) -> None:
        """Opens a stream and waits for its first event. Raises ConnectionError for an answer that is no stream."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        started_s = time.perf_counter()
        self._writer.write(self._request)
        async with asyncio.timeout(_FIRST_EVENT_S):
            status = await self._reader.readline()
            if b" 200 " not in status:
                raise ConnectionError(f"the gateway answered {status.decode().strip()!r}")
            await self._reader.readuntil(b"data:")
        self.first_event_s = time.perf_counter() - started_s
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while data := await self._reader.read(1 << 16):
            self.num_bytes += len(data)

    @property
    def is_lost(self) -> bool:
        return self._reading.done()

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.transport.abort()


def request_of(port: int, num_prompt_tokens: int, num_output_tokens: int) -> bytes:
    """Token ids as of a vocabulary of 150,000: five digits and more."""
    prompt = [10_000 + number * 7919 % 140_000 for number in range(num_prompt_tokens)]
    document = {"model": "mock", "prompt": prompt, "max_tokens": num_output_tokens, "stream": True}
    body = json.dumps(document, separators=(",", ":")).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def hold(args: argparse.Namespace, port: int, gateway: psutil.Process, say: Say) -> dict[str, Any]:
    request = request_of(port, args.prompt_tokens, args.output_tokens)
    opening = asyncio.Semaphore(args.concurrency)

    async def begin(number: int) -> Held:
        stream = Held(port, request)
        async with opening:
            await stream.open()
        if number % 500 == 499:
            say(f"{number + 1} streams")
        return stream

    warm = await asyncio.gather(*(begin(0) for _ in range(args.concurrency)))
    await asyncio.gather(*(stream.close() for stream in warm))
    await asyncio.sleep(args.hold / 4)
    before = gateway.memory_info().rss
    cpu_before_s, started_s = sum(gateway.cpu_times()[:2]), time.perf_counter()
    streams = await asyncio.gather(*(begin(number) for number in range(args.streams)))
    opened_s = time.perf_counter() - started_s
    peak = 0
    say(f"all {args.streams} are held for {args.hold:g} s")
    end_s = time.monotonic() + args.hold
    while time.monotonic() < end_s:
        peak = max(peak, gateway.memory_info().rss)
        await asyncio.sleep(_LOOK_S)
    num_lost = sum(stream.is_lost for stream in streams)
    cpu_s = sum(gateway.cpu_times()[:2]) - cpu_before_s
    await asyncio.gather(*(stream.close() for stream in streams))
    firsts_ms = [stream.first_event_s * 1e3 for stream in streams]
    return {
        "bench": "held_streams",
        "streams": args.streams,
        "prompt_tokens": args.prompt_tokens,
        "request_bytes": len(request),
        "rss_before_mb": round(before / 1e6, 1),
        "rss_mb": round(peak / 1e6, 1),
        "bytes_per_stream": round((peak - before) / args.streams),
        "rss_of_10000_mb": round((before + (peak - before) / args.streams * 10_000) / 1e6, 1),
        "first_event_ms": round(quantile(firsts_ms, 0.5), 1),
        "first_event_p99_ms": round(quantile(firsts_ms, 0.99), 1),
        "opened_s": round(opened_s, 1),
        "cpu_s": round(cpu_s, 1),
        "lost": num_lost,
    }


def raise_descriptors(num_streams: int) -> None:
    """Raises the limit of descriptors, for this process and those that it starts. Raises OSError if the hard limit does
    not allow that."""
    wanted = 2 * num_streams + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
    except (ValueError, OSError):
        raise OSError(f"{wanted} descriptors are needed, and the hard limit is {hard}") from None


def run(args: argparse.Namespace) -> dict[str, Any]:
    raise_descriptors(args.streams + args.concurrency)
    port, *engine_ports = free_ports(1 + args.engines)
    endpoints = ",".join(f"127.0.0.1:{one}" for one in engine_ports)
    with contextlib.ExitStack() as stack:
        say = stack.enter_context(saying("starting the mock engines"))
        for one in engine_ports:
            command = [sys.executable, "-m", "tests.support.mock_api", "--port", str(one)]
            stack.enter_context(running([*command, "--interval-ms", str(args.interval * 1e3)], one, "/health"))
        say("starting the gateway")
        command = [sys.executable, "-m", "llumsched.cli", "gateway", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--scheduling-policy", "round-robin", "--llm-backend-endpoints", endpoints, "--access-log", "off"]
        command += ["--max-requests", str(args.streams + args.concurrency), "--shutdown-timeout", "0"]
        pid = stack.enter_context(running(command, port, "/v1/models"))
        return uvloop.run(hold(args, port, psutil.Process(pid), say))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between two events of a stream")
    parser.add_argument("--hold", type=float, default=20.0, help="seconds for which all are held")
    parser.add_argument("--concurrency", type=int, default=32, help="streams opened at a time")
    parser.add_argument("--engines", type=int, default=2)
    add_json(parser)
    args = parser.parse_args()
    row = run(args)
    print(f"{'':24} {'before':>9} {'held':>9}")
    print(f"{'RSS of the gateway, MB':24} {row['rss_before_mb']:9.0f} {row['rss_mb']:9.0f}")
    print(
        f"a stream: {row['bytes_per_stream'] / 1e3:.0f} kB, of which its request is {row['request_bytes'] / 1e3:.0f} kB"
    )
    print(f"10,000 of them: {row['rss_of_10000_mb']:.0f} MB (bar: {BAR_MB:.0f} MB for 8k tokens)")
    print(f"first event: {row['first_event_ms']:.0f} ms, p99 {row['first_event_p99_ms']:.0f} ms; {row['lost']} lost")
    print_json(args.json, row)


if __name__ == "__main__":
    main()
