# SPDX-License-Identifier: Apache-2.0
"""Arguments that several sub-commands have."""

from __future__ import annotations

import argparse
import math

from llumlet.types import Address


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object per line on stdout, nothing else there")


def address(flag: str, text: str | None) -> tuple[list[Address], list[str]]:
    """One address, or one fault."""
    if text is None:
        return [], [f"{flag} HOST:PORT is missing"]
    try:
        return [Address.parse(text)], []
    except ValueError as error:
        return [], [f"{flag} {error}"]


def number(flag: str, text: str) -> tuple[float, list[str]]:
    """A finite number, or 0 and a fault."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return (value, []) if math.isfinite(value) else (0.0, [f"{flag} {text!r} is not a number"])
