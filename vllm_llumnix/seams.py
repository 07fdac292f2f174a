# SPDX-License-Identifier: Apache-2.0
"""All attributes of vLLM that are wrapped or set at run time, in one table for each process, for code and `doctor`.
See `patching.seam`. Imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm_llumnix.patching.seam import Seam, SeamKind, Seams

_WRAPPED, _SET, _ADDED = SeamKind.WRAPPED, SeamKind.SET, SeamKind.ADDED
_CORE = "vllm/v1/engine/core.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_POOL = "vllm/v1/core/block_pool.py"
_EXECUTOR = "vllm/v1/executor/abstract.py"
_REQUEST = "vllm/v1/request.py"
_CLIENT = "vllm/v1/engine/core_client.py"

# Conditions under which a row can go.
_LOAD = "vLLM tells of the requests and tokens that it adds, starts and finishes"
_MOVES = "vLLM can take a request out of a batch and put it into another engine's"
_NAMES = "vLLM's events name blocks so that others can compute the names"
_QUIET = "vLLM asks an extension to let go of blocks before it pauses, resets its caches or changes its weights"
_AROUND = "vLLM calls back around the model"
_ADAPTERS = "an engine can be asked for its adapters by name"
_UTILITY = "vLLM lets an extension add utilities"
_SLEEP = "vLLM calls back when the KV memory goes and comes"
_OUTLIVES = "vLLM lets an API server outlive its engine"


def _core(attribute: str, kind: SeamKind, why: str, remove_when: str, test: str, owner: str = "EngineCore") -> Seam:
    return Seam(_CORE, owner, attribute, kind, why, "core", remove_when, f"tests/{test}.py")


def _scheduler(
    attribute: str, kind: SeamKind, why: str, remove_when: str = _LOAD, test: str = "engine/test_load"
) -> Seam:
    return Seam(_SCHEDULER, "Scheduler", attribute, kind, why, "core", remove_when, f"tests/{test}.py")


def _pool(attribute: str, why: str) -> Seam:
    return Seam(_POOL, "BlockPool", attribute, _WRAPPED, why, "core", _NAMES, "tests/engine/test_cached_blocks.py")


def _request(attribute: str, why: str, kind: SeamKind = _SET, test: str = "engine/test_scheduler_port") -> Seam:
    return Seam(_REQUEST, "Request", attribute, kind, why, "core", _MOVES, f"tests/{test}.py")


def _config(path: str, owner: str, attribute: str, why: str, test: str) -> Seam:
    return Seam(path, owner, attribute, _SET, why, "core", _MOVES, f"tests/engine/{test}.py")


def _worker(attribute: str, why: str, remove_when: str = _SLEEP, test: str = "kv/test_kv_cuda") -> Seam:
    path = "vllm/v1/worker/gpu_worker.py"
    return Seam(path, "Worker", attribute, _WRAPPED, why, "worker", remove_when, f"tests/{test}.py")


def _client(attribute: str, kind: SeamKind, why: str) -> Seam:
    test = "tests/frontend/test_frontend_lifetime.py"
    return Seam(_CLIENT, "BackgroundResources", attribute, kind, why, "api", _OUTLIVES, test)


_PROC = "EngineCoreProc"
_PAUSES, _SESSIONS, _PORT = "engine/test_pauses", "engine/test_sessions", "engine/test_scheduler_port"
_COMPLETE = "a pause is complete when no request is frozen and no move holds a block"
_TOKEN = "chunked prefills leave a newcomer its token, for one step"

ENGINE = Seams(
    # The engine
    _core(
        "shutdown",
        _WRAPPED,
        "the llumlet's thread ends before the engine takes down what it uses",
        "vLLM calls back when an engine ends",
        "integration/test_drain",
    ),
    _core(
        "_handle_client_request",
        _WRAPPED,
        "requests that the loop turns away are not counted as load; a long utility call is no hang",
        _LOAD,
        "engine/test_engine_status",
        _PROC,
    ),
    _core(
        "_process_aborts_queue",
        _WRAPPED,
        "the first call after the model has returned: claims on a stuck engine's requests are settled there",
        _AROUND,
        "engine/test_claims",
    ),
    _core(
        "step_fn",
        _WRAPPED,
        "with several batches in flight a step may end without having waited for the model",
        _AROUND,
        "engine/test_claims",
    ),
    _core(
        "add_lora",
        _WRAPPED,
        "the front-end's adapters become known: requests that arrive name them",
        _ADAPTERS,
        "engine/test_adapters",
    ),
    _core("remove_lora", _WRAPPED, "an adapter that was removed is not offered", _ADAPTERS, "engine/test_adapters"),
    _core("_pause_complete", _WRAPPED, _COMPLETE, _QUIET, _PAUSES, _PROC),
    _core("_notify_idle_state_callbacks", _WRAPPED, _COMPLETE, _QUIET, _PAUSES, _PROC),
    _core("collective_rpc", _WRAPPED, "workers may change their weights: all moves end", _QUIET, _PAUSES),
    _core("set_weight_version", _WRAPPED, "the weights change: all moves end", _QUIET, _PAUSES),
    _core("llumlet_drain", _ADDED, "a utility: API servers report their drain", _UTILITY, "integration/test_drain"),
    _core("llumlet_moves", _ADDED, "a utility: API servers ask for moves", _UTILITY, "integration/test_metrics"),
    _core(
        "engines_running",
        _SET,
        "data-parallel ranks that step together start together for a request that comes from elsewhere",
        "a request can be given to an engine whose history is known",
        "engine/test_lockstep",
        _PROC,
    ),
    # The executor
    Seam(
        _EXECUTOR,
        "Executor",
        "execute_model",
        _WRAPPED,
        "the time, size and end of a model step are known, which tells a hang",
        "core",
        _AROUND,
        "tests/engine/test_progress.py",
    ),
    Seam(
        "vllm/distributed/elastic_ep/elastic_state.py",
        "ElasticEPScalingState",
        "progress",
        _WRAPPED,
        "a change of the number of ranks takes long and is no hang",
        "core",
        "vLLM says that it scales",
        "tests/engine/test_compiles.py",
    ),
    # The scheduler's methods
    _scheduler("schedule", _WRAPPED, "load: requests that start, tokens; the V1 runner gets a moved request's images"),
    _scheduler("update_from_output", _WRAPPED, "load: computed tokens, duration of a batch, accepted drafts of states"),
    _scheduler("_enqueue_waiting_request", _WRAPPED, "load: a request is queued"),
    _scheduler("_update_request_as_session", _WRAPPED, "load: a session gets more input; its output before that"),
    _scheduler(
        "add_request",
        _WRAPPED,
        "parts of an input wait while their request is on its way out, and are dropped when it has left",
        _MOVES,
        _SESSIONS,
    ),
    _scheduler(
        "num_waiting_for_streaming_input", _SET, "a request that comes waits for more of its input", _MOVES, _SESSIONS
    ),
    _scheduler("_preempt_request", _WRAPPED, "load: a request is preempted"),
    _scheduler("_free_request", _WRAPPED, "load: a request leaves"),
    _scheduler("_set_kv_fetch_stage", _WRAPPED, "load: a request's KV is on its way"),
    _scheduler(
        "set_pause_state", _WRAPPED, "status: the scheduler is paused; and a pause ends all moves", _QUIET, _PAUSES
    ),
    _scheduler(
        "reset_prefix_cache",
        _WRAPPED,
        "a reset ends all moves, and does not fail for the blocks that they hold",
        _QUIET,
        _PAUSES,
    ),
    # The prefix cache
    _pool("cache_full_blocks", "blocks that are cached get names that schedulers can compute"),
    _pool("_remove_cached_block_hashes", "names go with the blocks that had them"),
    _pool("reset_prefix_cache", "names go with the whole cache"),
    # Values that the scheduler reads at every step
    _scheduler("max_num_active_reqs", _SET, "a reservation holds a batch slot", _MOVES, _PORT),
    _scheduler(
        "lora_config",
        _SET,
        "a copy of its own: workers in the same process read vLLM's",
        _MOVES,
        "engine/test_adapter_places",
    ),
    _config(
        "vllm/config/lora.py",
        "LoRAConfig",
        "max_loras",
        "expected and frozen requests hold places for their adapters; in the scheduler's copy",
        "test_adapter_places",
    ),
    _config(
        "vllm/config/scheduler.py",
        "SchedulerConfig",
        "long_prefill_token_threshold",
        _TOKEN,
        "test_scheduler_port",
    ),
    _scheduler("adaptive_long_prefill_threshold", _SET, _TOKEN, _MOVES, _PORT),
    # Requests
    _request("next_decode_eligible_step", "a frozen request is not scheduled, nor one without a block in this step"),
    _request("streaming_queue", "a request that comes waits for more of its input", test=_SESSIONS),
    _request("status", "a request that comes waits to be scheduled"),
    _request("num_computed_tokens", "the KV cache of a request that comes is in place"),
    _request("client_index", "outputs of a request from elsewhere take the relay"),
    _request(
        "trace_headers",
        "the name with which a request came travels among them, and is taken out before vLLM traces anything",
        test="frontend/test_frontend_moves",
    ),
    _request("prefill_stats", "the front-end had them from the engine that did the prefill"),
    Seam(
        _REQUEST,
        "Request",
        "priority",
        _SET,
        "a request that has waited for long comes before others, also where vLLM orders by priority",
        "core",
        "vLLM's priorities age",
        "tests/engine/test_ageing.py",
    ),
    _request(
        "num_preemptions",
        "counted over all engines; beside a KV connector, a request that comes has not been preempted here",
    ),
    _request("llumlet_residence", "this engine's notes on a request hang on it, and die with it", _ADDED),
    # Grammars
    Seam(
        "vllm/v1/structured_output/__init__.py",
        "StructuredOutputManager",
        "grammar_init",
        _WRAPPED,
        "vLLM calls it on one thread, requests that come here on another; and a compiler can end the engine",
        "core",
        "grammar_init can be called by several threads",
        "tests/exactness/test_matrix.py",
    ),
)

WORKER = Seams(
    _worker("sleep", "nobody reads or writes KV memory that sleep mode has taken away"),
    _worker("discard", "as sleep, for the KV memory alone"),
    _worker("wake_up", "the KV memory is back"),
    _worker(
        "compile_or_warm_up_model",
        "nobody touches the GPU while CUDA graphs are captured, which elastic expert parallelism does at run time",
        "vLLM captures graphs in thread-local mode",
    ),
    _worker(
        "execute_model",
        "a request that comes back has its state in another block",
        "vLLM forgets the place of a state when a request is over, also in a step that computes nothing",
        "integration/test_hybrids",
    ),
    Seam(
        "vllm/v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder",
        "sync_batch",
        _WRAPPED,
        "a request that enters the V1 runner's batch with a history is told that it has thought already",
        "worker",
        "vLLM counts what is there when a request enters the batch again",
        "tests/engine/test_thinking_budget.py",
    ),
)

CLIENT = Seams(
    _client(
        "validate_alive",
        SeamKind.REPLACED,
        "vLLM's receive task ends when the engine says that it is dying; ours goes on with what the relay brings",
    ),
    _client("engine_dead", _SET, "vLLM refuses new requests and reports itself unhealthy, while streams go on"),
    Seam(
        "vllm/entrypoints/generate/base/serving.py",
        "GenerateBaseServing",
        "_raise_if_error",
        _WRAPPED,
        "the client is told why its request was ended, with a code on which nobody sends it again",
        "api",
        "vLLM takes the text and the code of an error from the engine's output",
        "tests/frontend/test_frontend_endings.py",
    ),
)

ALL: tuple[Seam, ...] = (*ENGINE, *WORKER, *CLIENT)


def require(engine: Any) -> None:
    """Checks an engine before anything is changed there. Raises PatchError naming the attributes that it lacks."""
    scheduler = engine.scheduler
    ENGINE.require(
        {
            "EngineCore": engine,
            "EngineCoreProc": engine,
            "Executor": engine.model_executor,
            "Scheduler": scheduler,
            "BlockPool": scheduler.kv_cache_manager.block_pool,
            "SchedulerConfig": scheduler.scheduler_config,
            "LoRAConfig": scheduler.lora_config,
            "StructuredOutputManager": engine.structured_output_manager,
        }
    )
