# SPDX-License-Identifier: Apache-2.0
"""What can be set of the number of instances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds
from llumlet.process.kinds import Kind
from llumlet.process.settings import Group
from llumsched.policy.document import Mode

_DESCRIPTION: Final = """Says how many instances each model and infer type should have, at GET /scale and in Prometheus.
Freeness is Llumnix's: tokens of KV cache that are free for each request, on average over a group; as many steps could
all of them go on."""

_scaling = Group("scaling", _DESCRIPTION, "--scaling-")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the number of instances of a group; both belong to it."""

    least: int
    most: int

    def clamp(self, number: float) -> int:
        """The whole number of instances, within the limits, that is enough for `number`."""
        return int(min(max(math.ceil(number), self.least), self.most))

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def read_bounds(text: str) -> Bounds:
    """Raises ValueError that says what is wrong with `MIN:MAX`."""
    least_text, colon, most_text = text.partition(":")
    digits = least_text, most_text
    if not (colon and all(each.isascii() and each.isdigit() for each in digits)):
        raise ValueError(f"{text!r} is not MIN:MAX, two whole numbers like 1:4")
    least, most = map(int, digits)
    if least == 0:
        raise ValueError(f"{text!r}: MIN must be at least 1; without any instance nothing tells of load")
    if least > most:
        raise ValueError(f"{text!r}: MIN is above MAX")
    return Bounds(least, most)


BOUNDS: Final = Kind(read_bounds, "MIN:MAX")


@dataclass(frozen=True, slots=True)
class Config:
    """`bounds` None: nothing is said of numbers of instances."""

    bounds: Bounds | None = _scaling.setting(
        None, BOUNDS, "say how many instances each model and infer type should have, from MIN to MAX",
        flag="--scaling", mode=Mode.FULL,
    )  # fmt: skip
    low_freeness: float = _scaling.setting(
        160.0, kinds.number("TOKENS", at_least=0), "below it there are too few instances", mode=Mode.FULL
    )
    high_freeness: float = _scaling.setting(
        320.0, kinds.number("TOKENS", at_least=0), "with one instance fewer still above it: there are too many",
        mode=Mode.FULL,
    )  # fmt: skip
    ttft_s: float = _scaling.setting(
        0.0, kinds.seconds(), "too few also where a prompt would wait so long for its first token; 0: not looked at",
        mode=Mode.FULL,
    )  # fmt: skip
    tpot_s: float = _scaling.setting(
        0.0, kinds.seconds(), "and where there would be so much time between two tokens; 0: not looked at",
        mode=Mode.FULL,
    )  # fmt: skip
    cold_start_s: float = _scaling.setting(
        60.0, kinds.seconds(), "from an instance's start until it serves: load that grows is looked at so far ahead",
        mode=Mode.FULL,
    )  # fmt: skip
    settle_s: float = _scaling.setting(
        30.0, kinds.seconds(), "how long there must have been too many before one leaves", mode=Mode.FULL
    )
    interval_s: float = _scaling.setting(1.0, kinds.seconds(above=0), "between two looks at the load", mode=Mode.FULL)


def faults(config: Config, prefix: str = _scaling.prefix) -> Iterator[str]:
    """`prefix`: of the flags by which it was said."""
    if config.high_freeness < config.low_freeness:
        yield (
            f"{prefix}high-freeness {config.high_freeness:g} is below {prefix}low-freeness "
            f"{config.low_freeness:g}: there would be too few and too many at a time"
        )
