# SPDX-License-Identifier: Apache-2.0
"""The settled part of an engine's next steps: the steps in which requests need another block, or reach their largest
number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

NUM_STEPS: Final = 64
"""Number of steps looked ahead: half a second or more, with steps of 8 ms or more."""


class ComingSteps(NamedTuple):
    """By step, the next one first."""

    blocks: list[int]
    """Blocks that requests take, less those that they free; empty without decodes."""
    ends: list[int]
    """Requests whose last token is that of the step before. Without trailing zeros."""


def coming_steps(num_tokens: Sequence[int], left: Sequence[int], block_size: int) -> ComingSteps:
    """`num_tokens`: of each request that decodes, prompt and output; the KV cache of its last token is computed by the
    step under way. `left`: how many more it may have, that step's among them."""
    if not num_tokens:
        return ComingSteps([], [])
    tokens, most = np.asarray(num_tokens), np.maximum(left, 1)
    ending = most <= NUM_STEPS
    ends = np.bincount(most[ending], minlength=NUM_STEPS + 1)[1:]
    held = -(-(tokens + most - 1)[ending] // block_size)
    blocks = -np.bincount(most[ending], held, NUM_STEPS + 1)[1:].astype(np.int64)
    for after in range(0, NUM_STEPS, block_size):
        full = 1 + -tokens % block_size + after
        blocks += np.bincount(full[full < np.minimum(most, NUM_STEPS + 1)], minlength=NUM_STEPS + 1)[1:]
    last = int(np.flatnonzero(ends)[-1]) + 1 if ending.any() else 0
    return ComingSteps(blocks.tolist(), ends[:last].tolist())
