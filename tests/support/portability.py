# SPDX-License-Identifier: Apache-2.0
"""The tables of `docs/reference/portability.md`, from `vllm_llumnix.engine.portability`.

python -m tests.support.portability docs/reference/portability.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.parts import fill
from vllm_llumnix.engine.compatibility.portability import (
    ELSEWHERE,
    KV_REFUSED_ENGINES,
    MOVED,
    REFUSED_ENGINES,
    REFUSED_REQUESTS,
    Evidence,
    Exactness,
)

PAGE = Path(__file__).parents[2] / "docs/reference/portability.md"
_UNREADABLE = (
    "KV memory that no transport reads",
    "layouts that scatter a page, several allocations, pages in host memory beside a GPU, "
    "devices other than CPU and CUDA",
)


def document() -> str:
    return fill(PAGE.read_text(), {"requests": _requests, "engines": _engines, "tokens alone": _tokens_alone})


def _requests() -> str:
    rows = [(row.kind, row.exactness, row.v1, row.v2, row.because) for row in MOVED]
    rows += [(row.reason, Exactness.REFUSED, row.v1, row.v2, "") for row in REFUSED_REQUESTS]
    return _table(("request", "class", "V1 on CPU", "V2, asynchronous", "because"), rows)


def _engines() -> str:
    return _table(("engine", "because"), [(row.reason, row.because) for row in REFUSED_ENGINES])


def _tokens_alone() -> str:
    rows = [(row.reason, row.because, row.measured or Evidence.BY_READING) for row in KV_REFUSED_ENGINES]
    rows += [(ELSEWHERE, "Ray, `--nnodes`", Evidence.BY_READING), (*_UNREADABLE, Evidence.BY_READING)]
    return _table(("engine", "such as", "measured"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ("---",) * len(head), *rows])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document())
