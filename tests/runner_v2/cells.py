# SPDX-License-Identifier: Apache-2.0
"""Which cells of the matrix of moves run on engines with the V2 runner.

A token takes Triton's interpreter some ten times as long as a CPU kernel, so `COVER` shows each kind of request once,
and each value of the other axes several times: every other one in `make test`, the others and the product in
`make test-full`.
"""

from __future__ import annotations

import itertools
import random

from tests.exactness.cells import AXES, SAMPLING, Cell
from tests.exactness.test_matrix import Pace

ROUTES = ("aba", "ab", "abca")
"""`c` is the small engine."""
PACE = Pace(length=80, first=10, between=10)
SHORT = Pace(length=56, first=8, between=5)
"""For top-k and top-p, which are slower still."""
OTHERS = {axis: values for axis, values in AXES.items() if axis != "sampling"} | {"route": list(ROUTES)}
NUM_MORE = 200


def allowed(cell: Cell) -> bool:
    """For log probabilities of its prompt, vLLM lets a request neither stream nor use cached blocks."""
    return cell["logprobs"] != "output and prompt" or (cell["delivery"], cell["prefix"]) == ("whole", "cold")


def pace(cell: Cell) -> Pace:
    return SHORT if "top-k" in cell["sampling"] else PACE


def _cover() -> list[Cell]:
    """Each kind with log probabilities, which show a last bit; of the other axes, each value in turn, at random
    phases."""
    order = random.Random(3)
    axes = {axis: order.sample(values, len(values)) for axis, values in OTHERS.items() if axis != "logprobs"}
    turns = {axis: itertools.cycle(values) for axis, values in axes.items()}
    cells = []
    for sampling in SAMPLING:
        if order.random() < 0.5:  # else two axes of two values would go hand in hand
            next(turns[order.choice(list(turns))])
        cells.append({"sampling": sampling, "logprobs": "output", **{axis: next(turn) for axis, turn in turns.items()}})
    whole = {"endpoint": "completions", "delivery": "whole", "company": "alone", "prefix": "cold", "extras": "none"}
    return [*cells, {"sampling": "greedy", "logprobs": "output and prompt", "route": "aba", **whole}]


COVER = _cover()


def more() -> list[Cell]:
    """Drawn from the product, without those that `COVER` holds."""
    axes = {"sampling": list(SAMPLING), **OTHERS}
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    drawn = random.Random(0).sample([cell for cell in product if allowed(cell)], NUM_MORE)
    return [cell for cell in drawn if cell not in COVER]
