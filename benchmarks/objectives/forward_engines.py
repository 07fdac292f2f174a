# SPDX-License-Identifier: Apache-2.0
"""How far is a view from the truth on real engines, as it was reported and as it is moved on?

The engines, the load and the way requests go are those of `latency`. Beside its scheduler stand others that only look:
each hears of every status so much later, and of every request when it is sent. Whenever a status comes in time, it is
the truth of that moment, and each of them is held against it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.calibrate.engines import spec
from benchmarks.objectives.forward import SMALLER
from benchmarks.objectives.latency import IDLE, LOADS, NUM_ENGINES, Load, World, play
from benchmarks.objectives.outcome import Outcome
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.account import Account
from llumsched.cluster.view import View
from llumsched.cms.embedded import EmbeddedStore
from llumsched.dispatch.dispatcher import Dispatcher, Knowledge
from llumsched.foresight.moved_on import Forecast, Forward
from llumsched.policy.document import Mode, load_policy
from llumsched.up.ports import free_port
from tests.support.harness import Fleet
from tests.support.progress import Say
from tests.support.stats import median, quantile

AGES_S: Final = (0.1, 0.2, 0.5)
RUNS: Final = LOADS[1:]
"""Busy, and near saturation."""
_FIGURES: Final = {
    "num_used_gpu_tokens": "KV usage, % points: mean error",
    "scheduler_running_to_decode_requests_num": "decode batch: mean error",
}


class _Looker:
    """Hears of statuses `late_s` later than others, and observes the view of those that hear at once."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.errors: dict[str, list[tuple[float, float]]] = {name: [] for name in _FIGURES}
        """Sizes, by column: of what was reported, and of what was moved on."""
        self._view = View()
        self.account = Account(time.monotonic, 10.0)
        policy, knowledge = load_policy("load-balance", Mode.FULL), Knowledge(forecast=Forecast(time.monotonic))
        self._dispatcher = Dispatcher(self._view, policy, self.account, time.monotonic, knowledge=knowledge)

    def appeared(self, instance: Instance) -> None:
        self._view.put_metadata(instance.metadata)
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        status = instance.status
        if status is None:
            return
        self._look(instance)
        asyncio.get_running_loop().call_later(self.late_s, self._view.put_status, status)

    def left(self, instance: Instance) -> None:
        self._view.remove(instance.id)

    def _look(self, true: Instance) -> None:
        table, status = self._dispatcher.table, true.status
        row = table.index[true.id]
        if status is None or table.instances[row].status is None:
            return
        forward = Forward(table, time.monotonic())
        for name, errors in self.errors.items():
            unit = 100 / status.num_total_gpu_tokens if "tokens" in name else 1.0
            is_true = getattr(status, name)
            sizes = [abs(float(view[name][row]) - is_true) * unit for view in (table, forward)]
            errors.append((sizes[0], sizes[1]))


class _Watched(World):
    """Requests of it are told to all lookers."""

    def __init__(self, store: EmbeddedStore, lookers: Sequence[_Looker]) -> None:
        super().__init__(store)
        self._lookers = lookers

    def sent(self, request_id: str, instance_id: str, num_prompt: int) -> None:
        for looker in self._lookers:
            looker.account.dispatched(request_id, instance_id, InferType.NEUTRAL, num_prompt)


async def measure(logs: Path, loads: Sequence[Load], overlap: float, seed: int, say: Say) -> list[Outcome]:
    port = free_port()
    store, fleet = EmbeddedStore(port=port), Fleet(logs)
    await store.start()
    try:
        say(f"engines: starting {NUM_ENGINES}")
        specs = [spec(number, [f"127.0.0.1:{port}"], logs, overlap) for number in range(NUM_ENGINES)]
        await asyncio.to_thread(fleet.start, *specs)
        lookers = [_Looker(late_s) for late_s in AGES_S]
        for looker in lookers:
            store.view.observe(looker)
        world = _Watched(store, lookers)
        say("engines: warm-up")
        await play(world, IDLE, seed)
        found = []
        for number, load in enumerate(loads, start=1):
            say(f"engines: {load.name}, {load.rate} requests a second for each engine, {load.seconds:.0f} s")
            for looker in lookers:
                looker.errors = {name: [] for name in _FIGURES}
            await play(world, load, seed + number)
            found += [outcome for looker in lookers for outcome in _outcomes(load, looker)]
        return found
    finally:
        await store.close()
        await asyncio.to_thread(fleet.close)


def _outcomes(load: Load, looker: _Looker) -> Iterator[Outcome]:
    for name, figure in _FIGURES.items():
        reported, moved = (list(each) for each in zip(*looker.errors[name], strict=True))
        mean = sum(reported) / len(reported)
        yield Outcome(
            case=f"engines: {load.name}, {1000 * looker.late_s:.0f} ms",
            figure=figure,
            baseline=mean,
            ours=sum(moved) / len(moved),
            target=mean / SMALLER,
            more={
                "median_stale": median(reported), "median_moved": median(moved),
                "p90_stale": quantile(reported, 0.9), "p90_moved": quantile(moved, 0.9), "looks": len(moved),
            },
        )  # fmt: skip
