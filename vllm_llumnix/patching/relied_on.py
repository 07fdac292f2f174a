# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM whose behaviour the engine side counts on, beyond the lines that the patches change.

A release's `CONTRACT` holds a hash of each (`contract.py`). One that differs from it is named when an instance starts;
one that `refuses` ends the start: what is wrong there is not seen as an error but as wrong tokens or lost KV blocks.

A row is added with the first use of a function, and the contracts are written again: `vllm-llumnix patch contract`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reliance:
    """`name` is that of a function, a method (`Class.method`) or a class; `used_by` the modules that count on it."""

    path: str
    name: str
    used_by: str
    refuses: bool = False


def _of(path: str, used_by: str, names: str, owner: str = "", refuses: bool = False) -> list[Reliance]:
    prefix = f"{owner}." if owner else ""
    return [Reliance(path, prefix + name, used_by, refuses) for name in names.split()]


_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_ASYNC_SCHEDULER = "vllm/v1/core/sched/async_scheduler.py"
_QUEUES = "vllm/v1/core/sched/request_queue.py"
_CACHE = "vllm/v1/core/kv_cache_manager.py"
_COORDINATOR = "vllm/v1/core/kv_cache_coordinator.py"
_GROUPS = "vllm/v1/core/single_type_kv_cache_manager.py"
_POOL = "vllm/v1/core/block_pool.py"
_CACHE_PARTS = "vllm/v1/core/kv_cache_utils.py"
_REQUEST = "vllm/v1/request.py"
_MESSAGES = "vllm/v1/engine/__init__.py"
_INPUTS = "vllm/multimodal/inputs.py"
_PROCESSOR = "vllm/multimodal/processing/processor.py"
_ENCODER_CACHE = "vllm/v1/core/encoder_cache_manager.py"
_CORE = "vllm/v1/engine/core.py"
_CLIENT = "vllm/v1/engine/core_client.py"
_GRAMMARS = "vllm/v1/structured_output/__init__.py"
_EXECUTOR = "vllm/v1/executor/abstract.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"
_V1_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_V1_BATCH = "vllm/v1/worker/gpu_input_batch.py"
_BUDGETS = "vllm/v1/sample/thinking_budget_state.py"
_V2_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_V2_STATES = "vllm/v1/worker/gpu/states.py"
_V2_HYBRID = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
_STATES = "vllm/v1/worker/mamba_utils.py"
_STATE_PARTS = "vllm/model_executor/layers/mamba/mamba_utils.py"
_SPECS = "vllm/v1/kv_cache_interface.py"
_BACKENDS = "vllm/v1/attention/backends"
_LAYERS = "vllm/model_executor/layers"
_AUX_OUTPUT = "vllm/distributed/aux_output_connector/connector.py"
_CONNECTORS = "vllm/distributed/kv_transfer/kv_connector/v1"

RELIED_ON: tuple[Reliance, ...] = (
    # What freezes a request, drains it, and takes a newcomer first.
    *_of(_SCHEDULER, "engine/blocks/scheduler_port.py", "schedule _update_after_schedule", "Scheduler", refuses=True),
    *_of(_ASYNC_SCHEDULER, "engine/blocks/scheduler_port.py", "_update_after_schedule", "AsyncScheduler", refuses=True),
    *_of(_SCHEDULER, "engine/load/scheduler_events.py", "update_from_output", "Scheduler", refuses=True),
    # Who leaves, and when its blocks come back.
    *_of(_SCHEDULER, "engine/blocks/scheduler_port.py", "finish_requests", "Scheduler", refuses=True),
    *_of(_SCHEDULER, "engine/load/scheduler_events.py", "_preempt_request _free_request", "Scheduler", refuses=True),
    *_of(
        _SCHEDULER,
        "engine/blocks/scheduler_port.py",
        "_request_blocks_can_be_freed _free_request_blocks _drain_deferred_frees",
        "Scheduler",
    ),
    # Queues.
    *_of(
        _SCHEDULER,
        "engine/load/scheduler_events.py",
        "_enqueue_waiting_request _update_request_as_session _set_kv_fetch_stage set_pause_state",
        "Scheduler",
    ),
    *_of(_SCHEDULER, "engine/recovery/adoptions.py", "add_request", "Scheduler"),
    *_of(_SCHEDULER, "engine/loop.py", "has_requests", "Scheduler"),
    *_of(_SCHEDULER, "engine/service/status.py", "pause_state", "Scheduler"),
    *_of(_SCHEDULER, "engine/blocks/reservations.py", "_inflight_prefill_reserved_blocks", "Scheduler"),
    *_of(_QUEUES, "engine/blocks/scheduler_port.py", "FCFSRequestQueue PriorityRequestQueue"),
    # Blocks: reserved, pinned, published, given back.
    *_of(
        _CACHE,
        "engine/blocks/reservations.py",
        "allocate_slots cache_blocks remove_skipped_blocks free",
        "KVCacheManager",
        refuses=True,
    ),
    *_of(
        _CACHE,
        "engine/blocks/reservations.py",
        "get_computed_blocks truncate_computed_blocks get_blocks",
        "KVCacheManager",
    ),
    *_of(
        _COORDINATOR,
        "engine/blocks/reservations.py",
        "allocate_new_computed_blocks",
        "KVCacheCoordinator",
        refuses=True,
    ),
    *_of(
        _GROUPS,
        "engine/blocks/reservations.py",
        "add_local_computed_blocks allocate_external_computed_blocks allocate_new_blocks remove_skipped_blocks",
        "SingleTypeKVCacheManager",
        refuses=True,
    ),
    *_of(_GROUPS, "engine/blocks/block_rows.py", "get_num_skipped_tokens", "SlidingWindowManager", refuses=True),
    *_of(
        _GROUPS, "engine/blocks/block_rows.py", "get_num_skipped_tokens", "ChunkedLocalAttentionManager", refuses=True
    ),
    *_of(
        _GROUPS,
        "engine/blocks/block_rows.py",
        "allocate_new_blocks remove_skipped_blocks get_num_skipped_tokens cache_blocks",
        "MambaManager",
        refuses=True,
    ),
    *_of(
        _GROUPS,
        "engine/blocks/block_rows.py",
        "_claim_ring_block allocate_new_blocks allocate_external_computed_blocks remove_skipped_blocks",
        "CircularBufferManager",
        refuses=True,
    ),
    *_of(_GROUPS, "engine/blocks/block_rows.py", "remove_skipped_blocks", "RSWAManager", refuses=True),
    *_of(_SCHEDULER, "engine/requests/request_state.py", "_mark_prefix_replay", "Scheduler"),
    # Where workers leave the states of drafts, and how they go on from the last that was accepted.
    *_of(
        _STATES,
        "engine/blocks/latest_states.py",
        "preprocess_mamba_align_fused_kernel postprocess_mamba_fused_kernel",
        refuses=True,
    ),
    *_of(
        _V2_HYBRID,
        "engine/blocks/latest_states.py",
        "add_request postprocess_state",
        "MambaHybridModelState",
        refuses=True,
    ),
    *_of(_STATE_PARTS, "kv/memory/vllm_cache.py", "get_conv_copy_spec get_temporal_copy_spec", refuses=True),
    *_of(_CACHE, "engine/load/scheduler_events.py", "prefix_cache_lookup_enabled", "KVCacheManager"),
    *_of(_COORDINATOR, "engine/load/scheduler_events.py", "find_longest_cache_hit", "UnitaryKVCacheCoordinator"),
    *_of(_POOL, "engine/blocks/scheduler_port.py", "touch free_blocks", "BlockPool", refuses=True),
    *_of(_POOL, "engine/blocks/scheduler_port.py", "get_num_free_blocks", "BlockPool"),
    # Names of cached blocks: what is wrong with them sends requests a longer way, and changes no token.
    *_of(_POOL, "engine/blocks/cached_blocks.py", "cache_full_blocks _remove_cached_block_hashes", "BlockPool"),
    *_of(_POOL, "engine/blocks/cached_blocks.py", "reset_prefix_cache _maybe_evict_cached_block", "BlockPool"),
    *_of(_POOL, "engine/blocks/cached_blocks.py", "get_one_block", "BlockHashToBlockMap"),
    *_of(_CACHE_PARTS, "engine/blocks/scheduler_port.py", "get_all_free_blocks", "FreeKVCacheBlockQueue"),
    *_of(_CACHE, "engine/blocks/scheduler_port.py", "take_events", "KVCacheManager"),
    # KV connectors: what they take for granted of a request that is scheduled, and of blocks that are free.
    *_of(_SCHEDULER, "engine/blocks/connectors.py", "_connector_finished _handle_blocked_waiting_request", "Scheduler"),
    *_of(_SCHEDULER, "engine/blocks/connectors.py", "_update_from_kv_xfer_finished", "Scheduler"),
    *_of(
        f"{_CONNECTORS}/offloading/scheduler.py",
        "engine/blocks/connectors.py",
        "on_new_request request_finished build_connector_meta _update_req_states _build_store_jobs "
        "update_connector_output has_pending_push_work",
        "OffloadingConnectorScheduler",
    ),
    *_of(f"{_CONNECTORS}/offloading/worker.py", "engine/blocks/connectors.py", "OffloadingConnectorWorker"),
    *_of(
        f"{_CONNECTORS}/example_connector.py", "engine/blocks/connectors.py", "build_connector_meta", "ExampleConnector"
    ),
    *_of(f"{_CONNECTORS}/multi_connector.py", "engine/blocks/connectors.py", "on_new_request", "MultiConnector"),
    *_of(
        f"{_CONNECTORS}/nixl/pull_scheduler.py",
        "engine/blocks/connectors.py",
        "update_state_after_alloc request_finished",
        "NixlPullConnectorScheduler",
    ),
    # A request, and what travels of it.
    *_of(_REQUEST, "engine/requests/request_state.py", "__init__ append_output_token_ids is_finished", "Request"),
    *_of(_REQUEST, "engine/requests/request_state.py", "num_tokens num_output_tokens use_structured_output", "Request"),
    *_of(_REQUEST, "engine/queue/shortage.py", "num_tokens_with_spec", "Request"),
    *_of(_REQUEST, "engine/requests/request_state.py", "RequestStatus"),
    # Images and embeddings of its prompt: their form, when they are looked at, and what of them the workers get.
    *_of(
        _INPUTS,
        "wire/features_wire.py",
        "MultiModalFeatureSpec MultiModalFieldElem MultiModalKwargsItem PlaceholderRange",
    ),
    *_of(_INPUTS, "engine/requests/prompts.py", "MultiModalBatchedField MultiModalFlatField MultiModalSharedField"),
    *_of(_PROCESSOR, "engine/requests/prompts.py", "get_dummy_mm_inputs", "BaseMultiModalProcessor"),
    *_of("vllm/multimodal/registry.py", "engine/requests/prompts.py", "create_processor", "MultiModalRegistry"),
    *_of(
        "vllm/multimodal/utils.py", "engine/load/scheduler_events.py", "strip_covered_mm_data get_mm_features_in_window"
    ),
    *_of(_SCHEDULER, "engine/requests/prompts.py", "_try_schedule_encoder_inputs _free_encoder_inputs", "Scheduler"),
    *_of(_ENCODER_CACHE, "engine/requests/prompts.py", "free", "EncoderCacheManager"),
    *_of(_CACHE_PARTS, "engine/requests/request_state.py", "generate_block_hash_extra_keys"),
    *_of(_MESSAGES, "frontend/origin.py", "EngineCoreRequest EngineCoreOutput EngineCoreOutputs FinishReason"),
    *_of(_MESSAGES, "frontend/client.py", "EngineCoreRequestType"),
    # Which rows of routed experts come with which tokens.
    *_of(_AUX_OUTPUT, "wire/relay_convert.py", "build_connector_meta take_output", "AuxOutputSchedulerConnector"),
    # The engine's loop and its threads.
    *_of(_CORE, "engine/load/model_watch.py", "step step_with_batch_queue", "EngineCore", refuses=True),
    *_of(_CORE, "engine/load/model_watch.py", "_process_aborts_queue", "EngineCore"),
    *_of(_CORE, "engine/loop.py", "execute_dummy_batch", "EngineCore"),
    *_of(
        _CORE,
        "engine/loop.py",
        "has_work run_busy_loop _process_input_queue _process_engine_step",
        "EngineCoreProc",
        refuses=True,
    ),
    *_of(_CORE, "engine/loop.py", "process_input_sockets process_output_sockets", "EngineCoreProc"),
    *_of(_CORE, "engine/load/scheduler_events.py", "_handle_client_request _invoke_utility_method", "EngineCoreProc"),
    *_of(_CORE, "engine/loop.py", "is_running", "EngineCoreProc"),
    *_of(_CORE, "engine/loop.py", "run_busy_loop _handle_client_request add_request", "DPEngineCoreProc"),
    *_of(_CORE, "engine/attach.py", "shutdown add_lora remove_lora", "EngineCore"),
    # Pauses and resets: when they come, what they call, what fails for blocks that are held.
    *_of(
        _CORE,
        "engine/pauses.py",
        "_reset_caches _finish_pause release_kv_cache_memory sleep collective_rpc set_weight_version",
        "EngineCore",
    ),
    *_of(
        _CORE,
        "engine/pauses.py",
        "pause_scheduler _pause_complete _notify_idle_state_callbacks",
        "EngineCoreProc",
    ),
    *_of(_CORE, "engine/pauses.py", "_pause_complete", "DPEngineCoreProc"),
    *_of(_SCHEDULER, "engine/pauses.py", "reset_prefix_cache", "Scheduler", refuses=True),
    *_of(_CORE, "engine/service/aborts.py", "abort_requests", "EngineCore"),
    *_of(_CORE, "engine/context.py", "get_weight_version", "EngineCore"),
    *_of(_EXECUTOR, "engine/attach.py", "add_lora collective_rpc", "Executor"),
    *_of(_EXECUTOR, "engine/load/model_watch.py", "execute_model", "Executor"),
    *_of(_GRAMMARS, "engine/requests/grammars.py", "grammar_init accept_tokens", "StructuredOutputManager"),
    # Workers: how a request with a history enters the batch, and when the KV memory goes away.
    *_of(_V1_RUNNER, "engine/blocks/scheduler_port.py", "_update_states _init_mrope_positions", "GPUModelRunner"),
    *_of(_V1_BATCH, "engine/blocks/scheduler_port.py", "add_request", "InputBatch"),
    *_of(_V2_RUNNER, "engine/blocks/scheduler_port.py", "add_requests", "GPUModelRunner"),
    *_of(_V2_STATES, "engine/blocks/scheduler_port.py", "add_request", "RequestState"),
    *_of(_WORKER, "kv/worker.py", "sleep discard wake_up compile_or_warm_up_model execute_model", "Worker"),
    *_of(
        _BUDGETS, "steps/thinking_budget.py", "sync_batch update_state _update_think_state", "ThinkingBudgetStateHolder"
    ),
    # What is in a page, byte by byte: `WRITTEN_AS_BY` says of two releases that it is the same. Compiled kernels of
    # vLLM, FlashAttention and FlashInfer write there as well.
    *_of(
        _SPECS,
        "engine/compatibility/facts.py",
        "create_kv_cache_views compute_layout_strides compute_layer_kv_cache_shape_bytes",
    ),
    *_of(
        _SPECS,
        "engine/compatibility/facts.py",
        "num_heads state_content_size_bytes unpadded_page_size_bytes",
        "AttentionSpec",
    ),
    *_of(_SPECS, "engine/compatibility/facts.py", "state_content_size_bytes", "MambaSpec"),
    *_of("vllm/v1/kv_cache_layout.py", "engine/compatibility/facts.py", "KVCacheLayout"),
    *_of(f"{_BACKENDS}/flash_attn.py", "engine/compatibility/facts.py", "do_kv_cache_update", "FlashAttentionImpl"),
    *_of(f"{_BACKENDS}/flashinfer.py", "engine/compatibility/facts.py", "do_kv_cache_update", "FlashInferImpl"),
    *_of(f"{_BACKENDS}/flashinfer.py", "engine/compatibility/facts.py", "customize_spec", "FlashInferBackend"),
    *_of(f"{_BACKENDS}/triton_attn.py", "engine/compatibility/facts.py", "do_kv_cache_update", "TritonAttentionImpl"),
    *_of(f"{_BACKENDS}/triton_attn.py", "engine/compatibility/facts.py", "customize_spec", "TritonAttentionBackend"),
    *_of(f"{_BACKENDS}/b12x.py", "engine/compatibility/facts.py", "customize_spec", "B12xPagedAttentionBackend"),
    *_of(f"{_BACKENDS}/cpu_attn.py", "engine/compatibility/facts.py", "do_kv_cache_update", "CPUAttentionBackendImpl"),
    *_of(
        "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
        "engine/compatibility/facts.py",
        "triton_reshape_and_cache_flash reshape_and_cache_kernel_flash",
    ),
    *_of(f"{_LAYERS}/attention/mla_attention.py", "engine/compatibility/facts.py", "unified_mla_kv_cache_update"),
    *_of(f"{_LAYERS}/mamba/abstract.py", "engine/compatibility/facts.py", "bind_kv_cache", "MambaBase"),
    *_of(f"{_LAYERS}/mamba/mamba_utils.py", "engine/compatibility/facts.py", "MambaStateShapeCalculator"),
    # Classes that are known by their names, without an import: under another one they would be taken for what they
    # derive from.
    *_of(
        _SPECS,
        "kv/memory/vllm_cache.py",
        "MLAAttentionSpec SlidingWindowMLASpec HiddenStateCacheSpec SinkFullAttentionSpec CrossAttentionSpec",
    ),
    *_of(
        f"{_LAYERS}/attention_layer_base.py",
        "kv/memory/vllm_cache.py",
        "bind_kv_cache get_attn_backend",
        "AttentionLayerBase",
    ),
    *_of(f"{_LAYERS}/fused_moe/routed_experts.py", "kv/fingerprint.py", "__init__", "RoutedExperts"),
    *_of(f"{_LAYERS}/vocab_parallel_embedding.py", "kv/fingerprint.py", "__init__", "VocabParallelEmbedding"),
    *_of(f"{_LAYERS}/vocab_parallel_embedding.py", "kv/fingerprint.py", "__init__", "ParallelLMHead"),
    # The API server's client.
    *_of(
        _CLIENT,
        "frontend/client.py",
        "_ensure_output_queue_task add_request_async abort_requests_async _send_input "
        "pause_scheduler_async sleep_async add_lora_async remove_lora_async",
        "AsyncMPClient",
    ),
    *_of(_CLIENT, "frontend/origin.py", "_call_utility_async", "AsyncMPClient"),
    *_of(_CLIENT, "frontend/client.py", "start_engine_core_monitor shutdown", "MPClient"),
    *_of(_CLIENT, "frontend/client.py", "validate_alive", "BackgroundResources"),
    *_of(
        _CLIENT,
        "frontend/client.py",
        "get_core_engine_for_request process_engine_outputs abort_requests_async",
        "DPLBAsyncMPClient",
    ),
)
