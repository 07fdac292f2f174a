# SPDX-License-Identifier: Apache-2.0
"""The real cluster: engines, a scheduler with the rescheduler inside, a gateway, and a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.calibrate.load import SHORT, Counts, Played, times_of
from benchmarks.rebalance import TOKEN_IDS, Arrival, Case, play, preemptions
from llumsched.cluster.instance import Instance
from llumsched.cms.embedded import EmbeddedStore
from tests.support.client import Client
from tests.support.control import Control, rescheduling
from tests.support.harness import Server


class CountedStatuses:
    """A store beside the scheduler's, that counts what it is told."""

    def __init__(self, port: int) -> None:
        self.number = 0
        self.ids: set[str] = set()
        self._store = EmbeddedStore(port=port)
        self._store.view.observe(self)

    async def __aenter__(self) -> Self:
        await self._store.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._store.close()

    def appeared(self, instance: Instance) -> None:
        pass

    def changed(self, instance: Instance) -> None:
        self.number += instance.id in self.ids

    def left(self, instance: Instance) -> None:
        pass


@dataclass(frozen=True)
class Cluster:
    """`cms_port`: where the scheduler listens, of which all these engines and no others know."""

    engines: Sequence[Server]
    cms_port: int
    logs: Path
    gateway: Sequence[str] = ()
    """Further arguments of the gateway."""

    def control(self, case: Case) -> Control:
        name = f"{len(self.engines)}-{case.name}-"
        cms = f"listen://127.0.0.1:{self.cms_port}"
        return Control(self.logs, cms, schedulers=[case.scheduler_arguments], gateway=self.gateway, name=name)

    async def play(self, case: Case, requests: Sequence[Arrival], statuses: CountedStatuses) -> Played:
        async with self.control(case) as control:
            await control.knows(len(self.engines))
            await self.warm_up(control)
            before = await preemptions(self.engines)
            statuses.ids = {str(engine.spec.instance_id) for engine in self.engines}
            began_s, num_statuses = time.monotonic(), statuses.number
            streams = await play(control.gateway_url, requests)
            num_statuses = statuses.number - num_statuses
            rate = num_statuses / (time.monotonic() - began_s) / len(self.engines)
            moves = (await rescheduling(control.scheduler_url))["moves"] if case.rescheduling else []
            counts = Counts(await preemptions(self.engines) - before, sum(move["num_moved"] for move in moves), rate)
            return Played([times_of(ttft_s, stream) for ttft_s, stream in streams], counts)

    async def warm_up(self, control: Control) -> None:
        """A request to each engine, one after the other: connections are there, and round robin is where it began."""
        async with Client(control.gateway_url) as client:
            for _ in self.engines:
                stream = await client.complete([TOKEN_IDS[0]] * SHORT.prompt[0], 2, ignore_eos=True)
                await stream.result()
                await asyncio.sleep(0.1)  # until the scheduler has been told that it has ended
