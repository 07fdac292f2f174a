# SPDX-License-Identifier: Apache-2.0
"""Of every test on a cluster."""

from __future__ import annotations

import pytest

both = pytest.mark.parametrize(
    "asynchronous", [pytest.param(False, id="sync", marks=pytest.mark.rest), pytest.param(True, id="async")]
)
"""With synchronous scheduling in `make test-rest`."""
MARKS = [
    pytest.mark.asyncio,
    # vLLM's input and output threads leave their sockets to their contexts.
    pytest.mark.filterwarnings("ignore:Destroying context with unclosed socket:ResourceWarning"),
]
