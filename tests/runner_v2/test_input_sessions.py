# SPDX-License-Identifier: Apache-2.0
"""Streaming input under the V2 runner and asynchronous scheduling: a session moves between two parts, and its next part
finds what the last one has left."""

from __future__ import annotations

import pytest

from tests.integration.test_input_sessions import goes_there_and_back
from tests.runner_v2.conftest import Cast


@pytest.mark.asyncio
async def test_there_and_back(cast: Cast) -> None:
    await goes_there_and_back(cast["a"], cast["b"])
