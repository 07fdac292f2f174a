# SPDX-License-Identifier: Apache-2.0
"""Trials of suspects at an engine: one at a time over all origins.

A suspect is on trial until it has survived as many tokens as its origin asks for. The record of steps names it: if it
crashes this engine, all origins know that the other requests of the step are innocent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from llumlet.protocol.errors import Reason, Refused


class Tried(Protocol):
    """The interface used of an engine's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_output_tokens(self) -> int: ...
    def is_finished(self) -> bool: ...


@dataclasses.dataclass(eq=False, slots=True)
class _Trial:
    request: Tried
    until: int
    """So many output tokens are the end of it."""

    @property
    def is_over(self) -> bool:
        return self.request.is_finished() or self.request.num_output_tokens >= self.until


class Trials:
    """Trials at one engine, at most one open. `note` records the request on trial, or None."""

    def __init__(self, note: Callable[[str | None], None]) -> None:
        self._note = note
        self._open: _Trial | None = None

    def open(self, request: Tried, num_tokens: int) -> None:
        """Begins a trial, before the request is given to the scheduler. Raises Refused(destination_busy) if another
        one is on trial."""
        if self._open is not None and not self._open.is_over:
            raise Refused(Reason.DESTINATION_BUSY, "another request is on trial here")
        self._open = _Trial(request, request.num_output_tokens + num_tokens)
        self._note(request.request_id)

    def close(self, request: Tried) -> None:
        """Ends the trial: it was survived, or the request did not reach the scheduler."""
        if self._open is not None and self._open.request is request:
            self._note(None)
            self._open = None

    def has(self, request: Tried) -> bool:
        trial = self._open
        return trial is not None and trial.request is request and not trial.is_over

    def look(self) -> None:
        """Between two steps: whether it has survived."""
        trial = self._open
        if trial is not None and trial.is_over:
            self.close(trial.request)
