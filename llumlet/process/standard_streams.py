# SPDX-License-Identifier: Apache-2.0
"""Standard output and error of a command, which may be closed, full, or of an encoding with few characters.

Standard library only.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TextIO, cast

UNWRITTEN: Final = 7
"""The exit code of a command whose output could not be written."""


class OutputLost(SystemExit):
    """Ends the process because its output is lost. Not an OSError, which callers handle themselves."""

    def __init__(self) -> None:
        super().__init__(UNWRITTEN)


@contextmanager
def guarded(program: str) -> Iterator[None]:
    """Inside, a write to standard output that fails raises `OutputLost`, which a reader that left (`| head`) brings
    about in silence and anything else with a line on standard error. What cannot be written to standard error is
    dropped. Characters that the encoding lacks are written as escapes."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Out(streams[0], program), _Guarded(streams[1])
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputLost:
        _discard(streams[0])
        raise
    finally:
        sys.stdout, sys.stderr = streams


class _Guarded:
    """A stream whose failures are handled here. `None`, as Python has it for a closed descriptor, discards
    everything."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or cast(TextIO, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        if getattr(self._stream, "errors", "") == "strict" and hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """Drops what could not be written."""


class _Out(_Guarded):
    def __init__(self, stream: TextIO | None, program: str) -> None:
        super().__init__(stream)
        self._program = program

    def _failed(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.ESHUTDOWN):
            print(f"{self._program}: the output cannot be written: {error.strerror}", file=sys.stderr)
        raise OutputLost


def _discard(stream: TextIO | None) -> None:
    """Discards the stream's buffer, which Python would write again at its end."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)
