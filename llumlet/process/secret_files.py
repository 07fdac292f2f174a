# SPDX-License-Identifier: Apache-2.0
"""Files with secrets and certificates: their permissions, and how changes take effect. Standard library only."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

_log = logging.getLogger(__name__)
LOOK_S: Final = 1.0
"""Time between two looks at a file."""

T = TypeVar("T")


def read_secret(path: str) -> bytes:
    """The contents. Raises ValueError, which never holds them, if the file cannot or must not be used."""
    return read_file(path, is_secret=True)


def read_word(path: str) -> str:
    """The one word of a file with a secret. Raises ValueError, which never holds it."""
    word = read_secret(path).decode(errors="replace").strip()
    if not re.fullmatch(r"[!-~]+", word):
        raise ValueError(f"{path} does not hold one word of printable ASCII characters")
    return word


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
    """Detects changed files, including a replaced link, as in Kubernetes secrets."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self._seen = self._state()

    def has_changed(self) -> bool:
        seen, self._seen = self._seen, self._state()
        return seen != self._seen

    def _state(self) -> list[tuple[int, ...] | None]:
        return [_state_of(path) for path in self.paths]


def _state_of(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


class Current(Generic[T]):
    """The meaning of files that belong together, read again within a second of a change. Files that cannot be used any
    more change nothing: the former value stays, the log says why once, and `num_refused` counts them. Any thread may
    ask.

    `read` is given the paths. It and the constructor raise ValueError or OSError, which never hold a secret. `what`:
    for people, a plural.
    """

    def __init__(
        self, read: Callable[..., T], what: str, *paths: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = Watched(*paths)
        self._read = read
        self._what = what
        self._clock = clock
        self._looked_s = clock()
        self._value = read(*paths)
        self.is_refused = False
        """True if the files, as they are now, cannot be used."""
        _ALL.add(self)

    @property
    def value(self) -> T:
        now_s = self._clock()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self.look()
        return self._value

    def look(self) -> None:
        """Reads the files now if they have changed."""
        if self._files.has_changed():
            self._reload()

    def _reload(self) -> None:
        try:
            self._value = self._read(*self._files.paths)
        except (ValueError, OSError) as error:
            self.is_refused = True
            _log.error("the %s stay as they were: %s", self._what, error)
        else:
            self.is_refused = False
            _log.info("the %s were read again", self._what)


_ALL: Final[WeakSet[Current[Any]]] = WeakSet()


def num_refused() -> int:
    """Checks all files of this process, and counts those whose present content is unusable."""
    found = list(_ALL)
    for current in found:
        _ = current.value
    return sum(current.is_refused for current in found)


class Bearer(Mapping[str, str]):
    """Headers with the word that a file holds now; empty without a file. Their representation shows none of it."""

    def __init__(self, path: str, what: str) -> None:
        """Raises ValueError for a file that holds no word."""
        self._word = Current(read_word, what, path) if path else None

    def __getitem__(self, name: str) -> str:
        if self._word is None or name != "Authorization":
            raise KeyError(name)
        return f"Bearer {self._word.value}"

    def __iter__(self) -> Iterator[str]:
        return iter(() if self._word is None else ("Authorization",))

    def __len__(self) -> int:
        return int(self._word is not None)

    def __repr__(self) -> str:
        return f"<{len(self)} secret headers>"
