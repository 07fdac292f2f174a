# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine client, able to follow its requests to other engines.

`llumnix_client_class(cls)` mixes this into any of vLLM's asynchronous clients. Everything is decided by `origin`; here
are the methods of vLLM's client that are overridden for it:

- a generation request carries the address of this process's relay, for life;
- outputs of its own engine go through the streams' gates on their way to vLLM's queue (`process_engine_outputs`, a hook
  that vLLM's receive task awaits right before it enqueues);
- outputs that come over the relay go through the same gates into the same queue, dressed as the home engine's: its
  index (vLLM's statistics know no other) and this host's clock (vLLM computes latencies from differences);
- an abort goes to whoever runs the request as well as down vLLM's own path, where the home engine sends it after the
  request. Neither has to arrive: a sender of unwanted outputs is told so each time;
- a stream whose owner is lost goes on at another engine, and the death of the home engine's process ends this one only
  when the last stream has ended.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_llumnix import config
from vllm_llumnix.errors import ConfigError
from vllm_llumnix.frontend.asgi import num_deaths, served
from vllm_llumnix.frontend.origin import OriginShell
from vllm_llumnix.frontend.session_inputs import InputSessions
from vllm_llumnix.frontend.vllm_client_types import Client, ClientVllmConfig
from vllm_llumnix.seams import CLIENT
from vllm_llumnix.switch import CONFIG_VARIABLE
from vllm_llumnix.wire.request_wire import with_name

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest, PauseMode
    from vllm.v1.engine.core_client import AsyncMPClient as _Client  # mypy reads nothing of vLLM: its methods are Any
else:
    _Client = object

OutputHook = Callable[[Client, EngineCoreOutputs], Awaitable[None]]


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

    def __init__(self, vllm_config: ClientVllmConfig, *args: Any, **kwargs: Any) -> None:
        settings = config.current()
        if settings is None:
            raise ConfigError([f"{CONFIG_VARIABLE} is not set"])
        self.origin = OriginShell(self, vllm_config, settings)
        self.sessions = InputSessions(self.origin.core, self.origin.open, self.origin.carry_out, self._unlearn)
        super().__init__(vllm_config, *args, **kwargs)
        self._outlive_engine()

    @property
    def relay_address(self) -> str | None:
        """The address at which engines report our requests that moved; None until the event loop runs."""
        return self.origin.relay.address if self.origin.relay is not None else None

    def _ensure_output_queue_task(self) -> None:
        super()._ensure_output_queue_task()
        self.origin.ensure_relay()

    def shutdown(self, timeout: float | None = None) -> None:
        self.origin.shutdown(timeout or 0.0)
        super().shutdown(timeout)

    # Requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        origin = self.origin
        if (http := served.get()) is not None:
            request.priority = http.priority_of(request.priority)
            request.trace_headers = with_name(request.trace_headers, http.name)
        if request.sampling_params is None or request.abort_immediately:
            # Pooling requests and requests that end at once keep to vLLM's own ways.
            await super().add_request_async(request)
            return
        request.queue_server_address = origin.ensure_relay().address
        if self.sessions.has_part(request):
            if self.sessions.take(request):
                await self._send_home(request)
            return
        if request.lora_request is not None:
            origin.adapters.learn(request.lora_request)
        stream = origin.open(request)
        await self._send_home(request)
        if deaths := num_deaths.get():
            origin.came_after(stream, deaths)

    def _unlearn(self, mm_hash: str) -> None:
        """Have the image sent whole when it comes again, as where vLLM finds out that its engine does not have it."""
        if self._renderer is not None and (cache := self._renderer.mm_processor_cache) is not None:
            cache.invalidate(mm_hash)

    async def _send_home(self, request: EngineCoreRequest) -> None:
        try:
            await super().add_request_async(request)
        except BaseException:
            self.sessions.close([request.request_id])
            self.origin.close([request.request_id])
            raise

    def get_core_engine_for_request(self, request: EngineCoreRequest) -> bytes:
        engine: bytes = super().get_core_engine_for_request(request)
        self.origin.sent_to(request.request_id, engine)
        return engine

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        closed = self.origin.close(request_ids)
        self.sessions.close(request_ids)
        unroutable = self.origin.unroutable(closed)
        try:
            await super().abort_requests_async(request_ids)
            for engine, ids in unroutable.items():
                await self._send_input(EngineCoreRequestType.ABORT, ids, engine)
        finally:
            # The home engine reports the end of a request that it runs. If the request has moved, nobody does.
            self.origin.settle(closed)

    @staticmethod
    async def process_engine_outputs(self: LlumnixClientMixin, outputs: EngineCoreOutputs) -> None:
        """vLLM's receive task awaits this, then enqueues `outputs`. Nothing may be awaited after the gate."""
        stock_hook = type(self)._stock_hook
        if stock_hook is not None:
            await stock_hook(self, outputs)
        if outputs.outputs:
            self.origin.take_home(outputs)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        added: bool = await super().add_lora_async(lora_request)
        self.origin.adapters.learn(lora_request, reloaded=lora_request.load_inplace)
        return added

    async def remove_lora_async(self, lora_id: int) -> bool:
        self.origin.adapters.forget(lora_id)
        removed: bool = await super().remove_lora_async(lora_id)
        return removed

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        with self.origin.expecting_aborts(mode):
            await super().pause_scheduler_async(mode, clear_cache)

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        with self.origin.expecting_aborts(mode):
            await super().sleep_async(level, mode)

    # The death of the home engine's process

    def start_engine_core_monitor(self) -> None:
        """vLLM's monitor shuts the client down when an engine process ends, and every stream with it."""
        manager = self.resources.engine_manager
        if manager is None:
            return
        reference = weakref.ref(self)

        def monitor() -> None:
            manager.monitor_engine_liveness()
            client = reference()
            if client is not None and client._finalizer.alive and not client.resources.engine_dead:
                client.origin.engine_died()

        threading.Thread(target=monitor, daemon=True, name="llumnix-engine-monitor").start()

    def _outlive_engine(self) -> None:
        """vLLM's receive task ends when the engine says that it is dying; ours goes on with what the relay brings."""
        resources, reference = self.resources, weakref.ref(self)

        def validate_alive(frames: list[Any]) -> None:
            if len(frames) == 1 and frames[0].buffer == EngineCoreProc.ENGINE_CORE_DEAD:
                frames[:] = [_NO_OUTPUTS]
                if (client := reference()) is not None and not resources.engine_dead:
                    client.origin.engine_died()

        CLIENT.wrap(resources, "BackgroundResources.validate_alive", validate_alive)


_NO_OUTPUTS = MsgpackEncoder().encode(EngineCoreOutputs())[0]
