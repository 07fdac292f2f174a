# SPDX-License-Identifier: Apache-2.0
"""`llumnix top`: the cluster, live."""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.table import Table

from llumlet.types import Address
from llumsched import output, scheduler_access
from llumsched.commands import arguments
from llumsched.commands.instances import add_cms, cms_faults
from llumsched.exit_codes import ExitCode
from llumsched.top import rows
from llumsched.top.source import Snapshot, Source

DESCRIPTION = """Watch instances, their load, and the moves between them.

Keys: q quits, s changes the order, space holds the view. PREFILL are prompt tokens that are still to be computed; IN
and OUT are moves now. With --json: one object per --interval, with the CMS's view, the instances and the moves; with
--once one of them, and exit code 4 if the CMS was not reached."""

FIRST_S = 5.0
"""How long --once waits for the CMS and the scheduler."""
NUM_MOVES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cms(parser)
    parser.add_argument(
        "--scheduler", metavar="HOST:PORT", help="HTTP address of the scheduler whose rescheduler's moves are shown"
    )
    scheduler_access.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print what is now, and exit")
    parser.add_argument("--interval", default="1", metavar="SECONDS", help="between two objects of --json (default 1)")
    arguments.add_json(parser)


def faults(args: argparse.Namespace) -> list[str]:
    found = cms_faults(args)
    if not args.cms and not found:
        found.append("--cms HOST:PORT is missing")
    args.scheduler_address = None
    if args.scheduler is not None:
        addresses, more = arguments.address("--scheduler", args.scheduler.removeprefix("http://").rstrip("/"))
        found += more
        args.scheduler_address = addresses[0] if addresses else None
    args.access, more = scheduler_access.given(args)
    found += more
    args.interval_s, more = arguments.number("--interval", args.interval)
    found += more or ([] if args.interval_s > 0 else ["--interval must be positive"])
    if not (args.once or args.json or sys.stdout.isatty()):
        found.append("the output is no terminal: add --once or --json")
    return found


def run(args: argparse.Namespace) -> int:
    if not (args.once or args.json):
        from llumsched.top.app import TopApp

        TopApp(_source(args)).run()
        return ExitCode.OK
    return asyncio.run(_print(args))


def _source(args: argparse.Namespace) -> Source:
    address: Address | None = args.scheduler_address
    return Source(args.cms, address, args.credentials, args.access)


async def _print(args: argparse.Namespace) -> int:
    async with _source(args) as source:
        await source.first(FIRST_S)
        while True:
            snapshot = source.snapshot()
            if args.json:
                output.print_json(snapshot.to_dict())
            else:
                _print_tables(snapshot)
            if args.once:
                return ExitCode.OK if snapshot.connected else ExitCode.UNREACHABLE
            await asyncio.sleep(args.interval_s)


def _print_tables(snapshot: Snapshot) -> None:
    screen = output.console()
    screen.print(rows.headline(snapshot))
    tables: list[tuple[Table, dict[str, rows.Cells]]] = [
        (output.table(rows.INSTANCE_COLUMNS), rows.instance_rows(snapshot)),
        (output.table(rows.MOVE_COLUMNS), rows.move_rows(snapshot, NUM_MOVES)),
    ]
    for table, lines in tables:
        for cells in lines.values():
            table.add_row(*cells)
        if lines:
            screen.print()
            screen.print(table)
