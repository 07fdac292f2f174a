# SPDX-License-Identifier: Apache-2.0
"""How long an instance may be silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds without a word after which an instance is taken out of the view."""

    silent_s: float = 10.0
    """Silence while the connection stands. Ten keep-alives: a process that starves comes back in time."""
    cut_s: float = 3.0
    """Time after a connection broke (a process that was killed) for a new one. Two attempts of a reporter."""


PATIENCE: Final = Patience()
