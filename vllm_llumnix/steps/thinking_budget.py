# SPDX-License-Identifier: Apache-2.0
"""Thinking token budgets on the V1 runner: where a request's count stands when it enters a batch with a history.

The runner counts step by step, and begins anew whenever a request enters its batch: one that was moved, or preempted,
or left out of a step. Of its output it then sees all at once what it should have seen token by token, and the end of
the thinking comes at another token. The V2 runner derives the count from the tokens and needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

State = dict[str, Any]
"""State that the runner keeps for a request: a machine that is told the output again before each token is sampled."""


class BatchUpdate(Protocol):
    """`vllm.v1.sample.logits_processor.BatchUpdate`."""

    added: list[tuple[int, Any, list[int] | None, list[int]]]
    """Row, parameters, prompt, and the list that output tokens are appended to."""


class BudgetHolder(Protocol):
    """`vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder`."""

    think_start_token_ids: list[int]
    think_end_token_ids: list[int]
    in_spec_mode: bool
    _state: dict[int, State]

    def sync_batch(self, batch_update: BatchUpdate | None) -> None: ...

    def _update_think_state(self, state: State) -> None: ...


def sync_with_history(holder: BudgetHolder) -> Callable[[BatchUpdate | None], None]:
    """Replacement of `holder.sync_batch`. With drafts nobody knows what was told in which step, and the count begins
    anew as it does in stock vLLM."""
    stock = holder.sync_batch

    def sync_batch(batch_update: BatchUpdate | None) -> None:
        stock(batch_update)
        if batch_update is None or holder.in_spec_mode:
            return
        # Rows may have been moved since they were added.
        entered = {id(output) for _, _, _, output in batch_update.added}
        for state in holder._state.values():
            if id(state["output_tok_ids"]) in entered:
                tell_history(holder, state)

    return sync_batch


def tell_history(holder: BudgetHolder, state: State) -> None:
    """Tell a machine that has just been set up what it would have been told by now. What comes before its next token
    the sampler tells it."""
    output: list[int] = state["output_tok_ids"]
    if -1 in output:  # not there yet: the step that samples it is in flight
        return
    ends = {ids[-1] for ids in (holder.think_start_token_ids, holder.think_end_token_ids) if ids}
    for length in _lengths(state, output, ends):
        state["output_tok_ids"] = output[:length]
        state["force_index"] = []
        holder._update_think_state(state)
    state["output_tok_ids"] = output


def _lengths(state: State, output: list[int], ends: set[int]) -> Iterator[int]:
    """Lengths of the outputs that the machine was told, as far as they matter: those around a token that may complete a
    marker, and where the budget may be over. In between it only counts, or waits for a marker."""
    markers = iter([at for at, token in enumerate(output) if token in ends])
    marker = next(markers, len(output))
    length = 0
    while length < len(output):
        yield length
        while marker < length:
            marker = next(markers, len(output))
        following = marker if length < marker else length + 1
        if state["in_end"] or state["end_thinking"] != -1:
            following = length + 1
        elif state["start_thinking"] != -1:
            following = min(following, length + max(1, state["check_count_down"] - 1))
        length = following
