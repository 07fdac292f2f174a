# SPDX-License-Identifier: Apache-2.0
"""LlumnixClient: vLLM's engine client with a relay socket, so that a stream survives its request's moves.

One relay (a ZMQ ROUTER) per API server process. Its address travels with every request and never changes; whatever
engine runs the request sends its outputs there. Aborts go both ways: to the engine that last sent output, over the
relay, and to the home engine, which forwards them; either is enough.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_llumnix import config
from vllm_llumnix.frontend.streams import Sender, Streams
from vllm_llumnix.ids import Epoch
from vllm_llumnix.migration import wire

logger = logging.getLogger("vllm.llumnix")

QUEUED_MESSAGES = 100_000


class RelaySocket:
    """The socket, and the task that reads it for as long as `handler` lives."""

    def __init__(self, host: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._task: asyncio.Task[None] | None = None

    def read_for(self, handler: LlumnixClient) -> None:
        """Start reading; needs a running event loop. The task does not keep `handler` alive."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                _read(self._socket, weakref.ref(handler)), name="llumnix-relay"
            )

    def send(self, receiver: Sender, message: wire.ToEngine) -> None:
        """Never waits: what an engine's queue does not take is repeated when it reports the request again."""
        sent = self._socket.send_multipart([receiver, wire.encode(message)])
        if not sent.done():
            sent.cancel()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._context.destroy(linger=0)


async def _read(socket: zmq.asyncio.Socket, handler_ref: weakref.ref[LlumnixClient]) -> None:
    while True:
        frames = await socket.recv_multipart()
        handler = handler_ref()
        if handler is None:
            return
        try:
            sender, data = frames
            message = wire.decode_to_origin(data)
        except (ValueError, msgspec.ValidationError, msgspec.DecodeError) as error:
            logger.warning("relay: ignoring a malformed message: %s", error)
            continue
        handler.on_relay_message(sender, message)
        del handler


class LlumnixClient(AsyncMPClient if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into each of vLLM's asynchronous clients by `llumnix_client_class`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.streams = Streams()
        settings = config.current()
        self.relay = RelaySocket(settings.host if settings else "127.0.0.1")
        super().__init__(*args, **kwargs)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.relay.close()
        super().shutdown(*args, **kwargs)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.relay.read_for(self)
        if request.pooling_params is None:
            request.queue_server_address = self.relay.address
            self.streams.open(request.request_id)
        await super().add_request_async(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        moved = [request_id for request_id in request_ids if self.streams.has_moved(request_id)]
        self._tell(self.streams.close(request_ids))
        await super().abort_requests_async(request_ids)
        if moved:
            # Our own engine will not report the end of a request that it no longer has.
            self._account(EngineCoreOutputs(finished_requests=set(moved)))

    @staticmethod
    async def process_engine_outputs(self: LlumnixClient, outputs: EngineCoreOutputs) -> None:
        """vLLM's receive task awaits this and enqueues `outputs` right after. It must not suspend."""
        if outputs.outputs:
            outputs.outputs = self.streams.home(outputs.outputs, outputs.engine_index)
        self._account(outputs)

    def on_relay_message(self, sender: Sender, message: wire.ToOrigin) -> None:
        """Synchronous: gate and enqueue are one section."""
        match message:
            case wire.TokenBatch():
                self._on_tokens(sender, message)
            case wire.FenceQuestion():
                self.relay.send(sender, self.streams.fence(message))
            case wire.Heartbeat():
                self.relay.send(sender, wire.HeartbeatAck(self.streams.unknown(message.requests)))
            case wire.Hello():
                if message.version != wire.RELAY_VERSION:
                    logger.error(
                        "instance %s speaks relay version %d, this API server %d: its outputs cannot be read",
                        message.instance, message.version, wire.RELAY_VERSION,
                    )

    def _on_tokens(self, sender: Sender, batch: wire.TokenBatch) -> None:
        released, unwanted = self.streams.relayed(sender, batch)
        for engine_index, outputs in released.items():
            if not outputs:
                continue
            finished = {output.request_id for output in outputs if output.finish_reason is not None}
            # Index and time stamp of our own: vLLM's statistics know neither foreign engines nor foreign clocks.
            ours = EngineCoreOutputs(
                engine_index=engine_index,
                outputs=outputs,
                finished_requests=finished or None,
                weight_version=batch.weight_version,
            )
            self._account(ours)
            self.outputs_queue.put_nowait(ours)
        if unwanted:
            self.relay.send(sender, wire.Release(unwanted))

    def _tell(self, unwanted: dict[Sender, list[tuple[str, Epoch]]]) -> None:
        for owner, requests in unwanted.items():
            self.relay.send(owner, wire.Release(requests))

    def _account(self, outputs: EngineCoreOutputs) -> None:
        """The stock client's own bookkeeping of finished requests, if it has any."""
        stock = getattr(super(), "process_engine_outputs", None)
        if stock is not None:
            _run_at_once(stock(self, outputs))


def _run_at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that is known not to suspend. Raises RuntimeError if it does."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("the engine client's output hook suspended: tokens could be reordered")


@functools.cache
def llumnix_client_class(cls: type[AsyncMPClient]) -> type[AsyncMPClient]:
    """`cls` with a relay."""
    return type(f"Llumnix{cls.__name__}", (LlumnixClient, cls), {"__doc__": LlumnixClient.__doc__})
