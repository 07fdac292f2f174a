# SPDX-License-Identifier: Apache-2.0
"""Asks many llumlets one question at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumsched.console import output
from llumsched.console.exit_codes import ExitCode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LlumletAnswer(Generic[T]):
    """The answer of `address`, or the reason why there is none: one of `value` and `failure` is set. Without an address
    no llumlet was asked."""

    address: Address | None
    value: T | None
    failure: LlumletCallFailed | None

    @property
    def where(self) -> str:
        return str(self.address) if self.address is not None else self.failure.address if self.failure else ""

    def error_dict(self) -> dict[str, Any] | None:
        return None if self.failure is None else output.failure_dict(self.failure)


async def ask_all(
    addresses: Sequence[Address], question: Callable[[LlumletClient], Awaitable[T]], credentials: Credentials
) -> list[LlumletAnswer[T]]:
    """The answers in the order of `addresses`. Takes as long as the slowest."""

    async def ask(address: Address) -> LlumletAnswer[T]:
        async with LlumletClient(address, credentials=credentials) as client:
            try:
                return LlumletAnswer(address, await question(client), None)
            except LlumletCallFailed as failure:
                return LlumletAnswer(address, None, failure)

    return await asyncio.gather(*(ask(address) for address in addresses))


def report_failures(answers: Sequence[LlumletAnswer[Any]], *, quiet: bool) -> ExitCode:
    """Prints the failures unless `quiet`; the exit code is that of the first."""
    failures = [answer.failure for answer in answers if answer.failure is not None]
    if not quiet:
        for failure in failures:
            output.print_failure(failure)
    return output.exit_code(failures[0]) if failures else ExitCode.OK
