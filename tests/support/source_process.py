# SPDX-License-Identifier: Apache-2.0
"""A process whose memory is read by a benchmark: the two sides of how it says what it offers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

END_SECONDS = 30


def offer(what: msgspec.Struct) -> None:
    """In the child: tell the parent, and stay until it wants no more."""
    print(msgspec.msgpack.encode(what).hex(), flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def offered(kind: type[T], module: str, *arguments: str) -> Iterator[T]:
    """What `python -m module arguments` offers, while it is there."""
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield msgspec.msgpack.decode(bytes.fromhex(child.stdout.readline().decode()), type=kind)
    finally:
        child.stdin.close()
        child.wait(END_SECONDS)
        child.stdout.close()
