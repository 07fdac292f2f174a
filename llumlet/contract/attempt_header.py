# SPDX-License-Identifier: Apache-2.0
"""The HTTP header in which a gateway tells an engine how many instances have died with a request."""

from __future__ import annotations

from typing import Final

ATTEMPT_HEADER: Final = "X-Llumnix-Attempt"
"""Holds 1 more than the number of instances that died with the request; absent for the first instance."""
MAX_DEATHS: Final = 8
"""Largest number of deaths that is believed; more would change nothing."""


def attempt_after(num_deaths: int) -> str:
    return str(num_deaths + 1)


def deaths_before(attempt: str) -> int:
    """Number of instances that died with the request, by the header's value; 0 if that is no number."""
    text = attempt[:4]
    return min(MAX_DEATHS, max(0, int(text) - 1)) if text.isascii() and text.isdigit() else 0
