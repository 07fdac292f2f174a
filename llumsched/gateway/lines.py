# SPDX-License-Identifier: Apache-2.0
"""Lines for stdout and stderr, written by a thread: a pipe whose reader has stopped would block the event loop and all
streams."""

from __future__ import annotations

import logging
import os
import select
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

STDOUT: Final = 1
STDERR: Final = 2
_MOST_BYTES: Final = 8 << 20
_CLOSE_S: Final = 2.0


class LineWriter:
    """Lines for one descriptor. One thread at a time may call `write`, which never blocks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_given = 0
        """Bytes of all lines taken."""
        self._num_written = 0
        """Bytes of all lines written, by the thread."""
        self._thread = threading.Thread(target=self._run, name=f"lines-{descriptor}", daemon=True)
        self._thread.start()

    def write(self, lines: str) -> bool:
        """Takes lines. Returns False, and drops them, if too much is waiting."""
        data = lines.encode(errors="backslashreplace")
        if self._num_given - self._num_written + len(data) > _MOST_BYTES:
            return False
        self._num_given += len(data)
        self._waiting.put(data)
        return True

    def close(self) -> None:
        """Waits a limited time for the remaining lines."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (data := self._waiting.get()) is not None:
            with suppress(OSError):  # nobody will read it any more
                self._write(memoryview(data))
            self._num_written += len(data)

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # who started us has it so
                select.select([], [self._descriptor], [])


class LineHandler(logging.Handler):
    """Writes log records to stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LineWriter(STDERR)

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(self.format(record) + "\n")

    def close(self) -> None:
        self._writer.close()
        super().close()
