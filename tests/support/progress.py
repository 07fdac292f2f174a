# SPDX-License-Identifier: Apache-2.0
"""What a long-running program is doing, on stderr: a spinner on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console

Say = Callable[[str], None]


@contextlib.contextmanager
def saying(first: str) -> Iterator[Say]:
    """`say("text")` shows what is being done now; repetitions cost nothing and show nothing."""
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()
    said: set[str] = set()
    if console.is_terminal:
        with console.status(first) as status:
            yield status.update
        return

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            console.print(f"[{time.monotonic() - started:6.1f} s] {text}", markup=False)

    say(first)
    yield say
