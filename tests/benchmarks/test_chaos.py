# SPDX-License-Identifier: Apache-2.0
"""A short one: real gateways, schedulers and Redis, few instances; and what a lost or a wrong token is called."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import passed, run
from benchmarks.chaos.load import Load, due


@pytest.mark.asyncio
@pytest.mark.rest
async def test_nothing_is_lost_in_a_little_chaos(tmp_path: Path) -> None:
    result = await run(6, 12.0, 6, seed=3, logs=tmp_path, say=lambda _: None)
    assert passed(result), result
    assert result["requests"] >= 6
    assert sum(result["harm"].values()) >= 1


@pytest.mark.parametrize(
    ("tokens", "reason", "is_done", "error", "counts"),
    [
        ([0, 1, 2, 3], "length", True, "", (0, 0, 0)),
        ([0, 1, 2], "length", True, "", (1, 1, 0)),
        ([0, 1, 2, 3], "", True, "", (1, 1, 0)),
        ([0, 1, 2, 3], "length", False, "", (1, 1, 0)),
        ([0, 1], "", True, "lost", (1, 0, 0)),
        ([0, 1, 1, 2, 3], "length", True, "", (0, 0, 3)),
    ],
    ids=["whole", "a token short", "no reason", "no end mark", "an error", "a token twice"],
)
def test_verdicts(tokens: list[int], reason: str, is_done: bool, error: str, counts: tuple[int, int, int]) -> None:
    expected = due([1, 2, 3], 4)
    assert len(set(expected)) == 4
    load = Load(list, 1, random.Random(1))
    load._judge([expected[index] for index in tokens], expected, reason, is_done, error)
    assert (load.verdicts.failed, load.verdicts.truncated, load.verdicts.wrong_tokens) == counts
