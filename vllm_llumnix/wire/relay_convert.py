# SPDX-License-Identifier: Apache-2.0
"""vLLM's `EngineCoreOutput` to and from the relay's `wire.TokenOutput`, for engines and API servers.

What travels: token ids, logprobs of sampled tokens, what they were drawn from (sampling masks), the experts that they
were routed to, finish and stop reason, the count of NaNs. What does not: prompt logprobs, prefill statistics and events
(they belong to the prefill, which the front-end has heard of from the engine that did it, in that host's clock), and
what only requests that are never moved have: pooling outputs, parameters of KV and encoder-cache transfers.

Logprobs are float32 in vLLM and 64-bit floats on the wire: every value, infinities and NaN included, arrives unchanged.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from llumlet.protocol import wire
from llumlet.protocol.errors import RemoteProtocolError
from llumlet.protocol.ids import HOME, Epoch


class ExpertsForm(NamedTuple):
    """Form in which vLLM reports a token's experts: an array of layers and experts."""

    num_layers: int
    num_per_token: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """Type of vLLM's `RoutedExpertsCapturer`."""
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype(np.uint16)

    def rows_in(self, data: bytes) -> np.ndarray:
        """A row for each token. Raises ValueError."""
        return np.frombuffer(data, self.dtype).reshape((-1, self.num_layers, self.num_per_token))


class OutputForm(NamedTuple):
    """Content of the outputs of a model's engines. `has_masks`: they tell what they draw from; `experts`: where they
    route tokens to."""

    vocab_size: int
    has_masks: bool = False
    experts: ExpertsForm | None = None


_FINISH_REASONS = frozenset(int(reason) for reason in FinishReason)


def token_output_from(output: EngineCoreOutput, epoch: Epoch, base: int, first: int) -> wire.TokenOutput:
    """Message from the engine that owns a request under `epoch` to its origin; `first` indexes the first token."""
    finish_reason = output.finish_reason
    return wire.TokenOutput(
        request_id=output.request_id,
        epoch=epoch,
        base=base,
        first=first,
        token_ids=output.new_token_ids,
        finish_reason=None if finish_reason is None else int(finish_reason),
        stop_reason=output.stop_reason,
        logprobs=_wire_logprobs(output.new_logprobs),
        num_nans_in_logits=output.num_nans_in_logits,
        sampling_masks=None if output.new_sampling_mask is None else output.new_sampling_mask.to_nested_list(),
        routed_experts=None if output.routed_experts is None else output.routed_experts.tobytes(),
    )


def engine_output_from(
    token: wire.TokenOutput, skip: int, count: int, finished: bool, experts: ExpertsForm | None = None
) -> EngineCoreOutput:
    """Tokens `[skip, skip + count)` of what a relay brought, as if the request's own engine had sent them.

    `token` has passed `check`. Its finish and stop reason count only if `finished`.
    """
    rows = None if experts is None or token.routed_experts is None else experts.rows_in(token.routed_experts)
    ends = finished and token.finish_reason is not None
    return EngineCoreOutput(
        request_id=token.request_id,
        new_token_ids=token.token_ids[skip : skip + count],
        new_logprobs=_lists(token.logprobs, skip, count),
        new_sampling_mask=_mask(token.sampling_masks, skip, count),
        finish_reason=FinishReason(token.finish_reason) if ends else None,
        stop_reason=token.stop_reason if ends else None,
        num_nans_in_logits=token.num_nans_in_logits,
        routed_experts=_experts(rows, len(token.token_ids), skip, count),
    )


def sliced(output: EngineCoreOutput, skip: int, count: int, finished: bool) -> EngineCoreOutput:
    """Tokens `[skip, skip + count)` of an engine's output, with its end only if `finished`; all of a token together.

    The output itself if that is all of it. What is not a token stays with the part that has the first token.
    """
    ends = finished and output.finish_reason is not None
    if not skip and count == len(output.new_token_ids) and ends == output.finished:
        return output
    logprobs, mask = output.new_logprobs, output.new_sampling_mask
    return msgspec.structs.replace(
        output,
        new_token_ids=output.new_token_ids[skip : skip + count],
        new_logprobs=None if logprobs is None else _rows(logprobs, skip, count),
        new_sampling_mask=None if mask is None else _mask(mask.to_nested_list(), skip, count),
        routed_experts=_experts(output.routed_experts, len(output.new_token_ids), skip, count),
        finish_reason=output.finish_reason if ends else None,
        stop_reason=output.stop_reason if ends else None,
        events=None if skip else output.events,
        prefill_stats=None if skip else output.prefill_stats,
    )


def check(token: wire.TokenOutput, form: OutputForm, *, wants_logprobs: bool) -> None:
    """Raise RemoteProtocolError for what would break the front-end: one bad output ends every stream of an API server.

    Stock vLLM trusts its own engine here; a peer is not that engine.
    """
    vocab_size = form.vocab_size
    if token.epoch <= HOME:
        raise RemoteProtocolError(f"epoch {token.epoch} on the relay")
    if token.first < 0 or token.base < 0:
        raise RemoteProtocolError(f"negative index: first {token.first}, base {token.base}")
    if token.finish_reason is not None and token.finish_reason not in _FINISH_REASONS:
        raise RemoteProtocolError(f"finish reason {token.finish_reason}")
    _check_ids(token.token_ids, vocab_size)
    if (token.sampling_masks is not None) is not (form.has_masks and bool(token.token_ids)):
        raise RemoteProtocolError("sampling masks are not there, or were not to be")
    if token.sampling_masks is not None and len(token.sampling_masks) != len(token.token_ids):
        raise RemoteProtocolError(f"{len(token.token_ids)} tokens, but another number of sampling masks")
    for mask in token.sampling_masks or ():
        _check_ids(mask, vocab_size)
    _check_experts(token, form.experts)
    logprobs = token.logprobs
    if logprobs is None:
        if wants_logprobs and token.token_ids:
            raise RemoteProtocolError("no logprobs, but the request asked for them")
        return
    if not wants_logprobs:
        raise RemoteProtocolError("logprobs that the request did not ask for")
    rows = len(token.token_ids)
    width = len(logprobs.logprobs[0]) if logprobs.logprobs else 0
    if not rows == len(logprobs.token_ids) == len(logprobs.logprobs) == len(logprobs.ranks):
        raise RemoteProtocolError(f"{rows} tokens, but another number of logprob rows")
    if rows and not width:
        raise RemoteProtocolError("empty logprob rows")
    for ids, values in zip(logprobs.token_ids, logprobs.logprobs, strict=True):
        if len(ids) != width or len(values) != width:
            raise RemoteProtocolError("logprob rows of different lengths")
        _check_ids(ids, vocab_size)
    if not all(-(2**31) <= rank < 2**31 for rank in logprobs.ranks):
        raise RemoteProtocolError("a logprob rank is out of range")


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise RemoteProtocolError(f"a token id is outside [0, {vocab_size})")


def _check_experts(token: wire.TokenOutput, experts: ExpertsForm | None) -> None:
    data = token.routed_experts
    if (data is not None) is not (experts is not None and bool(token.token_ids)):
        raise RemoteProtocolError("routed experts are not there, or were not to be")
    if data is None or experts is None:
        return
    try:
        rows = experts.rows_in(data)
    except ValueError as error:
        raise RemoteProtocolError(f"routed experts of {len(data)} bytes") from error
    # Of a first token there is none if those of the prompt are not asked for.
    if len(rows) < len(token.token_ids) - 1:
        raise RemoteProtocolError(f"{len(token.token_ids)} tokens, but the experts of {len(rows)}")
    if rows.size and int(rows.max()) >= experts.num_experts:
        raise RemoteProtocolError(f"an expert is outside [0, {experts.num_experts})")


def _wire_logprobs(logprobs: LogprobsLists | None) -> wire.Logprobs | None:
    if logprobs is None:
        return None
    return wire.Logprobs(
        token_ids=logprobs.logprob_token_ids.tolist(),
        logprobs=logprobs.logprobs.tolist(),
        ranks=logprobs.sampled_token_ranks.tolist(),
    )


def _lists(logprobs: wire.Logprobs | None, skip: int, count: int) -> LogprobsLists | None:
    """Rows `[skip, skip + count)` in the types of vLLM's sampler."""
    if logprobs is None:
        return None
    rows = slice(skip, skip + count)
    return LogprobsLists(
        logprob_token_ids=_matrix(logprobs.token_ids[rows], np.dtype(np.int32)),
        logprobs=_matrix(logprobs.logprobs[rows], np.dtype(np.float32)),
        sampled_token_ranks=np.array(logprobs.ranks[rows], dtype=np.int64),
    )


def _mask(masks: list[list[int]] | None, skip: int, count: int) -> SamplingMaskLists | None:
    """Masks of tokens `[skip, skip + count)`, as vLLM's scheduler cuts them out for a request."""
    if masks is None or not count:
        return None
    rows = masks[skip : skip + count]
    token_ids = np.array(list(itertools.chain.from_iterable(rows)), dtype=np.int32)
    offsets = None if count == 1 else np.array([0, *itertools.accumulate(map(len, rows))], dtype=np.int64)
    return SamplingMaskLists(token_ids, offsets)


def _experts(rows: np.ndarray | None, num_tokens: int, skip: int, count: int) -> np.ndarray | None:
    """Rows of tokens `[skip, skip + count)` of an output with `num_tokens`, those of its prompt with the first."""
    if rows is None or not count:
        return None
    first = len(rows) - num_tokens
    return rows[first + skip if skip else 0 : first + skip + count]


def _matrix(rows: list[list[int]] | list[list[float]], dtype: np.dtype) -> np.ndarray:
    return np.array(rows, dtype=dtype) if rows else np.empty((0, 1), dtype=dtype)


def _rows(logprobs: LogprobsLists, skip: int, count: int) -> LogprobsLists:
    rows = slice(skip, skip + count)
    return LogprobsLists(
        logprobs.logprob_token_ids[rows],
        logprobs.logprobs[rows],
        logprobs.sampled_token_ranks[rows],
    )
