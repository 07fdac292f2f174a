# SPDX-License-Identifier: Apache-2.0
"""What runs beside the tests makes way for those with engines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tests.support.beside import Beside, beside
from tests.support.harness import cpu_seconds

SPINNING = "import os; os.fork()\nwhile True: pass"


def cpu_of(running: Beside) -> float:
    return sum(cpu_seconds(pid) for pid in running._command.pids())


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
    return True


def test_it_stands_still_while_it_is_paused() -> None:
    def advances() -> bool:
        before = cpu_of(spinning)
        time.sleep(0.3)
        return cpu_of(spinning) > before

    with beside((sys.executable, "-c", SPINNING)) as spinning:
        assert within(60.0, advances)
        with spinning.paused():
            assert within(5.0, lambda: not advances()), "a signal takes its time"
            assert not advances()
        assert within(60.0, advances)
