# SPDX-License-Identifier: Apache-2.0
"""What follows from what was seen of a cell: pure, and the order in which attempts are made.

Two unmoved runs of one request are the control. In bf16 a GPU may give them different tokens, by another batch, another
split of a sum, another kernel; then no move can be blamed, or cleared, by comparing tokens, and the next of NUMERICS is
tried, in which a token does not depend on that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from benchmarks.gpu_check.cells import Cell, Engines, Machine, Task, why_unrun
from tests.support.moves import Move
from tests.support.progress import Say

Numerics = Literal["as started", "batch invariant", "float32"]
Verdict = Literal["right", "wrong", "undecided", "unrun"]
Part = dict[str, Any]
Pair = TypeVar("Pair")

NUMERICS: tuple[Numerics, ...] = ("as started", "batch invariant", "float32")
_RUNNER = re.compile(r"vllm\.v1\.worker\.[a-z]+([._])model_runner\.")
"""V2 runners are in packages, `gpu.model_runner`; V1's are modules, `gpu_model_runner`."""


class NotStarted(Exception):
    """Engines did not start. `stock`: nor would they without the llumlet."""

    def __init__(self, why: str, *, stock: bool) -> None:
        super().__init__(why)
        self.stock = stock


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """One engine, by its own word: "RUNNER behind SCHEDULER, steps in flight: N"; and whether workers are processes."""

    runner: str
    scheduler: str
    steps_in_flight: int
    executor: str

    @property
    def runner_kind(self) -> str:
        found = _RUNNER.match(self.runner)
        return self.runner if found is None else "v2" if found[1] == "." else "v1"


@dataclasses.dataclass(slots=True)
class Observed:
    """What was seen of a cell on one pair of engines."""

    engines: list[Runs]
    unmoved: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)
    """The tokens of two runs of each request."""
    moved: list[list[int]] = dataclasses.field(default_factory=list)
    """Token lists of one run each."""
    moves: list[Move] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    """What the task itself found wrong."""
    figures: Part = dataclasses.field(default_factory=dict)


class Bench(Protocol[Pair]):
    """Two engines at a time."""

    def pair(self, engines: Engines, numerics: Numerics) -> contextlib.AbstractContextManager[Pair]:
        """Raises NotStarted."""

    def observe(self, pair: Pair, cell: Cell) -> Observed:
        """May raise anything: then what was asked did not work."""


class Judgement(NamedTuple):
    verdict: Verdict
    why: list[str]
    """Everything that speaks against it."""
    tokens_only: bool = False
    """Whether it is wrong for nothing but tokens that differ."""


def judged(cell: Cell, seen: Observed) -> Judgement:
    """The verdict on one attempt."""
    wanted, faults = cell.engines, list(seen.faults)
    for runs in seen.engines:
        if runs.runner_kind != wanted.runner:
            faults.append(f"the {wanted.runner} runner was asked for, {runs.runner} is there")
        if wanted.executor not in ("", runs.executor):
            faults.append(f"executor {wanted.executor} was asked for, {runs.executor} is there")
    for move in seen.moves:
        if not move.live:
            faults.append(f"a move was not live: {move.phase}, {move.mode}, {move.reason} {move.detail}".rstrip())
        elif move.transport != wanted.transport:
            faults.append(f"a move went over {move.transport}, not {wanted.transport}")
    if cell.task != "kill" and not (seen.moves and seen.moved):
        faults.append("nothing was moved")
    apart, differ = [], []
    for moved, (one, other) in zip(seen.moved, seen.unmoved, strict=True):
        if one != other:
            apart.append(f"two unmoved runs differ from token {_common(one, other)} on")
        elif moved != one:
            differ.append(f"tokens differ from token {_common(moved, one)} of {len(one)} on")
    if faults or differ:
        return Judgement("wrong", faults + differ + apart, tokens_only=not faults)
    return Judgement("undecided" if apart else "right", apart)


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens they have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def numerics_of(task: Task, stand_in: bool) -> list[Numerics]:
    """Numerics to try, in order. A prefix hit brings blocks that were computed in another batch: in bf16 nothing says
    that they are the same."""
    rungs = [it for it in NUMERICS if not (stand_in and it == "batch invariant")]
    return rungs[1:] if task == "prefix" else rungs


def run_cells(cells: list[Cell], machine: Machine, bench: Bench[Any], say: Say) -> list[Part]:
    """A row for each, in order. Cells with the same engines share a pair."""
    rows = []
    for engines, group in itertools.groupby(cells, key=lambda cell: cell.engines):
        same = list(group)
        why = why_unrun(same[0], machine)
        attempts: dict[str, list[Part]] = {cell.name: [] for cell in same}
        if why is None:
            _attempt(engines, same, machine, bench, say, attempts)
        rows += [row(cell, attempts[cell.name], why) for cell in same]
    return rows


def _attempt(
    engines: Engines, cells: list[Cell], machine: Machine, bench: Bench[Any], say: Say, attempts: dict[str, list[Part]]
) -> None:
    """Fill in `attempts`, on one pair of engines for each way of computing that is needed."""
    for numerics in NUMERICS:
        pending = [cell for cell in cells if _is_next(attempts[cell.name], numerics, cell, machine)]
        if not pending:
            continue
        say(f"{pending[0].name}: starting engines, {numerics}")
        try:
            with bench.pair(engines, numerics) as pair:
                for cell in pending:
                    say(f"{cell.name}, {numerics}")
                    seen = _observed(partial(bench.observe, pair, cell), cell)
                    attempts[cell.name].append({"numerics": numerics} | seen)
        except NotStarted as error:
            outcome = {"numerics": numerics, "verdict": "unrun" if error.stock else "wrong", "why": [str(error)]}
            for cell in pending:
                attempts[cell.name].append(dict(outcome))


def _is_next(made: list[Part], numerics: Numerics, cell: Cell, machine: Machine) -> bool:
    """The first attempt, or one more because those before leave open what tokens tell. One that is wrong only by its
    tokens is no better for another, but whoever looks for the fault knows more."""
    if numerics not in numerics_of(cell.task, machine.stand_in):
        return False
    if [(attempt["numerics"], attempt["verdict"]) for attempt in made] == [("as started", "unrun")]:
        return False  # it is not for the numerics that vLLM does not start
    return all(attempt["verdict"] in ("undecided", "unrun") or attempt.get("tokens_only") for attempt in made)


def _observed(observe: Callable[[], Observed], cell: Cell) -> Part:
    try:
        seen = observe()
    except Exception as error:  # noqa: BLE001 - a report about what does not work
        return {"verdict": "wrong", "why": [f"{type(error).__name__}: {error}"]}
    verdict, why, tokens_only = judged(cell, seen)
    return {
        "verdict": verdict,
        "why": why,
        "tokens_only": tokens_only,
        "engines": [dataclasses.asdict(runs) for runs in seen.engines],
        "transports": sorted({move.transport for move in seen.moves if move.moved}),
        "moves": len(seen.moves),
        **seen.figures,
    }


def row(cell: Cell, attempts: list[Part], obstacle: str | None) -> Part:
    """The cell's line of the report. What was wrong once is wrong, whatever came of it in other numerics."""
    verdicts = [attempt["verdict"] for attempt in attempts]
    order: tuple[Verdict, ...] = ("wrong", "right", "undecided", "unrun")
    verdict = next((it for it in order if it in verdicts), "unrun")
    why = [obstacle] if obstacle else [] if verdict == "right" else [it for a in attempts for it in a["why"]]
    proved = {runs["runner"] for attempt in attempts for runs in attempt.get("engines", ())}
    return {
        "cell": cell.name,
        "task": cell.task,
        "asked": dataclasses.asdict(cell.engines),
        "verdict": verdict,
        "why": why,
        "runner": ", ".join(sorted(proved)) or None,
        "concluded": concluded(attempts),
        "attempts": attempts,
    }


def concluded(attempts: list[Part]) -> str:
    """A sentence of what the attempts say together of the tokens."""
    by_verdict = {attempt["verdict"]: attempt["numerics"] for attempt in reversed(attempts)}
    exact, apart = by_verdict.get("right"), by_verdict.get("undecided")
    differs = next((attempt["numerics"] for attempt in attempts if attempt.get("tokens_only")), None)
    if differs and exact:
        return (
            f"differs {differs}, where unmoved runs agree, and is exact {exact}: the bytes arrive, and what computes "
            "with them after a move is not what did before"
        )
    if exact:
        return f"exact, {exact}" + (f"; nothing follows {apart}, where unmoved runs differ, too" if apart else "")
    if apart and not differs:
        return "nothing: unmoved runs differ, too"
    return "differs" if differs else "nothing"


def counts(rows: list[Part]) -> dict[Verdict, int]:
    order: tuple[Verdict, ...] = ("right", "wrong", "undecided", "unrun")
    return {verdict: sum(it["verdict"] == verdict for it in rows) for verdict in order}
