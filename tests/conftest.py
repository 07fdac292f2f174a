# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test package. Nothing here starts an engine."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import functools
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llumsched.up import reaper
from tests.support import harness, moves, speed, warm
from tests.support.beside import Beside, beside
from tests.support.harness import command_line
from tests.support.model import PRESETS, build

# Before anything imports a library that looks for models on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

END_SECONDS = 60
"""In which Python ends when the last test has; a thread that keeps it is shown and the run fails."""


ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SHARED = ("engines", "cast", "fleet_of", "wheels")
"""Fixtures of several files that take long to set up."""

STARTED = time.monotonic()
LONG_SECONDS = 300
"""From which on a run says how fast the machine is."""
PATIENT_MS = 2000.0
"""Stall budget of moves, where it is not what a test is about. How fast the link is is measured by a pull or two, and
where many servers share a machine one of them may stand still in one."""
NUM_SCHEDULES = 20_000
SIMULATION = (sys.executable, "-m", "tests.simulation", "--schedules", str(NUM_SCHEDULES))


@pytest.fixture(scope="session", autouse=True)
def patience_with_moves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "STALL_BUDGET_MS", PATIENT_MS)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the time of a whole run is to be compared by."""
    if time.monotonic() - STARTED > LONG_SECONDS:
        terminalreporter.write_line(speed.measured())


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where workers share the tests, a file goes to one of them as a whole, and so do all files with the same engines:
    each worker would start its own."""
    from xdist.scheduler import LoadScopeScheduling

    class BySetUp(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((name for name in SHARED if name in arguments_in(ROOT / path)), path)

    return BySetUp(config, log)


@functools.cache
def arguments_in(path: Path) -> frozenset[str]:
    """Of the functions there, fixtures among them."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS))
    return frozenset(argument.arg for function in functions for argument in function.args.args)


def pytest_unconfigure() -> None:
    if not is_worker():  # which waits for the others
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small test model; built once and cached between runs."""
    return build(PRESETS["tiny"])


@pytest.fixture
def llumlet_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the llumlet logs in an engine or API server, from warnings on. In a whole run it depends on the tests before
    how vLLM has set up its own logging, which is above the llumlet's."""
    logger = logging.getLogger("vllm.llumnix")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.WARNING, logger.name)
    return caplog


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Whatever the tests of this session started below this process has ended with it."""
    before = set(reaper.descendants(os.getpid()))
    yield
    left = {pid: command_line(pid) for pid in set(reaper.descendants(os.getpid())) - before}
    # Python's own helpers end with the interpreter.
    left = {pid: name for pid, name in left.items() if "multiprocessing" not in name}
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def warm_starts(no_process_left_behind: None) -> Iterator[None]:
    """Servers are forked from processes that have imported vLLM, and their models run in the engine's process: as on a
    GPU, and with a third less to compute. Tests that need a worker's own process, or several, say so."""
    parents = warm.Parents()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "start_server", parents.start)
        patch.setattr(harness, "usual_executor", "uni")
        yield
    parents.close()


@pytest.fixture(scope="session", autouse=True)
def simulation(no_process_left_behind: None, request: pytest.FixtureRequest) -> Iterator[Beside | None]:
    """Plays random schedules from the beginning of a run on if one of its tests asks for them: they take minutes of all
    cores, and most tests leave as much idle. Not those with engines: there it stands still. Nor where workers share the
    tests and leave nothing: there it begins when it is asked for."""
    wanted = any("random_schedules" in getattr(item, "fixturenames", ()) for item in request.session.items)
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(beside(SIMULATION)) if wanted and not is_worker() else None


@pytest.fixture(scope="session")
def random_schedules(simulation: Beside | None) -> Iterator[Beside]:
    """`python -m tests.simulation`, NUM_SCHEDULES of them."""
    with contextlib.ExitStack() as stack:
        yield simulation or stack.enter_context(beside(SIMULATION))


def is_worker() -> bool:
    """Whether other processes play a part of the tests meanwhile."""
    return "PYTEST_XDIST_WORKER" in os.environ
