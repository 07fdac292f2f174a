# SPDX-License-Identifier: Apache-2.0
"""Reports mock API servers to a CMS as instances that are idle, so that a scheduler in full mode places requests there.

python -m benchmarks.reporting HOST:PORT MODEL API_PORT,API_PORT,…
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from llumlet.contract.cms.reporter import Reporter
from llumlet.contract.types import InstanceMetadata, InstanceStatus

_TOKENS = 1 << 20


def _metadata(name: str, model: str, port: int) -> InstanceMetadata:
    return InstanceMetadata(
        instance_id=name,
        incarnation="1",
        instance_type="neutral",
        ip="127.0.0.1",
        api_server_port=port,
        max_model_len=4096,
        served_models=[model],
        data_parallel_size=1,
    )


def _status(name: str) -> InstanceStatus:
    return InstanceStatus(
        instance_id=name, incarnation="1", update_id=1, schedulable=True, num_total_gpu_tokens=_TOKENS
    )


async def report(cms: str, model: str, ports: list[int]) -> None:
    """Until it is cancelled."""
    names = [f"mock-{port}" for port in ports]
    reporters = [
        Reporter(cms, partial(_metadata, name, model, port), partial(_status, name))
        for name, port in zip(names, ports, strict=True)
    ]
    await asyncio.gather(*(reporter.run() for reporter in reporters))


if __name__ == "__main__":
    asyncio.run(report(sys.argv[1], sys.argv[2], [int(port) for port in sys.argv[3].split(",")]))
