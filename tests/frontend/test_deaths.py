# SPDX-License-Identifier: Apache-2.0
"""What the record of an engine's steps says of an engine that is dead, and of one that only is silent."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_llumnix import step_record
from vllm_llumnix.frontend.deaths import STUCK_SECONDS, steps_of
from vllm_llumnix.frontend.owners import Owner
from vllm_llumnix.step_record import StepRecord


@pytest.fixture
def owner() -> Owner:
    return Owner("e", uuid.uuid4().hex, b"e")


@pytest.fixture
def record(owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRecord]:
    monkeypatch.setattr(step_record, "DIRECTORY", tmp_path)
    record = StepRecord(owner.incarnation, 4, 2)
    yield record
    record.close()


def later() -> float:
    return time.monotonic() + 2 * STUCK_SECONDS


def test_a_grammar_may_be_why_an_engine_is_dead(owner: Owner, record: StepRecord) -> None:
    record.compile("compiled")
    record.begin(SimpleNamespace(num_scheduled_tokens={"in a step": 1}))
    owner.died("its process has ended", time.monotonic())
    steps = steps_of(owner, time.monotonic())
    assert steps is not None
    assert [steps.had(name) for name in ("compiled", "in a step", "waits")] == [True, True, False]


def test_a_grammar_that_takes_long_is_why_nobody_is_silent(owner: Owner, record: StepRecord) -> None:
    record.compile("compiled")
    assert steps_of(owner, later()) is None, "it is cut off"
    record.begin(SimpleNamespace(num_scheduled_tokens={"in a step": 1}))
    assert steps_of(owner, time.monotonic()) is None, "a young step: it gets on"
    steps = steps_of(owner, later())
    assert steps is not None
    assert [steps.had(name) for name in ("compiled", "in a step")] == [False, True]
