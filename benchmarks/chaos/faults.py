# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, and when: by chance, a tenth of the instances at a time, and now and then a part of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from benchmarks.chaos.fleet import HARM
from benchmarks.chaos.parts import Cluster
from tests.support.progress import Say

_ILL_S: Final = (3.0, 12.0)
_MOST_ILL: Final = 0.1
_REDIS_S: Final = 3.0
_PART_EVERY_S: Final = 20.0


class Faults:
    """`counts`: what was done, by name. `spares_first`: of schedulers and gateways."""

    def __init__(self, cluster: Cluster, draw: random.Random, say: Say, *, spares_first: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._schedulers = cluster.schedulers[spares_first:]
        self._gateways = cluster.gateways[spares_first:]
        self._random = draw
        self._say = say
        self._ill: set[str] = set()

    async def run(self, seconds: float) -> None:
        """Makes faults until then; what is ill then is mended."""
        until_s = time.monotonic() + seconds
        most_ill = max(1, round(_MOST_ILL * len(self._cluster.fleet.ids)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._harm_parts(until_s))
            for _ in range(most_ill):
                tasks.create_task(self._harm_instances(until_s))

    async def _harm_instances(self, until_s: float) -> None:
        """One after another."""
        fleet = self._cluster.fleet
        while time.monotonic() < until_s:
            victim = self._random.choice([one for one in fleet.ids if one not in self._ill])
            harm = self._random.choice(list(HARM))
            self._ill.add(victim)
            self.counts[harm] += 1
            await fleet.do(harm, victim)
            await asyncio.sleep(min(self._random.uniform(*_ILL_S), max(0.0, until_s - time.monotonic())))
            await fleet.do("mend", victim)
            self._ill.discard(victim)

    async def _harm_parts(self, until_s: float) -> None:
        cluster = self._cluster
        harm: dict[str, Callable[[], Awaitable[None]]] = {
            "scheduler killed": lambda: self._random.choice(self._schedulers).kill(),
            "gateway replaced": lambda: self._random.choice(self._gateways).replace(),
            "redis stands still": lambda: cluster.redis.stand_still(_REDIS_S),
            "redis killed": cluster.redis.kill,
        }
        names = list(harm)
        while time.monotonic() + _PART_EVERY_S < until_s:
            await asyncio.sleep(self._random.uniform(0.2, 1.0) * _PART_EVERY_S)
            name = names[sum(self.counts[one] for one in names) % len(names)]
            self._say(name)
            self.counts[name] += 1
            await harm[name]()

    async def sample(self, every_s: float) -> None:
        """Sizes of the parts, until it is cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(every_s)
                self._cluster.measure()
