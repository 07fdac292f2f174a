# SPDX-License-Identifier: Apache-2.0
"""The table of `docs/reference/defaults.md` of flags that are not here, from `llumsched.console.llumnix_flags`.

python -m tests.support.llumnix_flags docs/reference/defaults.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from llumsched.console.llumnix_flags import ABSENT
from tests.support.parts import fill

ROOT = Path(__file__).parents[2]


def table() -> str:
    rows = (f"| {', '.join(f'`{flag}`' for flag in flags)} | {instead} |" for flags, instead in ABSENT)
    return "\n".join(["| Flag of Llumnix | Here |", "|---|---|", *rows])


def render(text: str) -> str:
    return fill(text, {"flags that are not here": table})


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(render(path.read_text()))
