# SPDX-License-Identifier: Apache-2.0
"""Work that waits for nothing, done beside the tests: it takes what they leave of the cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAST = '{ echo 19 > /proc/self/autogroup; } 2> /dev/null; exec nice -n 19 "$0" "$@"'
"""A session of its own: where the kernel groups processes by session, niceness counts only among those of one."""


class Beside:
    """A program of this project that runs from the beginning. Its lines and its exit code are asked for by a test."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", LAST, *command],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def lines(self, timeout_s: float) -> list[str]:
        """All that it has printed, when it has ended. Fails if it did."""
        printed, _ = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0, printed[-4000:]
        return printed.splitlines()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextlib.contextmanager
def beside(command: Sequence[str]) -> Iterator[Beside]:
    running = Beside(command)
    try:
        yield running
    finally:
        running.end()
