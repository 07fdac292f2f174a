# SPDX-License-Identifier: Apache-2.0
"""The end of an API server that holds streams: refuse new work, have the engine emptied, wait for the last stream.

vLLM's launcher answers SIGTERM by calling the client's `shutdown` in a helper thread, while the event loop goes on
serving; `drain` runs on that loop before anything is shut down. The client's connections end here, so this process
lives as long as its streams do, wherever their requests run. Its engine does not: empty, it ends at once and gives its
memory back, as if it had died with nothing in it. (Not of several API servers, whose engine is their parent's.)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_llumnix.frontend.asgi import Message, Middleware, Receive, Send, respond
from vllm_llumnix.frontend.peers import Peers
from vllm_llumnix.frontend.vllm_client_types import Client

logger = logging.getLogger("vllm.llumnix")

POLL_SECONDS = 0.25
REPORT_SECONDS = 1.0
LINGER_SECONDS = 0.75
"""Time for what is queued to reach clients and operators before everything ends."""
CALL_SECONDS = 2.0
"""An engine that takes longer hangs, or computes a long step."""

refusing = threading.Event()
"""Set when this process takes no new requests."""

_TEXT = "This instance is shutting down and takes no new requests. Please retry on a different instance."
_BODY = json.dumps(
    {"error": {"message": _TEXT, "type": "ServiceUnavailableError", "param": None, "code": 503}}
).encode()
_HEADERS = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"retry-after", b"1")]
_HEALTH = frozenset({"/health", "/ping"})
_ENDING = frozenset({"cancel", "abort_requests"})


class RefuseNew(Middleware):
    """503 for new work and health checks in a drain."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not refusing.is_set() or not _is_new_work(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": _TEXT})
        else:
            await respond(send, 503, _HEADERS, _BODY)


def _is_new_work(scope: Message) -> bool:
    if scope["type"] != "http":
        return bool(scope["type"] == "websocket")
    path: str = scope["path"]
    if scope["method"] == "POST":
        return path.rpartition("/")[2] not in _ENDING
    return path in _HEALTH


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """State of the drain in the engines: their answers summed up."""

    seconds: float
    """Seconds that the drain may take; 0: there is none."""
    num_requests: int
    num_moving: int
    num_moved: int
    silent: bool
    """An engine has not answered; a dead one is not asked."""

    @property
    def empty(self) -> bool:
        return not (self.num_requests or self.num_moving or self.silent)


class Drained(Protocol):
    """Holder of the streams that a drain waits for."""

    client: Client
    peers: Peers

    @property
    def num_streams(self) -> int: ...
    @property
    def num_at_home(self) -> int: ...
    @property
    def owns_engine(self) -> bool: ...
    async def end_engine(self) -> None: ...
    def cut_streams(self) -> None: ...


async def drain(holder: Drained, seconds: float) -> None:
    """Returns when no stream is left and the engine is empty, after the time limit, or on a second signal.

    `seconds` is the limit of this process's own configuration; one that an operator gave to the engine goes before it.
    Without any, vLLM's own shutdown follows at once.
    """
    refusing.set()
    standing = await _report(holder, seconds)
    seconds = standing.seconds
    if seconds <= 0:
        return
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not the main thread's loop
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    began = reported = time.monotonic()
    logger.info("llumlet: draining: %s; at most %.0f s, a second signal ends it", _words(holder, standing), seconds)
    empty_before = over_before = has_ended = False
    while not stop.is_set() and time.monotonic() - began < seconds:
        # Twice in a row: a request may just be on its way to the engine, or its last token to its client.
        empty = standing.empty and not holder.num_at_home
        over = empty and not holder.num_streams
        if over and over_before:
            break
        if empty and empty_before and not over and not has_ended and holder.owns_engine:
            logger.info("llumlet: the engine is empty and ends; %s", _words(holder, standing))
            await _report(holder, seconds, 0)
            await asyncio.sleep(LINGER_SECONDS)
            await _unless(stop, holder.end_engine())
            has_ended = True
        empty_before, over_before = empty, over
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), POLL_SECONDS)
        if not has_ended:
            standing = await _report(holder, seconds)
        if time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            left = began + seconds - reported
            logger.info("llumlet: draining: %s; %.0f s left", _words(holder, standing), left)
    num_cut = holder.num_streams
    if num_cut:
        why = "a second signal came" if stop.is_set() else f"the {seconds:.0f} s are over"
        logger.warning("llumlet: %s; ending %d streams", why, num_cut)
    else:
        logger.info("llumlet: drained in %.1f s: %s", time.monotonic() - began, _words(holder, standing))
    if not has_ended:
        await _report(holder, seconds, num_cut)
    holder.cut_streams()
    await asyncio.sleep(LINGER_SECONDS)


async def _unless(stop: asyncio.Event, action: Coroutine[Any, Any, None]) -> None:
    """Returns when it has ended, or as soon as `stop` is set: then it goes on alone. vLLM's engine takes seconds."""
    acting, stopping = asyncio.create_task(action), asyncio.create_task(stop.wait())
    await asyncio.wait((acting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if acting.done():
        await acting


async def _report(holder: Drained, seconds: float, num_cut: int | None = None) -> Standing:
    """Tell every engine how it stands here; returns how it stands there."""
    client = holder.client
    peers = list(holder.peers.addresses)
    arguments = ("llumlet_drain", client.client_index, peers, seconds, holder.num_streams, num_cut)
    calls = [
        asyncio.wait_for(client._call_utility_async(*arguments, engine=engine), CALL_SECONDS)
        for engine in client.core_engines
    ]
    answers: list[dict[str, Any]] = []
    silent = False
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, TimeoutError):
            silent = not client.resources.engine_dead
        elif isinstance(answer, EngineDeadError):
            continue
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answers.append(answer)
    limit = max((answer["seconds"] for answer in answers), default=seconds)
    counts = {name: sum(answer[name] for answer in answers) for name in ("num_requests", "num_moving", "num_moved")}
    return Standing(limit, silent=silent, **counts)


def _words(holder: Drained, standing: Standing) -> str:
    here = "an engine that does not answer" if standing.silent else f"{standing.num_requests} requests in the engine"
    return f"{holder.num_streams} streams, {here}, {standing.num_moved} moved away"
