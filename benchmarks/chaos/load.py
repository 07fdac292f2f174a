# SPDX-License-Identifier: Apache-2.0
"""Clients that know which tokens they are to get, and what became of each of their requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from llumsim.live.world import VOCABULARY, next_token

MODEL = "simulated"
_MOST_KEPT = 50
_AGAIN_S = 0.1
"""Before another gateway is asked, when one cannot be reached."""


@dataclass(slots=True)
class Verdicts:
    """Verdicts on all requests of a run."""

    requests: int = 0
    failed: int = 0
    """Ended with an error, before or within the stream."""
    truncated: int = 0
    """Ended without an error, a finish reason and the end mark."""
    wrong_tokens: int = 0
    """Others than those that were due: told twice, left out, or made up."""
    longest_gap_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def fail(self, kind: str, text: str) -> None:
        self.failed += 1
        self.errors[kind] += 1
        if len(self.examples) < _MOST_KEPT:
            self.examples.append(f"{kind}: {text[:300]}")


def due(prompt: Sequence[int], number: int) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Load:
    """`concurrency` clients, each with one stream after another, through any of the gateways that take connections."""

    def __init__(self, gateways: Callable[[], Sequence[str]], concurrency: int, draw: random.Random) -> None:
        self.verdicts = Verdicts()
        self._gateways = gateways
        self._concurrency = concurrency
        self._random = draw
        self._until_s = 0.0

    async def run(self, seconds: float) -> None:
        """Streams that have begun by then come to their end."""
        self._until_s = time.monotonic() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=120.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(self._client(session) for _ in range(self._concurrency)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < self._until_s:
            prompt = [self._random.randrange(1, VOCABULARY) for _ in range(self._random.randint(10, 200))]
            number = self._random.randint(10, 120)
            self.verdicts.requests += 1
            began_s = time.monotonic()
            try:
                await self._stream(session, prompt, number)
            except aiohttp.ClientConnectorError:
                # A gateway that is being started: as a load balancer would, another one is taken.
                self.verdicts.requests -= 1
                await asyncio.sleep(_AGAIN_S)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.verdicts.truncated += 1
                self.verdicts.fail("connection", repr(error))
            else:
                self.verdicts.latencies_s.append(time.monotonic() - began_s)

    async def _stream(self, session: aiohttp.ClientSession, prompt: list[int], number: int) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": number, "stream": True, "temperature": 0}
        url = f"{self._random.choice(self._gateways())}/v1/completions"
        text, reason, is_done, error = "", "", False, ""
        heard_s = time.monotonic()
        async with session.post(url, json=body) as answer:
            if answer.status != 200:
                self.verdicts.fail(f"status {answer.status}", await answer.text())
                return
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                now_s = time.monotonic()
                if text:
                    self.verdicts.longest_gap_s = max(self.verdicts.longest_gap_s, now_s - heard_s)
                heard_s = now_s
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    error = event["error"]["message"]
                    continue
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
        self._judge([int(word) for word in text.split()], due(prompt, number), reason, is_done, error)

    def _judge(self, tokens: list[int], expected: list[int], reason: str, is_done: bool, error: str) -> None:
        verdicts = self.verdicts
        verdicts.wrong_tokens += sum(one != other for one, other in zip(tokens, expected, strict=False))
        verdicts.wrong_tokens += max(0, len(tokens) - len(expected))
        if error:
            verdicts.fail("error in the stream", f"after {len(tokens)} of {len(expected)} tokens: {error}")
        elif len(tokens) < len(expected) or reason != "length" or not is_done:
            verdicts.truncated += 1
            verdicts.fail("truncated", f"{len(tokens)} of {len(expected)} tokens, {reason!r}, done: {is_done}")
