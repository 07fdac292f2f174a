# SPDX-License-Identifier: Apache-2.0
"""Reasons why a gateway sends an instance nothing, shared by gateways and schedulers."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    UNREACHABLE = "unreachable"
    """No connection to the instance can be made."""
    ERRORS = "errors"
    """Answers have status 500 and above, or break off."""
    REFUSALS = "refusals"
    """The instance refuses requests that another one takes."""
    SILENCE = "silence"
    """Several requests wait for the instance and nothing comes, while others answer."""
    SLOWNESS = "slowness"
    """Tokens come many times slower than from others with the same model."""
    HANG = "hang"
    """The API server answers, and its engine core does nothing."""
