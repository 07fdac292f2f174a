# SPDX-License-Identifier: Apache-2.0
"""What can be moved, how exactly it goes on, and what is refused: the one table behind refusals and documentation.

    python -m vllm_llumnix.engine.portability     # writes docs/portability.md

A row with a condition refuses: the text of the row is what `Migrate` and `llumnix ps` say. The rows without one say
which class a request that moves belongs to.
"""

from __future__ import annotations

import dataclasses
import enum
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_llumnix.engine.block_rows import Kind, kind_of
from vllm_llumnix.engine.request_state import residence_of
from vllm_llumnix.engine.vllm_types import Engine, Request
from vllm_llumnix.features_wire import MAX_INPUT_BYTES, is_plain, is_whole, num_bytes
from vllm_llumnix.kv.messages import MoverInfo
from vllm_llumnix.kv.process import boot_id
from vllm_llumnix.kv.vllm_types import KVCacheGroup

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "portability.md"

MARK = "llumnix_portable"
"""What a class of custom logits processors sets to True, itself and not by inheritance, to be moved."""


class Exactness(enum.StrEnum):
    """How a moved request's tokens and log probabilities compare with those of an unmoved run in the same company."""

    BIT_EXACT = "bit-exact"
    EXACT_IN_FP32 = "exact in fp32"
    REFUSED = "refused"


class Evidence(enum.StrEnum):
    """How a row is known to hold on the engines that tests run: those with vLLM's V1 runner on CPUs (`v1`), and those
    with its V2 runner and asynchronous scheduling, which is what GPUs run, with Triton's interpreter in their place
    (`v2`)."""

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
        """Whether the sampler may know it already: of one that waits, there is nothing yet that tokens do not tell."""
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
    here with vLLM's V1 runner; empty if it is known by reading."""

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
    Moved(
        "images and the like",
        Exactness.BIT_EXACT,
        "what the processor made of them is carried; it is looked at again where a prompt is computed again",
        v2=Evidence.BY_READING,
    ),
    Moved("prompt embeddings, among tokens or alone", Exactness.BIT_EXACT, "they are carried", v2=Evidence.BY_READING),
    Moved(
        f"custom logits processors, all with the mark `{MARK} = True`",
        Exactness.BIT_EXACT,
        "the destination has the same ones, and gives them the tokens so far",
        v2=Evidence.BY_READING,
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
    RefusedRequest("streaming input", lambda it: it.request.resumable),
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
        "KV transfer parameters", lambda it: bool(it.request.kv_transfer_params or it.request.ec_transfer_params)
    ),
    RefusedRequest("extra arguments for custom logits processors", lambda it: bool(it.params.extra_args)),
    RefusedRequest(
        "a thinking token budget on the V1 runner, once it has begun",
        lambda it: it.params.thinking_token_budget is not None and not it.model_runner_v2 and it.begun,
        v2=Evidence.BY_READING,
    ),
    RefusedRequest("trace replay", lambda it: it.params.trace_decode_token_ids is not None),
    RefusedRequest("repetition detection", lambda it: it.params.repetition_detection is not None),
    RefusedRequest("watermarking", lambda it: bool(it.params.watermarking)),
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


def _kv_cache_groups(engine: Engine) -> Sequence[KVCacheGroup]:
    return engine.scheduler.kv_cache_config.kv_cache_groups


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
    RefusedEngine(
        "routed experts in the output",
        lambda engine: engine.vllm_config.aux_output_config.enable_return_routed_experts,
        "the relay does not carry them to the API server",
    ),
    RefusedEngine(
        "sampling masks in the output",
        lambda engine: engine.vllm_config.model_config.return_sampling_mask,
        "the relay does not carry them to the API server",
    ),
)
"""Engines none of whose requests can go on elsewhere."""

KV_REFUSED_ENGINES = (
    RefusedEngine(
        "a KV cache of another kind than attention, windows and states",
        lambda engine: None in [kind_of(group) for group in _kv_cache_groups(engine)],
        "compressed tokens, rings, caches on the host (DeepSeek V4, HiSparse)",
    ),
    RefusedEngine(
        "states that change with every step beside speculative decoding",
        lambda engine: (
            engine.vllm_config.speculative_config is not None
            and Kind.STATE in [kind_of(group) for group in _kv_cache_groups(engine)]
        ),
        "which of several states is the latest is known to the worker alone",
    ),
    RefusedEngine(
        "another KV connector is configured (--kv-transfer-config)",
        lambda engine: engine.scheduler.connector is not None,
        "it has blocks of its own to fetch and to keep: prefill/decode disaggregation, CPU offloading, LMCache",
        "`ExampleConnector`",
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


_INTRODUCTION = """\
# What moves, and how exactly

<!-- Generated by `make docs` from vllm_llumnix/engine/portability.py. -->

A moved request is compared with an unmoved run in the same company: the same number of requests in every batch, because
vLLM's kernels give other last bits for another number of rows.

- **bit-exact**: everything the next token depends on is carried; tokens and log probabilities are the same, in any
  data type.
- **exact in fp32**: something was computed in another batch, or with another kernel, than without the move. In float32
  the tokens are the same for all practical purposes; in bfloat16 they may part after some dozens.
- **refused**: neither its KV cache nor its tokens are enough, whichever engine it runs on. `Migrate` answers
  `not_portable` with the reason, `llumnix ps` shows it, and the request goes on where it is.

`tests/exactness` and `tests/runner_v2` move each kind between real engines and hold it to its class. Two columns say on
which engines: vLLM's V1 runner with synchronous scheduling, its choice on a CPU; and the V2 runner with asynchronous
scheduling, its choice on a GPU, here with Triton's interpreter in the GPU's place (`tests/support/v2_on_cpu`), in
float32 with log probabilities compared to the last digit. What a GPU's own kernels do is measured by neither
(`benchmarks/gpu_check`).

- **measured**: on such engines, by those tests.
- **by reading**: follows from vLLM's code; no test shows it.
- **not this runner**: the row is about another one.
"""

_TOKENS_ALONE = """\
## Engines whose requests go on with their tokens alone

What cannot be carried with its KV cache is carried with its tokens: the engine that goes on with a request computes its
prompt and output again, in one prefill, and its sampler is where it was. Such a request is exact in fp32, as every one
whose KV cache was computed in another batch. A request of a lost engine is started again so, and one that waits has
nothing to leave behind.

`Migrate` does that by itself where no method is named, also where two engines share no transport, and says so: the mode
of the move is `recompute`, `tokens_alone` has the reason, and the summary counts such moves (`recomputed`). Who names a
method that copies (`llumnix migrate --method live`) insists: the request stays, `not_portable`. A drain and a failover
name none; to balance load a prefill is not worth it, and the rescheduler leaves such requests where they run.
`llumnix ps` shows how each would go: `live`, `recompute`, `waiting`, or why not at all.

Measured on small random models, with the V1 runner (`tests/integration/test_refusals.py`), and by `--method recompute`
(`test_hybrids.py`): in float32 the tokens are those of an unmoved run. Qwen3-Next computes in bfloat16 on a CPU: there
each token is, up to rounding, the one that an engine finds best behind those before it.
"""

_KINDS = """\
## KV caches of several kinds

Layers that keep something of every token, layers that look at a window, and layers with a state instead have block
tables of their own, and vLLM gives all of them blocks of one memory. A move counts in rows: the blocks of so many
tokens in every table that keeps tokens.

| what the layers keep | in rounds | while it is frozen | at the destination | measured |
|---|---|---|---|---|
| every token: full attention, MLA | rows whose bytes are final | the rest | hits of the prefix cache are not copied \
| every model |
| a window: sliding windows, chunked local attention | the same, but for blocks that the window has left behind \
| the rest | no block is held for what the window has left behind; hits count as far as every table has them \
| Gemma 3, gpt-oss, windows in every layer |
| a state: Mamba, linear attention, short convolutions | nothing | one block a table, counted in the stall budget \
| put where the scheduler looks for it; no hits | Qwen3-Next |

Measured (`tests/integration/test_hybrids.py`): prompts longer than four windows, there and back in the middle of a
stream, with the tokens of an unmoved run, in bfloat16 as well; a corrupted key or state of each table changes them; a
drain, and `kill -9` of the owner; an engine that hangs, from which windows are fetched, but no states: the step may be
in the middle of one. A stream of 4,096 tokens stands still for 1.7 to 1.8 gaps between its tokens (Llama 1.73, Gemma 3
1.84, gpt-oss 1.80, Qwen3-Next 1.69; the gaps of these small models are of 6 to 12 ms): `python -m benchmarks.models`.
"""

_UNREADABLE = f"""\
| KV memory that no transport reads | layouts that scatter a page, several allocations, pages in \
host memory beside a GPU, devices other than CPU and CUDA | {Evidence.BY_READING} |"""

_DRAFTS = """
## Drafts

The KV cache of a draft model (EAGLE, MTP) lies in the same blocks as the target's and moves along. The V2 runner says
that a step is done when its tokens are there, before it proposes the next drafts: what the draft model writes for the
last step may be missing from the copy, and what it still writes for a request that has ended may fall into a block
that was copied since. Only pages of the draft's own layers are concerned, and drafts only propose: tokens and log
probabilities are the target's, and what may be lost is the acceptance of a draft. (By reading: no GPU has run this.)
"""

_THE_MARK = f"""\

## Custom logits processors

vLLM loads the classes of `--logits-processors`, and every one that an installed package offers as a plugin. Nobody can
see from outside what such a class remembers, so one that says nothing keeps its engine's requests where they are. It
says that they may be moved by setting

    {MARK} = True

in its own body; subclasses say it for themselves. That promises: what it does to a request's next token depends on
nothing but the request's parameters, prompt and output tokens so far, the last as `BatchUpdate.added` gives them when
the request enters a batch; and engines that are peers have the same version of it. They must name the same classes in
the same order, or they refuse each other (`incompatible_engine`). Requests with `vllm_xargs` are still refused.

A plugin that reads output tokens cannot keep this promise on the V1 GPU runner with asynchronous scheduling: vLLM waits
for the latest of them only where `--logits-processors` names a class.
"""


def render() -> str:
    """The text of docs/portability.md."""
    runners = "V1 on CPU | V2, asynchronous"
    lines = [_INTRODUCTION, "## Requests", "", f"| request | class | {runners} | because |", "|---|---|---|---|---|"]
    lines += [f"| {row.kind} | {row.exactness} | {row.v1} | {row.v2} | {row.because} |" for row in MOVED]
    lines += [f"| {row.reason} | {Exactness.REFUSED} | {row.v1} | {row.v2} | |" for row in REFUSED_REQUESTS]
    lines += ["", "## Engines whose requests are refused", "", "| engine | because |", "|---|---|"]
    lines += [f"| {row.reason} | {row.because} |" for row in REFUSED_ENGINES]
    lines += ["", _KINDS, "", _TOKENS_ALONE, "| engine | such as | measured |", "|---|---|---|"]
    lines += [f"| {row.reason} | {row.because} | {row.measured or Evidence.BY_READING} |" for row in KV_REFUSED_ENGINES]
    lines += [f"| {ELSEWHERE} | Ray, `--nnodes` | {Evidence.BY_READING} |", _UNREADABLE]
    return "\n".join([*lines, _DRAFTS + _THE_MARK])


if __name__ == "__main__":
    DOCUMENT.write_text(render())
