# SPDX-License-Identifier: Apache-2.0
"""Predicts a request's wait for its first token, and for each later one, by the step model of each instance.

The instance's work until then is computed in closed form, for all instances at a time. With base = a + d · decodes + e
· decode KV, a step that computes x prefill tokens takes base + b · x + c · pairs; prefills get what decodes leave of
`max_num_batched_tokens`, first come, first served.

TTFT. The status tells the work when the step under way had run for `loop_age_ms`; since then `age_s` have passed, which
gives the present step and its end. The rest of the prefills, the requests sent since, and the request itself, less its
cached prefix, take ceil(tokens / budget) steps. If there are no blocks for all of them, it takes at least until there
are: decodes give back the share `gone_per_s` of their tokens, and the others take one block token per token. If the
batch is full (`max_num_seqs`), it takes at least until as many have ended as are before it, `ended_per_s` of the
decodes. It is the time in the engine, without the network and the API server.

TPOT. base with the request in it, times `step_stretch`, for the share of prefills in the time between two tokens.

The names are Llumnix's, whose `predicted_ttft` and `predicted_tpot` interpolate in a grid of measured values and are
infinite outside it. Less is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from llumsched.cluster.columns import Columns, UnknownColumn, Values
from llumsched.cluster.providers import HIT_COLUMN

_MS: Final = 1e3
_LEAST_GAIN: Final = 0.1
"""Smallest share of the ended requests' blocks that is free for newcomers; running requests preempt each other for the
rest."""
_FEW_TOKENS: Final = 2048.0
"""Tokens per batch of an instance that does not tell."""


def predicted_ttft(columns: Columns) -> Values:
    """Milliseconds to the first token of the request, or of an empty one."""
    num_decodes, decode_kv = columns["scheduler_running_to_decode_requests_num"], _decode_kv(columns)
    base_s = _base_s(columns, num_decodes, decode_kv)
    batch = columns["max_num_batched_tokens"]
    budget = np.maximum(np.where(batch > 0, batch, _FEW_TOKENS) - num_decodes, 1.0)

    # The steps of what was there: full ones, one with the rest, and then such as only decode.
    waiting = columns["num_uncomputed_tokens_all_waiting_prefills"]
    known = waiting + columns["num_uncomputed_tokens_scheduler_running_prefills"]
    pairs_each = columns["num_uncomputed_pairs"] / np.maximum(known, 1.0)
    token_s = columns["step_prefill_token_s"] + columns["step_pair_s"] * pairs_each
    full_s = base_s + token_s * budget
    all_full_s = np.floor(known / budget) * full_s
    remainder = known % budget
    known_s = all_full_s + np.where(remainder > 0, base_s + token_s * remainder, 0.0)

    # The one that is under way now, and when it ends.
    elapsed_s = np.maximum(_or_zero(columns, "age_s"), 0.0) + columns["loop_age_ms"] / _MS
    is_full, prefills = elapsed_s < all_full_s, elapsed_s < known_s
    number = np.floor(elapsed_s / full_s) + 1.0
    decoding_s = elapsed_s - known_s
    rest_s = np.where(is_full, number * full_s - elapsed_s, known_s - elapsed_s)
    rest_s = np.where(prefills, rest_s, (np.floor(decoding_s / base_s) + 1.0) * base_s - decoding_s)
    rest_s = np.where((num_decodes == 0) & (known == 0), 0.0, rest_s)
    left = np.where(is_full, known - number * budget, 0.0)

    # From there on. Those before it decode one after the other: on average, half of them.
    prompt = _or_zero(columns, "prompt_num_tokens")
    hit = np.minimum(_or_zero(columns, HIT_COLUMN), prompt)
    sent, own = columns["sent_uncomputed_prefill_tokens"], prompt - hit
    joining = (columns["num_waiting_requests"] + columns["sent_prefill_requests"]) / 2.0
    steps = np.maximum(np.ceil((left + sent + own) / np.maximum(budget - joining, 1.0)), 1.0)
    step_s = _base_s(columns, num_decodes + joining, decode_kv + (waiting + sent) / 2.0)
    own_pairs = columns["sent_uncomputed_prefill_pairs"] + own * (own + 1.0) / 2.0 + own * hit
    own_s = columns["step_prefill_token_s"] * (sent + own) + columns["step_pair_s"] * own_pairs
    computing_s = rest_s + steps * step_s + token_s * left + own_s
    room_s = np.maximum(
        _until_room_s(columns, prompt, num_decodes, decode_kv, base_s), _until_place_s(columns, num_decodes)
    )
    seconds: Values = np.maximum(computing_s, room_s + step_s + own_s)
    return seconds * _MS


def _until_room_s(columns: Columns, own: Values, num_decodes: Values, decode_kv: Values, base_s: Values) -> Values:
    """Seconds until enough requests have ended for the blocks of all waiting requests and this one."""
    free = columns["num_total_gpu_tokens"] - columns["num_used_gpu_tokens"]
    needed = (
        columns["num_unallocated_tokens_all_waiting_requests"]
        + columns["num_unallocated_tokens_scheduler_running_prefills"]
        + columns["sent_tokens"]
        + own
    )
    ending = columns["gone_per_s"] * decode_kv
    growing = num_decodes / (base_s * columns["step_stretch"])
    seconds = np.maximum(needed - free, 0.0) / np.maximum(ending - growing, _LEAST_GAIN * ending)
    known: Values = np.nan_to_num(seconds, nan=0.0, posinf=0.0)
    return known


def _until_place_s(columns: Columns, num_decodes: Values) -> Values:
    """Seconds until the batch has places for all waiting requests and this one."""
    needed = columns["num_running_requests"] + columns["num_waiting_requests"] + columns["sent_requests"] + 1.0
    seconds = np.maximum(needed - columns["max_num_seqs"], 0.0) / (columns["ended_per_s"] * num_decodes)
    known: Values = np.nan_to_num(seconds, nan=0.0, posinf=0.0)
    return known


def predicted_tpot(columns: Columns) -> Values:
    """Milliseconds between two tokens with the request, if there is one, among the decodes."""
    own = _or_zero(columns, "prompt_num_tokens")
    num_decodes = (
        columns["scheduler_running_to_decode_requests_num"]
        + columns["scheduler_waiting_to_decode_requests_num"]
        + columns["sent_decode_requests"]
        + (own > 0)
    )
    decode_kv = (
        columns["scheduler_running_to_decode_tokens_num"]
        + columns["scheduler_waiting_to_decode_tokens_num"]
        + columns["sent_decode_tokens"]
        + own
    )
    # No more of them at a time than there is room for.
    share = np.minimum(columns["num_total_gpu_tokens"] / np.maximum(decode_kv, 1.0), 1.0)
    return _base_s(columns, num_decodes * share, decode_kv * share) * columns["step_stretch"] * _MS


def _base_s(columns: Columns, num_decodes: Values, decode_kv: Values) -> Values:
    """Seconds of a step without prefills."""
    return columns["step_s"] + columns["step_decode_s"] * num_decodes + columns["step_decode_token_s"] * decode_kv


def _decode_kv(columns: Columns) -> Values:
    """Tokens in the KV cache of present decodes, without what prefills have still to compute."""
    tokens = (
        columns["scheduler_running_to_decode_tokens_num"] - columns["num_uncomputed_tokens_scheduler_running_prefills"]
    )
    return np.maximum(tokens, 0.0)


def _or_zero(columns: Columns, name: str) -> Values:
    """A column that only decisions about a request have; otherwise 0."""
    try:
        return columns[name]
    except UnknownColumn:
        return np.zeros(len(columns))


PREDICTIONS: Final[Mapping[str, Callable[[Columns], Values]]] = {
    "predicted_ttft": predicted_ttft,
    "predicted_tpot": predicted_tpot,
}
"""Predictions by the names of the metrics."""
