# SPDX-License-Identifier: Apache-2.0
"""What would this load be like on that cluster, with these settings of the scheduler? Simulated: docs/simulator.md.

Engines and links are models; the view, dispatch, rescheduling, the migration protocol and the gateway's queue are those
of production, on a virtual clock. Several settings are played with the same requests, one after the other:

    python -m benchmarks.cluster --lengths m-m --rate 16 --requests 10000 --instances 16 \\
        --settings round-robin load-balance load-balance+moves
    python -m benchmarks.cluster --trace azure2023_conv.csv --rate 400 --instances 1000 \\
        --tokens-told-s 1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from llumlet import setting_sources, settings
from llumsched.policy.reader import built_in_policies
from llumsched.rescheduling import arguments as rescheduling
from llumsched.rescheduling.config import Config as ReschedulingConfig
from llumsched.simulator.cluster import ClusterConfig, Happening, What, run
from llumsched.simulator.control import ControlConfig
from llumsched.simulator.lengths import LENGTHS, PAIRS
from llumsched.simulator.member import Cadence
from llumsched.simulator.metrics import Metrics, Slo, Summary
from llumsched.simulator.step_model import built_in_hardware, load_hardware
from llumsched.simulator.workload import Arrival, assigned, clipped, made_up, prioritized, read_trace, scaled
from tests.support.report import add_json, print_json

_RESCHEDULING: Final = (rescheduling.Switches, ReschedulingConfig)
MOVES: Final = "+moves"
"""At the end of a setting: with the rescheduler."""
_HAPPENS: Final = {
    What.FAIL: "it dies then",
    What.STOP: "it is drained",
    What.START: "it is ordered; comes after its cold start",
}
_ROWS: Final = (
    ("TTFT p50", "ttft_p50_s"),
    ("TTFT p99", "ttft_p99_s"),
    ("TPOT p50", "tpot_p50_s"),
    ("TPOT p99", "tpot_p99_s"),
    ("gap p99, all tokens", "gap_p99_s"),
    ("gap p99.9, all tokens", "gap_p999_s"),
    ("request, mean", "e2e_mean_s"),
    ("lost to preemption, mean of requests", "preemption_loss"),
    ("requests preempted, share", "preempted_share"),
    ("computed again, share of tokens", "recompute_share"),
    ("prompts found in the prefix cache, share of tokens", "cached_share"),
    ("fragmented, share of KV cache", "fragmentation"),
    ("KV cache used, share", "kv_used"),
    ("moves", "moves"),
    ("stall of a move p50", "move_stall_p50_s"),
    ("stall of a move p99", "move_stall_p99_s"),
    ("within the SLO, a second", "goodput"),
    ("within the SLO, share", "slo_attainment"),
    ("instance-seconds", "instance_s"),
)


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    reading = setting_sources.read("rescheduler", _RESCHEDULING, args, environ={})
    _, moves = rescheduling.prepare(reading)
    if reading.faults:
        parser.error("; ".join(reading.faults))
    try:
        arrivals = _arrivals(args)
        config = _config(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    results: list[tuple[str, Summary, Metrics]] = []
    rows: list[dict[str, Any]] = []
    for setting in args.settings:
        policy, has_moves = setting.removesuffix(MOVES), setting.endswith(MOVES)
        control = replace(config.control, policy=policy, rescheduling=moves if has_moves else None)
        with _records(args.records, setting) as records, _showing(setting, arrivals) as progress:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            summary, metrics = run(replace(config, control=control), arrivals, records, progress)
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        results.append((setting, summary, metrics))
        rows.append(
            {
                "bench": "cluster",
                "trace": args.trace.name if args.trace else args.lengths,
                "instances": sum(number for _, _, number in config.groups),
                "rate": round(len(arrivals) / max(arrivals[-1].at_s, 1e-9), 4),
                "policy": setting,
                **summary.to_dict(),
                "wall_s": round(wall_s, 3),
                "cpu_s": round(cpu_s, 3),
                "seed": args.seed,
            }
        )
    Console(stderr=True).print(_table(results))
    if args.plots:
        from benchmarks.cluster_plots import plot  # matplotlib is not needed otherwise

        plot(args.plots, results)
    print_json(args.json, *rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load = parser.add_argument_group("load")
    what = load.add_mutually_exclusive_group()
    what.add_argument("--trace", type=Path, help="Azure's CSV, or Mooncake's .jsonl")
    what.add_argument("--lengths", choices=sorted(PAIRS), default="m-m", help="made up, as in Llumnix's paper")
    load.add_argument("--rate", type=float, help="requests a second; of a trace, its own if left out")
    load.add_argument("--requests", type=int, default=10_000, help="of a made-up load")
    load.add_argument(
        "--cv", type=float, default=1.0, help="variation of the time between two; 1 is Poisson, else Gamma"
    )
    load.add_argument("--seconds", type=float, help="cut a trace after so long")
    load.add_argument("--urgent", type=float, default=0.0, metavar="SHARE", help="of requests that go first")
    load.add_argument("--seed", type=int, default=0)
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--instances", type=int, default=16)
    cluster.add_argument(
        "--hardware", default="a10-llama-7b", help=f"{', '.join(built_in_hardware())}, or a .json file"
    )
    cluster.add_argument(
        "--model", action="append", default=[], metavar="NAME:INSTANCES:WEIGHT",
        help="one of several models, instead of --instances; its share of the requests is by its weight",
    )  # fmt: skip
    for event in What:
        cluster.add_argument(
            f"--{event}", action="append", default=[], type=_moment, metavar="SECOND:INSTANCE",
            help=_HAPPENS[event],
        )  # fmt: skip
    cluster.add_argument("--by-priority", action="store_true", help="engines heed priorities")
    cluster.add_argument("--no-prefix-caching", action="store_true")
    cluster.add_argument(
        "--tokens-told-s", type=float, default=Cadence().tokens_s,
        help="how often instances tell that requests have grown; 1 makes large clusters twice as fast",
    )  # fmt: skip
    control = parser.add_argument_group("scheduler")
    control.add_argument(
        "--settings", nargs="+", default=["load-balance", f"load-balance{MOVES}"], metavar="POLICY[+moves]",
        help=f"{', '.join(built_in_policies())}, or a .yaml file; +moves adds the rescheduler",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--slo-ttft-s", type=float, default=Slo().ttft_s)
    output.add_argument("--slo-tpot-s", type=float, default=Slo().tpot_s)
    output.add_argument("--records", type=Path, metavar="DIR", help="a line of JSON for each request, a file a setting")
    output.add_argument("--plots", type=Path, metavar="DIR", help="PNG; needs matplotlib")
    add_json(output)
    settings.add_arguments(parser, (ReschedulingConfig,))
    return parser


def _moment(text: str) -> tuple[float, int]:
    second, _, number = text.partition(":")
    return float(second), int(number)


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    """Raises ValueError for a load of nothing."""
    draw = random.Random(args.seed)
    if args.trace:
        trace = read_trace(args.trace)
        if args.seconds:
            trace = [arrival for arrival in trace if arrival.at_s <= args.seconds]
        own_rate = len(trace) / max(trace[-1].at_s, 1e-9)
        arrivals = scaled(trace, args.rate / own_rate, draw) if args.rate else trace
    else:
        if not args.rate:
            raise ValueError("a made-up load needs a --rate")
        prompts, outputs = PAIRS[args.lengths]
        arrivals = made_up(args.rate, args.requests, (LENGTHS[prompts], LENGTHS[outputs]), draw, cv=args.cv)
    engine = load_hardware(args.hardware).engine
    arrivals = clipped(arrivals, min(engine.max_model_len, engine.num_blocks * engine.block_size))
    if args.urgent:
        arrivals = prioritized(arrivals, args.urgent, draw)
    if args.model:
        arrivals = assigned(arrivals, {name: weight for name, _, weight in map(_model, args.model)}, draw)
    if not arrivals:
        raise ValueError("no request fits an engine")
    return arrivals


def _model(text: str) -> tuple[str, int, float]:
    name, number, weight = text.split(":")
    return name, int(number), float(weight)


def _config(args: argparse.Namespace) -> ClusterConfig:
    hardware = load_hardware(args.hardware)
    engine = replace(hardware.engine, by_priority=args.by_priority, prefix_caching=not args.no_prefix_caching)
    hardware = replace(hardware, engine=engine)
    groups = [(name, hardware, number) for name, number, _ in map(_model, args.model)]
    happenings = [Happening(at_s, event, number) for event in What for at_s, number in getattr(args, event)]
    return ClusterConfig(
        groups=groups or [("", hardware, args.instances)],
        control=ControlConfig(),
        cadence=Cadence(tokens_s=args.tokens_told_s),
        happenings=happenings,
        slo=Slo(args.slo_ttft_s, args.slo_tpot_s),
        seed=args.seed,
    )


@contextmanager
def _records(directory: Path | None, setting: str) -> Iterator[TextIO | None]:
    if directory is None:
        yield None
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{Path(setting).name}.jsonl").open("w") as file:
        yield file


@contextmanager
def _showing(setting: str, arrivals: Sequence[Arrival]) -> Iterator[Callable[[float, int], None]]:
    """A bar over the requests, on a terminal; a line every now and then elsewhere."""
    console, began_s = Console(stderr=True, highlight=False), time.perf_counter()
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"),
                   TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(setting, total=len(arrivals), speed="")

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
            done, factor = num_ended / len(arrivals), at_s / (now_s - began_s)
            print(f"{setting}: {done:4.0%}, {at_s:.0f} s, {factor:.1f} x real time", file=sys.stderr, flush=True)

    yield say


def _table(results: Sequence[tuple[str, Summary, Metrics]]) -> Table:
    table = Table("seconds", *(setting for setting, _, _ in results), title="simulated cluster")
    for title, name in _ROWS:
        table.add_row(title, *(f"{getattr(summary, name):.4g}" for _, summary, _ in results))
    return table


if __name__ == "__main__":
    main()
