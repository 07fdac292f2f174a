# SPDX-License-Identifier: Apache-2.0
"""Files with secrets, which not everybody may read. Standard library only."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

_log = logging.getLogger(__name__)
LOOK_S: Final = 1.0
"""Time between two looks at a file."""

T = TypeVar("T")


def read_secret(path: str) -> bytes:
    """The contents. Raises ValueError, which never holds them, if the file cannot or must not be used."""
    return read_file(path, is_secret=True)


def read_file(path: str, *, is_secret: bool) -> bytes:
    """The contents of a file, which everybody may read unless it `is_secret`. Raises ValueError as `read_secret`."""
    try:
        with Path(path).open("rb") as file:
            if is_secret and os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ValueError(f"{path} can be read or written by everybody on this host: chmod o-rw it")
            return file.read()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


class Watched:
    """Tells when a file may have another content than when it was asked last, also if a link was put in its place, as
    Kubernetes does with secrets."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = self._state()

    def has_changed(self) -> bool:
        seen, self._seen = self._seen, self._state()
        return seen != self._seen

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


class Current(Generic[T]):
    """What a file means, read again within a second of a change. A file that cannot be used any more changes nothing,
    but is told in the log. Any thread may ask.

    `read` and the constructor raise ValueError, which never holds a secret. `what`: for people, a plural.
    """

    def __init__(self, path: str, read: Callable[[str], T], what: str, clock: Callable[[], float] = time.monotonic):
        self._file = Watched(path)
        self._read = read
        self._what = what
        self._clock = clock
        self._looked_s = clock()
        self._value = read(path)

    @property
    def value(self) -> T:
        now_s = self._clock()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            if self._file.has_changed():
                self._reload()
        return self._value

    def _reload(self) -> None:
        try:
            self._value = self._read(self._file.path)
        except ValueError as error:
            _log.error("the %s stay as they were: %s", self._what, error)
        else:
            _log.info("the %s were read again", self._what)
