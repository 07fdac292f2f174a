# SPDX-License-Identifier: Apache-2.0
"""Of every test on a cluster."""

from __future__ import annotations

import pytest

MARKS = [
    pytest.mark.asyncio,
    # vLLM's input and output threads leave their sockets to their contexts.
    pytest.mark.filterwarnings("ignore:Destroying context with unclosed socket:ResourceWarning"),
]
