# SPDX-License-Identifier: Apache-2.0
"""The figures of the cost of a move, from windows that never ran, and from threads that did."""

from __future__ import annotations

import io
import os
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from benchmarks.call_floor import Calls
from benchmarks.move_cost import PARTS, Accounts, Block, Window, costs, part_of, result, table_of
from tests.support.client import StreamFailed
from tests.support.harness import Server
from tests.support.moves import Move
from vllm_llumnix.kv.mover.process import name_thread


def moves(count: int) -> tuple[Move, ...]:
    made = SimpleNamespace(copied_bytes=36 << 20, transport="local")
    return cast(tuple[Move, ...], (made,) * count)


def block(speed: float = 1.0) -> Block:
    """An engine that runs 10 ms a step, and 4 moves of 5 ms of the llumlets and 2 ms of the copy each."""

    def window(steps: int, made: int) -> Window:
        return Window({"models": 0.010 * steps, "llumlets": 0.005 * made, "copy": 0.002 * made}, steps, moves(made))

    return window(int(100 * speed), 0), window(80, 2), window(90, 2), window(100, 0)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_steps_without_moves_cost_nothing(speed: float) -> None:
    found = costs(block(speed))
    assert found["llumlets"] == pytest.approx(5.0)
    assert found["copy"] == pytest.approx(2.0)
    assert found["models"] == pytest.approx(0.0, abs=1e-9)
    assert set(found) == set(PARTS)


def test_the_row_says_what_is_neither_copy_nor_llumlet() -> None:
    row = result([block(), block(0.5), block()], 1024, {"llumlets": 3.0, "asker": 1.0})
    assert (row["bench"], row["copy_ms"], row["llumlets_ms"], row["rest_ms"], row["moves"]) == (
        "move_cost",
        2.0,
        5.0,
        0.0,
        12,
    )
    assert row["cpu_ms_per_move"] == 7.0
    low, high = row["cpu_ms_bounds"]
    assert low <= row["cpu_ms_per_move"] <= high
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(table_of(row))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["│", "llumlets", "│", "5.00", "│", "3.00", "│"] in rows
    assert ["│", "copy", "│", "2.00", "│", "│"] in rows


def test_windows_without_moves_or_steps_are_not_divided_by() -> None:
    quiet, first, second, last = block()
    with pytest.raises(StreamFailed, match="0 moves"):
        costs((quiet, quiet, quiet, last))
    stuck = Window({}, 0)
    with pytest.raises(StreamFailed, match="0 steps in quiet"):
        costs((stuck, first, second, stuck))


@pytest.mark.parametrize(
    ("process", "thread", "part"),
    [
        ("VLLM::Worker", "llumnix-mover", "copy"),
        ("VLLM::EngineCore", "llumnix-llumlet", "llumlets"),
        ("VLLM::EngineCore", "llumnix-helper", "llumlets"),
        ("VLLM::EngineCore", "VLLM::EngineCor", "loops"),
        ("VLLM::EngineCore", "ZMQbg/IO/0", "libraries"),
        ("VLLM::Worker", "VLLM::Worker", "models"),
        ("python vllm serve model", "vllm", "api"),
    ],
)
def test_a_thread_belongs_to_one_part(process: str, thread: str, part: str) -> None:
    assert part_of(process, thread) == part


def test_the_accounts_find_what_a_named_thread_has_run() -> None:
    done = threading.Event()

    def run() -> None:
        name_thread("llumnix-llumlet")
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        ran.set()
        done.wait()

    ran = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    ran.wait()
    server: Any = SimpleNamespace(pids=lambda: [os.getpid()])
    accounts = Accounts(cast(list[Server], [server]), os.getpid())
    times = accounts.read()
    done.set()
    thread.join()
    assert times["llumlets"] >= 0.19
    assert times["asker"] >= times["llumlets"]


def test_calls_alone_take_time_of_every_part() -> None:
    with Calls() as calls:
        cost = calls.cost(3, pause_s=0.01)
    assert set(cost) == {"llumlets", "asker", "libraries"}
    assert all(0.05 < milliseconds < 1000 for milliseconds in cost.values()), cost
