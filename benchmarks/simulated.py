# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of simulated clusters have in common: a load, a setting of the scheduler, a run, and its progress."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llumlet.process import setting_sources, settings
from llumsched.policy.document import Mode, load_policy
from llumsched.policy.reader import built_in_policies
from llumsched.rescheduling import switches as rescheduling
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsim.cluster.workload import (
    LENGTHS,
    PAIRS,
    Arrival,
    Lengths,
    assigned,
    clipped,
    made_up,
    prioritized,
    read_trace,
    scaled,
    waved,
)
from llumsim.engine.step_model import EngineConfig

_RESCHEDULING: Final = (rescheduling.Switches, ReschedulingConfig)
MOVES: Final = "+moves"
"""Suffix of a setting's policy: with the rescheduler."""
NOTATION: Final = "[NAME=]POLICY[+moves [--rescheduling-…]]"
SETTING_HELP: Final = (
    f"{', '.join(built_in_policies())}, or a .yaml file; +moves adds the rescheduler, whose flags may follow, all in "
    "one word: 'eager=load-balance+moves --rescheduling-horizon-seconds 10'"
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests, made up or of a trace; the same values make the same ones."""

    lengths: str | tuple[Lengths, Lengths] = "m-m"
    """Lengths of a made-up load: a name of `PAIRS`, or of prompts and of outputs."""
    num_requests: int = 10_000
    cv: float = 1.0
    """Variation of the time between two requests."""
    valley: float = 1.0
    """The least rate of a made-up load, as a share of `rate`, which is then the greatest; it begins with the least."""
    period_s: float = 3600.0
    """From one valley to the next."""
    trace: Path | None = None
    seconds: float | None = None
    """After which a trace is cut."""
    rate: float | None = None
    """Requests a second; of a trace its own if None."""
    urgent: float = 0.0
    """Share of the requests that go first."""
    models: Mapping[str, float] = field(default_factory=dict)
    """Models and their weights; if there are none, requests are for any."""
    seed: int = 0

    def arrivals(self, engine: EngineConfig) -> list[Arrival]:
        """What of it fits an engine. Raises ValueError if nothing does, OSError."""
        draw = random.Random(self.seed)
        arrivals = self._of_trace(self.trace, draw) if self.trace else self._made_up(draw)
        arrivals = clipped(arrivals, min(engine.max_model_len, engine.num_blocks * engine.block_size))
        if self.urgent:
            arrivals = prioritized(arrivals, self.urgent, draw)
        if self.models:
            arrivals = assigned(arrivals, dict(self.models), draw)
        if not arrivals:
            raise ValueError("no request fits an engine")
        return arrivals

    def _of_trace(self, path: Path, draw: random.Random) -> list[Arrival]:
        trace = read_trace(path)
        if self.seconds:
            trace = [arrival for arrival in trace if arrival.at_s <= self.seconds]
        own_rate = len(trace) / max(trace[-1].at_s, 1e-9)
        return scaled(trace, self.rate / own_rate, draw) if self.rate else trace

    def _made_up(self, draw: random.Random) -> list[Arrival]:
        if not self.rate:
            raise ValueError("a made-up load needs a --rate")
        lengths = self.lengths
        if isinstance(lengths, str):
            prompts, outputs = PAIRS[lengths]
            lengths = LENGTHS[prompts], LENGTHS[outputs]
        return waved(made_up(self.rate, self.num_requests, lengths, draw, cv=self.cv), self.valley, self.period_s)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the scheduler."""

    name: str
    policy: str
    """The policy of dispatch."""
    rescheduling: ReschedulingConfig | None = None
    """The rescheduler's settings. None: nothing moves."""
    priority_headroom: float | None = None
    """In place of the built-in one, for dispatch and rescheduling alike."""


def share(text: str) -> float:
    """A flag's value. Raises ArgumentTypeError, ValueError."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: above 0 and below 1")
    return value


def add_rescheduling(parser: argparse.ArgumentParser) -> None:
    """The rescheduler's flags, for all settings that move."""
    settings.add_arguments(parser, (ReschedulingConfig,))


def read_setting(text: str, common: argparse.Namespace | None = None) -> Setting:
    """The setting that a text in `NOTATION` says. `common`: flags of the rescheduler that hold where the setting does
    not say otherwise. Raises ValueError that says everything that is wrong."""
    words = shlex.split(text)
    if not words:
        raise ValueError("an empty setting")
    first, *flags = words
    name, equals, rest = first.partition("=")
    policy, has_moves = (rest if equals else name).removesuffix(MOVES), first.endswith(MOVES)
    if flags and not has_moves:
        raise ValueError(f"setting {text!r}: flags are for the rescheduler, which needs {MOVES}")
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_rescheduling(parser)
    args = parser.parse_args(flags, argparse.Namespace(**vars(common) if common else {}))
    load_policy(policy, Mode.FULL)
    reading = setting_sources.read("rescheduler", _RESCHEDULING, args, environ={})
    _, config = rescheduling.prepare(reading)
    if reading.faults:
        raise ValueError(f"setting {text!r}: {'; '.join(reading.faults)}")
    return Setting(
        name=name if equals else text,
        policy=policy,
        rescheduling=config if has_moves else None,
        priority_headroom=config.priority_headroom,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # the caller says it
        raise ValueError(message)


@contextmanager
def showing(title: str, num_requests: int, *, has_terminal: bool = True) -> Iterator[Callable[[float, int], None]]:
    """A bar over the requests, on a terminal that nobody else writes to; a line every now and then elsewhere."""
    console, began_s = Console(stderr=True, highlight=False, markup=False), time.perf_counter()
    if console.is_terminal and has_terminal:
        title_column, speed = (
            TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[speed]}")
        )
        columns = (title_column, BarColumn(), speed, TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=num_requests, speed="")

            def show(at_s: float, num_ended: int) -> None:
                factor = at_s / max(time.perf_counter() - began_s, 1e-9)
                bar.update(task, completed=num_ended, speed=f"{at_s:6.0f} s, {factor:.1f} x")

            yield show
        return
    told_s = began_s

    def say(at_s: float, num_ended: int) -> None:
        nonlocal told_s
        now_s = time.perf_counter()
        if now_s - told_s >= 10:
            told_s = now_s
            done, factor = num_ended / num_requests, at_s / (now_s - began_s)
            print(f"{title}: {done:4.0%}, {at_s:.0f} s, {factor:.1f} x real time", file=sys.stderr, flush=True)

    yield say
