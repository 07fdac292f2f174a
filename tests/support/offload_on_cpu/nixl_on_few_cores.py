# SPDX-License-Identifier: Apache-2.0
"""vLLM's `NixlConnector` for engines that share few cores: this is its `kv_connector_module_path`.

Each agent of NIXL has a thread that looks without a pause for what has come: a core for each worker, of which machines
with GPUs have plenty. Here it looks a thousand times a second.

An engine and its worker wait for each other's messages by calling `sched_yield` without a pause. Where something else
keeps the cores busy, too, Linux 6.18 leaves other runnable threads, those of the tests, waiting for up to ten seconds
then, and streams are over before the move that was to meet them. So these two sleep between looks. It makes a step
half as long again, the reason why other engines do not.
"""

from __future__ import annotations

import time
from typing import Any

from nixl import _api
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

__all__ = ["NixlConnector"]

PAUSE_US = 1000
LOOKS_EVERY_S = 20e-6
"""The kernel's timer adds some 60 us."""

_stock = _api.nixlBind.nixlAgent


def _agent(name: str, config: Any) -> Any:
    config.pthrDelay = PAUSE_US
    return _stock(name, config)


_api.nixlBind.nixlAgent = _agent
shm_broadcast.sched_yield = lambda: time.sleep(LOOKS_EVERY_S)
