# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

# Before anything imports vLLM.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(autouse=True)
def hurried_production() -> Iterator[None]:
    from tests.shells.cluster import hurried
    from tests.shells.network import intercepted

    with hurried(), intercepted():
        yield


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Whatever threads a test starts have ended with it; but for the helpers of its own event loop, which end later."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio_")]
    left = [name for name in left if "_poll_wrapper" not in name]  # gRPC's own, one for the process
    assert not left, f"threads left behind: {left}"
