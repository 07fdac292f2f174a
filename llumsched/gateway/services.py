# SPDX-License-Identifier: Apache-2.0
"""What answering a request needs: the parts of the gateway that all requests share, and what is known of this one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.body import Body, Prompt
from llumsched.gateway.config import Config
from llumsched.gateway.forwarded import RawHeaders
from llumsched.gateway.metrics import Metrics, Record
from llumsched.gateway.placement import Placed, Placement
from llumsched.gateway.retries import RetryBudget
from llumsched.gateway.stored import StoredResponses
from llumsched.gateway.suspects import Trials
from llumsched.gateway.tokens import TokenCounter
from llumsched.gateway.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Received:
    """A request that is to be sent to an engine."""

    request: web.BaseRequest
    body: Body
    record: Record
    own_id: str
    """The id under which engine and scheduler know the request."""
    started_s: float
    prompt: Prompt
    """What is known of its prompt; nothing if nobody asks for that."""
    headers: RawHeaders
    """Headers for the engine."""

    @property
    def target(self) -> str:
        """Path and query. No path that is passed needs escapes."""
        query = self.request.rel_url.raw_query_string
        return f"{self.request.path}?{query}" if query else self.request.path


class Running(Protocol):
    """A request that an engine has."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        ...

    async def keep_alive(self, since_s: float, now_s: float) -> None:
        """Send its client a comment if it has got nothing since then."""
        ...


@dataclass(eq=False, slots=True)
class Services:
    config: Config
    backends: Backends
    placement: Placement
    upstream: Upstream
    metrics: Metrics
    tokens: TokenCounter
    stored: StoredResponses
    num_in_flight: int = 0
    budget: RetryBudget = field(init=False)
    trials: Trials[Backend] = field(init=False)
    running: dict[Running, Placed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = RetryBudget(self.config.retry_budget, lambda: self.num_in_flight, time.monotonic)
        self.trials = Trials(lambda: len(self.backends) - len(self.backends.avoided()))
