# SPDX-License-Identifier: Apache-2.0
"""vLLM's `NixlConnector` for engines that share few cores: this is its `kv_connector_module_path`.

Each agent of NIXL has a thread that looks without a pause for what has come: a core for each worker, of which machines
with GPUs have plenty. Here it looks a thousand times a second.
"""

from __future__ import annotations

from typing import Any

from nixl import _api
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

__all__ = ["NixlConnector"]

PAUSE_US = 1000

_stock = _api.nixlBind.nixlAgent


def _agent(name: str, config: Any) -> Any:
    config.pthrDelay = PAUSE_US
    return _stock(name, config)


_api.nixlBind.nixlAgent = _agent
