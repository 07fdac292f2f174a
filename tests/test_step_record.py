# SPDX-License-Identifier: Apache-2.0
"""What is written of the steps under way can be read when the engine is dead, and by nobody else's leave."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_llumnix.steps import step_record
from vllm_llumnix.steps.step_record import NUM_GRAMMARS, LastSteps, StepRecord, name_of, read

INCARNATION = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(step_record, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.fixture
def record() -> Iterator[StepRecord]:
    record = StepRecord(INCARNATION, capacity=4, depth=2)
    yield record
    record.close()


def batch(*request_ids: str) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(request_ids, 1))


def under_way() -> frozenset[bytes]:
    found = read(INCARNATION)
    assert found is not None
    return found.under_way


def names(*request_ids: str) -> frozenset[bytes]:
    return frozenset(map(name_of, request_ids))


def test_all_batches_in_flight_are_under_way(record: StepRecord) -> None:
    first, second, third = batch("a", "b"), batch("b", "c"), batch("a", "b")
    assert under_way() == names()
    record.begin(first)
    record.begin(second)
    assert under_way() == names("a", "b", "c")
    record.end(first)
    assert under_way() == names("b", "c")
    record.begin(third)
    record.end(second)
    assert under_way() == names("a", "b")
    record.end(third)
    assert under_way() == names()
    record.end(third)


def test_when_and_whom_over_many_steps(record: StepRecord) -> None:
    """Slots are used again, by the same requests and by others."""
    before = time.monotonic()
    in_flight = [batch("a")]
    record.begin(in_flight[0])
    for number in range(1, 50):
        in_flight.append(batch("a", *(["b"] if number % 7 else []), f"c{number // 5}"))
        record.begin(in_flight[-1])
        assert under_way() == names(*in_flight[-2].num_scheduled_tokens, *in_flight[-1].num_scheduled_tokens)
        record.end(in_flight[-2])
    found = read(INCARNATION)
    assert found is not None
    assert before <= found.began <= time.monotonic()
    assert found.had("a")
    assert not found.had("c1")


def test_while_the_loop_chooses_it_can_be_anybody(record: StepRecord) -> None:
    def had() -> bool:
        found = read(INCARNATION)
        assert found is not None
        return found.had("whoever")

    record.scheduling()
    assert had()
    record.begin(batch("a"))
    assert not had()
    record.scheduling()
    record.idle()
    assert not had()


def compiling() -> frozenset[bytes]:
    found = read(INCARNATION)
    assert found is not None
    return found.compiling


def test_whose_grammar_is_compiled(record: StepRecord) -> None:
    ends = {name: record.compile(name) for name in ("a", "b", "c")}
    found = read(INCARNATION)
    assert found is not None
    assert found.had("a")
    assert not found.anybody
    assert not found.under_way
    ends["b"]()
    record.begin(batch("d"))
    assert compiling() == names("a", "c")
    assert under_way() == names("d")
    for name in ("a", "c"):
        ends[name]()
    assert compiling() == names()


def test_of_many_grammars_the_oldest_are_written_down(record: StepRecord) -> None:
    ends = [record.compile(f"{number}") for number in range(NUM_GRAMMARS + 2)]
    assert compiling() == names(*map(str, range(NUM_GRAMMARS)))
    for end in ends:
        end()
    assert compiling() == names()
    record.compile("again")
    assert compiling() == names("again")


def test_a_grammar_that_outlives_its_engine() -> None:
    record = StepRecord(INCARNATION, capacity=4, depth=2)
    end = record.compile("a")
    record.close()
    end()
    record.compile("b")()


def test_more_requests_than_there_is_room_for(record: StepRecord) -> None:
    record.begin(batch("a", "b", "c", "d", "e"))
    found = read(INCARNATION)
    assert found is not None
    assert found.anybody


def test_trial_explains_the_other_requests(record: StepRecord) -> None:
    record.try_out("tried")
    record.begin(batch("tried", "beside"))
    found = read(INCARNATION)
    assert found is not None
    assert found.tried_another("beside")
    assert not found.tried_another("tried")
    record.try_out(None)
    found = read(INCARNATION)
    assert found is not None
    assert not found.tried_another("beside")
    assert not LastSteps(names("beside"), on_trial=name_of("waits")).tried_another("beside"), "it was in no step"


def test_an_engine_on_its_way_out(record: StepRecord) -> None:
    assert read(INCARNATION) == LastSteps()
    record.leave()
    record.leave()
    assert read(INCARNATION) == LastSteps(leaving=True)


def test_killed_process_leaves_its_record(directory: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from types import SimpleNamespace
        from vllm_llumnix.steps import step_record
        step_record.DIRECTORY = Path({str(directory)!r})
        record = step_record.StepRecord({INCARNATION!r}, 256, 2)
        record.begin(SimpleNamespace(num_scheduled_tokens={{"a": 1, "b": 17}}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert under_way() == names("a", "b")


def test_the_next_engine_sweeps_up(record: StepRecord, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no living engine holds any more, and nobody may want to read."""
    dead = directory / f"{step_record.PREFIX}{uuid.uuid4().hex}"
    dead.write_bytes(b"x")
    another = StepRecord(uuid.uuid4().hex, 4, 2)
    assert dead.exists(), "too young"
    monkeypatch.setattr(step_record, "SWEEP_SECONDS", -1.0)
    StepRecord(uuid.uuid4().hex, 4, 2).close()
    assert not dead.exists()
    assert len(list(directory.iterdir())) == 2
    another.close()
    assert read(INCARNATION) == LastSteps()


def test_nothing_is_left_of_an_engine_that_ends(directory: Path) -> None:
    StepRecord(INCARNATION, 4, 2).close()
    assert list(directory.iterdir()) == []
    assert read(INCARNATION) is None


def test_without_room_for_a_file(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def no_room(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    record = StepRecord(INCARNATION, 4, 2)
    record.begin(batch("a"))
    assert read(INCARNATION) is None
    assert list(directory.iterdir()) == []
    record.close()


@pytest.mark.parametrize(
    "incarnation", ["", "1", "../" + INCARNATION[3:], INCARNATION.upper(), INCARNATION + "\n", "/etc/passwd"]
)
def test_a_peer_names_no_file(record: StepRecord, incarnation: str) -> None:
    assert read(incarnation) is None


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 1000, b"LLXSTEP1" + b"\xff" * 24])
def test_invalid_record_is_unknown(directory: Path, content: bytes) -> None:
    (directory / (step_record.PREFIX + INCARNATION)).write_bytes(content)
    assert read(INCARNATION) is None


def test_a_link_is_not_followed(record: StepRecord, directory: Path) -> None:
    other = uuid.uuid4().hex
    (directory / (step_record.PREFIX + other)).symlink_to(directory / (step_record.PREFIX + INCARNATION))
    assert read(other) is None
