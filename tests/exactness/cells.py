# SPDX-License-Identifier: Apache-2.0
"""The matrix of moves: what a request can ask for, how it is asked, and where it goes.

`COVER` holds a small set of cells in which every two values of different axes that can meet do meet, as far as one
engine configuration allows, and `FEW` some of these that hold every value; `SAMPLING` says what each request kind
sends.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from typing import Any

Cell = dict[str, str]

_SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 400, "maxLength": 500}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
_CHOICES = ["".join(chr(97 + (start + step * step) % 26) for step in range(260)) for start in range(3)]
GUIDED: dict[str, dict[str, Any]] = {
    "json, in a string": {"structured_outputs": {"json": _SCHEMA}},
    "regex, in a number": {"structured_outputs": {"regex": "[0-9]{100,120}"}},
    "choice": {"structured_outputs": {"choice": _CHOICES}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= item{50,55} "."\nitem ::= [a-z] [0-9]'}},
}
REASONING = {"reasoning_start_str": "ba", "reasoning_end_str": "do go"}
"""Of the engines: token 220, and 233 and 143."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": _SEEDED,
    "top-p, top-k, min-p": _SEEDED | {"top_p": 0.95, "top_k": 200, "min_p": 0.0001},
    "penalties": _SEEDED | {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {str(token): 4.0 for token in range(200, 260)}},
    # More than 128 with the end of the sequence end an engine with the V2 runner, and without this project, too.
    "min_tokens": {"min_tokens": 120, "stop_token_ids": list(range(100, 220))},
    "bad_words": {"bad_words": ["a", "e", "ba", "do"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(100, 600))},
    "stop strings": {"stop": ["never in the text"]},
    "include_stop_str": {"stop": ["never in the text"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [0, 1, 2]},
    # Found as soon as the output is long enough to be looked at, which it is behind the moves.
    "repetition detection": {
        "repetition_detection": {"min_pattern_size": 1, "max_pattern_size": 4, "min_count": 3},
        "logit_bias": {"300": 100.0},
        "min_tokens": 120,
    },
    # A section of thinking that began in the prompt is cut off between the moves, and others begin.
    "thinking budget": _SEEDED | {"thinking_token_budget": 80, "logit_bias": {"220": 6.0}},
    "vllm_xargs": _SEEDED | {"vllm_xargs": {"avoid": list(range(100, 300))}},
    **{kind: parameters | _SEEDED for kind, parameters in GUIDED.items()},
}
AXES: dict[str, list[str]] = {
    "sampling": list(SAMPLING),
    "logprobs": ["none", "output", "output and prompt"],
    "endpoint": ["completions", "chat"],
    "delivery": ["streaming", "whole"],
    "route": ["ab", "aba", "abc"],
    "company": ["alone", "neighbours"],
    "prefix": ["cold", "cached"],
    "extras": ["none", "priority"],
}


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """What the engines are started with; `routes` says how many are needed."""

    dtype: str
    block_size: int
    routes: tuple[str, ...]
    transport: str
    exact: bool = False
    """With `--llumlet-exact`."""
    processor: bool = False
    """Every request goes through a custom logits processor with the mark that it is portable."""

    def allows(self, cell: Cell) -> bool:
        """In bfloat16 a prefix hit is exact only if it is copied too (docs/reference/portability.md). For log
        probabilities of its prompt, vLLM lets a request neither stream nor use cached blocks.
        """
        if cell["sampling"] == "vllm_xargs" and not self.processor:
            return False
        return (
            cell["route"] in self.routes
            and (cell["prefix"] == "cold" or self.dtype == "float32" or self.exact)
            and (cell["logprobs"] != "output and prompt" or (cell["delivery"], cell["prefix"]) == ("whole", "cold"))
        )

    def __str__(self) -> str:
        return f"{self.dtype}-{self.block_size}"


CONFIGURATIONS = (
    Configuration("float32", 64, ("ab", "aba", "abc"), "local"),
    Configuration("bfloat16", 32, ("ab", "aba"), "mooncake", exact=True),
    Configuration("bfloat16", 128, ("ab", "aba"), "tcp", processor=True),
)


ORDER = 17
"""Of the first 60, this seed gives the smallest set: 48 cells."""


def all_cells() -> list[tuple[Configuration, Cell]]:
    """The full product, without what a configuration does not allow."""
    product = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [(where, cell) for where in CONFIGURATIONS for cell in product if where.allows(cell)]


def covering(cells: list[tuple[Configuration, Cell]], *, at_once: int) -> list[tuple[Configuration, Cell]]:
    """Greedily chosen cells that hold every value that `cells` hold (`at_once`: 1), or every pair of values (2); the
    configuration is one more axis.

    Which of equally good cells is taken depends on their order; of pairs, 45 is the least that there can be (kinds x
    routes).
    """
    numbers: dict[Any, int] = {}

    def held(where: Configuration, cell: Cell) -> int:
        """A bit for each value, or pair of values."""
        values = {**cell, "configuration": str(where)}.items()
        return sum(1 << numbers.setdefault(one, len(numbers)) for one in itertools.combinations(values, at_once))

    rows = [(where, cell, held(where, cell)) for where, cell in cells]
    random.Random(ORDER).shuffle(rows)
    missing = (1 << len(numbers)) - 1
    chosen: list[tuple[Configuration, Cell]] = []
    times: Counter[Configuration] = Counter()
    while missing:
        # Of cells that add equally much, one of the configuration with the fewest.
        where, cell, found = max(rows, key=lambda row: ((row[2] & missing).bit_count(), -times[row[0]]))
        chosen.append((where, cell))
        times[where] += 1
        missing &= ~found
    return sorted(chosen, key=lambda row: CONFIGURATIONS.index(row[0]))


def name(where: Configuration, cell: Cell) -> str:
    return "-".join([str(where), *cell.values()]).replace(" ", "_")


COVER = covering(all_cells(), at_once=2)
FEW = covering(COVER, at_once=1)
