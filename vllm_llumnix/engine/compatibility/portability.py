# SPDX-License-Identifier: Apache-2.0
"""Requests and engines that can be moved, how exactly they go on, and the reasons to refuse: the one table behind
refusals and documentation (docs/reference/portability.md).

A row with a condition refuses: `Migrate` and `llumnix ps` show its text. The other rows tell the class of a request
that moves.
"""

from __future__ import annotations

import dataclasses
import enum
import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from vllm_llumnix.engine.blocks.block_rows import GroupKind, kind_of
from vllm_llumnix.engine.blocks.connectors import has_unknown_connector
from vllm_llumnix.engine.requests.request_state import residence_of
from vllm_llumnix.engine.vllm_types import Engine, Request
from vllm_llumnix.kv.mover.messages import MoverInfo
from vllm_llumnix.kv.mover.process import boot_id
from vllm_llumnix.wire.features_wire import MAX_INPUT_BYTES, is_plain, is_whole, num_bytes
from vllm_llumnix.wire.request_wire import fetched_from_here, may_be_lost

MARK = "llumnix_portable"
"""Attribute that a class of custom logits processors sets to True, itself and not by inheritance, to be moved."""


class Exactness(enum.StrEnum):
    """Classes of how a moved request's tokens and log probabilities compare with those of an unmoved run in the same
    company."""

    BIT_EXACT = "bit-exact"
    EXACT_IN_FP32 = "exact in fp32"
    REFUSED = "refused"


class Evidence(enum.StrEnum):
    """Evidence for a row on the engines that tests run: those with vLLM's V1 runner on CPUs (`v1`), and those with its
    V2 runner and asynchronous scheduling, which is what GPUs run, with Triton's interpreter in their place (`v2`)."""

    MEASURED = "measured"
    BY_READING = "by reading"
    REFUSED = "refused"
    OTHER = "not this runner"
    """The row is about another one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A kind of request that moves, and what decides its class."""

    kind: str
    exactness: Exactness
    because: str
    v1: Evidence = Evidence.MEASURED
    v2: Evidence = Evidence.MEASURED


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A request and the facts of its engine that refusals look at."""

    request: Request
    model_runner_v2: bool
    device: str
    spec_decode: bool
    features_stay: str | None = None

    @property
    def params(self) -> Any:
        return self.request.sampling_params

    @property
    def has_relay(self) -> bool:
        residence = residence_of(self.request)
        return residence is not None and residence.origin is not None

    @property
    def begun(self) -> bool:
        """True if the sampler may know the request already. For a waiting request, its tokens say everything."""
        return bool(self.request.num_computed_tokens or self.request.num_output_tokens)

    @property
    def seeded(self) -> bool:
        return self.params.seed is not None and self.params.temperature > 0


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedRequest:
    """`applies` may rely on every row above its own not having applied."""

    reason: str
    applies: Callable[[Subject], bool]
    v1: Evidence = Evidence.REFUSED
    v2: Evidence = Evidence.REFUSED


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedEngine:
    """An engine whose requests do not move, or not with their KV cache. `applies` gets vLLM's `EngineCore`; it may rely
    on every row above its own not having applied. `measured`: engines that have shown what goes on with tokens alone,
    with vLLM's V1 runner if nothing else is said; empty if it is known by reading."""

    reason: str
    applies: Callable[[Any], bool]
    because: str
    measured: str = ""


_ALL_CARRIED = "all KV bytes and the sampler's state are carried"
_GRAMMAR = "the grammar is compiled at the destination and fed the tokens so far"
_RECOMPUTED = "prompt or output tokens are computed at the destination, in another batch than without the move"

MOVED = (
    Moved("greedy decoding", Exactness.BIT_EXACT, _ALL_CARRIED),
    Moved(
        "a seed, with temperature, top-p, top-k or min-p",
        Exactness.BIT_EXACT,
        "the generator is advanced to where it was",
    ),
    Moved(
        "no seed, temperature above 0",
        Exactness.BIT_EXACT,
        "the probabilities; the draws differ between two unmoved runs as well",
    ),
    Moved(
        "repetition, presence and frequency penalties",
        Exactness.BIT_EXACT,
        "counted from the tokens, which are carried",
    ),
    Moved("logit_bias, allowed_token_ids, bad_words, min_tokens", Exactness.BIT_EXACT, _ALL_CARRIED),
    Moved(
        "stop strings, with or without include_stop_str_in_output",
        Exactness.BIT_EXACT,
        "found by the API server, which stays",
    ),
    Moved("stop_token_ids, end of sequence, max_tokens", Exactness.BIT_EXACT, _ALL_CARRIED),
    Moved("logprobs", Exactness.BIT_EXACT, _ALL_CARRIED),
    Moved("prompt_logprobs, once the prompt is done", Exactness.BIT_EXACT, "they are delivered before the move"),
    Moved("guided decoding: JSON schema, regex, choice, grammar", Exactness.BIT_EXACT, _GRAMMAR),
    Moved("n above 1", Exactness.BIT_EXACT, "each child moves by itself"),
    Moved(
        "a LoRA adapter, to an engine that has it",
        Exactness.BIT_EXACT,
        "the destination's own of that name, if its contents are the same; else `lora_not_available`",
    ),
    Moved("priority, cache_salt", Exactness.BIT_EXACT, _ALL_CARRIED),
    Moved("a thinking token budget", Exactness.BIT_EXACT, "counted from the tokens, which are carried"),
    Moved("repetition detection", Exactness.BIT_EXACT, "looks at the output, which is carried"),
    Moved(
        "trace replay, to an engine with --enable-trace-replay",
        Exactness.BIT_EXACT,
        "the trace is carried, and how far it is follows from the output",
        v1=Evidence.OTHER,
    ),
    Moved(
        "watermarking, to an engine with the same configuration",
        Exactness.BIT_EXACT,
        "depends on the tokens so far and on the key",
        v1=Evidence.OTHER,
    ),
    Moved(
        "sampling masks in the output (--return-sampling-mask)",
        Exactness.BIT_EXACT,
        "each token brings along what it was drawn from",
        v1=Evidence.OTHER,
    ),
    Moved(
        "images and the like",
        Exactness.BIT_EXACT,
        "what the processor made of them is carried; it is looked at again where a prompt is computed again",
    ),
    Moved("prompt embeddings, among tokens or alone", Exactness.BIT_EXACT, "they are carried"),
    Moved(
        "streaming input, between two parts",
        Exactness.BIT_EXACT,
        "the API server sends the next part to where the request is",
    ),
    Moved(
        f"custom logits processors, all with the mark `{MARK} = True`",
        Exactness.BIT_EXACT,
        "the destination has the same ones, and gives them the tokens so far",
    ),
    Moved(
        "`vllm_xargs`, for such processors",
        Exactness.BIT_EXACT,
        "carried with the other parameters",
    ),
    Moved(
        "a prefix-cache hit at the destination",
        Exactness.EXACT_IN_FP32,
        "blocks that another request computed; `--llumlet-exact` copies them too: then as without a hit",
    ),
    Moved("a preempted request", Exactness.EXACT_IN_FP32, _RECOMPUTED),
    Moved("a request in its prefill, or waiting", Exactness.EXACT_IN_FP32, _RECOMPUTED),
)

REFUSED_REQUESTS = (
    RefusedRequest("pooling requests are not moved", lambda it: it.params is None),
    RefusedRequest(
        "its API server has no relay (it was not started with --enable-llumlet)", lambda it: not it.has_relay
    ),
    RefusedRequest(
        "streaming input with a seed or guided decoding",
        lambda it: it.request.resumable and (it.seeded or it.params.structured_outputs is not None),
    ),
    RefusedRequest(
        "images or the like, in an engine that prunes videos or has an encoder-cache connector or manager",
        lambda it: bool(it.request.mm_features) and it.features_stay is not None,
    ),
    RefusedRequest(
        "images or the like that the engine has only the address of (--mm-processor-cache-type shm)",
        lambda it: not is_whole(it.request.mm_features),
    ),
    RefusedRequest(
        "images or the like that overlap (sound within videos), or do not lie in host memory",
        lambda it: not is_plain(it.request.mm_features, it.request.prompt_embeds),
    ),
    RefusedRequest(
        f"images and prompt embeddings of more than {MAX_INPUT_BYTES >> 20} MiB, as the processor gives them",
        lambda it: num_bytes(it.request.mm_features, it.request.prompt_embeds) > MAX_INPUT_BYTES,
    ),
    RefusedRequest(
        "its KV cache is to be fetched from here by another engine (do_remote_decode)",
        lambda it: fetched_from_here(it.request.kv_transfer_params),
    ),
    RefusedRequest(
        "KV transfer parameters other than those of a prompt that another engine has computed",
        lambda it: bool(it.request.ec_transfer_params) or not may_be_lost(it.request.kv_transfer_params),
    ),
    RefusedRequest(
        "a thinking token budget with speculative decoding on the V1 runner, once it has begun",
        lambda it: (
            it.params.thinking_token_budget is not None and it.spec_decode and not it.model_runner_v2 and it.begun
        ),
        v2=Evidence.BY_READING,
    ),
    RefusedRequest(
        "a seed with speculative decoding on the V1 runner, once it has begun",
        lambda it: it.seeded and it.spec_decode and not it.model_runner_v2 and it.begun,
        v2=Evidence.MEASURED,
    ),
    RefusedRequest(
        "a seed on the V1 GPU runner, once it has begun",
        lambda it: it.seeded and it.device != "cpu" and not it.model_runner_v2 and it.begun,
        v1=Evidence.OTHER,
        v2=Evidence.OTHER,
    ),
)


def _kinds_of(engine: Engine) -> set[GroupKind | None]:
    """Kinds of cache that the layers of the engine's model keep."""
    return {kind_of(group) for group in engine.scheduler.kv_cache_config.kv_cache_groups}


def _has_states(engine: Engine) -> bool:
    return GroupKind.STATE in _kinds_of(engine)


def _has_rings(engine: Engine) -> bool:
    return GroupKind.RING in _kinds_of(engine)


def custom_logits_processors(engine: Engine) -> list[type]:
    """The classes of an engine's own logits processors: every one that is installed as a plugin, then those of
    `--logits-processors`.
    """
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    listed = engine.vllm_config.model_config.logits_processors or ()
    installed = [plugin.load() for plugin in entry_points(group=LOGITSPROCS_GROUP)]
    return installed + [pkgutil.resolve_name(it) if isinstance(it, str) else it for it in listed]


def _unmarked_logits_processor(engine: Engine) -> bool:
    return not all(vars(processor).get(MARK) is True for processor in custom_logits_processors(engine))


REFUSED_ENGINES = (
    RefusedEngine(
        "encoder-decoder models are not supported",
        lambda engine: engine.vllm_config.model_config.is_encoder_decoder,
        "what the encoder was given is no token",
    ),
    RefusedEngine(
        f"custom logits processors without the mark `{MARK} = True`",
        _unmarked_logits_processor,
        "nobody knows what they remember, nor whether a peer's are the same",
    ),
)
"""Engines none of whose requests can go on elsewhere."""

KV_REFUSED_ENGINES = (
    RefusedEngine(
        "a KV cache of another kind than attention, windows, states and rings",
        lambda engine: None in _kinds_of(engine),
        "caches on the host (HiSparse), static sinks, hidden states that are taken out (extract_hidden_states)",
    ),
    RefusedEngine(
        "states that change with every step beside speculative decoding on the V1 runner",
        lambda engine: (
            engine.vllm_config.speculative_config is not None
            and _has_states(engine)
            and not engine.scheduler.use_v2_model_runner
        ),
        "it forgets how many drafts were accepted of a request that is left out of a step, as a frozen one is",
    ),
    RefusedEngine(
        "rings on the V1 runner",
        lambda engine: _has_rings(engine) and not engine.scheduler.use_v2_model_runner,
        "it keeps what DeepSeek V4.1 hashes of the latest tokens beside the KV cache",
    ),
    RefusedEngine(
        "states that lag behind, with a log of what they lack (--use-replayssm)",
        lambda engine: engine.vllm_config.cache_config.use_replayssm and _has_states(engine),
        "how much of the log counts is known to the worker alone; vLLM has no KV connector beside it, either",
    ),
    RefusedEngine(
        "routed experts in the output (--enable-return-routed-experts)",
        lambda engine: engine.vllm_config.aux_output_config.enable_return_routed_experts,
        "vLLM keeps those of a cached block for the next request that finds it, where they were computed",
        "Qwen3-MoE, with the V2 runner",
    ),
    RefusedEngine(
        "a KV connector of which moves know nothing (--kv-transfer-config)",
        lambda engine: has_unknown_connector(engine.scheduler),
        "LMCache, Mooncake, one of your own; ask for it by its name, in an issue",
        "one that is derived from `ExampleConnector`",
    ),
    RefusedEngine(
        "states that change with every step beside a KV connector",
        lambda engine: engine.scheduler.connector is not None and (_has_states(engine) or _has_rings(engine)),
        "connectors are told of states at other moments than of keys and values",
    ),
)
"""Engines whose KV cache stays where it is. A worker whose memory no transport reads has a reason of its own."""

ELSEWHERE = "workers on another host than the engine"


def why_not_portable(
    request: Request, *, model_runner_v2: bool, device: str, spec_decode: bool, features_stay: str | None = None
) -> str | None:
    """Why this request cannot be moved so that it goes on exactly; None if it can."""
    subject = Subject(request, model_runner_v2, device, spec_decode, features_stay)
    return next((row.reason for row in REFUSED_REQUESTS if row.applies(subject)), None)


def why_engine_unsupported(engine: Engine) -> str | None:
    """Why no request of this engine can be moved; None if they can."""
    return next((row.reason for row in REFUSED_ENGINES if row.applies(engine)), None)


def why_kv_unsupported(engine: Engine, movers: Iterable[MoverInfo]) -> str | None:
    """Why requests of this engine cannot bring their KV cache along; None if they can."""
    reason = next((row.reason for row in KV_REFUSED_ENGINES if row.applies(engine)), None)
    if reason is None and any(mover.memory.boot_id != boot_id() for mover in movers):
        # Their movers listen on sockets of that host.
        reason = ELSEWHERE
    return reason or next(filter(None, (mover.memory.unavailable for mover in movers)), None)
