# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of its coming steps, beside a count of every request step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llumlet.contract.coming_steps import NUM_STEPS, coming_steps


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(-2, 100)), max_size=12), st.sampled_from([1, 7, 16, 128]))
def test_coming_steps_are_those_that_then_come(requests: list[tuple[int, int]], block_size: int) -> None:
    coming = coming_steps([number for number, _ in requests], [left for _, left in requests], block_size)
    held = [[number, -(-number // block_size), max(left, 1)] for number, left in requests]
    blocks, ends = [], []
    for _ in range(NUM_STEPS):
        taken = ended = 0
        for one in list(held):
            one[0], one[2] = one[0] + 1, one[2] - 1
            if not one[2]:
                held.remove(one)
                taken, ended = taken - one[1], ended + 1
            elif one[0] > one[1] * block_size:
                one[1] += 1
                taken += 1
        blocks.append(taken)
        ends.append(ended)
    assert coming.blocks == (blocks if requests else [])
    assert np.trim_zeros(ends, "b") == coming.ends
