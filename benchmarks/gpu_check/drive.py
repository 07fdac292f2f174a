# SPDX-License-Identifier: Apache-2.0
"""The check on a borrowed machine, as the script calls it that sets such a machine up.

    python drive.py --report OUT/report.jsonl --parts
    python drive.py --report OUT/report.jsonl --logs DIR --seconds 400 --cells 'defaults,LoRA' graphs-v2-fp8-gqa-16
    python drive.py --report OUT/report.jsonl --summary

Every argument is one of `python -m benchmarks.gpu_check`, of another name; groups of cells are run one behind the
other, so that those with equal engines share a pair. `--summary` prints what a report has so far.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console


def summary(report: Path) -> None:
    from benchmarks.gpu_check.__main__ import table_of
    from benchmarks.gpu_check.verdicts import counts

    lines = report.read_text().splitlines() if report.is_file() else []
    rows = [row for row in map(json.loads, lines) if "verdict" in row]
    Console(width=160, markup=False).print(table_of(rows))
    print(counts(rows), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--report", type=Path, required=True, help="the file of --json")
    add("--logs", help="as --logs")
    add("--seconds", default="400", help="as --seconds")
    add("--start-s", default="150", help="as --start-timeout")
    add("--numerics", default="1", help="as --numerics")
    add("--flags", default="", help="as --flags")
    add("--parts", action="store_true", help="the parts, no cell")
    add("--cells", nargs="+", default=[], metavar="NAME,…", help="cells, no part")
    add("--summary", action="store_true", help="print a table of the report so far")
    options = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    if options.summary:
        summary(options.report)
        return 0
    from benchmarks.gpu_check.__main__ import main as check

    common = ["--json", str(options.report), "--seconds", options.seconds]
    if options.parts:
        return check([*common, "--no-cells"])
    cells = ["--no-parts", "--cells", ",".join(options.cells), "--logs", options.logs or "/tmp/gpu-check-logs"]
    return check(
        [
            *common,
            *cells,
            "--start-timeout",
            options.start_s,
            "--numerics",
            options.numerics,
            f"--flags={options.flags}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
