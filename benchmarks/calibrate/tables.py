# SPDX-License-Identifier: Apache-2.0
"""What came out, for people. Of every pair of figures the first is real, the second simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from rich.console import RenderableType
from rich.table import Table

from benchmarks.calibrate.comparison import (
    Of,
    Outcome,
    Ranking,
    errors,
    median_size,
    quantile_error,
    quantile_spread,
    run_spread,
    tpot,
    ttft,
)
from benchmarks.calibrate.load import Counts, Played
from benchmarks.calibrate.probe import Probed
from tests.support.stats import median, quantile


def tables(probed: Probed, outcomes: Sequence[Outcome], ranked: Sequence[Ranking]) -> Iterator[RenderableType]:
    yield _of_probe(probed)
    yield _of_settings(outcomes)
    yield _of_quantiles(outcomes)
    yield _of_loads(outcomes)
    if ranked:
        yield _of_ranks(ranked)


def _of_probe(probed: Probed) -> Table:
    table = Table(title=f"Probe: {probed.hardware.name}")
    for name in ("what", "value"):
        table.add_column(name)
    for name, value in probed.to_dict().items():
        table.add_row(name, str(value))
    return table


def _of_settings(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Request by request: median of |error|, and of real runs among themselves")
    columns = ("engines", "load", "setting", "TTFT", "real", "TPOT", "real", "preempted", "moves", "statuses/s")
    for name in columns:
        table.add_column(name, justify="left" if name in ("load", "setting") else "right")
    for one in outcomes:
        table.add_row(
            str(one.num_instances), one.load, one.setting, *_errors([one], ttft), *_errors([one], tpot),
            *(_both(one, name) for name in Counts._fields),
        )  # fmt: skip
    table.add_row("", "", "all", *_errors(outcomes, ttft), *_errors(outcomes, tpot))
    return table


def _errors(outcomes: Sequence[Outcome], of: Of) -> tuple[str, str]:
    return f"{median_size(errors(outcomes, of)):.1%}", _share(run_spread(outcomes, of))


def _share(values: Sequence[float]) -> str:
    return f"{median_size(values):.1%}" if values else ""


def _both(outcome: Outcome, name: str) -> str:
    def mean(world: Sequence[Played]) -> float:
        return fmean(getattr(played.counts, name) for played in world)

    return f"{mean(outcome.real):.3g} {mean(outcome.simulated):.3g}"


def _of_quantiles(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Distributions: real, error of the simulator, spread of real runs")
    table.add_column("engines", justify="right")
    for name in ("load", "setting"):
        table.add_column(name)
    for name in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        table.add_column(name, justify="right")
    for one in outcomes:
        cells = [_quantile(one, of, share) for of in (ttft, tpot) for share in (0.5, 0.99)]
        table.add_row(str(one.num_instances), one.load, one.setting, *cells)
    return table


def _quantile(outcome: Outcome, of: Of, share: float) -> str:
    real = quantile((of(times) for played in outcome.real for times in played.requests), share)
    error, between = quantile_error(outcome, of, share), quantile_spread(outcome, of, share)
    return f"{real * 1e3:.0f} ms {error:+.1%} ±{between:.1%}"


def _of_loads(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Bias: median of the signed error, and of its size")
    for name in ("load", "TTFT", "|TTFT|", "real", "TPOT", "|TPOT|", "real"):
        table.add_column(name, justify="left" if name == "load" else "right")
    for load in dict.fromkeys(one.load for one in outcomes):
        under = [one for one in outcomes if one.load == load]
        cells = [load]
        for of in (ttft, tpot):
            cells += [f"{median(errors(under, of)):+.1%}", *_errors(under, of)]
        table.add_row(*cells)
    return table


def _of_ranks(ranked: Sequence[Ranking]) -> Table:
    table = Table(title="Settings from the best to the worst: real above, simulated below", show_lines=True)
    for name in ("engines", "load", "measure", "order", "spread", "pairs told apart", "wrong"):
        table.add_column(name)
    for one in ranked:
        wrong = "\n".join(" < ".join(pair) for pair in one.wrong) or "none"
        table.add_row(
            str(one.num_instances), one.load, one.measure, f"{_order(one.real)}\n{_order(one.simulated)}",
            f"{one.real_spread:.1%}", str(one.num_told_apart), wrong,
        )  # fmt: skip
    return table


def _order(values: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{setting} {seconds * 1e3:.0f}" for setting, seconds in values)
