# SPDX-License-Identifier: Apache-2.0
"""The sizes and times that are allowed, `tests/budgets.toml`, beside what is true now.

    python -m tests.support.budgets            prints lines per package and fails if anything exceeds its budget
    python -m tests.support.budgets --write    sets lines and files to what is true now, rounded up

`make lint` runs the first. `make test` prints the minutes per test folder at its end (`minutes`).
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests/budgets.toml"
PRODUCT = ("llumlet", "llumsched", "vllm_llumnix")
BESIDE = ("llumsim", "benchmarks", "examples", "tests")
"""Folders of one budget each."""
FILE_LINES = 450
"""Most lines of a product file."""
FOLDER_FILES = 15
"""Most files of a product folder, without `__init__.py`."""
FAR = 2.0
"""A test folder that takes this many times its minutes on a machine of usual speed fails `make test`."""
ROUND = 50

Table = dict[str, int]


def read() -> dict[str, Table]:
    return tomllib.loads(FILE.read_text())


def sizes() -> dict[str, Table]:
    """Lines per package, files per crowded folder and lines of each file that is too long."""
    lines, files, long = Counter[str](), Counter[str](), Counter[str]()
    for path in _sources():
        top, *inner, name = path.relative_to(ROOT).parts
        count = path.read_bytes().count(b"\n")
        lines["/".join([top, *inner[:1]]) if top in PRODUCT else top] += count
        if top in PRODUCT:
            files["/".join([top, *inner])] += name != "__init__.py"
            long["/".join([top, *inner, name])] = count
    return {
        "lines": dict(sorted(lines.items())),
        "files": {folder: count for folder, count in sorted(files.items()) if count > FOLDER_FILES},
        "long": {file: count for file, count in sorted(long.items()) if count > FILE_LINES},
    }


def _sources() -> Iterator[Path]:
    for top in (*PRODUCT, *BESIDE):
        yield from (path for path in sorted((ROOT / top).rglob("*.py")) if "_pb2" not in path.name)


def faults(found: Mapping[str, Table], allowed: Mapping[str, Table]) -> list[str]:
    """Names each budget that is exceeded, a sentence each."""
    standard = {"lines": 0, "files": FOLDER_FILES, "long": FILE_LINES}
    unit = {"lines": "lines", "files": "files", "long": "lines"}
    return [
        f"{name} has {count} {unit[kind]}, {most} are allowed"
        for kind, counts in found.items()
        for name, count in counts.items()
        if count > (most := allowed.get(kind, {}).get(name, standard[kind]))
    ]


def table(found: Table, allowed: Table) -> Iterator[str]:
    for name in found:
        yield f"{name:30} {found[name]:7,} of {allowed.get(name, 0):7,}"
    product = [name for name in found if name.partition("/")[0] in PRODUCT]
    total, most = (sum(counts.get(name, 0) for name in product) for counts in (found, allowed))
    yield f"{'product':30} {total:7,} of {most:7,} lines"


def minutes(seconds: Mapping[str, float], slowness: float) -> tuple[list[str], list[str]]:
    """Lines of a table of minutes per test folder, and one sentence for each folder that took far too long.

    `slowness`: the time that this machine takes for what takes one on the machine of the budgets.
    """
    allowed = read()["minutes"]
    rows, faults = [], []
    for folder, taken in sorted(seconds.items()):
        most = allowed.get(folder, 1)
        rows.append(f"{folder:14} {taken / 60:5.1f} of {most:4} min")
        if taken / 60 > FAR * most * slowness:
            faults.append(f"tests/{folder} took {taken / 60:.1f} min, {most} are allowed (tests/budgets.toml)")
    rows.append(f"{'sum':14} {sum(seconds.values()) / 60:5.1f}; this machine takes {slowness:.1f} times the usual time")
    return rows, faults


def write(found: Mapping[str, Table]) -> None:
    """Replaces all tables but the minutes, with their numbers rounded up."""
    kept = read()
    rounded = {name: math.ceil(count / ROUND) * ROUND for name, count in found["lines"].items()}
    tables = {**found, "lines": rounded, "minutes": kept["minutes"], "seconds": kept["seconds"]}
    text = "# Allowed sizes and times: tests/support/budgets.py. Numbers go down; one that goes up needs a reason.\n"
    for kind, counts in tables.items():
        text += f"\n# {HEADS[kind]}\n[{kind}]\n"
        text += "".join(f'"{name}" = {count}\n' for name, count in counts.items())
    FILE.write_text(text)


HEADS = {
    "lines": "Lines per package, without generated code.",
    "files": f"Files of product folders that have more than {FOLDER_FILES}.",
    "long": f"Lines of product files that have more than {FILE_LINES}.",
    "minutes": "Minutes that the workers of `make test` take per test folder, together.",
    "seconds": "No budgets: the longest test files of the whole suite, which start first.",
}


def main() -> int:
    found = sizes()
    if "--write" in sys.argv[1:]:
        write(found)
    allowed = read()
    print("\n".join(table(found["lines"], allowed["lines"])))
    exceeded = faults(found, allowed)
    print("\n".join(f"over budget: {fault}" for fault in exceeded), end="\n" if exceeded else "")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
