# SPDX-License-Identifier: Apache-2.0
"""The attributes of vLLM that the engine side wraps or sets at run time, and why. See `patching.seam`."""

from __future__ import annotations

from typing import Any

from vllm_llumnix.patching.seam import Kind, Seam, Seams

_CORE = "vllm/v1/engine/core.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_POOL = "vllm/v1/core/block_pool.py"
_EXECUTOR = "vllm/v1/executor/abstract.py"
_REQUEST = "vllm/v1/request.py"
_LOAD = "vLLM tells of the requests and tokens that it adds, starts and finishes"
_MOVES = "vLLM can take a request out of a batch and put it into another engine's"
_NAMES = "vLLM's events name blocks so that others can compute the names"
_QUIET = "vLLM asks an extension to let go of blocks before it pauses, resets its caches or changes its weights"
_PAUSES_TEST = "tests/engine/test_pauses.py"
_LOAD_TEST = "tests/engine/test_load.py"
_PORT_TEST = "tests/engine/test_scheduler_port.py"


def _core(attribute: str, kind: Kind, why: str, remove_when: str, test: str, owner: str = "EngineCore") -> Seam:
    return Seam(_CORE, owner, attribute, kind, why, "core", remove_when, test)


def _scheduler(attribute: str, kind: Kind, why: str, remove_when: str, test: str) -> Seam:
    return Seam(_SCHEDULER, "Scheduler", attribute, kind, why, "core", remove_when, test)


def _pool(attribute: str, why: str) -> Seam:
    return Seam(_POOL, "BlockPool", attribute, Kind.WRAPPED, why, "core", _NAMES, "tests/engine/test_cached_blocks.py")


def _executor(attribute: str, why: str, remove_when: str, test: str) -> Seam:
    return Seam(_EXECUTOR, "Executor", attribute, Kind.WRAPPED, why, "core", remove_when, test)


def _request(attribute: str, kind: Kind, why: str, test: str = _PORT_TEST) -> Seam:
    return Seam(_REQUEST, "Request", attribute, kind, why, "core", _MOVES, test)


SEAMS = Seams(
    # The engine
    _core(
        "shutdown",
        Kind.WRAPPED,
        "the llumlet's thread ends before the engine takes down what it uses",
        "vLLM calls back when an engine ends",
        "tests/integration/test_drain.py",
    ),
    _core(
        "_handle_client_request",
        Kind.WRAPPED,
        "requests that the loop turns away are not counted as load; a long utility call is no hang",
        _LOAD,
        "tests/engine/test_engine_status.py",
        owner="EngineCoreProc",
    ),
    _core(
        "_process_aborts_queue",
        Kind.WRAPPED,
        "the first thing after the model has returned: claims on a stuck engine's requests are settled there",
        "vLLM calls back around the model",
        "tests/engine/test_claims.py",
    ),
    _core(
        "step_fn",
        Kind.WRAPPED,
        "with several batches in flight a step may end without having waited for the model",
        "vLLM calls back around the model",
        "tests/engine/test_claims.py",
    ),
    _core(
        "add_lora",
        Kind.WRAPPED,
        "the front-end's adapters become known: requests that arrive name them",
        "an engine can be asked for its adapters by name",
        "tests/engine/test_adapters.py",
    ),
    _core(
        "remove_lora",
        Kind.WRAPPED,
        "an adapter that was removed is not offered any more",
        "an engine can be asked for its adapters by name",
        "tests/engine/test_adapters.py",
    ),
    _core(
        "_pause_complete",
        Kind.WRAPPED,
        "a pause is complete when no request is frozen and no move holds a block",
        _QUIET,
        _PAUSES_TEST,
        owner="EngineCoreProc",
    ),
    _core(
        "_notify_idle_state_callbacks",
        Kind.WRAPPED,
        "a pause is complete when no request is frozen and no move holds a block",
        _QUIET,
        _PAUSES_TEST,
        owner="EngineCoreProc",
    ),
    _core(
        "collective_rpc",
        Kind.WRAPPED,
        "workers may change their weights: all moves end",
        _QUIET,
        _PAUSES_TEST,
    ),
    _core(
        "set_weight_version",
        Kind.WRAPPED,
        "the weights are others: all moves end",
        _QUIET,
        _PAUSES_TEST,
    ),
    _core(
        "llumlet_drain",
        Kind.ADDED,
        "a utility: API servers tell how their drain stands",
        "vLLM lets an extension add utilities",
        "tests/integration/test_drain.py",
    ),
    _core(
        "llumlet_moves",
        Kind.ADDED,
        "a utility: API servers ask for settled moves, for their metrics",
        "vLLM lets an extension add utilities",
        "tests/integration/test_metrics.py",
    ),
    _core(
        "engines_running",
        Kind.SET,
        "data-parallel ranks that step together start together for a request that comes from elsewhere",
        "a request can be given to an engine whose history is known",
        "tests/engine/test_lockstep.py",
        owner="EngineCoreProc",
    ),
    # The executor
    _executor(
        "execute_model",
        "the loop is known to be in a model step, since when, and for how many tokens: what tells a hang",
        "vLLM calls back around the model",
        "tests/engine/test_progress.py",
    ),
    Seam(
        "vllm/distributed/elastic_ep/elastic_state.py",
        "ElasticEPScalingState",
        "progress",
        Kind.WRAPPED,
        "the loop is known to change the number of ranks, which takes as long as it takes and is no hang",
        "core",
        "vLLM says that it scales",
        "tests/engine/test_compiles.py",
    ),
    # The scheduler's methods
    _scheduler(
        "schedule",
        Kind.WRAPPED,
        "load: what starts, and how many tokens; who moved here starts with its images, for the V1 runner",
        _LOAD,
        _LOAD_TEST,
    ),
    _scheduler(
        "update_from_output",
        Kind.WRAPPED,
        "load: what was computed; how long its batch took; how many drafts were accepted, where there are states",
        _LOAD,
        _LOAD_TEST,
    ),
    _scheduler("_enqueue_waiting_request", Kind.WRAPPED, "load: a request is queued", _LOAD, _LOAD_TEST),
    _scheduler(
        "_update_request_as_session",
        Kind.WRAPPED,
        "load: a session gets more input; and how much it has put out before that",
        _LOAD,
        _LOAD_TEST,
    ),
    _scheduler(
        "add_request",
        Kind.WRAPPED,
        "parts of an input wait while their request is on its way out, and are dropped when it has left",
        _MOVES,
        "tests/engine/test_sessions.py",
    ),
    _scheduler(
        "num_waiting_for_streaming_input",
        Kind.SET,
        "a request that comes waits for more of its input",
        _MOVES,
        "tests/engine/test_sessions.py",
    ),
    _scheduler("_preempt_request", Kind.WRAPPED, "load: a request is preempted", _LOAD, _LOAD_TEST),
    _scheduler("_free_request", Kind.WRAPPED, "load: a request leaves", _LOAD, _LOAD_TEST),
    _scheduler("_set_kv_fetch_stage", Kind.WRAPPED, "load: a request's KV is on its way", _LOAD, _LOAD_TEST),
    _scheduler(
        "set_pause_state",
        Kind.WRAPPED,
        "status: the scheduler is paused; and a pause ends all moves",
        _QUIET,
        _PAUSES_TEST,
    ),
    _scheduler(
        "reset_prefix_cache",
        Kind.WRAPPED,
        "a reset ends all moves, and does not fail for the blocks that they hold",
        _QUIET,
        _PAUSES_TEST,
    ),
    # The prefix cache
    _pool("cache_full_blocks", "blocks that are cached get names that schedulers can compute"),
    _pool("_remove_cached_block_hashes", "names go with the blocks that had them"),
    _pool("reset_prefix_cache", "names go with the whole cache"),
    # What the scheduler reads at every step
    _scheduler("max_num_active_reqs", Kind.SET, "a reservation holds a batch slot", _MOVES, _PORT_TEST),
    _scheduler(
        "lora_config",
        Kind.SET,
        "a copy of its own: workers in the same process read vLLM's",
        _MOVES,
        "tests/engine/test_adapter_places.py",
    ),
    Seam(
        "vllm/config/lora.py",
        "LoRAConfig",
        "max_loras",
        Kind.SET,
        "expected and frozen requests hold places for their adapters; in the scheduler's copy",
        "core",
        _MOVES,
        "tests/engine/test_adapter_places.py",
    ),
    Seam(
        "vllm/config/scheduler.py",
        "SchedulerConfig",
        "long_prefill_token_threshold",
        Kind.SET,
        "chunked prefills leave a newcomer its token, for one step",
        "core",
        _MOVES,
        _PORT_TEST,
    ),
    _scheduler(
        "adaptive_long_prefill_threshold",
        Kind.SET,
        "chunked prefills leave a newcomer its token, for one step",
        _MOVES,
        _PORT_TEST,
    ),
    # Requests
    _request(
        "next_decode_eligible_step", Kind.SET, "a frozen request is not scheduled, one without a block not in this step"
    ),
    _request(
        "streaming_queue",
        Kind.SET,
        "a request that comes waits for more of its input",
        "tests/engine/test_sessions.py",
    ),
    _request("status", Kind.SET, "a request that comes waits to be scheduled"),
    _request("num_computed_tokens", Kind.SET, "the KV cache of a request that comes is in place"),
    _request("client_index", Kind.SET, "outputs of a request from elsewhere take the relay"),
    _request(
        "trace_headers",
        Kind.SET,
        "the name with which a request came travels among them, and is taken out before vLLM traces anything",
        "tests/frontend/test_frontend_moves.py",
    ),
    _request("prefill_stats", Kind.SET, "the front-end had them from the engine that did the prefill"),
    Seam(
        _REQUEST,
        "Request",
        "priority",
        Kind.SET,
        "who has waited for long comes before others, also where vLLM orders by priority",
        "core",
        "vLLM's priorities age",
        "tests/engine/test_ageing.py",
    ),
    _request(
        "num_preemptions",
        Kind.SET,
        "counted over all engines; beside a KV connector, a request that comes has not been preempted here",
    ),
    _request("llumlet_residence", Kind.ADDED, "what this engine remembers of a request hangs on it, and dies with it"),
    # Grammars
    Seam(
        "vllm/v1/structured_output/__init__.py",
        "StructuredOutputManager",
        "grammar_init",
        Kind.WRAPPED,
        "vLLM calls it on one thread, the requests that come here on another; and a compiler can end the engine",
        "core",
        "grammar_init can be called by several threads",
        "tests/exactness/test_matrix.py",
    ),
)


def require(engine: Any) -> None:
    """Before anything of this engine is touched: raises PatchError naming what it does not have."""
    scheduler = engine.scheduler
    SEAMS.require(
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
