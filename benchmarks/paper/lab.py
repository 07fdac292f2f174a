# SPDX-License-Identifier: Apache-2.0
"""The lab in which experiments are played: what one run is, and many of them with several seeds, in several
processes."""

from __future__ import annotations

import io
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.simulated import MOVES, Load, Setting, read_setting, showing
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.member import Cadence
from llumsim.cluster.metrics import Metrics, RequestRecord, Slo
from llumsim.cluster.run import ClusterConfig, Happening, run
from llumsim.engine.step_model import Hardware, load_hardware
from tests.support.report import print_json

HERE: Final = Path(__file__).parent


def _own(name: str) -> str:
    """A setting of a policy beside this file."""
    path = shlex.quote(f"{HERE / name.removesuffix(MOVES)}.yaml")
    return f"{name}={path}{MOVES if name.endswith(MOVES) else ''}"


INFAAS: Final = _own("infaas")
INFAAS_MOVES: Final = _own(f"infaas{MOVES}")
INFAAS_MEMORY: Final = _own("infaas-memory")
PACKING: Final = _own("packing")
PACKING_MOVES: Final = _own(f"packing{MOVES}")
RANDOM: Final = "random"
RANDOM_MOVES: Final = f"{RANDOM}{MOVES}"
"""Settings of the paper's baselines, and what moves make of them."""
QUICK_REQUESTS: Final = 1_500
_WIDTH: Final = 200

Measure = Callable[[Metrics, Sequence[RequestRecord]], Mapping[str, float]]
"""Numbers beside those of the summary. Of a module, so that it can go to another process."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One cluster under one load. Everything that decides the result but the seed."""

    labels: Mapping[str, Any]
    """What tells it from the experiment's others, for people and for machines."""
    load: Load
    setting: Setting
    instances: int = 16
    hardware: Hardware = field(default_factory=lambda: load_hardware("a10-llama-7b"))
    cadence: Cadence = field(default_factory=Cadence)
    has_account: bool = True
    """Whether the scheduler counts what is on its way to instances."""
    has_hindsight: bool = False
    """Whether `Metrics.regrets` is measured."""
    happenings: Sequence[Happening] = ()
    slo: Slo | None = None
    """Objectives of all requests; None: they name none."""
    measure: Measure | None = None
    keeps_records: bool = False
    """Whether what is played comes with its records, which are many."""

    @property
    def title(self) -> str:
        return " ".join(str(value) for value in self.labels.values())

    def play(self, seed: int, *, has_terminal: bool) -> Played:
        arrivals = replace(self.load, seed=seed).arrivals(self.hardware.engine)
        setting = self.setting
        config = ClusterConfig(
            groups=[("", self.hardware, self.instances)],
            control=ControlConfig(
                policy=setting.policy,
                rescheduling=setting.rescheduling,
                priority_headroom=setting.priority_headroom,
                account=self.has_account,
                has_hindsight=self.has_hindsight,
            ),
            cadence=self.cadence,
            happenings=self.happenings,
            slo=self.slo or Slo(),
            tells_slo=self.slo is not None,
            seed=seed,
        )
        lines = io.StringIO() if self.measure is not None or self.keeps_records else None
        began_s = time.process_time()
        with showing(self.title, len(arrivals), has_terminal=has_terminal) as progress:
            summary, metrics = run(config, arrivals, lines, progress)
        cpu_s = time.process_time() - began_s
        numbers = summary.to_dict() | {
            "cpu_s": round(cpu_s, 2),
            "real_rate": len(arrivals) / max(arrivals[-1].at_s, 1e-9),
            "moves_per_instance_hour": 3600 * summary.moves / max(summary.instance_s, 1e-9),
            "speed": summary.virtual_s / max(cpu_s, 1e-9),
        }
        told = lines.getvalue().splitlines() if lines is not None else []
        records = [RequestRecord(**json.loads(line)) for line in told]
        if self.measure is not None:
            numbers |= self.measure(metrics, records)
        return Played(self, seed, numbers, records if self.keeps_records else [])


@dataclass(frozen=True, slots=True)
class Played:
    run: Run
    seed: int
    numbers: Mapping[str, float]
    """Numbers of `Summary`, of the run's own measure, `cpu_s`, and the rate that it really had."""
    records: Sequence[RequestRecord] = ()
    """Of all requests, if the run keeps them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run with each of its seeds."""

    run: Run
    played: Sequence[Played]

    def __getitem__(self, name: str) -> float:
        """The mean over the seeds."""
        return statistics.fmean(one.numbers[name] for one in self.played)

    def geometric(self, name: str) -> float:
        """The geometric mean over the seeds, for what differs between them by factors."""
        return statistics.geometric_mean(one.numbers[name] for one in self.played)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Plays runs of one experiment, and shows what came out."""

    experiment: str = ""
    is_quick: bool = False
    num_seeds: int = 1
    jobs: int = 1
    most_requests: int | None = None
    """Limit of a made-up load, whatever the experiment asks for."""
    urgent: float = 0.1
    """Share of urgent requests, where an experiment has any."""
    seconds: float | None = None
    """Seconds of a trace; what the experiment thinks right if None."""
    traces: Path | None = None
    settings: Sequence[Setting] = ()
    """Settings in the place of those that the experiment compares."""
    json_file: Path | None = None

    def requests(self, number: int) -> int:
        """How many of a made-up load."""
        return self.most_requests or (min(number, QUICK_REQUESTS) if self.is_quick else number)

    def cells(self, *all_of_them: Any) -> Sequence[Any]:
        """Values of a parameter: if it has to be quick, the first and the last."""
        return (all_of_them[0], all_of_them[-1]) if self.is_quick and len(all_of_them) > 2 else all_of_them

    def compared(self, *texts: str) -> Sequence[Setting]:
        return self.settings or [read_setting(text) for text in texts]

    def trace(self, name: str) -> Path | None:
        """The trace by name. None if there is none; people are told."""
        path = self.traces / name if self.traces else None
        if path is None or not path.exists():
            print(f"{self.experiment}: left out, {name} is not in --traces DIR", file=sys.stderr, flush=True)
            return None
        return path

    def play(self, runs: Iterable[Run], *, is_told: bool = True) -> list[Outcome]:
        """Results of runs in their order. `is_told`: a line of JSON for each run and seed."""
        listed = list(runs)
        jobs = [(one, seed) for one in listed for seed in range(self.num_seeds)]
        found: dict[int, list[Played]] = {}
        with self._playing(jobs) as results:
            for number, played in enumerate(results):
                found.setdefault(number // self.num_seeds, []).append(played)
                print(
                    f"{self.experiment} {number + 1}/{len(jobs)}: {played.run.title}, seed {played.seed}, "
                    f"{played.numbers['cpu_s']:.0f} s of CPU",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                if is_told:
                    print_json(self.json_file, self._row(played))
        return [Outcome(one, found[number]) for number, one in enumerate(listed)]

    @contextmanager
    def _playing(self, jobs: Sequence[tuple[Run, int]]) -> Iterator[Iterable[Played]]:
        if self.jobs == 1:
            yield (one.play(seed, has_terminal=True) for one, seed in jobs)
            return
        with ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn")) as pool:
            yield pool.map(_play, *zip(*jobs, strict=True))

    def _row(self, played: Played) -> Mapping[str, Any]:
        one = played.run
        return {
            "bench": "paper",
            "experiment": self.experiment,
            **one.labels,
            "instances": one.instances,
            "hardware": one.hardware.name,
            "seed": played.seed,
            **played.numbers,
        }

    def compare(self, *rows: tuple[str, str, float]) -> None:
        """`rows`: what it is, what the paper says of it, and what was measured here."""
        table = Table("", "paper", "ours", title=f"{self.experiment}: the paper's figures")
        for name, paper, ours in rows:
            table.add_row(name, paper, _shown(ours))
        _show(table)

    def table(self, outcomes: Sequence[Outcome], columns: Mapping[str, str]) -> None:
        """A row for each run: its labels, and means over the seeds of `columns`, titles by name."""
        if outcomes:
            titles = (*outcomes[0].run.labels, *columns.values())
            self.rows(titles, ((*one.run.labels.values(), *(one[name] for name in columns)) for one in outcomes))

    def rows(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """What an experiment found, where it is not a row for each run."""
        seeds = f"; means of {self.num_seeds} seeds" if self.num_seeds > 1 else ""
        table = Table(*titles, title=f"{self.experiment}{seeds}")
        for row in rows:
            table.add_row(*map(_shown, row))
        _show(table)


def _show(table: Table) -> None:
    """Prints a table for people; in a file, which has no width of its own, as Markdown."""
    if sys.stderr.isatty():
        Console(stderr=True, markup=False).print(table)
    else:
        table.box = box.MARKDOWN
        Console(stderr=True, width=_WIDTH, markup=False).print(table)


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _play(one: Run, seed: int) -> Played:
    return one.play(seed, has_terminal=False)


def ratio(one: float, other: float) -> float:
    """One by the other; 1 where both are nothing."""
    return one / other if other else (float("inf") if one else 1.0)


def mean(values: Sequence[float]) -> float:
    """0 if there are none."""
    return statistics.fmean(values) if values else 0.0
