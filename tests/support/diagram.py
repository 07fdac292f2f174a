# SPDX-License-Identifier: Apache-2.0
"""Pictures of the protocol, made from the tables: `python -m tests.support.diagram docs/understand/protocol.md`.

Replaces what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` in the file. With `--check`, changes nothing
and exits with 1 if something would change.
"""

from __future__ import annotations

import argparse
import enum
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llumlet.protocol import effects as do
from llumlet.protocol import events as ev
from llumlet.protocol.ids import Epoch
from llumlet.protocol.machine import Machine, Row
from llumlet.protocol.move.destination import Destination
from llumlet.protocol.move.plan import Method, Plan, Terms
from llumlet.protocol.move.source import Source
from llumlet.protocol.origin.replay import Replay
from llumlet.protocol.recovery.adoption import Adoption
from llumlet.protocol.recovery.claim import Claim
from llumlet.protocol.recovery.rescue import Rescue
from tests.support.parts import fill

AnyRow = Row[enum.StrEnum]


def states(table: Sequence[AnyRow]) -> str:
    """A Mermaid state diagram. Events that change nothing, and rows for late answers, are left out."""
    labels: dict[tuple[str, str], list[str]] = {}
    for row in table:
        if row.to is not row.state and not row.late:
            said = labels.setdefault((row.state.value, row.to.value), [])
            if row.event.__name__ not in said:
                said.append(row.event.__name__)
    ends = {state.value for row in table for state in (row.state, row.to)} - {start for start, _ in labels}
    lines = ["stateDiagram-v2", f"    [*] --> {table[0].state.value}"]
    lines += [f"    {start} --> {to}: {', '.join(said)}" for (start, to), said in labels.items()]
    lines += [f"    {end} --> [*]" for end in sorted(ends)]
    return _mermaid(lines)


def table(rows: Sequence[AnyRow]) -> str:
    """The transitions as a Markdown table, in the order in which they are tried; neighbours that agree share a line."""
    lines = ["| in | on | if | go to |", "|---|---|---|---|"]
    cells = ((row, (row.event.__name__, row.guard, _target(row))) for row in rows if not row.late)
    for (event, guard, to), group in itertools.groupby(cells, key=lambda cell: cell[1]):
        froms = ", ".join(row.state.value for row, _ in group)
        lines.append(f"| {froms} | {event} | {guard} | {to} |")
    return "\n".join(lines)


def _target(row: AnyRow) -> str:
    return "(stays)" if row.to is row.state else row.to.value


# A move on a good day. Each step is fed to a machine; what it asks for is drawn.

SCRIPT: tuple[tuple[str, ev.Event], ...] = (
    ("S", ev.Start()),
    ("D", ev.ReserveRequested()),
    ("D", ev.BlocksReserved(hit_blocks=2, num_blocks=10)),
    ("S", ev.Reserved(hit_blocks=2, lease_s=30.0, incarnation="D1")),
    ("S", ev.BlocksPinned(frontier_blocks=9, num_tokens=310)),
    ("D", ev.RoundRequested(round=1, from_block=2, to_block=9, num_tokens=310)),
    ("D", ev.Grown(num_blocks=12)),
    ("D", ev.PullDone(job=1, num_bytes=7 << 20, seconds=0.01)),
    ("S", ev.RoundDone(round=1, num_bytes=7 << 20, seconds=0.01)),
    ("S", ev.BlocksPinned(frontier_blocks=10, num_tokens=322)),
    ("S", ev.Frozen(num_tokens=323, computed_tokens=322, num_blocks=11, base=123)),
    ("D", ev.CommitRequested(epoch=Epoch(0, 1), base=123, computed_tokens=322, from_block=9, num_blocks=11)),
    ("D", ev.PullDone(job=2, num_bytes=2 << 20, seconds=0.003)),
    ("D", ev.Admitted()),
    ("S", ev.Committed(incarnation="D1")),
    ("D", ev.CloseRequested()),
)


def happy_path() -> str:
    """A Mermaid sequence diagram of `SCRIPT`, as the machines answer it."""
    plan = Plan(method=Method.LIVE, epoch_next=Epoch(0, 1), bytes_per_block=1 << 20)
    machines: dict[str, Machine[Any, Any, Any]] = {"S": Source(plan), "D": Destination(Terms(block_size=32))}
    lines = [
        "sequenceDiagram",
        "    participant O as origin",
        "    participant S as source",
        "    participant D as destination",
    ]
    lines += ["    S->>O: tokens 0 … 122, epoch 0.0"]
    for name, event in SCRIPT:
        for effect in machines[name].on(event):
            lines += [f"    {line}" for line in _arrow(effect)]
        if isinstance(event, ev.Admitted):
            lines += ["    D->>O: tokens from 123 on, epoch 0.1"]
    return _mermaid(lines)


def _arrow(effect: do.Effect) -> list[str]:
    """How an effect is drawn; timers and what concerns no peer and no block are left out."""
    match effect:
        case do.SendReserve():
            return ["S->>D: Reserve"]
        case do.AnswerReserve(hit_blocks=hits, lease_s=lease):
            return [f"D-->>S: {hits} blocks hit, lease {lease:.0f} s"]
        case do.PinBlocks(from_block=start):
            return [f"S->>S: pin the final blocks from {start} on"]
        case do.SendRound(round=number, from_block=start, to_block=end):
            return [f"S->>D: Round {number}: blocks [{start}, {end})"]
        case do.Pull(from_block=start, to_block=end):
            return [f"D->>S: pull [{start}, {end}) from memory"]
        case do.AnswerRound(round=number):
            return [f"D-->>S: round {number} done"]
        case do.Unpin():
            return ["S->>S: unpin"]
        case do.Freeze():
            return ["S->>S: freeze, drain the step in flight, pin every block"]
        case do.SendCommit(epoch=epoch, base=base, computed_tokens=computed, from_block=start, num_blocks=end):
            return [
                "Note over S: from here on in doubt",
                f"S->>D: Commit: epoch {epoch} from output {base}, {computed} tokens computed, blocks [{start}, {end})",
            ]
        case do.Admit():
            return ["D->>D: check the lease, publish hashes, admit"]
        case do.AnswerCommit(state=state):
            return [f"D-->>S: {state}"]
        case do.Release():
            return ["S->>S: release without a word, keep a forwarding entry"]
        case do.SendClose():
            return ["S->>D: Close"]
    return []


def _mermaid(lines: Sequence[str]) -> str:
    return "\n".join(["```mermaid", *lines, "```"])


MACHINES: dict[str, type[Machine[Any, Any, Any]]] = {
    "source": Source,
    "destination": Destination,
    "adoption": Adoption,
    "rescue": Rescue,
    "claim": Claim,
    "replay": Replay,
}
PARTS: dict[str, Callable[[], str]] = {
    "happy path": happy_path,
    **{f"{name} states": functools.partial(states, machine.TABLE) for name, machine in MACHINES.items()},
    **{f"{name} table": functools.partial(table, machine.TABLE) for name, machine in MACHINES.items()},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.diagram", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/understand/protocol.md"))
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the file is not current")
    options = parser.parse_args(arguments)
    text = options.file.read_text()
    current = fill(text, PARTS)
    if options.check:
        return int(current != text)
    options.file.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main())
