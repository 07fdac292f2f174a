# SPDX-License-Identifier: Apache-2.0
"""What the simulator is told of real engines, measured on loads of its own: none of what it is judged by.

- On idle engines, through gateway and scheduler: what a request needs before its first step and after it.
- Of engines alone, under a load that grows: the five numbers of the step model, and what a message takes.
- Of a request that is alone and moves to and fro: how fast blocks are copied.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.calibrate.comparison import median_size
from benchmarks.calibrate.engines import ENGINE, MODEL, loop_gap_s, measured, records_of
from benchmarks.calibrate.load import ANY, LONG, SHORT, ramp
from benchmarks.calibrate.real import Cluster
from benchmarks.rebalance import TOKEN_IDS, Case, play
from llumlet.contract.client import LlumletClient
from llumsched.latency.fitting import Coefficients, MeasuredStep, fit
from llumsim.cluster.member import Cadence
from llumsim.engine.step_model import Hardware, StepModel
from tests.support.client import Client
from tests.support.harness import Server
from tests.support.moves import Move, move_stream
from tests.support.progress import Say
from tests.support.stats import median, quantile

NUM_ALONE: Final = 24
"""Requests on idle engines."""
NUM_MOVES: Final = 12
HELD_OUT: Final = 0.25
"""Share of each engine's steps, the last ones, that the fit does not see."""
_PING_PAUSE_S: Final = 0.1
_NO_LINK: Final = 1e12


@dataclass(frozen=True)
class Probed:
    hardware: Hardware
    coefficients: Coefficients
    hop_s: float
    num_steps: int
    held_out_error: float
    """Median over the steps that the fit has not seen, relative to what they took."""
    held_out_p90: float
    held_out_bias: float
    """Median of the signed errors."""
    num_moves: int

    @property
    def cadence(self) -> Cadence:
        return Cadence(hop_s=self.hop_s)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_s": {name: float(f"{value:.4g}") for name, value in self.coefficients._asdict().items()},
            "steps": self.num_steps,
            "held_out_error": round(self.held_out_error, 4),
            "held_out_p90": round(self.held_out_p90, 4),
            "held_out_bias": round(self.held_out_bias, 4),
            "hop_ms": round(self.hop_s * 1e3, 3),
            "request_ms": round(self.hardware.request_s * 1e3, 2),
            "answer_ms": round(self.hardware.answer_s * 1e3, 2),
            "link_bytes_per_s": round(self.hardware.link_bytes_per_s),
            "probe_moves": self.num_moves,
        }


async def probe(cluster: Cluster, rates: Sequence[float], seconds: float, say: Say, name: str) -> Probed:
    """`rates`: requests a second of each engine, in turn, for so long. Raises ValueError if the steps do not determine
    the model."""
    say(f"{name}: requests on idle engines")
    before_s, after_s = await _alone(cluster)
    say(f"{name}: steps under a load that grows")
    began_s = time.monotonic()
    hop_s = await _under_load(cluster.engines, rates, seconds)
    ended_s = time.monotonic()
    records = {engine.name: records_of(engine) for engine in cluster.engines}
    steps = [list(measured(each, began_s, ended_s)) for each in records.values()]
    seen, unseen = _split(steps)
    coefficients = fit(seen)
    errors = coefficients.errors(unseen)
    gap_s = median(gap for each in records.values() for gap in loop_gap_s(each))
    moves: list[Move] = []
    if len(cluster.engines) > 1:
        say(f"{name}: moves")
        moves = await _moves(cluster.engines)
    hardware = Hardware(
        name=name,
        step=StepModel.of_seconds(*coefficients),
        engine=ENGINE,
        bytes_per_token=MODEL.kv_bytes_per_token,
        link_bytes_per_s=_speed(moves),
        instances_per_node=len(cluster.engines),
        cold_start_s=0.0,
        request_s=max(before_s - 3 * hop_s, 0.0),
        # The simulator's step ends with the engine's loop, not with the model.
        answer_s=max(after_s - gap_s - hop_s, 0.0),
        sources=(f"python -m benchmarks.calibrate: {name}, {len(seen)} steps",),
    )
    return Probed(
        hardware,
        coefficients,
        hop_s,
        len(seen) + len(unseen),
        median_size(errors),
        quantile(map(abs, errors), 0.9),
        median(errors),
        len(moves),
    )


async def _alone(cluster: Cluster) -> tuple[float, float]:
    """Medians of the seconds from a request's begin to that of its first step, and from the end of that step's model
    to the first token, of requests that are alone in the cluster."""
    chance = random.Random(0)
    seen = []
    async with cluster.control(Case("round-robin", False)) as control, Client(control.gateway_url) as client:
        await control.knows(len(cluster.engines))
        await cluster.warm_up(control)
        for lengths in itertools.islice(itertools.cycle((LONG, SHORT)), NUM_ALONE):
            prompt = chance.choices(TOKEN_IDS, k=lengths.draw(chance)[0])
            began_s = time.monotonic()
            stream = await client.complete(prompt, 2, ignore_eos=True)
            await stream.result()
            seen.append((began_s, stream.times[0]))
            await asyncio.sleep(chance.uniform(0.05, 0.15))
    steps = sorted(itertools.chain.from_iterable(map(records_of, cluster.engines)))
    first = [next(step for step in steps if step.began_s > began_s) for began_s, _ in seen]
    before = [step.began_s - began_s for step, (began_s, _) in zip(first, seen, strict=True)]
    after = [token_s - step.ended_s for step, (_, token_s) in zip(first, seen, strict=True)]
    return median(before), median(after)


async def _under_load(engines: Sequence[Server], rates: Sequence[float], seconds: float) -> float:
    """Loads each engine by itself, and asks the first for its status meanwhile: half of how long that takes, the
    median."""
    pings: list[float] = []

    async def ping() -> None:
        async with LlumletClient(str(engines[0].llumlet)) as client:
            while True:
                began_s = time.monotonic()
                await client.get_instance_status()
                pings.append(time.monotonic() - began_s)
                await asyncio.sleep(_PING_PAUSE_S)

    pinging = asyncio.create_task(ping())
    try:
        await asyncio.gather(
            *(play(engine.base_url, ramp(rates, seconds, seed)) for seed, engine in enumerate(engines))
        )
    finally:
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)
    return median(pings) / 2


async def _moves(engines: Sequence[Server]) -> list[Move]:
    """Moves of a request that is alone in two engines, to and fro."""
    chance, found = random.Random(1), []
    async with Client(engines[0].base_url) as client:
        prompt = chance.choices(TOKEN_IDS, k=ANY.prompt[1])
        stream = await client.complete(prompt, ENGINE.max_model_len - len(prompt), ignore_eos=True)
        await stream.wait_for(1)
        for source, destination in itertools.islice(itertools.cycle(itertools.permutations(engines[:2])), NUM_MOVES):
            found.append(await move_stream(source, destination, stream))
            await asyncio.sleep(chance.uniform(0.05, 0.15))
        await stream.disconnect()
    return [move for move in found if move.live]


def _speed(moves: Sequence[Move]) -> float:
    """Bytes a second of the last copy of moves, which is of one block or more: real links are no slower. How long
    rounds take is not seen from outside; here they are over before the step is in which they began. Without moves,
    nearly infinite."""
    seconds = sum(move.phase_ms["last_copy"] / 1e3 for move in moves)
    return len(moves) * ENGINE.block_size * MODEL.kv_bytes_per_token / seconds if moves else _NO_LINK


def _split(engines: Sequence[Sequence[MeasuredStep]]) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """What the fit sees, and what it does not."""
    seen: list[MeasuredStep] = []
    unseen: list[MeasuredStep] = []
    for steps in engines:
        at = round(len(steps) * (1 - HELD_OUT))
        seen += steps[:at]
        unseen += steps[at:]
    return seen, unseen
