# SPDX-License-Identifier: Apache-2.0
"""Compiles the grammars of arriving requests, in the threads that vLLM has for that. Llumlet thread only.

No thread of ours waits for a grammar: vLLM's own future is awaited on the event loop. A grammar may take minutes, and
nothing stops its compilation once that has begun; so of one source only a few are compiled at a time.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix import faults
from vllm_llumnix.engine.vllm_types import Request
from vllm_llumnix.seams import ENGINE
from vllm_llumnix.steps.step_record import StepRecord

GRAMMAR_SECONDS = 20.0
"""Time for one grammar, its place in the line included."""
PER_SOURCE = max(1, (os.cpu_count() or 1) // 4)
"""Grammars of one source that are compiled at a time: half of vLLM's threads for it, which are half of the cores."""


class Grammars:
    """Compiler of grammars for one engine. `manager` is its StructuredOutputManager. Whose grammar is being compiled is
    in `record`, for vLLM's own requests too: a compiler in C++ can end the process."""

    def __init__(self, manager: Any, record: StepRecord) -> None:
        self._manager = manager
        self._record = record
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Turns by source, for as long as somebody has a turn or waits for one."""
        self._wrap_init()

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer; None if it has none; then no request has a grammar."""
        return getattr(self._manager, "tokenizer", None)

    async def compile(self, request: Request, source: str, *, patience_s: float) -> None:
        """Returns when the request has its grammar. `patience_s`: how long it may wait for its source's others.

        Raises Refused: destination_busy when it is still their turn, deadline after `GRAMMAR_SECONDS`, invalid_request
        if the grammar is none.
        """
        turns = self._turns.get(source)
        if turns is None:
            turns = self._turns[source] = asyncio.Semaphore(PER_SOURCE)
        began = time.monotonic()
        try:
            async with asyncio.timeout(min(patience_s, GRAMMAR_SECONDS)):
                await turns.acquire()
        except TimeoutError:
            detail = f"as many grammars from {source} as may be are being compiled"
            raise Refused(Reason.DESTINATION_BUSY, detail) from None
        # The first one makes vLLM create its backend, which takes a while.
        grammar = await self._begin(request, turns)
        try:
            async with asyncio.timeout(GRAMMAR_SECONDS - (time.monotonic() - began)):
                await asyncio.wait({asyncio.wrap_future(grammar)})
        except TimeoutError:
            grammar.cancel()  # unless it has begun
            detail = f"the grammar was not compiled within {GRAMMAR_SECONDS:.0f} s"
            raise Refused(Reason.DEADLINE, detail) from None
        if (error := grammar.exception()) is not None:
            raise Refused(Reason.INVALID_REQUEST, f"grammar: {error}")

    def accepts(self, request: Request, token_id: int) -> bool:
        """Advance the grammar by a token that was produced under it. Any thread, one at a time."""
        return bool(self._manager.accept_tokens(request, [token_id]))

    async def _begin(self, request: Request, turns: asyncio.Semaphore) -> Future[Any]:
        """The turn is over when the compilation is, whoever still waits for it."""
        try:
            grammar = await asyncio.to_thread(self._submit, request)
        except BaseException:
            turns.release()
            raise
        asyncio.wrap_future(grammar).add_done_callback(lambda done: _end_turn(turns, done))
        return grammar

    def _submit(self, request: Request) -> Future[Any]:
        self._manager.grammar_init(request)
        return _future_of(request)

    def _wrap_init(self) -> None:
        """vLLM initialises grammars on its input thread only, and creates the backend there at the first use."""
        lock = threading.Lock()
        stock, record = self._manager.grammar_init, self._record

        def grammar_init(request: Request) -> None:
            with lock:
                end = record.compile(request.request_id)
                faults.hit("engine.grammar", requests=[request])
                try:
                    stock(request)
                except BaseException:
                    end()
                    raise
                _future_of(request).add_done_callback(lambda _: end())

        ENGINE.wrap(self._manager, "StructuredOutputManager.grammar_init", grammar_init)


def _future_of(request: Request) -> Future[Any]:
    assert request.structured_output_request is not None
    grammar = request.structured_output_request._grammar
    if isinstance(grammar, Future):
        return grammar
    compiled: Future[Any] = Future()  # on the spot, where vLLM has no threads for it
    compiled.set_result(grammar)
    return compiled


def _end_turn(turns: asyncio.Semaphore, done: asyncio.Future[Any]) -> None:
    turns.release()
    if not done.cancelled():
        done.exception()  # that nobody waits for it is no news
