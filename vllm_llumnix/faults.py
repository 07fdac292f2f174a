# SPDX-License-Identifier: Apache-2.0
"""Named points at which tests make an engine fail.

`LLUMNIX_FAULTS=MODULE:TEXT` imports MODULE when the process starts; its `arm(TEXT)` returns the function that every
point calls with its name and context (`tests/support/faults.py`). Without the variable a point costs one truth test.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _armed(said: str) -> Any:
    module, _, text = said.partition(":")
    return importlib.import_module(module).arm(text) if module else None


inject = _armed(os.environ.get("LLUMNIX_FAULTS", ""))


def hit(point: str, **context: Any) -> None:
    if inject is not None:
        inject(point, **context)
