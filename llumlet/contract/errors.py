# SPDX-License-Identifier: Apache-2.0
"""The errors of a call to a llumlet.

LlumletCallFailed
    ├── LlumletError            the llumlet refused; `reason` says why
    └── LlumletUnreachable      no answer: the outcome of the call is unknown
        └── NotALlumlet         something else listens at that address

An agent raises only `LlumletError` on purpose; any other exception reaches the caller as `INTERNAL`.
"""

from __future__ import annotations

from grpc import StatusCode

from llumlet.contract.status_codes import STATUS_OF_REASON
from llumlet.contract.types import Reason, reason_word


class LlumletCallFailed(Exception):
    """Base of everything that `LlumletClient` raises.

    `address`: that of the called llumlet ("" if an agent raised it). `detail`: a sentence for people, with the relevant
    values.
    """

    def __init__(self, text: str, detail: str, address: str) -> None:
        super().__init__(text)
        self.detail = detail
        self.address = address


class LlumletError(LlumletCallFailed):
    """A refusal with a reason."""

    def __init__(self, reason: Reason, detail: str = "", address: str = "") -> None:
        self.reason = reason
        super().__init__(f"{self.word}: {detail}" if detail else self.word, detail, address)

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
        super().__init__(f"{address}: {detail}", detail, address)
        self.timed_out = timed_out

    @property
    def nobody_listens(self) -> bool:
        """True if the host refuses connections to the port, so that the process is gone. A failed handshake is
        something else."""
        return "Connection refused" in self.detail


class NotALlumlet(LlumletUnreachable):
    """Something answers at `address`, but it does not speak this protocol."""
