# SPDX-License-Identifier: Apache-2.0
"""Work that waits for nothing, done beside the tests: it takes what they leave of the cores."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.harness import Command

ROOT = Path(__file__).parents[2]
LAST = 'cd "$0"; { echo 19 > /proc/self/autogroup; } 2> /dev/null; exec nice -n 19 "$@"'
"""A session of its own: where the kernel groups processes by session, niceness counts only among those of one."""


class Beside:
    """A program of this project that runs from the beginning, as long as it needs or this process lives."""

    def __init__(self, command: Command) -> None:
        self._command = command

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It takes nothing until the block ends."""
        stopped: set[int] = set()
        while more := set(self._command.pids()) - stopped:
            _signal(more, signal.SIGSTOP)
            stopped |= more
        try:
            yield
        finally:
            _signal(stopped, signal.SIGCONT)

    def lines(self, timeout_s: float) -> list[str]:
        """All that it has printed, when it has ended."""
        deadline = time.monotonic() + timeout_s
        while self._command.alive():
            assert time.monotonic() < deadline, f"it still runs after {timeout_s:g} s:\n{self._command.log_text()}"
            time.sleep(0.2)
        return self._command.log_text().splitlines()


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def paused(running: Beside | None) -> Iterator[None]:
    with running.paused() if running is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def beside(command: Sequence[str]) -> Iterator[Beside]:
    with tempfile.TemporaryDirectory(prefix="llx-") as directory:
        running = Command.start("beside", ["sh", "-c", LAST, str(ROOT), *command], Path(directory) / "log")
        try:
            yield Beside(running)
        finally:
            running.stop(grace_s=0)
