# SPDX-License-Identifier: Apache-2.0
"""A request that may have been the death of its last engine, on trial here: one at a time, whoever sends them.

It is on trial until it has survived as many tokens as its origin asks for. The record of the steps says who it is: if
this engine dies of it, every origin that has requests in the same step knows that those are innocent.
"""

from __future__ import annotations

import dataclasses

from llumlet.protocol.errors import Reason, Refused
from vllm_llumnix.engine.vllm_types import Request
from vllm_llumnix.step_record import StepRecord


@dataclasses.dataclass(eq=False, slots=True)
class _Trial:
    request: Request
    until: int
    """So many output tokens are the end of it."""

    @property
    def is_over(self) -> bool:
        return bool(self.request.is_finished()) or self.request.num_output_tokens >= self.until


class Trials:
    """Of one engine. At most one is open."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self._open: _Trial | None = None

    # Llumlet thread

    def open(self, request: Request, num_tokens: int) -> None:
        """Before the request is given to the scheduler. Raises Refused(destination_busy) if another one is on trial."""
        if self._open is not None and not self._open.is_over:
            raise Refused(Reason.DESTINATION_BUSY, "another request is on trial here")
        self._open = _Trial(request, request.num_output_tokens + num_tokens)
        self._record.try_out(request.request_id)

    def close(self, request: Request) -> None:
        """What was to be seen has been seen, or it has not become the scheduler's after all."""
        if self._open is not None and self._open.request is request:
            self._record.try_out(None)
            self._open = None

    def has(self, request: Request) -> bool:
        trial = self._open
        return trial is not None and trial.request is request and not trial.is_over

    # Loop thread

    def look(self) -> None:
        """Between two steps: whether it has survived."""
        trial = self._open
        if trial is not None and trial.is_over:
            self.close(trial.request)
