# SPDX-License-Identifier: Apache-2.0
"""A running request moves between two vLLM servers, and its client does not notice.

    make demo            or            python -m examples.demo
    make demo MODEL=gemma3             a small random model of another family

Starts two real servers with the same small model. Streams one completion from the first and leaves
it alone: the reference, twice, so that "identical" means something. Then streams the same request
again, moves it back and forth while it runs, and compares every token. The report shows which
server computed which part of the text, and for how long each move held the stream up, by the
client's own clock. The last line on stdout is one JSON object; the exit code is 0 only if every
move was live and all tokens are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from benchmarks.mover import MoveFailed, Mover
from tests.support.client import Client, Stream, StreamFailed
from tests.support.harness import Fleet, Server, ServerDied, ServerSpec
from tests.support.model import PRESETS, build
from tests.support.moves import Move, Stall, describe, first_index, stall_of_move
from tests.support.other_models import OTHER
from tests.support.other_models import build as build_other
from tests.support.progress import Say, saying
from tests.support.stats import median

NAMES = ("A", "B")
COLOURS = ("cyan", "yellow")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What happened: the moved stream, the two that were left alone, and the moves with stalls."""

    moved: Stream
    reference: Stream
    control: Stream
    moves: tuple[Move, ...]
    stalls: tuple[Stall, ...]

    @property
    def control_identical(self) -> bool:
        """The servers repeat themselves: without this no comparison means anything."""
        return self.reference.token_ids == self.control.token_ids

    @property
    def tokens_identical(self) -> bool:
        return self.moved.token_ids == self.reference.token_ids

    @property
    def all_live(self) -> bool:
        return all(move.live for move in self.moves)

    @property
    def good(self) -> bool:
        return bool(self.moves) and self.all_live and self.tokens_identical

    def as_json(self) -> dict[str, Any]:
        itl = median([gap for stall in self.stalls for gap in stall.steady])
        stall_p50 = median([stall.stall for stall in self.stalls])
        return {
            "moves": len(self.moves),
            "mode": "live" if self.all_live else ",".join(sorted({m.mode for m in self.moves})),
            "tokens_identical": self.tokens_identical,
            "text_identical": self.moved.text == self.reference.text,
            "control_identical": self.control_identical,
            "recomputed_tokens": sum(move.recomputed_tokens for move in self.moves),
            "copied_bytes": sum(move.copied_bytes for move in self.moves),
            "stall_ms_p50": round(stall_p50 * 1e3, 3),
            "stall_ms_max": round(max(stall.stall for stall in self.stalls) * 1e3, 3),
            "itl_ms_p50": round(itl * 1e3, 3),
            "stall_over_itl_p50": round(stall_p50 / itl, 3),
            "output_tokens": len(self.moved.token_ids),
            "context_tokens": [move.context_tokens for move in self.moves],
            "transport": ",".join(sorted({move.transport for move in self.moves})),
        }


async def stream_with_moves(
    servers: Sequence[Server], prompt: list[int], num_moves: int, spacing: int, say: Say
) -> Outcome:
    """Run the request three times on the first server, the third time with the moves."""
    home = servers[0]
    num_tokens = (num_moves + 1) * spacing
    async with Client(home.base_url) as client:

        async def start(name: str) -> Stream:
            # No run may use what another left in the prefix cache: a prefill in other pieces rounds differently.
            return await client.complete(prompt, num_tokens, cache_salt=name)

        runs = []
        for name in ("reference", "the same again"):
            say(f"{name}: {num_tokens} tokens, not moved")
            runs.append(await (await start(name)).result())
        async with Mover(servers) as mover:
            stream = await start("moved")
            try:
                moves = await make_moves(mover, servers, stream, num_moves, spacing, say)
                say("the rest of the stream")
                moved = await stream.result(timeout_s=60)
            except (StreamFailed, MoveFailed) as error:
                raise type(error)(f"{error}\n{await describe(servers)}") from error
    stalls = tuple(stall_of_move(moved, move) for move in moves)
    return Outcome(moved, runs[0], runs[1], tuple(moves), stalls)


async def make_moves(
    mover: Mover, servers: Sequence[Server], stream: Stream, num_moves: int, spacing: int, say: Say
) -> list[Move]:
    """Move `stream` from one server to the other every `spacing` tokens. Raises MoveFailed."""
    moves = []
    for number in range(num_moves):
        await stream.wait_for((number + 1) * spacing - spacing // 2)
        source, destination = servers[number % 2], servers[(number + 1) % 2]
        say(f"move {number + 1} of {num_moves}: {source.name} to {destination.name}")
        moves.append(await mover.move(source, destination, stream))
    return moves


def report(outcome: Outcome, pieces: Sequence[str], console: Console) -> None:
    """The text in the colours of the servers, one line per move, and the verdict."""
    table = Table(title="Moves", title_justify="left")
    for column in ("", "context", "rounds", "copied", "recomputed", "stall", "gap", "stall / gap"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, (move, stall) in enumerate(zip(outcome.moves, outcome.stalls, strict=True)):
        table.add_row(
            f"{NAMES[number % 2]} → {NAMES[(number + 1) % 2]}",
            f"{move.context_tokens:,}",
            str(move.rounds),
            f"{move.copied_bytes / 2**20:.2f} MiB",
            str(move.recomputed_tokens),
            f"{stall.stall * 1e3:.1f} ms",
            f"{stall.itl * 1e3:.1f} ms",
            f"{stall.stall / stall.itl:.2f}",
        )
    console.print(Panel(_coloured(outcome, pieces), title="The stream, by the server that computed"))
    console.print(table)
    slowest = max(range(len(outcome.moves)), key=lambda number: outcome.stalls[number].stall)
    phases = outcome.moves[slowest].phase_ms
    parts = ", ".join(f"{phase} {ms:.1f} ms" for phase, ms in phases.items())
    console.print(f"Longest stall: move {slowest + 1}. Its phases: {parts or 'not reported'}.", highlight=False)
    same = "[green]the same[/]" if outcome.tokens_identical else "[red]not the same[/]"
    again = "the same" if outcome.control_identical else "[red]not the same[/]"
    console.print(
        f"{len(outcome.moved.token_ids)} tokens, {same} as without moves (a second run without moves: {again})."
    )
    if not outcome.all_live:
        console.print("[red]Not every move was live.[/]")


def _coloured(outcome: Outcome, pieces: Sequence[str]) -> Text:
    text = Text()
    borders = [first_index(m, len(outcome.moved.prompt_token_ids)) for m in outcome.moves]
    start = 0
    for number, end in enumerate([*borders, len(pieces)]):
        text.append(f"[{NAMES[number % 2]}]", style=f"bold reverse {COLOURS[number % 2]}")
        text.append("".join(pieces[start:end]), style=COLOURS[number % 2])
        start = end
    return text


def decode(model: Path, token_ids: Sequence[int]) -> list[str]:
    """The text of each token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.decode([token]) for token in token_ids]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    models = (*sorted(PRESETS), *OTHER)
    parser.add_argument("--model", choices=models, default="bench", help=f"one of {', '.join(models)}", metavar="MODEL")
    parser.add_argument("--moves", type=int, default=8, help="how often the request moves")
    parser.add_argument("--spacing", type=int, default=48, help="output tokens between two moves")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    prompt = random.Random(0).choices(range(100, 1000), k=options.prompt)
    with saying("building the model") as say:
        name = options.model
        model = build(PRESETS[name]) if name in PRESETS else build_other(OTHER[name])
        flags = OTHER[name].flags if name in OTHER else ()
        try:
            with Fleet(options.logs, say) as fleet:
                specs = [ServerSpec(model, name=name, instance_id=name, flags=flags) for name in NAMES]
                say("starting two vLLM servers")
                servers = fleet.start(*specs)
                run = stream_with_moves(servers, prompt, options.moves, options.spacing, say)
                outcome = asyncio.run(run)
        except (ServerDied, StreamFailed, MoveFailed) as error:
            print(f"failed: {error}\nThe servers' logs are in {fleet.log_dir}", file=sys.stderr)
            print(json.dumps({"moves": 0, "error": str(error)}))
            return 1
    report(outcome, decode(model, outcome.moved.token_ids), console)
    print(json.dumps(outcome.as_json()), flush=True)
    return 0 if outcome.good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
