# SPDX-License-Identifier: Apache-2.0
"""How far is a scheduler's view from the truth, as it was reported and as it is moved on? And what does dispatch gain?

Simulated, with production's view, account, step models and dispatch (docs/operate/simulator.md). Statuses come in
production's cadence and are so old when they come. Several times a second of virtual time each instance's KV usage
and decode batch in the first scheduler's table, and the same moved on (`llumsched.foresight.moved_on`), are compared
with what it would report at that moment. What nobody but the engine can know is who ends; so each load is played
three times: all requests end at the `max_tokens` that their engine knows, half of them, none.

Herds: several schedulers share a cluster, each knows what it has sent itself and what statuses tell. With old statuses
all of them send to the same few instances. Each is played with statuses as they were reported and moved on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.objectives.outcome import Outcome
from benchmarks.simulated import Load
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.member import Cadence
from llumsim.cluster.metrics import Metrics, Summary
from llumsim.cluster.run import ClusterConfig, run
from llumsim.cluster.truth import Miss
from llumsim.engine.step_model import load_hardware
from tests.support.progress import Say
from tests.support.stats import median, quantile

AGES_S: Final = (0.05, 0.1, 0.2, 0.5)
FORETOLD: Final = (1.0, 0.5, 0.0)
SMALLER: Final = 3
_LOOK_S: Final = 0.213
_WARM_S: Final = 60.0
"""From the start of a run: nothing is looked at before. Step models and rates of endings are learnt then."""


@dataclass(frozen=True)
class Scene:
    name: str
    hardware: str
    num_instances: int
    rate: float
    """Requests a second, of all instances; M-M lengths."""
    seconds: float


SCENES: Final = (
    Scene("a10 moderate", "a10-llama-7b", 4, 1.2, 500.0),
    Scene("a10 high", "a10-llama-7b", 4, 1.85, 400.0),
    Scene("h100 moderate", "h100-llama-8b", 2, 20.0, 120.0),
    Scene("h100 high", "h100-llama-8b", 2, 44.0, 120.0),
)
HERD: Final = Scene("herd", "h100-llama-8b", 4, 120.0, 15.0)
SCHEDULERS: Final = (1, 2, 4)
HERD_AGES_S: Final = (0.2, 0.5)
TOP_K: Final = (1, 3)


def measure(quick: bool, seed: int, say: Say) -> list[Outcome]:
    ages, foretold, scenes = AGES_S, FORETOLD, SCENES
    schedulers, herd_ages, herd = SCHEDULERS, HERD_AGES_S, HERD
    if quick:
        ages, foretold, scenes = ages[2:3], foretold[:1], (replace(scenes[0], seconds=150.0),)
        schedulers, herd_ages, herd = schedulers[1:2], herd_ages[1:2], replace(herd, seconds=6.0)
    found: list[Outcome] = []
    for scene, age_s, share in itertools.product(scenes, ages, foretold):
        say(f"forward: {scene.name}, statuses {1000 * age_s:.0f} ms old, {share:.0%} foretold")
        found += _outcomes(scene, age_s, share, _misses(scene, age_s, share, seed))
    for number, age_s, top_k in itertools.product(schedulers, herd_ages, TOP_K[:1] if quick else TOP_K):
        say(f"forward: {number} schedulers, statuses {1000 * age_s:.0f} ms old, top {top_k}")
        found += _herd(herd, number, age_s, top_k, seed)
    return found


def _play(scene: Scene, cadence: Cadence, control: ControlConfig, seed: int) -> tuple[Summary, Metrics]:
    hardware = load_hardware(scene.hardware)
    arrivals = Load(rate=scene.rate, num_requests=round(scene.rate * scene.seconds), seed=seed).arrivals(
        hardware.engine
    )
    groups = [("", hardware, scene.num_instances)]
    return run(ClusterConfig(groups=groups, control=control, cadence=cadence, seed=seed), arrivals)


def _misses(scene: Scene, age_s: float, share: float, seed: int) -> list[Miss]:
    control = ControlConfig(rescheduling=None, foresight_s=_LOOK_S)
    _, metrics = _play(scene, Cadence(late_s=age_s, foretold=share), control, seed)
    until_s = scene.seconds  # afterwards there are no arrivals
    num_looks = len(metrics.misses) // scene.num_instances
    looks = range(min(int(_WARM_S / _LOOK_S), num_looks // 2), min(int(until_s / _LOOK_S), num_looks))
    return list(metrics.misses[looks.start * scene.num_instances : looks.stop * scene.num_instances])


def _outcomes(scene: Scene, age_s: float, share: float, misses: Sequence[Miss]) -> Iterator[Outcome]:
    more = {
        "age_ms": 1000 * median([one.age_s for one in misses]),
        "gone": sum(one.num_gone for one in misses) / len(misses),
        "looks": len(misses),
    }
    quiet = [one for one in misses if not one.num_gone]
    for what, unit in (("kv", 100.0), ("batch", 1.0)):
        stale, moved = _sizes(misses, f"reported_{what}", unit), _sizes(misses, f"moved_{what}", unit)
        stale_mean, moved_mean = sum(stale) / len(stale), sum(moved) / len(moved)
        nobody = [sum(_sizes(quiet, f"{view}_{what}", unit)) / max(len(quiet), 1) for view in ("reported", "moved")]
        yield Outcome(
            case=f"forward: {scene.name}, {1000 * age_s:.0f} ms, {share:.0%} foretold",
            figure={"kv": "KV usage, % points: mean error", "batch": "decode batch: mean error"}[what],
            baseline=stale_mean,
            ours=moved_mean,
            target=stale_mean / SMALLER,
            more={
                "median_stale": median(stale), "median_moved": median(moved),
                "p90_stale": quantile(stale, 0.9), "p90_moved": quantile(moved, 0.9),
                "nobody_ended_stale": nobody[0], "nobody_ended_moved": nobody[1], **more,
            },
        )  # fmt: skip


def _sizes(misses: Sequence[Miss], name: str, unit: float) -> list[float]:
    return [abs(getattr(one, name)) * unit for one in misses]


def _herd(scene: Scene, num_schedulers: int, age_s: float, top_k: int, seed: int) -> Iterator[Outcome]:
    results = []
    for forward in (False, True):
        control = ControlConfig(rescheduling=None, num_schedulers=num_schedulers, top_k=top_k, forward_status=forward)
        cadence = Cadence(late_s=age_s, foretold=0.0 if forward else None)
        results.append(_play(scene, cadence, control, seed))
    (stale, stale_metrics), (moved, moved_metrics) = results
    case = f"forward: {num_schedulers} schedulers, {1000 * age_s:.0f} ms, top {top_k}"
    for figure, name in (
        ("TTFT mean, s", "ttft_mean_s"),
        ("TTFT p99, s", "ttft_p99_s"),
        ("TPOT p99, s", "tpot_p99_s"),
    ):
        yield Outcome(case=case, figure=figure, baseline=getattr(stale, name), ours=getattr(moved, name))
    yield Outcome(
        case=case, figure="KV usage: spread between instances",
        baseline=_spread(stale_metrics, scene), ours=_spread(moved_metrics, scene),
    )  # fmt: skip


def _spread(metrics: Metrics, scene: Scene) -> float:
    """The standard deviation of what the instances have in use, while requests come; the mean of all samples."""
    found = []
    for sample in metrics.samples:
        if scene.seconds / 4 < sample.at_s < scene.seconds:
            mean = sum(sample.loads) / len(sample.loads)
            found.append((sum((load - mean) ** 2 for load in sample.loads) / len(sample.loads)) ** 0.5)
    return sum(found) / max(len(found), 1)
