# SPDX-License-Identifier: Apache-2.0
"""Tells if the llumlet is on in this process. Imports only the standard library, as patched modules of vLLM ask it."""

from __future__ import annotations

import os

CONFIG_VARIABLE = "LLUMNIX_LLUMLET"


def enabled() -> bool:
    """True if this process belongs to an instance started with `--enable-llumlet`."""
    return bool(os.environ.get(CONFIG_VARIABLE))
