# SPDX-License-Identifier: Apache-2.0
"""Arguments that several sub-commands have."""

from __future__ import annotations

import argparse
import math

from llumlet.secret_files import read_secret
from llumlet.types import Address


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object per line on stdout, nothing else there")


def add_service_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--service-token-file", metavar="FILE", help="a token that the scheduler accepts of readers")


def service_headers(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Of a request to the scheduler, or one fault."""
    if not args.service_token_file:
        return {}, []
    try:
        return {"Authorization": f"Bearer {read_secret(args.service_token_file).decode('ascii').strip()}"}, []
    except ValueError as error:  # UnicodeDecodeError is one, and would show what is there
        why = "holds no token" if isinstance(error, UnicodeError) else str(error)
        return {}, [f"--service-token-file {why}"]


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
