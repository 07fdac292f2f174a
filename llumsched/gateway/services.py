# SPDX-License-Identifier: Apache-2.0
"""The parts of the gateway that all requests share, and the received request."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiohttp import web

from llumlet.protocol.recovery.retries import RetryBudget
from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.background import Background
from llumsched.gateway.body import Body, Prompt
from llumsched.gateway.chats.form import Form
from llumsched.gateway.config import Config
from llumsched.gateway.errors import Overloaded
from llumsched.gateway.forwarded import RawHeaders
from llumsched.gateway.gateway_metrics import Metrics, Record
from llumsched.gateway.placement import Placed, Placement
from llumsched.gateway.stored import Stored, StoredResponses
from llumsched.gateway.suspects import Trials
from llumsched.gateway.tokens import TokenCounter
from llumsched.gateway.upstream import Upstream

_log = logging.getLogger(__name__)

TOLD: Final = web.RequestKey("told", dict[str, str])
"""Key of a request for the CORS headers of its answer."""


@dataclass(frozen=True, slots=True)
class Received:
    """A request to be sent to an engine."""

    request: web.BaseRequest
    body: Body
    record: Record
    own_id: str
    """The id of the request at engine and scheduler."""
    started_s: float
    prompt: Prompt
    """The prompt, as far as it is known and needed."""
    headers: RawHeaders
    """Headers for the engine."""
    stored: Stored | None = None
    """The response that it names or continues."""
    own_response: str = ""
    """The id that its response gets at the engine, if it may be asked for again."""

    @property
    def target(self) -> str:
        """Path and query. The paths that are passed need no escapes."""
        path = self.request.path
        if self.stored is not None:
            path = path.replace(self.stored.shown, self.stored.own)
        query = self.request.rel_url.raw_query_string
        return f"{path}?{query}" if query else path


class Bodies:
    """Bytes of the bodies in flight, `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Counts bytes that have come. Raises Overloaded."""
        self.num_bytes += num_bytes
        if self.num_bytes > self._most:
            raise Overloaded("The bodies of the requests in flight are too large together.", retry_after_s=1)

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Running(Protocol):
    """A request that runs on an engine."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        ...


class Streamed(Protocol):
    """A request whose client waits for events."""

    async def keep_alive(self, since_s: float, now_s: float) -> None:
        """Sends its client a comment if it has got nothing since then."""
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
    bodies: Bodies = field(init=False)
    background: Background = field(init=False)
    budget: RetryBudget = field(init=False)
    trials: Trials[Backend] = field(init=False)
    _is_told: bool = False
    """True once it was logged that a tokenizer is missing."""
    running: dict[Running, Placed] = field(default_factory=dict)
    streamed: set[Streamed] = field(default_factory=set)

    def unnamed(self, form: Form, model: str) -> None:
        """Notes a prompt whose blocks cannot be named here although the scheduler asks for them."""
        self.metrics.unnamed.labels(form).inc()
        if not self._is_told and not self.tokens.knows(model):
            self._is_told = True
            _log.warning(
                "The scheduler places requests by prefix caches, and this gateway cannot name the blocks of their "
                "prompts: it has no tokenizer for the model %s. Give it one with --tokenizer-path [MODEL=]PATH",
                model or "(unnamed)",
            )

    def __post_init__(self) -> None:
        self.background = Background(self.backends)
        self.bodies = Bodies(self.config.max_bodies_bytes)
        self.budget = RetryBudget(self.config.retry_budget, lambda: self.num_in_flight, time.monotonic)
        self.trials = Trials(lambda: len(self.backends) - len(self.backends.avoided()))
