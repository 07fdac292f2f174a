# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test package. Nothing here starts an engine."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llumsched.up import reaper
from tests.support import harness, speed, warm
from tests.support.beside import Beside, beside
from tests.support.harness import command_line
from tests.support.model import PRESETS, build

# Before anything imports a library that looks for models on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

END_SECONDS = 60
"""In which Python ends when the last test has; a thread that keeps it is shown and the run fails."""


SHARED_ENGINES = ("engines", "cast", "fleet_of")
"""Fixtures of several files that start some."""

STARTED = time.monotonic()
LONG_SECONDS = 300
"""From which on a run says how fast the machine is."""
NUM_SCHEDULES = 100_000
SIMULATION = (sys.executable, "-m", "tests.simulation", "--schedules", str(NUM_SCHEDULES))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the time of a whole run is to be compared by."""
    if time.monotonic() - STARTED > LONG_SECONDS:
        terminalreporter.write_line(speed.measured())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where workers share the tests, a file goes to one of them as a whole, and so do all files with the same engines:
    each worker would start them for itself."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    for path, tests in files.items():
        used = {name for item in tests for name in getattr(item, "fixturenames", ())}
        group = next((name for name in SHARED_ENGINES if name in used), str(path))
        for item in tests:
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_unconfigure() -> None:
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
    """Servers are forked from processes that have imported vLLM."""
    parents = warm.Parents()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "start_server", parents.start)
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
