# SPDX-License-Identifier: Apache-2.0
"""The llumlet's thread: triggering, peer calls, copying and relaying, beside the engine's loop.

One thread with one asyncio event loop hosts the llumlet's gRPC service, the state machines of all migrations, the
clients of the movers and the relay. It asks the engine's loop for changes through `EngineLoop.call` and never touches a
queue or a block itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import uvloop

from vllm_llumnix.kv.mover.process import name_thread

logger = logging.getLogger("vllm.llumnix")

NAME = "llumnix-llumlet"
NUM_HELPERS = min(8, max(2, len(os.sched_getaffinity(0))))
"""Threads for what would keep the event loop waiting, such as hashing a prompt. None of them waits for anything: more
than cores would only wait for each other, and all share the interpreter with the engine's loop."""
START_SECONDS = 30.0
STOP_SECONDS = 2.0


class Inhabitant(Protocol):
    """An object that lives on the thread."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Inhabitant)


class LlumletThread:
    """Owns the thread and its event loop."""

    def __init__(self) -> None:
        self.event_loop = uvloop.new_event_loop()
        self._thread: threading.Thread | None = None
        self._inhabitant: Inhabitant | None = None

    def start(self, move_in: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns what `move_in` returns on the thread; `stop` closes that. Raises what it raises, and TimeoutError."""
        moved_in: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(move_in, moved_in), name=NAME, daemon=True)
        self._thread.start()
        self._inhabitant = inhabitant = moved_in.result(START_SECONDS)
        return inhabitant

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function` soon on the thread, in the order of posting. Any thread; never blocks."""
        try:
            self.event_loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: the process is going down
            logger.debug("the llumlet's thread is gone; dropping %s", function)

    def stop(self) -> None:
        """Close the llumlet, the relay and the clients, so that peers notice at once. Any other thread."""
        if self._inhabitant is None or self._thread is None:
            return
        closed = asyncio.run_coroutine_threadsafe(self._inhabitant.close(), self.event_loop)
        with contextlib.suppress(TimeoutError):
            closed.result(STOP_SECONDS)
        self.event_loop.call_soon_threadsafe(self.event_loop.stop)
        self._thread.join(STOP_SECONDS)

    def _run(self, move_in: Callable[[], Coroutine[Any, Any, T]], moved_in: Future[T]) -> None:
        name_thread(NAME)
        asyncio.set_event_loop(self.event_loop)
        self.event_loop.set_default_executor(_helpers())
        self.event_loop.set_exception_handler(_log_exception)
        try:
            moved_in.set_result(self.event_loop.run_until_complete(move_in()))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            moved_in.set_exception(error)
            return
        self.event_loop.run_forever()


def _helpers() -> ThreadPoolExecutor:
    """All threads of it run from the start, so that the number of an instance's threads says whether it leaks any."""
    name = "llumnix-helper"
    pool = ThreadPoolExecutor(NUM_HELPERS, thread_name_prefix=name, initializer=name_thread, initargs=(name,))
    together = threading.Barrier(NUM_HELPERS)
    for _ in range(NUM_HELPERS):
        pool.submit(together.wait)
    return pool


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    logger.error("llumlet: %s", context.get("message"), exc_info=error)
