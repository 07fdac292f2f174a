# SPDX-License-Identifier: Apache-2.0
"""How do the models that people serve move? One small random model of each family, on two engines.

    python -m benchmarks.models --json models.jsonl
    python -m benchmarks.models gemma3 qwen3-next --moves 20

Of each family: a greedy stream that is moved to the other engine and back while it decodes, against the same stream
unmoved (`identical`), and how long a stream of `--length` tokens stands still when it moves, by its client's clock,
over the gap between its tokens, as `benchmarks.downtime` measures it (target: at most 1.6). One JSON object for each;
`live`: every move brought its KV cache along; `groups`: KV cache groups. The models are as large as that benchmark's,
whose steps take about as long as a GPU's; those of the tests (`--size tiny`) take a few milliseconds.
`--runner v2` plays vLLM's V2 runner with asynchronous scheduling, by means of Triton's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.downtime import Cell, measure_cell, prompt_of
from benchmarks.mover import Mover
from tests.support.client import Client
from tests.support.harness import Fleet, Runner, Server, ServerSpec, add_runner
from tests.support.model import PRESETS
from tests.support.model import build as build_llama
from tests.support.other_models import OTHER, build
from tests.support.progress import Say, saying
from tests.support.report import add_json, print_json

FAMILIES: Final = ("llama", *OTHER)
LARGE: Final = "bench"
SIZES: Final = ("tiny", LARGE)
TARGET: Final = 1.6
MOST_TOLD: Final = 500
"""Characters of what went wrong with a family."""
OUTPUT: Final = 160
AT: Final = 30
"""Tokens between two moves."""
SHORT: Final = 400
"""Tokens of the prompt whose tokens are compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What one family showed."""

    family: str
    size: str
    runner: Runner
    groups: int
    is_identical: bool
    cell: Cell

    def as_json(self) -> dict[str, Any]:
        measured = self.cell.as_json(None, self.runner)
        return {
            "bench": "models",
            "family": self.family,
            "size": self.size,
            "runner": self.runner or "default",
            "live": measured.get("mode") == "live",
            "identical": self.is_identical,
            "context_tokens": self.cell.length,
            "moves": measured["moves"],
            "stall_over_itl_p50": measured.get("stall_over_itl_p50"),
            "stall_ms_p50": measured.get("stall_ms", {}).get("p50"),
            "itl_ms_p50": measured.get("itl_ms_p50"),
            "copied_bytes": measured.get("copied_bytes"),
            "groups": self.groups,
            "failures": measured["failures"],
        }


def spec_of(family: str, size: str, runner: Runner, length: int) -> ServerSpec:
    flags: tuple[str, ...] = ("--no-enable-prefix-caching",)
    if family == "llama":
        model = build_llama(PRESETS[size])
    else:
        other = OTHER[family]
        model, flags = build(other.enlarged() if size == LARGE else other), (*flags, *other.flags)
    return ServerSpec(
        model,
        runner=runner,
        max_model_len=min(8192, 2 * length + 2048),
        max_num_seqs=4,
        block_size=None,
        flags=flags,
    )


def groups_of(server: Server) -> int:
    """By what vLLM says of block sizes; of one group it says nothing."""
    found = re.search(r"kv cache group sizes \(([\d, ]+)\)", server.log_text())
    return len(re.findall(r"\d+", found[1])) if found else 1


async def is_identical(servers: Sequence[Server]) -> bool:
    """Whether a stream that moves there and back has the tokens of one that does not."""
    prompt = prompt_of(SHORT, seed=0)
    async with Client(servers[0].base_url) as client, Mover(servers) as mover:
        unmoved = await (await client.complete(prompt, OUTPUT, ignore_eos=True)).result()
        moved = await client.complete(prompt, OUTPUT, ignore_eos=True)
        for source, destination in ((servers[0], servers[1]), (servers[1], servers[0])):
            await moved.wait_for(len(moved.token_ids) + AT)
            await mover.move(source, destination, moved, method="live")
        return (await moved.result()).token_ids == unmoved.token_ids


def measure(family: str, spec: ServerSpec, options: argparse.Namespace, say: Say) -> Found:
    cell = Cell("live", options.length)
    logs = options.logs / family if options.logs else None
    with Fleet(logs) as fleet:
        say(f"{family}: starting two engines")
        servers = fleet.start(*(dataclasses.replace(spec, name=name, instance_id=name) for name in ("a", "b")))
        say(f"{family}: there and back")
        identical = asyncio.run(is_identical(servers))
        say(f"{family}: {options.moves} moves of {options.length} tokens")
        asyncio.run(measure_cell(servers, cell, options.moves, lambda: None))
        return Found(family, options.size, options.runner, groups_of(servers[0]), identical, cell)


def table_of(found: Sequence[Found], broken: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Models on two engines, live moves")
    for heading in ("family", "groups", "live", "identical", "context", "moves", "stall ms", "gap ms", "stall / gap"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for one in found:
        line = one.as_json()
        if line["stall_over_itl_p50"] is None:
            table.add_row(one.family, str(one.groups), *line["failures"][:1], style="red")
            continue
        yes = {True: "yes", False: "NO"}
        table.add_row(
            one.family,
            str(one.groups),
            yes[line["live"]],
            yes[line["identical"]],
            str(line["context_tokens"]),
            str(line["moves"]),
            f"{line['stall_ms_p50']:.1f}",
            f"{line['itl_ms_p50']:.1f}",
            f"{line['stall_over_itl_p50']:.2f}",
        )
    for failed in broken:
        table.add_row(failed["family"], "", *failed["failures"], style="red")
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    add("--length", type=int, default=4096, help="tokens of the streams whose stall is measured")
    add("--moves", type=int, default=12, help="moves of each family, the first not counted")
    add("--size", choices=SIZES, default=LARGE, help="%(default)s if left out; tiny: those of the tests")
    add_runner(parser)
    add("--logs", type=Path, metavar="DIR")
    add_json(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if options.moves < 1 or not 64 <= options.length <= 6000:
        parser.error("--moves must be positive, --length from 64 to 6000")
    found: list[Found] = []
    broken: list[dict[str, Any]] = []
    with saying("models") as say:
        say("making the models")
        families = options.families or FAMILIES
        specs = {family: spec_of(family, options.size, options.runner, options.length) for family in families}
        for family, spec in specs.items():
            try:
                found.append(measure(family, spec, options, say))
            except Exception as error:  # noqa: BLE001 - what was measured of others is told all the same
                problem = f"{type(error).__name__}: {error}".strip()[:MOST_TOLD]
                say(f"{family}: {problem}")
                broken.append({"bench": "models", "family": family, "live": False, "failures": [problem]})
    Console(width=120, markup=False).print(table_of(found, broken))
    lines = [*(one.as_json() for one in found), *broken]
    print_json(options.json, *lines)
    slow = [it for it in lines if not it.get("stall_over_itl_p50") or it["stall_over_itl_p50"] > TARGET]
    print(f"{len(lines) - len(slow)} of {len(lines)} families at or below {TARGET} gaps", file=sys.stderr)
    return 0 if all(it["live"] and it["identical"] for it in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
