# SPDX-License-Identifier: Apache-2.0
"""Protocols of vLLM's engine client, with the attributes that are read, called or set.

vLLM's own classes satisfy these (`tests/frontend/test_frontend_vllm_types.py`). `seams` lists the attributes set at run
time, and `client` overrides methods by inheritance.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import MutableMapping
from typing import Any, Protocol, runtime_checkable

import zmq.asyncio
from vllm.v1.engine import EngineCoreOutputs


class ClientModelConfig(Protocol):
    served_model_name: str
    """The first of them."""
    return_sampling_mask: bool

    def get_vocab_size(self) -> int: ...

    def get_total_num_hidden_layers(self) -> int: ...

    def get_num_experts(self) -> int: ...

    def get_num_experts_per_tok(self) -> int: ...


class AuxOutputConfig(Protocol):
    enable_return_routed_experts: bool


class CacheConfig(Protocol):
    block_size: int
    """Tokens; that of the engine as soon as it is there."""


class ClientParallelConfig(Protocol):
    _api_process_count: int


class ClientVllmConfig(Protocol):
    model_config: ClientModelConfig
    cache_config: CacheConfig
    parallel_config: ClientParallelConfig
    aux_output_config: AuxOutputConfig
    lora_config: object | None
    shutdown_timeout: int
    """Seconds."""


class EngineManager(Protocol):
    """The manager of the engines' processes, in the process that started them."""

    def monitor_engine_liveness(self) -> None:
        """Returns when one has ended."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends them. From any thread; waits for it."""


class Resources(Protocol):
    """Resources that a client closes at its end; it outlives the client."""

    engine_dead: bool
    engine_manager: EngineManager | None

    def validate_alive(self, frames: list[Any]) -> None: ...


class Client(Protocol):
    """`vllm.v1.engine.core_client.AsyncMPClient`. Engines are named by their rank, two bytes, the lower one first."""

    vllm_config: ClientVllmConfig
    ctx: zmq.asyncio.Context
    resources: Resources
    client_index: int
    """Number of this API server."""
    core_engine: bytes
    core_engines: list[bytes]
    outputs_queue: asyncio.Queue[EngineCoreOutputs | Exception]
    _finalizer: weakref.finalize[..., Any]
    """Alive until the client is shut down."""

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        """Calls the engine's method and returns its result, decoded from msgpack."""

    def shutdown(self, timeout: float | None = None) -> None: ...


@runtime_checkable
class BalancingClient(Protocol):
    """`DPLBAsyncMPClient`, which spreads requests over the data-parallel engines behind it, and knows where each is."""

    reqs_in_flight: MutableMapping[str, bytes]
    engine_inflight: MutableMapping[bytes, int]
