# SPDX-License-Identifier: Apache-2.0
"""Plays a load on a simulated cluster, to see how it does with these settings of the scheduler.

Simulated: docs/operate/simulator.md.

Engines and links are models; the view, dispatch, rescheduling, the migration protocol and the gateway's queue are those
of production, on a virtual clock. Several settings are played with the same requests, one after the other:

    python -m benchmarks.cluster --lengths m-m --rate 16 --requests 10000 --instances 16 \\
        --settings round-robin load-balance load-balance+moves
    python -m benchmarks.cluster --trace azure2023_conv.csv --rate 400 --instances 1000 \\
        --tokens-told-s 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table

from benchmarks.simulated import MOVES, NOTATION, SETTING_HELP, Load, add_rescheduling, read_setting, showing
from llumsim.cluster.control import ControlConfig
from llumsim.cluster.member import Cadence
from llumsim.cluster.metrics import Metrics, Slo, Summary
from llumsim.cluster.run import ClusterConfig, Happening, What, run
from llumsim.cluster.workload import PAIRS
from llumsim.engine.step_model import built_in_hardware, load_hardware
from tests.support.report import add_json, print_json

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
    ("request p99", "e2e_p99_s"),
    ("lost to preemption, mean of requests", "preemption_loss"),
    ("requests preempted, share", "preempted_share"),
    ("computed again, share of tokens", "recompute_share"),
    ("prompts found in the prefix cache, share of tokens", "cached_share"),
    ("fragmented, share of KV cache", "fragmentation"),
    ("KV cache used, share", "kv_used"),
    ("moves", "moves"),
    ("stall of a move p50", "move_stall_p50_s"),
    ("stall of a move p99", "move_stall_p99_s"),
    ("requests that moved", "moved_requests"),
    ("TPOT mean: of those that moved", "moved_tpot_mean_s"),
    ("TPOT mean: of those that stayed", "stayed_tpot_mean_s"),
    ("lost to preemption: mean of those that moved", "moved_preemption_loss"),
    ("lost to preemption: mean of those that stayed", "stayed_preemption_loss"),
    ("within the SLO, a second", "goodput"),
    ("within the SLO, share", "slo_attainment"),
    ("instance-seconds", "instance_s"),
)


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    try:
        settings = [read_setting(text, args) for text in args.settings]
        arrivals = _load(args).arrivals(load_hardware(args.hardware).engine)
        config = _config(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    results: list[tuple[str, Summary, Metrics]] = []
    rows: list[dict[str, Any]] = []
    for setting in settings:
        control = replace(
            config.control,
            policy=setting.policy,
            rescheduling=setting.rescheduling,
            priority_headroom=setting.priority_headroom,
        )
        with _records(args.records, setting.name) as records, showing(setting.name, len(arrivals)) as progress:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            summary, metrics = run(replace(config, control=control), arrivals, records, progress)
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        results.append((setting.name, summary, metrics))
        rows.append(
            {
                "bench": "cluster",
                "trace": args.trace.name if args.trace else args.lengths,
                "instances": sum(number for _, _, number in config.groups),
                "rate": round(len(arrivals) / max(arrivals[-1].at_s, 1e-9), 4),
                "policy": setting.name,
                **summary.to_dict(),
                "wall_s": round(wall_s, 3),
                "cpu_s": round(cpu_s, 3),
                "seed": args.seed,
            }
        )
    Console(stderr=True, markup=False).print(_table(results))
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
    load.add_argument(
        "--valley", type=float, default=1.0, metavar="SHARE",
        help="of --rate, to which that of a made-up load goes down, and up again; it begins there",
    )  # fmt: skip
    load.add_argument("--period", type=float, default=3600.0, metavar="SECONDS", help="from one valley to the next")
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
        "--settings", nargs="+", default=["load-balance", f"load-balance{MOVES}"], metavar=NOTATION,
        help=SETTING_HELP,
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--slo-ttft-s", type=float, default=Slo().ttft_s)
    output.add_argument("--slo-tpot-s", type=float, default=Slo().tpot_s)
    output.add_argument("--records", type=Path, metavar="DIR", help="a line of JSON for each request, a file a setting")
    output.add_argument("--plots", type=Path, metavar="DIR", help="PNG; needs matplotlib")
    add_json(output)
    add_rescheduling(parser)
    return parser


def _moment(text: str) -> tuple[float, int]:
    second, _, number = text.partition(":")
    return float(second), int(number)


def _load(args: argparse.Namespace) -> Load:
    return Load(
        lengths=args.lengths,
        num_requests=args.requests,
        cv=args.cv,
        valley=args.valley,
        period_s=args.period,
        trace=args.trace,
        seconds=args.seconds,
        rate=args.rate,
        urgent=args.urgent,
        models={name: weight for name, _, weight in map(_model, args.model)},
        seed=args.seed,
    )


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
        tells_slo=True,
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


def _table(results: Sequence[tuple[str, Summary, Metrics]]) -> Table:
    table = Table("seconds", *(setting for setting, _, _ in results), title="simulated cluster")
    for title, name in _ROWS:
        table.add_row(title, *(f"{getattr(summary, name):.4g}" for _, summary, _ in results))
    return table


if __name__ == "__main__":
    main()
