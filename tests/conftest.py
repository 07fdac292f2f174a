# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test package. Nothing here starts an engine."""

from __future__ import annotations

import ast
import faulthandler
import functools
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llumsched.up import reaper
from tests.support import budgets, harness, moves, speed, warm
from tests.support.harness import command_line
from tests.support.model import PRESETS, build

# Before anything imports a library that looks for models on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

END_SECONDS = 60
"""In which Python ends when the last test has; a thread that keeps it is shown and the run fails."""


ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SHARED = (
    ("tests/exactness/", "fleet_of"),
    ("tests/integration/", "engines"),
    ("tests/packaging/", "wheels"),
    ("tests/runner_v2/", "cast"),
)
"""Fixtures of a folder that take long to set up and serve several files."""

STARTED = time.monotonic()
OVER_BUDGET = 6
"""Exit status of pytest where a folder took far more than its minutes."""
_seconds: Counter[str] = Counter()
_told: list[str] = []
LONG_SECONDS = 300
"""From which on a run says how fast the machine is."""
PATIENT_MS = 2000.0
"""Stall budget of moves, where it is not what a test is about. How fast the link is is measured by a pull or two, and
where many servers share a machine one of them may stand still in one."""


@pytest.fixture(scope="session", autouse=True)
def patience_with_moves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "STALL_BUDGET_MS", PATIENT_MS)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget", action="store_true", help="print minutes per folder, and fail far above tests/budgets.toml"
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the time of each folder; in a run with workers, that of all of them."""
    folder, _, rest = report.nodeid.partition("::")[0].removeprefix("tests/").partition("/")
    _seconds[folder if rest else "."] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.budget and not is_worker():
        rows, faults = budgets.minutes(_seconds, speed.slowness())
        _told.extend([*rows, *faults])
        if faults:
            session.exitstatus = OVER_BUDGET


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the minutes per folder, and for a long run the speed of this machine, to compare its time by."""
    for line in _told:
        terminalreporter.write_line(line)
    if time.monotonic() - STARTED > LONG_SECONDS:
        terminalreporter.write_line(speed.measured())


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each file to one worker, and likewise all files that share a set-up. The longest start first."""
    from xdist.scheduler import LoadScopeScheduling

    class BySetUp(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return set_up_of(nodeid.partition("::")[0])

    return BySetUp(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in the order of collection: the longest set-up first, or one worker would end long after the
    others."""
    if is_worker():
        paths = {item: item.nodeid.partition("::")[0] for item in items}
        taken = Counter[str]()
        for path in set(paths.values()):
            taken[set_up_of(path)] += budgets.read()["seconds"].get(path, 0)
        items.sort(key=lambda item: -taken[set_up_of(paths[item])])


def pytest_collection_finish() -> None:
    """Keeps what the test modules have imported out of each collection of garbage, which takes 0.4 s with vLLM."""
    gc.collect()
    gc.freeze()


def set_up_of(path: str) -> str:
    """The shared fixture that the tests of a file are set up with, or the file itself."""
    used = arguments_in(ROOT / path)
    return next((f"{folder}:{name}" for folder, name in SHARED if path.startswith(folder) and name in used), path)


@functools.cache
def arguments_in(path: Path) -> frozenset[str]:
    """Of the functions there, fixtures among them."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS))
    return frozenset(argument.arg for function in functions for argument in function.args.args)


def pytest_unconfigure() -> None:
    gc.unfreeze()
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


def is_worker() -> bool:
    """Whether other processes play a part of the tests meanwhile."""
    return "PYTEST_XDIST_WORKER" in os.environ
