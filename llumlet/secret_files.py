# SPDX-License-Identifier: Apache-2.0
"""Files with secrets, which not everybody may read. Standard library only."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_secret(path: str) -> bytes:
    """The contents. Raises ValueError, which never holds them, if the file cannot or must not be used."""
    try:
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ValueError(f"{path} can be read or written by everybody on this host: chmod o-rw it")
            return file.read()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


class Watched:
    """Tells when a file may have another content than when it was asked last. Also one that is replaced by a link, as
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
