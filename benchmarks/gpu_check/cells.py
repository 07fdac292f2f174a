# SPDX-License-Identifier: Apache-2.0
"""Which engines are checked doing what, and what of that a machine can run."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

Task = Literal["move", "prefix", "lora", "ngram", "json", "kill"]
Runner = Literal["v2", "v1"]
Kv = Literal["bf16", "fp8"]
Attention = Literal["gqa", "mla"]


@dataclasses.dataclass(frozen=True, slots=True)
class Engines:
    """What both engines of a cell are started with; by default, what vLLM does on a GPU."""

    graphs: bool = True
    runner: Runner = "v2"
    kv: Kv = "bf16"
    attention: Attention = "gqa"
    block_size: int | None = None
    executor: Literal["", "uni", "mp"] = ""
    ranks: int = 1
    """Tensor parallel."""
    gpus: int = 1
    """How many they need: 2 with one rank each means that each has its own."""
    transport: Literal["local", "tcp"] = "local"
    lora: bool = False
    ngram: bool = False
    slow_copy: bool = False
    """Copies last long enough for something to happen meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    name: str
    engines: Engines
    task: Task = "move"


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Where the check runs."""

    num_gpus: int
    stand_in: bool = False
    """Engines on a CPU take the place of those on GPUs, one core that of each."""
    obstacle: str | None = None
    """Why there are no engines at all."""
    gpus_reach_each_other: bool = False


GRAPHS = (True, False)
RUNNERS: tuple[Runner, ...] = ("v2", "v1")
KVS: tuple[Kv, ...] = ("bf16", "fp8")
ATTENTIONS: tuple[Attention, ...] = ("gqa", "mla")
BLOCK_SIZES = (16, 64)
_COVER: tuple[tuple[bool, Runner, Kv, Attention, int], ...] = (
    # In the first six any two choices meet; the others show each beside graphs and the V2 runner, which GPUs have.
    (True, "v2", "bf16", "gqa", 16),
    (True, "v1", "bf16", "mla", 16),
    (True, "v1", "fp8", "mla", 64),
    (False, "v2", "bf16", "mla", 64),
    (False, "v2", "fp8", "gqa", 64),
    (False, "v1", "fp8", "gqa", 16),
    (True, "v2", "bf16", "mla", 64),
    (True, "v2", "fp8", "gqa", 16),
)


def matrix(every: bool = False) -> list[Cell]:
    """The covering set, or the whole product."""
    rows = itertools.product(GRAPHS, RUNNERS, KVS, ATTENTIONS, BLOCK_SIZES) if every else _COVER
    return [Cell("-".join(("graphs" if row[0] else "eager", *map(str, row[1:]))), Engines(*row)) for row in rows]


def single(stand_in: bool) -> list[Cell]:
    """A cell of each kind, on what vLLM starts by default. Cells with equal engines follow each other. The most telling
    cells come first, for a machine that is there for a short time."""
    base = Engines(graphs=not stand_in)

    return [
        Cell("defaults", base),
        Cell("JSON schema", base, "json"),
        Cell("prefix hits", base, "prefix"),
        Cell("source killed", dataclasses.replace(base, slow_copy=True), "kill"),
        Cell("tcp", dataclasses.replace(base, transport="tcp")),
        Cell("LoRA", dataclasses.replace(base, lora=True), "lora"),
        Cell("n-grams", dataclasses.replace(base, ngram=True), "ngram"),
        Cell("executor uni", dataclasses.replace(base, executor="uni")),
        Cell("executor mp", dataclasses.replace(base, executor="mp")),
        Cell("tensor parallel 2", dataclasses.replace(base, ranks=2, gpus=2)),
        Cell("two GPUs", dataclasses.replace(base, gpus=2)),
    ]


def why_unrun(cell: Cell, machine: Machine) -> str | None:
    """Why this machine cannot run the cell; None if it can try."""
    engines = cell.engines
    if machine.obstacle is not None:
        return machine.obstacle
    if machine.stand_in:
        if engines.graphs:
            return "a CPU captures no graphs"
        if engines.gpus > engines.ranks:
            return "a CPU stands in for no second GPU"
        if (engines.kv, engines.attention) == ("fp8", "mla"):
            return "vLLM's CPU kernels for MLA keep nothing in fp8"
        return None
    if engines.gpus > machine.num_gpus:
        return f"{engines.gpus} GPUs are needed, there is {machine.num_gpus}"
    if engines.gpus > engines.ranks and not machine.gpus_reach_each_other:
        return "the two GPUs do not reach each other's memory"
    return None
