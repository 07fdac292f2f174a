# SPDX-License-Identifier: Apache-2.0
"""Engines made of sockets, and vLLM's real clients connected to them.

`FakeEngine` is what an API server sees of its own EngineCore: a DEALER on which requests and aborts arrive, a PUSH for
outputs. `FakePeer` is what it sees of any engine on the relay. The clients are vLLM's own classes, constructed the way
vLLM does when its engines are managed by another process.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from llumlet.process.credentials import NONE, Credentials
from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from vllm_llumnix import hooks
from vllm_llumnix.frontend.client import llumnix_client_class
from vllm_llumnix.wire.addresses import RelayAddress
from vllm_llumnix.wire.relay_keys import connect

VOCAB_SIZE = 1000
FIRST_HOP = Epoch(0, 1)
DIGEST = "digest"
SECONDS = 15.0
"""How long a test waits for a message before it fails."""

if "queue_server_address" in EngineCoreRequest.__struct_fields__:
    Request = EngineCoreRequest
else:  # a process whose vLLM is not patched

    class Request(EngineCoreRequest, array_like=True, omit_defaults=True, gc=False):  # type: ignore[no-redef,call-arg]
        queue_server_address: str | None = None


def request(request_id: str, **changes: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=100),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return Request(**(fields | changes))


def output(request_id: str, *token_ids: int, finish: FinishReason | None = None, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, list(token_ids), finish_reason=finish, **fields)


def relayed(
    request_id: str,
    first: int,
    *token_ids: int,
    epoch: Epoch = FIRST_HOP,
    base: int = 0,
    finish: FinishReason | None = None,
    **fields: Any,
) -> wire.TokenOutput:
    finish_reason = None if finish is None else int(finish)
    return wire.TokenOutput(request_id, epoch, base, first, list(token_ids), finish_reason, **fields)


class FakeEngine:
    """One EngineCore as its API server sees it. Says that it is ready as soon as the client listens."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path, rank: int = 0) -> None:
        self.rank = rank
        self.identity = rank.to_bytes(2, "little")
        self._input: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, self.identity)
        self._input.setsockopt(zmq.LINGER, 0)
        self._input.connect(f"ipc://{directory}/in")
        zmq.Socket.shadow(self._input).send(_ready(rank))
        self._output: zmq.asyncio.Socket = context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.LINGER, 0)
        self._output.connect(f"ipc://{directory}/out")
        self._encoder = MsgpackEncoder()
        self._requests = MsgpackDecoder(Request)
        self._aborts = MsgpackDecoder(list[str])

    async def send(self, *outputs: EngineCoreOutput, **fields: Any) -> None:
        """The outputs of one step."""
        batch = EngineCoreOutputs(engine_index=self.rank, outputs=list(outputs), **fields)
        await self._output.send_multipart(self._encoder.encode(batch))

    async def farewell(self) -> None:
        """What an engine sends that dies of an error."""
        await self._output.send(EngineCoreProc.ENGINE_CORE_DEAD)

    async def added(self) -> EngineCoreRequest:
        return self._requests.decode(await self._receive(EngineCoreRequestType.ADD))

    async def aborted(self) -> list[str]:
        return self._aborts.decode(await self._receive(EngineCoreRequestType.ABORT))

    async def silent(self) -> bool:
        """Nothing of requests has arrived."""
        while await self._input.poll(50):
            kind, *_ = await self._input.recv_multipart()
            if kind != EngineCoreRequestType.UTILITY.value:
                return False
        return True

    async def _receive(self, expected: EngineCoreRequestType) -> list[bytes]:
        """The next message. Questions, such as for moves, are asked at any time, and not answered."""
        kind = EngineCoreRequestType.UTILITY.value
        while kind == EngineCoreRequestType.UTILITY.value:
            kind, *frames = await asyncio.wait_for(self._input.recv_multipart(), SECONDS)
        assert kind == expected.value
        return frames

    def close(self) -> None:
        self._input.close()
        self._output.close()


class FakePeer:
    """Another engine, on the relay."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        name: str = "peer",
        llumlet: str = "127.0.0.1:1",
        credentials: Credentials = NONE,
        incarnation: str = "1",
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.llumlet = llumlet
        self.socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        connect(self.socket, RelayAddress.parse(address), credentials)

    async def send(self, message: wire.ToOrigin) -> None:
        await self.socket.send(wire.encode(message))

    async def hello(self, version: int = wire.RELAY_VERSION) -> None:
        await self.send(wire.Hello(version, self.name, self.incarnation, self.llumlet, DIGEST))

    async def tokens(self, *outputs: wire.TokenOutput, weight_version: str | None = None) -> None:
        await self.send(wire.TokenBatch(self.name, self.incarnation, self.llumlet, list(outputs), weight_version))

    async def fence(self, request_id: str, epoch: Epoch) -> wire.FenceAnswer:
        await self.send(wire.FenceQuestion(7, request_id, epoch))
        answer = await self.answer()
        assert isinstance(answer, wire.FenceAnswer)
        assert (answer.question, answer.request_id) == (7, request_id)
        return answer

    async def heartbeat(
        self, *request_ids: str, epoch: Epoch = FIRST_HOP, health: wire.Health = wire.Health.OK
    ) -> list[str]:
        """Returns the requests that the origin does not know. Whatever was sent before has been handled then."""
        await self.send(
            wire.Heartbeat(self.name, self.incarnation, health, [(request_id, epoch) for request_id in request_ids])
        )
        answer = await self.answer()
        assert isinstance(answer, wire.HeartbeatAck)
        return answer.unknown

    async def answer(self) -> wire.ToEngine:
        return wire.decode_to_engine(await asyncio.wait_for(self.socket.recv(), SECONDS))

    def close(self) -> None:
        self.socket.close()


def new_client(cls: type, directory: Path, ranks: int = 1, client_index: int = 0) -> Any:
    """A client of vLLM's class `cls`, made to follow moves, connected to the fake engines of `directory`."""
    addresses = {
        "input_address": f"ipc://{directory}/in",
        "output_address": f"ipc://{directory}/out",
        "stats_update_address": f"ipc://{directory}/stats",
    }
    return llumnix_client_class(cls)(_config(ranks), None, False, addresses, client_index=client_index)


def close_client(client: Any) -> None:
    client.shutdown()
    # vLLM leaves its context to the interpreter's end; the tests look for what is left open.
    client.resources.ctx.destroy(linger=0)


async def tokens_of(client: Any, count: int) -> list[int]:
    """The next `count` tokens that vLLM would hand to its output processor, of whatever request."""
    tokens: list[int] = []
    while len(tokens) < count:
        outputs = await next_outputs(client)
        tokens += [token for part in outputs.outputs for token in part.new_token_ids]
    return tokens


async def next_outputs(client: Any) -> EngineCoreOutputs:
    return await asyncio.wait_for(client.get_output_async(), SECONDS)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when it holds; fails if it does not come to hold."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of tests
            await asyncio.sleep(0.005)


def _ready(rank: int) -> bytes:
    response = EngineCoreReadyResponse(
        max_model_len=4096,
        num_gpu_blocks=100,
        block_size=32,
        dp_stats_address=None,
        dtype="float32",
        vllm_version="0",
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=rank,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        instance_id="",
        supports_lora=False,
        max_loras=0,
    )
    fields = {field.name: getattr(response, field.name) for field in dataclasses.fields(response)}
    return msgspec.msgpack.encode(fields | {"patch_digest": hooks.ready_digest()})


def _config(ranks: int) -> Any:
    """As much of a VllmConfig as a client reads."""
    return SimpleNamespace(
        lora_config=None,
        model_config=SimpleNamespace(
            multimodal_config=None,
            max_model_len=4096,
            get_vocab_size=lambda: VOCAB_SIZE,
            return_sampling_mask=False,
            served_model_name="model",
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=0, block_size=32),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        parallel_config=SimpleNamespace(
            enable_elastic_ep=False,
            enable_fault_tolerance=False,
            local_engines_only=False,
            _api_process_count=1,
            data_parallel_size=ranks,
            data_parallel_size_local=ranks,
            data_parallel_index=0,
            data_parallel_rank=0,
            data_parallel_rank_local=None,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
        ),
    )
