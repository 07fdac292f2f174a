# SPDX-License-Identifier: Apache-2.0
"""How near do predictions come to what clients of real engines then see?

Two real engines, each step as long as a device's (`benchmarks.calibrate.steps_on_cpu`), tell a dispatcher of this
process their status; requests go straight to the engine that it chooses. Before each decision it is noted what
`predicted_ttft` and `predicted_tpot` say of the engine that is then taken, by what was learnt until then: nothing of
the request itself. A warm-up on idle engines gives what is added for the way: the API server, and back to the client.

Then the load changes at once, and is five times that: how long do predictions take to be right again?
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.calibrate.engines import ENGINE, spec
from benchmarks.calibrate.load import ANY, Lengths
from benchmarks.objectives.outcome import Outcome
from benchmarks.rebalance import TOKEN_IDS
from llumsched.cluster.providers.account import Account
from llumsched.cms.embedded import EmbeddedStore
from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.document import Mode, load_policy
from llumsched.policy.metrics import METRICS
from llumsched.request import Request
from llumsched.up.ports import free_port
from tests.support.client import Client
from tests.support.harness import Fleet
from tests.support.progress import Say
from tests.support.stats import median, quantile

NUM_ENGINES: Final = 2
TARGET: Final = 0.05
_OUTPUTS: Final = Lengths(ANY.prompt, (24, 120))
"""Prompts as the probe of the calibration has them, and outputs that are long enough to have a TPOT."""


@dataclass(frozen=True)
class Load:
    name: str
    rate: float
    """Requests a second for each engine."""
    seconds: float
    has_target: bool = False


IDLE: Final = Load("idle", 0.2, 40.0)
CHANGED: Final = Load("five times the load at once", 1.0, 100.0)
CONVERGED_S: Final = 60.0
"""Time after a change from which on predictions are to be right."""
WINDOW_S: Final = 10.0
LOADS: Final = (
    Load("moderate", 0.6, 60.0, has_target=True),
    Load("busy", 1.0, 60.0),
    Load("near saturation", 1.4, 40.0),
)


@dataclass(frozen=True)
class Seen:
    """One request: milliseconds as predicted, and as its client saw them."""

    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    began_s: float = 0.0
    """Its arrival, since the load began."""


class World:
    def __init__(self, store: EmbeddedStore) -> None:
        clock = time.monotonic
        self._account = Account(clock, 10.0)
        self._clock = clock
        self.dispatcher = Dispatcher(store.view, load_policy("load-balance", Mode.FULL), self._account, clock)
        self._number = 0

    def sent(self, request_id: str, instance_id: str, num_prompt: int) -> None:
        """A request goes to its instance now: for who wants to know."""

    async def serve(self, num_prompt: int, num_output: int, chance: random.Random) -> Seen:
        """Sends one request to where it belongs, and waits for its end."""
        self._number += 1
        prompt = chance.choices(TOKEN_IDS, k=num_prompt)
        request = Request(id=f"r{self._number}", prompt_num_tokens=num_prompt)
        table = self.dispatcher.table
        columns = Candidates(table, Context(self._clock(), request))
        said = {name: METRICS[name].values(columns).copy() for name in ("predicted_ttft", "predicted_tpot")}
        rows = dict(table.index)
        (placed,) = self.dispatcher.schedule(request)
        self.sent(request.id, placed.instance.id, num_prompt)
        row, address = rows[placed.instance.id], placed.instance.api_server
        began_s = time.monotonic()
        async with Client(f"http://{address}") as client:
            stream = await client.complete(prompt, num_output, request_id=request.id, ignore_eos=True)
            await stream.result()
        ttft_ms = (stream.times[0] - began_s) * 1e3
        tpot_ms = (stream.times[-1] - stream.times[0]) / (len(stream.times) - 1) * 1e3
        return Seen((float(said["predicted_ttft"][row]), ttft_ms), (float(said["predicted_tpot"][row]), tpot_ms))


async def play(world: World, load: Load, seed: int) -> list[Seen]:
    chance = random.Random(seed)
    tasks = []
    begin_s = at_s = time.monotonic()
    while (at_s := at_s + chance.expovariate(load.rate * NUM_ENGINES)) < begin_s + load.seconds:
        await asyncio.sleep(at_s - time.monotonic())
        tasks.append((at_s - begin_s, asyncio.create_task(world.serve(*_OUTPUTS.draw(chance), chance))))
    return [replace(await task, began_s=began_s) for began_s, task in tasks]


async def measure(logs: Path, loads: Sequence[Load], overlap: float, seed: int, say: Say) -> list[Outcome]:
    port = free_port()
    store, fleet = EmbeddedStore(port=port), Fleet(logs)
    await store.start()
    try:
        say(f"latency: starting {NUM_ENGINES} engines")
        specs = [spec(number, [f"127.0.0.1:{port}"], logs, overlap) for number in range(NUM_ENGINES)]
        await asyncio.to_thread(fleet.start, *specs)
        world = World(store)
        say("latency: warm-up on idle engines")
        warm = await play(world, IDLE, seed)
        way_ms = median(came - said for said, came in (one.ttft_ms for one in warm[len(warm) // 2 :]))
        changed = replace(CHANGED, seconds=min(CHANGED.seconds, 2 * loads[0].seconds))
        say(f"latency: {changed.name}, {changed.seconds:.0f} s")
        found = converged(await play(world, changed, seed), way_ms)
        for number, load in enumerate(loads, start=1):
            say(f"latency: {load.name}, {load.rate} requests a second for each engine, {load.seconds:.0f} s")
            seen = await play(world, load, seed + number)
            found += _outcomes(load, seen, way_ms)
        return found
    finally:
        await store.close()
        await asyncio.to_thread(fleet.close)


def converged(seen: Sequence[Seen], way_ms: float) -> list[Outcome]:
    """Median errors after a change, of the requests of each window; the baseline is the first."""
    found = []
    for name, errors in (
        ("TTFT", [(one.began_s, abs((one.ttft_ms[0] + way_ms) / one.ttft_ms[1] - 1)) for one in seen]),
        ("TPOT", [(one.began_s, abs(one.tpot_ms[0] / one.tpot_ms[1] - 1)) for one in seen]),
    ):
        windows: dict[int, list[float]] = {}
        for began_s, error in errors:
            windows.setdefault(int(began_s / WINDOW_S), []).append(error)
        medians = {number: median(of_window) for number, of_window in sorted(windows.items())}
        late = [error for began_s, error in errors if began_s >= CONVERGED_S]
        wrong = [number for number, error in medians.items() if error > 2 * TARGET]
        found.append(
            Outcome(
                case=f"latency: {name} after a change of load",
                figure=f"median error from {CONVERGED_S:.0f} s on",
                baseline=next(iter(medians.values())),
                ours=median(late) if late else medians[max(medians)],
                target=TARGET if late else None,
                more={"within twice that after_s": WINDOW_S * (max(wrong) + 1 if wrong else 0), "requests": len(seen)},
            )
        )
    return found


def _outcomes(load: Load, seen: Sequence[Seen], way_ms: float) -> list[Outcome]:
    found = []
    for name, pairs in (
        ("TTFT", [(said + way_ms, came) for said, came in (one.ttft_ms for one in seen)]),
        ("TPOT", [one.tpot_ms for one in seen]),
    ):
        errors = [said / came - 1 for said, came in pairs]
        sizes = [abs(error) for error in errors]
        # What somebody who knows no more than the load's median would say.
        usual = median(came for _, came in pairs)
        blind = median(abs(usual / came - 1) for _, came in pairs)
        found.append(
            Outcome(
                case=f"latency: {name}, {load.name}",
                figure="median error",
                baseline=blind,
                ours=median(sizes),
                target=TARGET if load.has_target else None,
                more={"p90": quantile(sizes, 0.9), "bias": median(errors), "requests": len(pairs),
                      "median_ms": usual, "way_ms": way_ms, "kv_tokens": ENGINE.num_blocks * ENGINE.block_size},
            )
        )  # fmt: skip
    return found
