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
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from benchmarks.gpu_check.budget import Budget
from benchmarks.gpu_check.cells import Cell, Engines, Machine, Task, why_unrun
from tests.support.progress import Say

if TYPE_CHECKING:
    from tests.support.moves import Move

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
    """An engine's own description: "RUNNER behind SCHEDULER, steps in flight: N"; True if workers are processes; and
    the attention backend, empty if the log does not name it."""

    runner: str
    scheduler: str
    steps_in_flight: int
    executor: str
    attention: str = ""

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


def run_cells(
    cells: list[Cell],
    machine: Machine,
    bench: Bench[Any],
    say: Say,
    budget: Budget | None = None,
    most: int = len(NUMERICS),
) -> Generator[Part]:
    """A row for each, as soon as it is known. Cells with the same engines share a pair.

    most: how many numerics are tried of each cell. No pair is begun for which `budget` has no time; the rows of cells
    that were left for that say so.
    """
    budget = budget or Budget()
    for engines, group in itertools.groupby(cells, key=lambda cell: cell.engines):
        same = list(group)
        if (why := why_unrun(same[0], machine)) is not None:
            yield from (row(cell, [], why) for cell in same)
            continue
        made: dict[str, list[Part]] = {cell.name: [] for cell in same}
        for numerics in NUMERICS:
            yield from _attempted(numerics, engines, same, machine, bench, say, budget, most, made)


def _attempted(
    numerics: Numerics,
    engines: Engines,
    cells: list[Cell],
    machine: Machine,
    bench: Bench[Any],
    say: Say,
    budget: Budget,
    most: int,
    made: dict[str, list[Part]],
) -> Iterator[Part]:
    """Make an attempt of all cells that need it in these numerics, on one pair; the rows of those that need no more."""

    def following(cell: Cell) -> Numerics | None:
        return _next(made[cell.name], numerics_of(cell.task, machine.stand_in)[:most])

    pending = [cell for cell in cells if following(cell) == numerics]
    if not pending:
        return
    if (why := budget.why_no_more()) is not None:
        for cell in pending:
            yield row(cell, made[cell.name], why, left=True)
            made[cell.name].append({"numerics": numerics, "verdict": "unrun", "why": [why], "left": True})
        return
    say(f"{pending[0].name}: starting engines, {numerics}")
    begun = list(pending)
    with budget.pair():
        try:
            with bench.pair(engines, numerics) as pair:
                while begun:
                    cell = begun[0]
                    say(f"{cell.name}, {numerics}")
                    seen = _observed(partial(bench.observe, pair, cell), cell)
                    begun.pop(0)
                    made[cell.name].append({"numerics": numerics} | seen)
                    if following(cell) is None:
                        yield row(cell, made[cell.name], None)
        except NotStarted as error:
            outcome: Part = {"verdict": "unrun" if error.stock else "wrong", "why": [str(error)]}
        except Exception as error:  # noqa: BLE001 - of the harness: the cells behind these are still to come
            say(f"{pending[0].name}: {error}")
            outcome = {"verdict": "wrong", "why": [f"{type(error).__name__}: {error}"]}
    for cell in begun:
        made[cell.name].append({"numerics": numerics} | outcome)
        if following(cell) is None:
            yield row(cell, made[cell.name], None)


def _next(made: list[Part], rungs: list[Numerics]) -> Numerics | None:
    """The numerics of the first attempt, or of one more because those before leave open what tokens tell. A cell
    whose tokens differ stays wrong. Further numerics are tried only to help find the cause."""
    if any(attempt.get("left") for attempt in made):
        return None
    if [(attempt["numerics"], attempt["verdict"]) for attempt in made] == [("as started", "unrun")]:
        return None  # it is not for the numerics that vLLM does not start
    if not all(attempt["verdict"] in ("undecided", "unrun") or attempt.get("tokens_only") for attempt in made):
        return None
    return rungs[len(made)] if len(made) < len(rungs) else None


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


def row(cell: Cell, attempts: list[Part], obstacle: str | None, *, left: bool = False) -> Part:
    """The cell's line of the report. What was wrong once is wrong, whatever came of it in other numerics. `left`: an
    attempt was not made for lack of time."""
    verdicts = [attempt["verdict"] for attempt in attempts]
    order: tuple[Verdict, ...] = ("wrong", "right", "undecided", "unrun")
    verdict = next((it for it in order if it in verdicts), "unrun")
    found = [] if verdict == "right" else [it for attempt in attempts for it in attempt["why"]]
    why = ([obstacle] if obstacle else []) + found
    engines = [runs for attempt in attempts for runs in attempt.get("engines", ())]
    proved, backends = {runs["runner"] for runs in engines}, {runs["attention"] for runs in engines}
    return {
        "cell": cell.name,
        "task": cell.task,
        "asked": dataclasses.asdict(cell.engines),
        "verdict": verdict,
        "why": why,
        "runner": ", ".join(sorted(proved)) or None,
        "attention": ", ".join(sorted({it for it in backends if it})) or None,
        "concluded": concluded(attempts),
        "left": left,
        "attempts": list(attempts),
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
