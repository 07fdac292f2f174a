# SPDX-License-Identifier: Apache-2.0
"""The bypass thread: triggering, peer calls, copying and relaying, beside the engine's loop.

One thread with one asyncio event loop hosts the llumlet's gRPC service, the state machines of all migrations, the
clients of the movers and the relay. It asks the engine's loop for changes through `kvconn.call` and never touches a
queue or a block itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import uvloop

import llumlet.server
from llumlet.types import Address
from vllm_llumnix.config import LlumletConfig
from vllm_llumnix.engine.identity import EngineIdentity
from vllm_llumnix.hosts import reachable_host
from vllm_llumnix.kv.messages import MoverInfo
from vllm_llumnix.kv.process import name_thread

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutputs

    from vllm_llumnix.engine.agent import LlumletAgent
    from vllm_llumnix.engine.kvconn import KVConnection

logger = logging.getLogger("vllm.llumnix")

NUM_HELPERS = min(8, max(2, len(os.sched_getaffinity(0))))
"""Threads for what would keep the event loop waiting, such as hashing a prompt. None of them waits for anything: more
than cores would only wait for each other, and all share the interpreter with the engine's loop."""
START_SECONDS = 30.0
STOP_SECONDS = 2.0


class Bypass:
    """Owns the thread. `start` returns once the llumlet listens; `post` hands work to it from any thread."""

    def __init__(self, config: LlumletConfig, identity: EngineIdentity, movers: list[MoverInfo], engine: Any) -> None:
        self.config = config
        self.credentials = config.credentials()
        self.identity = identity
        self.movers = movers
        self.engine = engine
        self.address: Address | None = None
        """Where peers and API servers reach the llumlet, once it listens."""
        self.started_at = time.time()
        self.draining = False
        """The engine is being emptied."""
        self.num_adopted = 0
        """Requests of lost owners that went on here, and how many of them with their KV cache. Bypass thread."""
        self.num_rescued = 0
        self._agent: LlumletAgent | None = None
        self._loop = uvloop.new_event_loop()
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers and ranks."""
        return sum(mover.memory.layout.bytes_per_block for mover in self.movers)

    @property
    def takes_requests(self) -> bool:
        """Whether new requests and moves may come; not when the engine is on its way out."""
        return bool(self.engine.is_running()) and not self.draining

    def stop_carrying_kv(self, reason: str) -> None:
        """From now on requests leave and come with their tokens alone, for the first reason given. Bypass thread.

        Moves that are on their way end as their copies do.
        """
        if self.identity.kv_unsupported is None:
            self.identity.kv_unsupported = reason
            logger.warning("llumlet: requests leave this engine without their KV cache: %s", reason)
            if self._agent is not None:
                self._agent.kvconn.port.load.touch()

    def start(self, kvconn: KVConnection) -> None:
        """Raises what kept the llumlet from listening."""
        self._thread = threading.Thread(target=self._run, args=(kvconn,), name="llumnix-bypass", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise TimeoutError(f"the llumlet did not start within {START_SECONDS:.0f} s")
        if self._failure is not None:
            raise self._failure

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function` soon on the bypass thread, in the order of posting. Any thread; never blocks."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: the process is going down
            logger.debug("bypass thread is gone; dropping %s", function)

    def stop(self) -> None:
        """Close the llumlet, the relay and the clients, so that peers notice at once. Any other thread."""
        if self._agent is None or self._thread is None:
            return
        closed = asyncio.run_coroutine_threadsafe(self._agent.close(), self._loop)
        with contextlib.suppress(TimeoutError):
            closed.result(STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)

    # Posted by the engine's threads, run on the bypass thread

    def relay_outputs(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        if self._agent is not None:
            self._agent.relay.send(client_index, outputs)

    def meet_origin(self, address: str) -> None:
        """An API server sends us requests: let it know who we are and that we live."""
        if self._agent is not None:
            self._agent.relay.meet(address)

    def forward_aborts(self, request_ids: list[str]) -> None:
        """The front-end aborts requests; those that have moved on from here are ended at their owner."""
        if self._agent is not None:
            self._agent.forward_aborts(request_ids)

    def learn_adapter(self, adapter: LoRARequest, reloaded: bool) -> None:
        """The front-end names a LoRA adapter of its own."""
        if self._agent is not None:
            self._agent.adapters.learn(adapter, reloaded=reloaded)

    def forget_adapter(self, lora_int_id: int) -> None:
        if self._agent is not None:
            self._agent.adapters.forget(lora_int_id)

    def report_drain(
        self, client_index: int, peers: list[str], seconds: float, num_streams: int, num_cut: int | None
    ) -> dict[str, Any]:
        """Called by each API server as a utility of the engine. Loop thread."""
        assert self._agent is not None
        return self._agent.drains.report(client_index, peers, seconds, num_streams, num_cut)

    def report_moves(self, since: int) -> tuple[int, list[dict[str, Any]]]:
        """Called by the API server as a utility of the engine: see `MoveRecords.since`. Loop thread."""
        assert self._agent is not None
        return self._agent.departures.records.since(since)

    def revoke_youngest_reservation(self) -> None:
        if self._agent is not None:
            self._agent.arrivals.revoke_youngest()

    def _run(self, kvconn: KVConnection) -> None:
        name_thread("llumnix-bypass")
        asyncio.set_event_loop(self._loop)
        self._loop.set_default_executor(_helpers())
        self._loop.set_exception_handler(_log_exception)
        try:
            self._loop.run_until_complete(self._listen(kvconn))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        self._loop.run_forever()

    async def _listen(self, kvconn: KVConnection) -> None:
        from vllm_llumnix.engine.agent import LlumletAgent

        agent = LlumletAgent(self, kvconn)
        config = self.config
        server = await llumlet.server.serve(
            agent, config.host, config.port, credentials=self.credentials, insecure=config.insecure
        )
        self.address = Address(reachable_host(config.host), server.port)
        agent.open(server)
        self._agent = agent


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
