# SPDX-License-Identifier: Apache-2.0
"""Settings of the number of instances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds
from llumlet.process.kinds import Kind
from llumlet.process.settings import Group
from llumsched.policy.document import Mode

_DESCRIPTION: Final = """Recommends a number of instances per model and infer type, at GET /scale and in Prometheus.
Freeness, as in Llumnix, is the number of free KV cache tokens per request of a group: how many more decode steps all
of them could take."""

_scaling = Group("scaling", _DESCRIPTION, "--scaling-", mode=Mode.FULL)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the number of instances of a group, both inclusive."""

    least: int
    most: int

    def clamp(self, number: float) -> int:
        """`number`, rounded up and limited."""
        return int(min(max(math.ceil(number), self.least), self.most))

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def read_bounds(text: str) -> Bounds:
    """Reads `MIN:MAX`. Raises ValueError that names the fault."""
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
class ScalingConfig:
    """With `bounds` None nothing is recommended."""

    bounds: Bounds | None = _scaling.setting(
        None,
        BOUNDS,
        "recommend a number of instances, from MIN to MAX, for each model and infer type; empty recommends none",
        flag="--scaling",
        common=True,
    )
    low_freeness: float = _scaling.setting(
        160.0,
        kinds.number("TOKENS", at_least=0),
        "scale out when the freeness of a group falls below this many tokens per request",
    )
    high_freeness: float = _scaling.setting(
        320.0,
        kinds.number("TOKENS", at_least=0),
        "scale in when the freeness of a group with one instance fewer would stay above this many tokens per request",
    )
    ttft_s: float = _scaling.setting(
        0.0,
        kinds.seconds(),
        "also scale out when the predicted time to first token exceeds this many seconds; 0 ignores it",
    )
    tpot_s: float = _scaling.setting(
        0.0,
        kinds.seconds(),
        "also scale out when the predicted time between two tokens exceeds this many seconds; 0 ignores it",
    )
    cold_start_s: float = _scaling.setting(
        60.0,
        kinds.seconds(),
        "seconds from the start of an instance until it serves: growing load is extrapolated this far",
    )
    settle_s: float = _scaling.setting(
        30.0, kinds.seconds(), "seconds for which a smaller number of instances must have been enough before one leaves"
    )
    interval_s: float = _scaling.setting(1.0, kinds.seconds(above=0), "seconds between two evaluations of the load")


def faults(config: ScalingConfig, prefix: str = _scaling.prefix) -> Iterator[str]:
    """`prefix` of the flags, for the messages."""
    if config.high_freeness < config.low_freeness:
        yield (
            f"{prefix}high-freeness {config.high_freeness:g} is below {prefix}low-freeness "
            f"{config.low_freeness:g}: there would be too few and too many at a time"
        )
