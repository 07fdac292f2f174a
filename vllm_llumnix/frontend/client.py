# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine client, able to follow its requests to other engines.

`llumnix_client_class(cls)` mixes this into any of vLLM's asynchronous clients. What it changes:

- a generation request carries the address of this process's relay, for life;
- outputs of its own engine go through the streams' gates on their way to vLLM's queue (`process_engine_outputs`, a hook
  that vLLM's receive task awaits right before it enqueues);
- outputs that come over the relay go through the same gates into the same queue, dressed as the home engine's: its
  index (vLLM's statistics know no other) and this host's clock (vLLM computes latencies from differences);
- an abort goes to whoever runs the request as well as down vLLM's own path, where the home engine sends it after the
  request. Neither has to arrive: a sender of unwanted outputs is told so each time.

Between a gate and the queue nothing is awaited: two tasks receive, and a suspension there would swap tokens.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType

from vllm_llumnix import config
from vllm_llumnix.errors import ConfigError
from vllm_llumnix.frontend.owners import Owner, Owners
from vllm_llumnix.frontend.relay import Complaints, Receive, Relay
from vllm_llumnix.frontend.streams import Stream, Streams
from vllm_llumnix.ids import Epoch
from vllm_llumnix.migration import wire

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core_client import AsyncMPClient as _Client
else:
    _Client = object

logger = logging.getLogger("vllm.llumnix")

OutputHook = Callable[[Any, EngineCoreOutputs], Awaitable[None]]


@functools.cache
def llumnix_client_class(cls: type) -> type:
    """The subclass of vLLM's client class `cls` that follows requests; the same one each time."""
    return type(
        f"Llumnix{cls.__name__}",
        (LlumnixClientMixin, cls),
        {"__module__": cls.__module__, "_stock_hook": getattr(cls, "process_engine_outputs", None)},
    )


class LlumnixClientMixin(_Client):  # type: ignore[misc]
    """See the module docstring. All methods but `shutdown` run on the API server's event loop.

    Because of `process_engine_outputs`, vLLM's receive task holds the client from the first output on, as it does with
    its own data-parallel client: `shutdown`, not the garbage collector, ends it. Our own task holds nothing.
    """

    _stock_hook: OutputHook | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.complaints = Complaints()
        """What went wrong on the relay, counted by kind."""
        self._owners = Owners()
        self._streams = Streams(vllm_config.model_config.get_vocab_size(), self.complaints.note)
        self._input_sessions: set[str] = set()
        self._relay: Relay | None = None
        super().__init__(vllm_config, *args, **kwargs)

    @property
    def relay_address(self) -> str | None:
        """Where engines report our requests that moved; None until the event loop runs."""
        return self._relay.address if self._relay is not None else None

    def _ensure_output_queue_task(self) -> None:
        super()._ensure_output_queue_task()
        self._ensure_relay()

    def _ensure_relay(self) -> Relay:
        if self._relay is None:
            settings = config.current()
            if settings is None:
                raise ConfigError([f"{config.CONFIG_VARIABLE} is not set"])
            relay = Relay(self.ctx, settings.host, _receiver(self), self.complaints)
            relay.start()
            weakref.finalize(self, relay.close)
            self._relay = relay
            logger.info("llumlet: relay for requests that move listens on %s", relay.address)
        return self._relay

    def shutdown(self, timeout: float | None = None) -> None:
        if self._relay is not None:
            self._relay.close()
        super().shutdown(timeout)

    # Requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if not self._may_move(request):
            await super().add_request_async(request)
            return
        request.queue_server_address = self._ensure_relay().address
        params = request.sampling_params
        assert params is not None
        self._streams.open(Stream(request.request_id, params.num_logprobs is not None, request.trace_headers))
        try:
            await super().add_request_async(request)
        except BaseException:
            self._streams.close([request.request_id])
            raise

    def get_core_engine_for_request(self, request: EngineCoreRequest) -> bytes:
        """vLLM's choice, remembered: `reqs_in_flight` forgets it as soon as the engine reports the request finished."""
        engine: bytes = super().get_core_engine_for_request(request)
        stream = self._streams.get(request.request_id)
        if stream is not None:
            stream.home = engine
        return engine

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        closed = self._streams.close(request_ids)
        self._input_sessions.difference_update(request_ids)
        self._release(closed)
        unroutable = self._unroutable(closed)
        try:
            await super().abort_requests_async(request_ids)
            for engine, ids in unroutable.items():
                await self._send_input(EngineCoreRequestType.ABORT, ids, engine)
        finally:
            # The home engine reports the end of a request that it runs. If the request has moved, nobody does.
            self._settle(closed)

    def _may_move(self, request: EngineCoreRequest) -> bool:
        """Pooling requests, sessions with streaming input and requests that end at once keep to vLLM's own ways."""
        if request.sampling_params is None or request.abort_immediately:
            return False
        if request.resumable:
            self._input_sessions.add(request.request_id)
            return False
        if request.request_id in self._input_sessions:  # the end of a session's input
            self._input_sessions.discard(request.request_id)
            return False
        return True

    def _release(self, streams: list[Stream]) -> None:
        """Tell the owners of requests that have moved that nobody waits for them any more."""
        unwanted: dict[Owner, list[tuple[str, Epoch]]] = {}
        for stream in streams:
            if stream.owner is not None:
                unwanted.setdefault(stream.owner, []).append((stream.request_id, stream.epoch))
        for owner, requests in unwanted.items():
            self._ensure_relay().send(owner.identity, wire.Release(requests))

    def _unroutable(self, streams: list[Stream]) -> dict[bytes, list[str]]:
        """Aborts that vLLM's data-parallel client would drop, by home engine.

        It finds the engine in `reqs_in_flight`, and a request that left its engine may be there no more; but the home
        engine is where an abort is sent on from.
        """
        in_flight = getattr(self, "reqs_in_flight", None)
        by_engine: dict[bytes, list[str]] = {}
        if in_flight is not None and not self.resources.engine_dead:
            for stream in streams:
                if stream.home is not None and stream.request_id not in in_flight:
                    by_engine.setdefault(stream.home, []).append(stream.request_id)
        return by_engine

    def _settle(self, streams: list[Stream]) -> None:
        """Do what vLLM's data-parallel client does when the home engine reports requests finished; again is nothing."""
        in_flight = getattr(self, "reqs_in_flight", None)
        if in_flight is None:
            return
        for stream in streams:
            engine = in_flight.pop(stream.request_id, None)
            if engine is not None:
                self.engine_inflight[engine] -= 1

    # Outputs of our own engines

    @staticmethod
    async def process_engine_outputs(self: LlumnixClientMixin, outputs: EngineCoreOutputs) -> None:
        """vLLM's receive task awaits this, then enqueues `outputs`. Nothing may be awaited after the gate."""
        stock_hook = type(self)._stock_hook
        if stock_hook is not None:
            await stock_hook(self, outputs)
        if outputs.outputs and (ended := self._streams.take_home(outputs)):
            self._settle(ended)

    # Outputs and questions of other engines

    def _on_relay(self, identity: bytes, message: wire.ToOrigin) -> None:
        relay = self._relay
        assert relay is not None
        match message:
            case wire.TokenBatch():
                owner = self._owners.heard(identity, message.instance, message.incarnation)
                owner.llumlet = message.llumlet
                taken = self._streams.take_batch(message, owner)
                self._enqueue(taken.delivered, message.weight_version)
                if taken.unwanted:
                    relay.send(identity, wire.Release(list(taken.unwanted.items())))
            case wire.Heartbeat():
                owner = self._owners.heard(identity, message.instance, message.incarnation)
                owner.steps = message.steps
                unknown = [rid for rid in message.requests if rid not in self._streams]
                relay.send(identity, wire.HeartbeatAck(unknown))
            case wire.FenceQuestion():
                relay.send(identity, self._streams.fence(message, self._owners.at(identity)))
            case wire.Hello():
                owner = self._owners.heard(identity, message.instance, message.incarnation)
                owner.llumlet = message.llumlet
                if message.version != wire.RELAY_VERSION:
                    self.complaints.note(
                        "version",
                        f"{message.instance} speaks version {message.version}, we {wire.RELAY_VERSION}",
                    )

    def _enqueue(self, delivered: list[tuple[Stream, EngineCoreOutput]], weight_version: str | None) -> None:
        """Into vLLM's queue, as if each output had come from the engine that its request was sent to."""
        by_engine: dict[int, list[EngineCoreOutput]] = {}
        ended: list[Stream] = []
        for stream, output in delivered:
            index = int.from_bytes(stream.home or self.core_engine, "little")
            by_engine.setdefault(index, []).append(output)
            if output.finished:
                ended.append(stream)
        for index, outputs in by_engine.items():
            self.outputs_queue.put_nowait(
                EngineCoreOutputs(
                    engine_index=index,
                    outputs=outputs,
                    finished_requests={o.request_id for o in outputs if o.finished} or None,
                    weight_version=weight_version,
                )
            )
        self._settle(ended)


def _receiver(client: LlumnixClientMixin) -> Receive:
    """A callback that does not keep the client alive: the relay's task runs as long as the client does, not longer."""
    reference = weakref.ref(client)

    def receive(identity: bytes, message: wire.ToOrigin) -> None:
        client = reference()
        if client is not None:
            client._on_relay(identity, message)

    return receive
