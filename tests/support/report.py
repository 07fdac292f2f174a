# SPDX-License-Identifier: Apache-2.0
"""A benchmark's result for machines: lines of JSON on stdout, and in a file that collects them."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="append the JSON to this file, too")


def print_json(to: Path | None, *rows: Mapping[str, Any]) -> None:
    """A line for each row. `to`: what `--json` said."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    print(text, end="", flush=True)
    if to is not None:
        with to.open("a") as file:
            file.write(text)


def commit() -> str:
    """The commit that is measured, with a `+` if files differ from it; empty outside of a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()
