# SPDX-License-Identifier: Apache-2.0
"""`llumnix top`: the cluster, live."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from llumlet.process import kinds
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import MARK, Kind
from llumlet.process.setting_sources import Reading
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.commands.instances import ClusterAddress, Cms, cluster_of
from llumsched.console import output
from llumsched.console.exit_codes import ExitCode
from llumsched.scheduler_access import AccessSettings
from llumsched.top import rows
from llumsched.top.source import Glance, Source

DESCRIPTION = """Watch instances, their load, and the moves between them.

Keys: q quits, s changes the order, space pauses the view. PREFILL counts prompt tokens still to be computed, IN and OUT
count moves under way. --json prints one object per --interval, with the CMS's view, the instances and the moves. With
--once, the exit code is 4 if the CMS was not reached."""

FIRST_S = 5.0
"""Longest time for which --once waits for the CMS and the scheduler."""
NUM_MOVES = 20


@dataclass(frozen=True, slots=True)
class TopOptions:
    scheduler: Address | None = OPTIONS.setting(
        None,
        Kind(lambda url: Address.parse(url.removeprefix("http://").rstrip("/")), "HOST:PORT"),
        "HTTP address of the scheduler whose moves are shown (default: the cluster's)",
    )
    once: bool = OPTIONS.setting(False, MARK, "print the present state and exit")
    interval_s: float = OPTIONS.setting(1.0, kinds.seconds(above=0), "seconds between two objects of --json")


SETTINGS: Final = (ClusterAddress, Cms, TopOptions, AccessSettings, Output)


@dataclass(frozen=True, slots=True)
class Top:
    cms: str
    scheduler: Address | None
    options: TopOptions
    access: AccessSettings
    as_json: bool

    def source(self, credentials: Credentials) -> Source:
        return Source(self.cms, self.options.scheduler or self.scheduler, credentials, self.access.access)


def prepare(reading: Reading) -> Top:
    as_json = reading.make(Output).json
    top = Top(*cluster_of(reading), reading.make(TopOptions), reading.make(AccessSettings), as_json)
    reading.check(_terminal_faults, top)
    return top


def _terminal_faults(top: Top) -> Iterator[str]:
    if not (top.options.once or top.as_json or sys.stdout.isatty()):
        yield "the output is not a terminal: add --once or --json"


def run(top: Top, credentials: Credentials) -> int:
    if not (top.options.once or top.as_json):
        from llumsched.top.app import TopApp

        TopApp(top.source(credentials)).run()
        return ExitCode.OK
    return asyncio.run(_print(top, credentials))


async def _print(top: Top, credentials: Credentials) -> int:
    async with top.source(credentials) as source:
        await source.first(FIRST_S)
        while True:
            snapshot = source.snapshot()
            if top.as_json:
                output.print_json(snapshot.to_dict())
            else:
                _print_tables(snapshot)
            if top.options.once:
                return ExitCode.OK if snapshot.connected else ExitCode.UNREACHABLE
            await asyncio.sleep(top.options.interval_s)


def _print_tables(snapshot: Glance) -> None:
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
