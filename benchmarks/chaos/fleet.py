# SPDX-License-Identifier: Apache-2.0
"""Simulated instances in a process of their own, which does them harm when it is told.

Orders come on stdin and are answered on stdout, a line of JSON each: `{"do": "kill", "id": "i-7"}`. What may be done to
an instance is in `HARM`; `mend` undoes it all; `state` tells what the engines hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import uvloop

from llumsim.live import SimulatedCluster, SimulatedInstance, engine_model

STEP_S: Final = 0.05
_TIMES_SLOWER: Final = 50.0
_STATUS: Final = 500


async def _hang(instance: SimulatedInstance) -> None:
    instance.hang()


async def _fail(instance: SimulatedInstance) -> None:
    instance.refuse(_STATUS)


async def _slow(instance: SimulatedInstance) -> None:
    instance.slow_down(_TIMES_SLOWER)


HARM: Final[Mapping[str, Callable[[SimulatedInstance], Awaitable[None]]]] = {
    "kill": SimulatedInstance.kill,
    "hang": _hang,
    "fail": _fail,
    "slow": _slow,
    "cut": SimulatedInstance.cut_off,
}


class _Fleet:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._harm: dict[str, str] = {}

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "state":
                return self._state()
            case "mend":
                await self._mend(order["id"])
            case harm:
                await HARM[harm](self._cluster.instances[order["id"]])
                self._harm[order["id"]] = harm
        return {}

    async def _mend(self, instance_id: str) -> None:
        instance, harm = self._cluster.instances[instance_id], self._harm.pop(instance_id, "")
        if harm == "kill":
            await self._cluster.add(instance_id)
            return
        instance.resume()
        instance.refuse(0)
        instance.slow_down(1.0)
        if harm == "cut":
            await instance.reconnect()

    def _state(self) -> dict[str, int]:
        engines = [instance.engine for instance in self._cluster.instances.values()]
        return {
            "requests": sum(len(engine.requests) for engine in engines),
            "blocks": sum(engine.config.num_blocks - engine.blocks.num_free for engine in engines),
        }


async def _run(size: int, cms: str) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    model = engine_model(step_s=STEP_S)
    async with SimulatedCluster(size, cms, prefix="i-", model=model, api=True) as cluster:
        fleet = _Fleet(cluster)
        print(json.dumps(sorted(cluster.instances)), flush=True)
        while line := await orders.readline():
            print(json.dumps(await fleet.obey(json.loads(line))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, required=True)
    parser.add_argument("--cms", required=True)
    args = parser.parse_args()
    uvloop.run(_run(args.instances, args.cms))


if __name__ == "__main__":
    main()
