# SPDX-License-Identifier: Apache-2.0
"""A private directory for a mover's socket, which no way of dying leaves behind for long.

The directory is for this user only, and its owner holds a lock on a file in it for as long as it
lives. It is removed when the owner exits; what a killed owner left, the next owner on this host
removes, as nobody holds the lock then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path

PREFIX = "llumnix-mover-"
LOCK = "lock"
MAX_SOCKET_PATH = 107


class PrivateDirectory:
    """Made by the constructor, removed by `close` or at exit.

    parent: where it is made; default: the system's directory for temporary files.
    Raises OSError; ValueError if a socket in `parent` would have too long a name.
    """

    def __init__(self, parent: str | None = None) -> None:
        root = Path(parent or tempfile.gettempdir())
        sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        # Locked before it gets its name: a sweeping neighbour never sees it unlocked.
        self._lock = os.open(self.path / f"{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / f"{LOCK}.new", self.path / LOCK)
        # Not atexit: its handlers do not run in the children of multiprocessing, and workers are
        # such.
        self._finalizer = util.Finalize(self, _remove, args=(str(self.path), self._lock, os.getpid()), exitpriority=10)
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH:
            self.close()
            raise ValueError(f"{root}: path too long for a socket; set TMPDIR to a shorter one")

    @property
    def socket_path(self) -> Path:
        return self.path / "mover"

    def close(self) -> None:
        self._finalizer()


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(root: Path) -> list[Path]:
    """Remove directories under `root` whose owner has ended without doing so; returns them."""
    removed = []
    for path in root.glob(f"{PREFIX}*"):
        try:
            if path.lstat().st_uid != os.geteuid():
                continue  # the directory for temporary files is everybody's: not a trap for us to empty
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # being made or removed at this moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)
    return removed
