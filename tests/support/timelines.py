# SPDX-License-Identifier: Apache-2.0
"""Streams and moves that never happened, for code that reads measurements."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tests.support.client import Stream
from tests.support.moves import Move

PROMPT_TOKENS = 100


def stream(gaps: list[float]) -> Stream:
    """A finished stream whose tokens arrived with these gaps, in seconds, from time 0 on."""
    times = list(itertools.accumulate(gaps, initial=0.0))
    return Stream(
        request_id="r",
        kind="cmpl",
        token_ids=list(range(len(times))),
        times=times,
        events=list(range(len(times))),
        text="x" * len(times),
        prompt_token_ids=list(range(PROMPT_TOKENS)),
        ended_at=times[-1],
    )


def move(index: int, asked_at: float, settled_at: float, **changes: Any) -> Move:
    """A live move whose destination computed output token `index` first."""
    made = Move(
        request_id="cmpl-r-0-abcdefgh",
        phase="moved",
        reason="",
        detail="",
        mode="live",
        rounds=2,
        copied_bytes=1 << 20,
        recomputed_tokens=0,
        context_tokens=PROMPT_TOKENS + index,
        hit_tokens=0,
        epoch=(0, 1),
        transport="local",
        tokens_alone="",
        phase_ms={"copying": 5.0, "committing": 2.0},
        phases=(("moved", settled_at),),
        asked_at=asked_at,
        settled_at=settled_at,
    )
    return dataclasses.replace(made, **changes)
