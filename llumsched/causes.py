# SPDX-License-Identifier: Apache-2.0
"""Why a gateway sends an instance nothing: a word between gateways and schedulers."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    UNREACHABLE = "unreachable"
    """No connection to it can be made."""
    ERRORS = "errors"
    """Answers of status 500 and above, and answers that break off."""
    REFUSALS = "refusals"
    """An instance that refuses what another instance takes."""
    SILENCE = "silence"
    """Several requests wait for it and nothing comes, while others answer."""
    SLOWNESS = "slowness"
    """An instance whose tokens come many times slower than those of others with the same model."""
    HANG = "hang"
    """An instance whose API server answers, and its engine core does nothing."""
