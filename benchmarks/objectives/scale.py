# SPDX-License-Identifier: Apache-2.0
"""How many instances fewer do moves need, where the scheduler says how many there are? And what does a ramp need?

Equal tails. As in §6.5 of Llumnix's paper at most 16 instances serve prompts and outputs of its "long" lengths. The
baseline stands in for INFaaS++: it has the same scaler, and its requests stay where they are. For each load the
freeness that is asked for is swept, which trades instances for the P99 of TTFT; compared is the mean number of
instances, those that start or empty themselves among them, at which each setting has a P99 of `TAIL_S`: between two of
its points, on a logarithmic scale. Instances are kept ready and serve within `_READY_S`, as the paper does not say how
long its own take; one case has the simulator's minute instead.

Ramp. From 2 to 10 and down to 1 requests a second, at most 8 instances, and a cold start of 100 s, as llm-d's: what
share of the requests meets its objectives, for how many instances on average? The baseline has 8 all the time, which is
what the peak needs.

Settings were chosen on seeds 100 and 101; figures are of the seed that is asked for.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.objectives.outcome import Outcome
from benchmarks.paper.lab import INFAAS
from benchmarks.simulated import Load, Setting, read_setting
from llumsched.scaling.scaling_config import Bounds, ScalingConfig
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.metrics import Slo, Summary
from llumsim.cluster.run import ClusterConfig, run
from llumsim.cluster.workload import LENGTHS, Arrival, clipped
from llumsim.engine.step_model import Hardware, load_hardware
from tests.support.progress import Say

TAIL_S: Final = 5.0
MOST: Final = 16
POINT_TARGET, SWEEP_TARGET = 0.64, 0.82
"""Instances as a share of the baseline's: 36 % fewer at the paper's point, 18 % over its sweep."""
_FREENESS: Final = (-150.0, 0.0, 160.0, 640.0)
"""Below which there are too few instances; a negative one has requests wait for each other's end."""
_BAND: Final = 160.0
"""Freeness above that, at which there are too many."""
_READY_S: Final = 5.0
_HARDWARE: Final = load_hardware("a10-llama-7b")
_OURS: Final = "load-balance+moves"

RAMP_MOST: Final = 8
RAMP_TARGET: Final = 5.9
ATTAINMENT_TARGET: Final = 0.958
_RAMP_RATES: Final = (2.0, 10.0, 1.0)
_RAMP_COLD_S: Final = 100.0
_RAMP_SLO: Final = Slo(ttft_s=5.0, tpot_s=0.15)
_RAMP_LENGTHS: Final = LENGTHS["medium"], LENGTHS["short"]
_RAMP: Final = ScalingConfig(
    bounds=Bounds(1, RAMP_MOST), low_freeness=200.0, high_freeness=350.0, cold_start_s=_RAMP_COLD_S, settle_s=30.0
)


@dataclass(frozen=True)
class Case:
    name: str
    rate: float = 1.5
    """Requests a second."""
    cv: float = 1.0
    cold_start_s: float = _READY_S

    @property
    def scaling(self) -> ScalingConfig:
        return ScalingConfig(
            bounds=Bounds(1, MOST), cold_start_s=self.cold_start_s, settle_s=max(10.0, self.cold_start_s / 2)
        )


POINT: Final = Case("1.5/s")
SWEEP: Final = (POINT, Case("1/s", rate=1.0), Case("2.2/s", rate=2.2), Case("1.5/s, CV 2", cv=2.0),
                Case("1.5/s, CV 4", cv=4.0))  # fmt: skip
COLD: Final = Case("1.5/s, cold start 60 s", cold_start_s=60.0)


@dataclass(frozen=True)
class Spent:
    """One run: what it cost, and what it came to."""

    instances: float
    """Mean number, cold starts and those that leave included."""
    tail_s: float
    """P99 of TTFT."""


def measure(*, quick: bool, seed: int, say: Say) -> list[Outcome]:
    num_requests, seconds = (300, 300.0) if quick else (1_500, 1_800.0)
    found = {case: _at_equal_tail(case, num_requests, seed, say) for case in ((POINT,) if quick else (*SWEEP, COLD))}
    outcomes = [
        Outcome(f"scale: instances at a P99 of {TAIL_S:g} s, {case.name}", "mean instances", *both,
                POINT_TARGET * both[0] if case is POINT else None)
        for case, both in found.items()
    ]  # fmt: skip
    if not quick:
        shares = [ours / baseline for baseline, ours in (found[case] for case in SWEEP)]
        outcomes.append(Outcome("scale: the same over the sweep", "share of the baseline's, mean", 1.0,
                                statistics.fmean(shares), SWEEP_TARGET))  # fmt: skip
    return outcomes + list(_ramp(seconds, seed, say))


def _at_equal_tail(case: Case, num_requests: int, seed: int, say: Say) -> tuple[float, float]:
    """Mean instances of the baseline and of ours."""
    hardware = replace(_HARDWARE, cold_start_s=case.cold_start_s)
    load = Load(lengths="l-l", rate=case.rate, cv=case.cv, num_requests=num_requests, seed=seed)
    arrivals = load.arrivals(hardware.engine)

    def played(name: str) -> Iterator[Spent]:
        for freeness in _FREENESS:
            scaling = replace(case.scaling, low_freeness=freeness, high_freeness=freeness + _BAND)
            summary = _play(read_setting(name), hardware, arrivals, MOST, scaling, seed)
            spent = Spent(summary.instance_s / summary.virtual_s, summary.ttft_p99_s)
            who = "ours" if name == _OURS else "baseline"
            say(f"scale: {case.name}, {who}, freeness {freeness:g}: {spent.instances:.2f}, P99 {spent.tail_s:.2f} s")
            yield spent

    return instances_at(TAIL_S, list(played(INFAAS))), instances_at(TAIL_S, list(played(_OURS)))


def instances_at(tail_s: float, points: Sequence[Spent]) -> float:
    """The fewest instances with which the tail is `tail_s`: between two points, by the logarithm of the tail. Of points
    that are all better, the cheapest; of points that are all worse, the dearest."""
    ordered = sorted(points, key=lambda one: (one.instances, -one.tail_s))
    if ordered[0].tail_s <= tail_s:
        return ordered[0].instances
    for one, other in itertools.pairwise(ordered):
        if other.tail_s <= tail_s:
            share = math.log(one.tail_s / tail_s) / math.log(one.tail_s / max(other.tail_s, 1e-9))
            return one.instances + share * (other.instances - one.instances)
    return ordered[-1].instances


def _ramp(seconds: float, seed: int, say: Say) -> Iterator[Outcome]:
    hardware = replace(_HARDWARE, cold_start_s=_RAMP_COLD_S)
    arrivals = clipped(ramp(seconds, random.Random(seed)), hardware.engine.max_model_len)
    found = {}
    for name, scaling in (("static", None), ("scaled", _RAMP)):
        summary = _play(read_setting(_OURS), hardware, arrivals, RAMP_MOST, scaling, seed, _RAMP_SLO)
        found[name] = summary.slo_attainment, summary.instance_s / summary.virtual_s, summary.num_lost
        say(f"scale: ramp, {name}: attainment {found[name][0]:.4f}, {found[name][1]:.2f} instances")
    (all_met, all_there, _), (met, there, num_lost) = found["static"], found["scaled"]
    yield Outcome(
        f"scale: ramp {'→'.join(f'{rate:g}' for rate in _RAMP_RATES)}/s", f"mean instances of {RAMP_MOST}",
        all_there, there, RAMP_TARGET, {"requests": len(arrivals), "lost": num_lost},
    )  # fmt: skip
    yield Outcome("scale: its misses", "share of the requests beyond their objectives", 1 - all_met, 1 - met,
                  1 - ATTAINMENT_TARGET)  # fmt: skip


def ramp(seconds: float, draw: random.Random) -> list[Arrival]:
    """Poisson arrivals whose rate grows evenly for half of the time, and falls evenly from there on."""
    first, peak, last = _RAMP_RATES
    at_s, arrivals = 0.0, list[Arrival]()
    while (at_s := at_s + draw.expovariate(peak)) < seconds:
        part = 2 * at_s / seconds
        rate = first + (peak - first) * part if part < 1 else peak + (last - peak) * (part - 1)
        if draw.random() * peak < rate:
            prompts, outputs = _RAMP_LENGTHS
            arrivals.append(Arrival(at_s, prompts.draw(draw), outputs.draw(draw)))
    return arrivals


def _play(
    setting: Setting, hardware: Hardware, arrivals: Sequence[Arrival], most: int, scaling: ScalingConfig | None,
    seed: int, slo: Slo | None = None,
) -> Summary:  # fmt: skip
    config = ClusterConfig(
        groups=[("", hardware, most)],
        control=ControlConfig(policy=setting.policy, rescheduling=setting.rescheduling),
        scaling=scaling,
        slo=slo or Slo(),
        seed=seed,
    )
    summary, _ = run(config, arrivals)
    return summary
