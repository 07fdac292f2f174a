# SPDX-License-Identifier: Apache-2.0
"""What the V1 runner counts of a thinking budget, told token by token and told afterwards."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_llumnix.steps.thinking_budget import sync_with_history

CPU = torch.device("cpu")


def holder(start: list[int], end: list[int], *, num_drafts: int = 0, mended: bool = True) -> Any:
    config = SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)
    made = ThinkingBudgetStateHolder(config, 4, num_drafts, CPU, False)
    if mended:
        made.sync_batch = sync_with_history(made)
    return made


def enters(
    to: Any, prompt: list[int], output: list[int], budget: int, moved: tuple[tuple[int, int], ...] = ()
) -> dict[str, Any]:
    """A request comes into row 0, which the same update may move; how its machine stands before its next token."""
    params = SimpleNamespace(thinking_token_budget=budget)
    moves = [(a, b, MoveDirectionality.UNIDIRECTIONAL) for a, b in moved]
    to.sync_batch(BatchUpdate(4, [], [(0, params, prompt, output)], moves))
    row = moved[-1][1] if moved else 0
    to.update_state([[]] * row + [output], None)
    state: dict[str, Any] = to._state[row]
    return state


def stayed(start: list[int], end: list[int], prompt: list[int], output: list[int], budget: int) -> dict[str, Any]:
    """The same of one that has been in the batch all along."""
    told = holder(start, end, mended=False)
    state = enters(told, prompt, [], budget)
    for length in range(1, len(output) + 1):
        told.update_state([output[:length]], None)
    return state


def drawn(seed: int) -> tuple[list[int], list[int], list[int], list[int], int]:
    """Markers of up to three of few tokens, so that they come often, and in each other."""
    draw = random.Random(seed)
    vocabulary = range(draw.choice([3, 5, 8, 20]))
    start, end, prompt, output = (
        draw.choices(vocabulary, k=draw.randint(*k)) for k in ((1, 3), (1, 3), (1, 8), (0, 60))
    )
    return start, end, prompt, output, draw.randint(0, 25)


def test_as_if_it_had_stayed() -> None:
    """What vLLM makes of it by itself is something else in more than half of these, or they would show nothing."""
    forgotten = 0
    for seed in range(3000):
        start, end, *request = drawn(seed)
        expected = stayed(start, end, *request)
        assert enters(holder(start, end), *request) == expected, seed
        forgotten += enters(holder(start, end, mended=False), *request) != expected
    assert forgotten > 1500


def test_a_row_that_is_moved_in_the_same_update() -> None:
    request = ([7], [9, 1, 2, 3, 4], 3)
    assert enters(holder([9], [8]), *request, moved=((0, 2),)) == stayed([9], [8], *request)


def test_others_are_left_alone() -> None:
    there = holder([9], [8])
    output = [9, 1]
    state = enters(there, [7], output, 9)
    before = dict(state)
    there.sync_batch(BatchUpdate(4, [], [(1, SimpleNamespace(thinking_token_budget=5), [7], [9, 2, 2])], []))
    assert there._state[0] == before
    there.sync_batch(None)
    assert there._state[0] == before


@pytest.mark.parametrize(("output", "num_drafts"), [([9, 1, -1], 0), ([9, 1, 2], 3)], ids=["in flight", "drafts"])
def test_some_budgets_cannot_be_followed(output: list[int], num_drafts: int) -> None:
    """As vLLM leaves it."""
    stock = enters(holder([9], [8], num_drafts=num_drafts, mended=False), [7], output, 2)
    assert enters(holder([9], [8], num_drafts=num_drafts), [7], output, 2) == stock


def test_long_answers_are_told_in_no_time() -> None:
    """Each telling looks through the output: ten thousand of them would hold up a step for seconds."""
    tellings = 0
    told = holder([9], [8])
    stock = told._update_think_state

    def count(state: dict[str, Any]) -> None:
        nonlocal tellings
        tellings += 1
        stock(state)

    told._update_think_state = count
    enters(told, [7, 9], [1] * 20_000, 30_000)
    assert tellings < 10
