# SPDX-License-Identifier: Apache-2.0
"""Protocols of vLLM's objects, with the attributes that the engine side reads, calls or sets.

mypy checks our code against these instead of vLLM's classes, so a misspelt attribute is a type error. A test checks
that vLLM's own classes satisfy them. `seams` lists the attributes that are wrapped or set at run time.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm_llumnix.kv.vllm_worker_types import KVCacheConfig, SchedulerOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.request_queue import SchedulingPolicy
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
    from vllm.v1.request import RequestStatus


class Request(Protocol):
    """`vllm.v1.request.Request`. Counts are of tokens, but for `num_preemptions`."""

    request_id: str
    client_index: int
    status: RequestStatus
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    prompt_is_token_ids: list[bool] | None
    mm_features: Sequence[Any]
    all_token_ids: Sequence[int]
    sampling_params: SamplingParams
    max_tokens: int
    priority: int
    arrival_time: float
    lora_request: LoRARequest | None
    structured_output_request: Any
    cache_salt: str | None
    session_id: str | None
    trace_headers: Mapping[str, str] | None
    kv_transfer_params: object | None
    ec_transfer_params: object | None
    block_hashes: Sequence[object]
    events: list[Any]
    prefill_stats: object | None
    resumable: bool
    streaming_queue: deque[Any]
    is_prefill_chunk: bool
    replay_start: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_output_placeholders: int
    num_stale_output_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    next_decode_eligible_step: int
    llumlet_residence: Any
    """Ours, where there is one: see `request_state.residence_of`."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_tokens_with_spec(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def output_token_ids(self) -> Sequence[int]: ...

    @property
    def use_structured_output(self) -> bool: ...

    def append_output_token_ids(self, token_ids: list[int]) -> None: ...

    def is_finished(self) -> bool: ...


class Block(Protocol):
    """A block of the KV cache, in the pool."""

    block_id: int

    @property
    def block_hash(self) -> object | None: ...


class FreeBlocks(Protocol):
    def get_all_free_blocks(self) -> Iterable[Block]: ...


class BlockPool(Protocol):
    """Block 0 is vLLM's null block: it belongs to nobody and is counted in `num_gpu_blocks`."""

    num_gpu_blocks: int
    null_block: Block
    free_block_queue: FreeBlocks
    hash_block_size: int

    def get_num_free_blocks(self) -> int: ...

    def touch(self, blocks: Sequence[Block]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


class KVCacheBlocks(Protocol):
    """The blocks of one request, a row for each group of layers."""

    blocks: Sequence[Sequence[Block]]


class GroupManager(Protocol):
    """The block tables of one group. `new_block_ids` are those that the workers are to fill with zeros."""

    block_size: int
    enable_caching: bool
    records_new_block_ids: bool
    new_block_ids: list[int]
    req_to_blocks: dict[str, list[Block]]
    num_cached_block: dict[str, int]


class KVCacheManager(Protocol):
    block_pool: BlockPool
    coordinator: Any
    enable_caching: bool
    empty_kv_cache_blocks: KVCacheBlocks
    max_model_len: int

    def get_blocks(self, request_id: str) -> KVCacheBlocks: ...

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, object]: ...

    def truncate_computed_blocks(self, computed_blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks: ...

    def allocate_slots(self, request: Request, num_new_tokens: int, **more: Any) -> KVCacheBlocks | None: ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None: ...

    def free(self, request: Request) -> None: ...

    def take_events(self) -> list[Any]: ...

    def prefix_cache_lookup_enabled(self, request: Request) -> bool: ...


class RequestQueue(Protocol):
    """First come, first served, or by priority."""

    def __bool__(self) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def __reversed__(self) -> Iterator[Request]:
        """Available for first come, first served only."""
        ...

    def insert(self, index: int, request: Request) -> None:
        """Queues of the first kind only have it."""

    def add_request(self, request: Request) -> None: ...

    def prepend_request(self, request: Request) -> None: ...

    def peek_request(self) -> Request: ...

    def remove_requests(self, requests: Iterable[Request]) -> None: ...


class EncoderCacheManager(Protocol):
    cache_size: int
    """Embeddings of images and the like; no item may have more."""


class SchedulerConfig(Protocol):
    long_prefill_token_threshold: int


class LoRAConfig(Protocol):
    max_loras: int


class Connector(Protocol):
    """The scheduler's side of a KV connector. `sub_connectors`: of one that is made of several."""

    sub_connectors: Sequence[Connector]

    def on_new_request(self, request: Request) -> None: ...

    def has_pending_push_work(self) -> bool: ...


class Scheduler(Protocol):
    """`running` are the requests of the batch; `kv_holding_waiting` those that wait with their KV cache in place."""

    requests: dict[str, Request]
    running: list[Request]
    waiting: RequestQueue
    kv_holding_waiting: RequestQueue
    deferred_waiting: set[Request]
    finished_req_ids: Collection[str]
    finished_req_ids_dict: Mapping[int, set[str]] | None
    pause_state: PauseState
    policy: SchedulingPolicy
    current_step: int
    scheduler_config: SchedulerConfig
    lora_config: LoRAConfig | None
    kv_cache_config: KVCacheConfig
    kv_cache_manager: KVCacheManager
    connector: Connector | None
    kv_event_publisher: Any
    encoder_cache_manager: EncoderCacheManager
    block_size: int
    max_num_active_reqs: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    num_lookahead_tokens: int
    num_sampled_tokens_per_step: int
    num_waiting_for_streaming_input: int
    max_model_len: int
    num_spec_tokens: int
    adaptive_long_prefill_threshold: bool
    use_v2_model_runner: bool

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput: ...

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: object
    ) -> dict[int, EngineCoreOutputs]: ...

    def add_request(self, request: Request) -> None: ...

    def finish_requests(self, request_ids: str | Iterable[str], finished_status: RequestStatus) -> object: ...

    def has_requests(self) -> bool: ...

    def set_pause_state(self, state: PauseState) -> None: ...

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool: ...

    def _enqueue_waiting_request(self, request: Request) -> None: ...

    def _update_request_as_session(self, session: Request, update: Any) -> None: ...

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None: ...

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any: ...

    def _set_kv_fetch_stage(self, request: Request, stage: str | None) -> None: ...

    def _inflight_prefill_reserved_blocks(self) -> int: ...


class Executor(Protocol):
    """Runs the workers."""

    def collective_rpc(self, method: Any, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Calls `method` on each worker; returns the results by rank."""

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> object: ...

    def add_lora(self, lora_request: LoRARequest) -> bool: ...


class Engine(Protocol):
    """`EngineCoreProc`, or `DPEngineCoreProc` for a rank that steps with others. `batch_queue` has the batches in
    flight, the latest first, where there may be several."""

    engine_index: int
    vllm_config: VllmConfig
    scheduler: Scheduler
    model_executor: Executor
    structured_output_manager: Any
    request_block_hasher: Any
    batch_queue: deque[Any] | None
    batch_queue_size: int
    engines_running: bool
    has_coordinator: bool
    current_wave: int
    input_queue: queue.Queue[Any]
    output_queue: queue.Queue[Any]

    def is_running(self) -> bool: ...

    def step_fn(self) -> Any: ...

    def abort_requests(self, request_ids: list[str]) -> None: ...

    def execute_dummy_batch(self) -> None: ...

    def get_weight_version(self) -> str: ...

    def add_lora(self, lora_request: LoRARequest) -> bool: ...

    def remove_lora(self, lora_id: int) -> bool: ...

    def shutdown(self) -> None: ...

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]: ...

    def set_weight_version(self, weight_version: str) -> None: ...

    def _pause_complete(self) -> bool: ...

    def _notify_idle_state_callbacks(self) -> None: ...

    def _process_aborts_queue(self) -> None: ...

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None: ...
