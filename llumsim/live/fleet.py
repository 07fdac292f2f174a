# SPDX-License-Identifier: Apache-2.0
"""A cluster of simulated instances."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from llumlet.process.credentials import NONE, Credentials
from llumsim.engine.step_model import Hardware
from llumsim.live.simulated import SimulatedInstance
from llumsim.live.world import World


class SimulatedCluster:
    """`async with SimulatedCluster(4, cms="127.0.0.1:7001") as cluster:` — instances `sim-0` to `sim-3`, on the running
    loop. Leaving stops those that still are."""

    def __init__(
        self,
        size: int,
        cms: str = "",
        *,
        prefix: str = "sim-",
        model: Hardware | None = None,
        credentials: Credentials = NONE,
        **metadata_fields: Any,
    ) -> None:
        self.instances: dict[str, SimulatedInstance] = {}
        self._new: dict[str, Any] = {"model": model, "credentials": credentials, "world": World(), **metadata_fields}
        self._cms = cms
        self._size = size
        self._prefix = prefix
        self._count = 0

    def __getitem__(self, index: int) -> SimulatedInstance:
        return list(self.instances.values())[index]

    def __len__(self) -> int:
        return len(self.instances)

    async def add(self, instance_id: str = "", **fields: Any) -> SimulatedInstance:
        """Start one more; `fields` as for `SimulatedInstance`, instead of the cluster's. One of the same id is killed
        first: the new one is its next life."""
        instance_id = instance_id or f"{self._prefix}{self._count}"
        self._count += 1
        if instance_id in self.instances:
            await self.instances[instance_id].kill()
        instance = SimulatedInstance(instance_id, self._cms, **(self._new | fields))
        await instance.start()
        self.instances[instance_id] = instance
        return instance

    async def __aenter__(self) -> Self:
        for _ in range(self._size):
            await self.add()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(instance.stop() for instance in self.instances.values()))
