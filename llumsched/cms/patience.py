# SPDX-License-Identifier: Apache-2.0
"""How long an instance may be silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Patience:
    """After how many seconds without a word an instance is taken out of the view."""

    silent_s: float = 10.0
    """Its connection stands, and nothing comes. Ten keep-alives: a process that starves comes back in time."""
    cut_s: float = 3.0
    """Its connection broke (a process that was killed), and no new one was made. Two attempts of a reporter."""


PATIENCE: Final = Patience()
