# SPDX-License-Identifier: Apache-2.0
"""What an engine's next steps will do, as far as it is settled: in which of them requests need another block, and with
which of them requests reach the number of tokens that they may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

NUM_STEPS: Final = 64
"""Steps that are looked ahead: half a second and more, on engines whose steps take 8 ms and more."""


class ComingSteps(NamedTuple):
    """By step, the next one first."""

    blocks: list[int]
    """Blocks that requests take, less those that come free; empty if nobody decodes."""
    ends: list[int]
    """Requests of which the last token is the one before it. Without the last zeros."""


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
