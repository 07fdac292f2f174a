# SPDX-License-Identifier: Apache-2.0
"""The output of all components on one stream, with the component's name before each line."""

from __future__ import annotations

import collections
import threading
from typing import TextIO

from llumsched.console import output

CAPACITY = 10_000
CLOSE_S = 2.0
_COLOURS = ("\x1b[36m", "\x1b[35m", "\x1b[32m", "\x1b[33m", "\x1b[34m", "\x1b[96m", "\x1b[95m", "\x1b[92m")
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"


class Screen:
    """Takes lines from any thread and never blocks.

    A stopped terminal (Ctrl-S) or a slow pipe must not stop an engine that logs. A thread writes; if it falls behind,
    the oldest lines are dropped and a line says so.
    """

    def __init__(self, stream: TextIO, names: list[str], *, colour: bool, capacity: int = CAPACITY) -> None:
        self._stream = stream
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[i % len(_COLOURS)] if colour else "" for i, name in enumerate(names)}
        self._lines: collections.deque[str] = collections.deque(maxlen=capacity)
        self._num_dropped = 0
        self._closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="screen", daemon=True)
        self._thread.start()

    def line(self, name: str, text: str) -> None:
        """Shows a component's text; control characters are neutralised."""
        # Of a progress bar that was drawn over and over, the last state.
        shown = output.clean(text.rstrip("\r").rpartition("\r")[2].expandtabs())
        colour = self._colours.get(name, "")
        prefix = f"{colour}{name:<{self._width}} |{_RESET if colour else ''}"
        self._put(f"{prefix} {shown}")

    def say(self, text: str, *, bold: bool = False) -> None:
        """A line of our own."""
        self._put(f"{_BOLD}{text}{_RESET}" if bold and any(self._colours.values()) else text)

    def close(self) -> None:
        """Writes the remaining lines for at most `CLOSE_S`."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(CLOSE_S)

    def _put(self, line: str) -> None:
        with self._change:
            self._num_dropped += len(self._lines) == self._lines.maxlen
            self._lines.append(line)
            self._change.notify()

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._lines or self._closing)
                lines, dropped, last = list(self._lines), self._num_dropped, self._closing
                self._lines.clear()
                self._num_dropped = 0
            if dropped:
                lines.insert(0, f"… {dropped} lines were left out: they came faster than they could be written")
            try:
                self._stream.writelines(f"{line}\n" for line in lines)
                self._stream.flush()
            except (OSError, ValueError):
                # Nobody reads any more. The components go on; `line` keeps the newest for nobody.
                return
            if last:
                return
