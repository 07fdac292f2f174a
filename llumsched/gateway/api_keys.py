# SPDX-License-Identifier: Apache-2.0
"""Clients' keys, the limits of each, and what is in use of them.

    {"team-a": {"keys": ["sk-…", "sha256:9f86…"], "requests_per_minute": 600, "concurrent_requests": 32},
     "batch": {"keys": ["sha256:60fd…"], "requests_per_second": 5, "tokens_in_flight": 200000},
     "chat": {"keys": ["sha256:2c26…"], "ttft_slo_ms": 500, "tpot_slo_ms": 50}}

A missing limit is none, except `best_priority`, which is then 0. Several keys of one name share its limits: the next
one is added before the last one is taken away.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

import msgspec
from aiohttp import web

from llumlet.process.secret_files import Current, read_secret
from llumlet.process.tokens import HashedKeys, faults_of
from llumsched.gateway.errors import Forbidden, Overloaded
from llumsched.gateway.objectives import Objectives

_MINUTE_S: Final = 60.0
_RELOAD_S: Final = 1.0
"""Time between two looks at the file."""
_LEAST_CHARACTERS: Final = 16
_POSITIVE: Final = (
    "requests_per_second",
    "requests_per_minute",
    "concurrent_requests",
    "tokens_in_flight",
    "ttft_slo_ms",
    "tpot_slo_ms",
)
UNLIMITED_SHARE: Final = 4
"""Share of `tokens_in_flight`, one in so many, that output without a limit counts for at most: such a request rarely
reaches the model's length, which alone may exceed the whole allowance."""
_MOST_SECRETS: Final = 32


class Allowance(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The entry of one name."""

    keys: list[str]
    requests_per_second: float | None = None
    requests_per_minute: float | None = None
    concurrent_requests: int | None = None
    tokens_in_flight: int | None = None
    """Limit of the tokens of all its requests in flight: prompts, and the most that they may generate. Output without a
    limit counts as at most a quarter of this limit."""
    best_priority: int | None = 0
    """The lowest `priority` that its requests may ask for (as in vLLM, lower numbers come first); null allows any."""
    ttft_slo_ms: float | None = None
    """Objectives of its requests that name none."""
    tpot_slo_ms: float | None = None


def read_keys(path: str) -> dict[str, Allowance]:
    """Allowances by name. Raises ValueError, which never holds a key."""
    try:
        found = msgspec.json.decode(read_secret(path), type=dict[str, Allowance])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    faults = faults_of({name: allowance.keys for name, allowance in found.items()}, _LEAST_CHARACTERS)
    for name, allowance in found.items():
        if not allowance.keys:
            faults.append(f"{name!r} has no keys")
        for limit in _POSITIVE:
            if (value := getattr(allowance, limit)) is not None and not value > 0:
                faults.append(f"{limit} of {name!r} must be positive")
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults)}")
    if not found:
        raise ValueError(f"{path} holds no keys")
    return found


class Limit(StrEnum):
    """The limit that a request exceeded."""

    KEY = "key"
    RATE = "rate"
    CONCURRENT = "concurrent"
    TOKENS = "tokens"
    PRIORITY = "priority"


class Exceeded(Overloaded):
    def __init__(self, message: str, tenant: str, limit: Limit, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.tenant = tenant
        self.limit = limit


class PriorityRefused(Forbidden):
    pass


class Bucket:
    """A token bucket."""

    def __init__(self, per_s: float, capacity: float, clock: Callable[[], float]) -> None:
        self._per_s, self._capacity, self._clock = per_s, capacity, clock
        self._level, self._at_s = capacity, clock()

    def wait_s(self) -> float:
        """Seconds until there is a token."""
        now_s = self._clock()
        self._level = min(self._capacity, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return max(0.0, (1.0 - self._level) / self._per_s)

    def take(self, number: int = 1) -> None:
        self._level -= number


class Tenant:
    """The owner of a key, and how much of the allowance is in use."""

    def __init__(self, name: str, allowance: Allowance, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._num_requests = 0
        self._num_tokens = 0
        self.allow(allowance)

    def allow(self, allowance: Allowance) -> None:
        """Replaces the allowance; requests in flight stay counted."""
        self.allowance = allowance
        self._buckets = [
            Bucket(rate / period_s, max(1.0, rate), self._clock)
            for rate, period_s in ((allowance.requests_per_second, 1.0), (allowance.requests_per_minute, _MINUTE_S))
            if rate is not None
        ]

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request while the block runs. Raises Exceeded."""
        self._check_concurrent(1)
        wait_s = max((bucket.wait_s() for bucket in self._buckets), default=0.0)
        if wait_s:
            raise Exceeded("This API key has exceeded its rate of requests.", self.name, Limit.RATE, wait_s)
        for bucket in self._buckets:
            bucket.take()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    @contextmanager
    def sequences(self, number: int) -> Iterator[None]:
        """Counts the sequences of a request beyond the first while the block runs, each as a request. Raises Exceeded
        if too many run; rates are charged to later requests."""
        self._check_concurrent(number)
        for bucket in self._buckets:
            bucket.take(number)
        with self.kept(number):
            yield

    @contextmanager
    def kept(self, number: int) -> Iterator[None]:
        """Counts requests that continue in the background while the block runs."""
        self._num_requests += number
        try:
            yield
        finally:
            self._num_requests -= number

    def _check_concurrent(self, number: int) -> None:
        most = self.allowance.concurrent_requests
        if number and most is not None and self._num_requests + number > most:
            worth = f" This one counts as {number + 1}." if number > 1 else ""
            raise Exceeded(f"This API key allows {most} requests in flight.{worth}", self.name, Limit.CONCURRENT)

    @property
    def limits_flight(self) -> bool:
        return self.allowance.concurrent_requests is not None or self.allowance.tokens_in_flight is not None

    @property
    def objectives(self) -> Objectives:
        """The objectives of requests that name none."""
        return Objectives(self.allowance.ttft_slo_ms or 0.0, self.allowance.tpot_slo_ms or 0.0)

    def check_priority(self, asked: int) -> None:
        """Checks the priority that a request's body asks for. Raises PriorityRefused."""
        best = self.allowance.best_priority
        if best is not None and asked < best:
            raise PriorityRefused(
                f"`priority` {asked} is refused: this API key allows {best} or more (lower numbers come first)."
            )

    @contextmanager
    def tokens(self, num_prompt: int, num_output: int) -> Iterator[None]:
        """Counts the tokens that a request may take while the block runs. A request that may generate more than the
        limit runs alone. Raises Exceeded."""
        most = self.allowance.tokens_in_flight
        number = num_prompt + num_output
        if most is not None:
            number = min(number, max(most, num_prompt))
            if self._num_tokens + number > most:
                text = f"This API key allows {most} tokens in flight: prompts and the longest outputs."
                raise Exceeded(text, self.name, Limit.TOKENS)
        self._num_tokens += number
        try:
            yield
        finally:
            self._num_tokens -= number


TENANT: Final = web.RequestKey("tenant", Tenant)
"""Key of a request for its tenant."""


class ApiKeys:
    """The keys of a file. Raises ValueError if it cannot be used."""

    def __init__(self, path: str) -> None:
        self._known: tuple[dict[str, Tenant], HashedKeys[str]] = ({}, HashedKeys({}))
        self.secrets: tuple[bytes, ...] = ()
        """Secrets derived from the present and the previous file, the newest first."""
        self._reloading = threading.Lock()
        # Asked by `reload` alone, which may take long, and never on the event loop.
        self._file = Current(self._load, "API keys", path, clock=lambda: 0.0)

    def reload(self) -> None:
        """Reads the file if it has changed; a faulty file is logged and ignored. Any thread may call this, and the file
        is read when it returns (10,000 keys take 40 ms)."""
        with self._reloading:
            self._file.look()

    async def keep_reading(self) -> None:
        """Reads the file whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(_RELOAD_S)
            await asyncio.to_thread(self.reload)

    def _load(self, path: str) -> None:
        allowances = read_keys(path)
        before, _ = self._known
        tenants = {}
        for name, allowance in allowances.items():
            tenant = tenants[name] = before.get(name) or Tenant(name, allowance)
            if tenant.allowance != allowance:
                tenant.allow(allowance)
        keys = HashedKeys({name: allowance.keys for name, allowance in allowances.items()})
        self._known = tenants, keys
        if (secret := keys.digest()) not in self.secrets:
            self.secrets = (secret, *self.secrets)[:_MOST_SECRETS]

    def whose(self, shown: Iterable[str]) -> Tenant | None:
        """The tenant of the first known key."""
        tenants, keys = self._known
        return next((tenants[name] for name in map(keys.whose, shown) if name is not None), None)
