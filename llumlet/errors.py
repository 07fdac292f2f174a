# SPDX-License-Identifier: Apache-2.0
"""What a call to a llumlet can end with, other than its answer.

    LlumletCallFailed
    ├── LlumletError            the llumlet answered no; `reason` says why
    └── LlumletUnreachable      no answer: what became of the call is not known
        └── NotALlumlet         something else listens at that address

An agent raises `LlumletError` and nothing else on purpose; anything else it raises reaches the
caller as `INTERNAL`.
"""

from __future__ import annotations

from grpc import StatusCode

from llumlet.status_codes import STATUS_OF_REASON
from llumlet.types import Reason, reason_word


class LlumletCallFailed(Exception):
    """Base of everything that `LlumletClient` raises."""


class LlumletError(LlumletCallFailed):
    """A refusal with a reason. `detail` is a sentence for people, with the values that matter."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{self.word}: {detail}" if detail else self.word)

    @property
    def word(self) -> str:
        return reason_word(self.reason)

    @property
    def code(self) -> StatusCode:
        return STATUS_OF_REASON[self.reason]


class LlumletUnreachable(LlumletCallFailed):
    """No answer from `address`, or none before the deadline (`timed_out`).

    The call may or may not have been obeyed.
    """

    def __init__(self, address: str, detail: str, *, timed_out: bool = False) -> None:
        super().__init__(f"{address}: {detail}")
        self.address = address
        self.detail = detail
        self.timed_out = timed_out


class NotALlumlet(LlumletUnreachable):
    """Something answers at `address`, but it does not speak this protocol."""
