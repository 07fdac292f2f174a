# SPDX-License-Identifier: Apache-2.0
"""The switch of the llumlet in this process. Imports the standard library only: patched modules of vLLM ask it."""

from __future__ import annotations

import os

CONFIG_VARIABLE = "LLUMNIX_LLUMLET"


def enabled() -> bool:
    """True if this process belongs to an instance started with `--enable-llumlet`."""
    return bool(os.environ.get(CONFIG_VARIABLE))
