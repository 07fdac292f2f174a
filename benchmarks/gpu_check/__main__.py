# SPDX-License-Identifier: Apache-2.0
"""The command line of the check, and its report."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks.gpu_check as package
from benchmarks.gpu_check import device
from benchmarks.gpu_check.cells import Cell, Machine, matrix, single
from benchmarks.gpu_check.engines import Engined
from benchmarks.gpu_check.verdicts import Part, counts, run_cells
from tests.support.progress import Say, saying
from vllm_llumnix.kv.kernels import Backend

STAND_IN = "engines with the V2 runner on a CPU, by Triton's interpreter, and a processor's kernels: no GPU was checked"


def this_machine(stand_in: bool) -> Machine:
    import vllm
    from vllm.platforms import current_platform

    if stand_in:
        why = f"vLLM {vllm.__version__} is not built for CPUs" if not current_platform.is_cpu() else None
        return Machine(0, stand_in=True, obstacle=why)
    count = torch.cuda.device_count()
    if not count:
        return Machine(0, obstacle="torch sees no GPU")
    if not current_platform.is_cuda():
        return Machine(count, obstacle=f"vLLM {vllm.__version__} is not built for CUDA")
    return Machine(count, gpus_reach_each_other=count > 1 and torch.cuda.can_device_access_peer(0, 1))


def without_engines(stand_in: bool, say: Say) -> dict[str, Part]:
    """The parts, in order: the kernels come first, as engines copy with them."""
    no_gpu = None if torch.cuda.is_available() else "torch sees no GPU"
    where = torch.device("cpu" if stand_in else "cuda")
    backends: tuple[Backend, ...] = ("cpp", "torch") if stand_in else ("cuda", "triton", "torch")
    any_device = None if stand_in else no_gpu
    parts: dict[str, tuple[Callable[[], Part], str | None]] = {
        "self_test": (partial(device.self_test, where), any_device),
        "kernels": (partial(device.check_kernels, where, backends), any_device),
        "seals": (partial(device.check_seals, where), any_device),
        "ipc": (device.check_ipc, no_gpu),
        "ipc_killed_source": (device.check_killed_source, no_gpu),
    }
    report = {}
    for name, (check, obstacle) in parts.items():
        say(name)
        report[name] = device.carried_out(check, obstacle)
    return report


def chosen(stand_in: bool, every: bool, named: list[str] | None) -> list[Cell]:
    """Raises ValueError for a name that no cell has."""
    if named is None:
        return matrix(every) + single(stand_in)
    cells = {cell.name: cell for cell in matrix(every=True) + single(stand_in)}
    if unknown := [name for name in named if name not in cells]:
        raise ValueError(f"no cell is called {', '.join(unknown)}; there are: {', '.join(cells)}")
    return [cells[name] for name in named]


def table_of(rows: list[Part]) -> Table:
    table = Table("cell", "verdict", "runner", "concluded, or why")
    for row in rows:
        table.add_row(row["cell"], row["verdict"], row["runner"], "\n".join(row["why"])[:600] or row["concluded"])
    return table


def is_good(parts: dict[str, Part], rows: list[Part]) -> bool:
    verdicts = [part["verdict"] for part in [*parts.values(), *rows]]
    return "right" in verdicts and not {"wrong", "undecided"} & {*verdicts}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--all", action="store_true", help="the whole product of the matrix, for an hour")
    add("--cells", metavar="NAME,…", help="only these; of the product and of the single ones")
    add("--stand-in", action="store_true", help="without a GPU: V2-on-CPU engines in its place")
    add("--json", type=Path, metavar="FILE")
    add("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    add("--serve-memory", action="store_true", help=argparse.SUPPRESS)
    add("--outlive-source", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve_memory:
        device.serve_memory()
        return 0
    if options.outlive_source:
        device.outlive_source()
        return 0
    try:
        named = None if options.cells is None else options.cells.split(",")
        cells = chosen(options.stand_in, options.all, named)
    except ValueError as error:
        parser.error(str(error))
    machine = this_machine(options.stand_in)
    with saying("self_test") as say, tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        parts = without_engines(options.stand_in, say)
        rows = run_cells(cells, machine, Engined(machine, options.logs, Path(scratch)), say)
    report: Part = {
        "bench": "gpu_check",
        "stand_in": STAND_IN if options.stand_in else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "parts": parts,
        "cells": rows,
        "counts": counts([*parts.values(), *rows]),
    }
    console = Console(stderr=True, width=160)
    console.print_json(data=parts)
    console.print(table_of(rows))
    line = json.dumps(report)
    print(line)
    if options.json is not None:
        options.json.write_text(f"{line}\n")
    return 0 if is_good(parts, rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
