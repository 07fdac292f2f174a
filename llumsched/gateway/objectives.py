# SPDX-License-Identifier: Apache-2.0
"""Objectives for the time of a request's tokens, from its headers, else its client's key, else its model; and the times
that are predicted for it.

The headers are those of llm-d's inference scheduler. Engines receive and ignore them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from llumsched.gateway.errors import InvalidRequest

TTFT_HEADER: Final = "x-llm-d-slo-ttft-ms"
TPOT_HEADER: Final = "x-llm-d-slo-tpot-ms"
MOST_MS: Final = 86_400_000.0


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives in milliseconds; 0 is none."""

    ttft_ms: float = 0.0
    """Time from the request's arrival at the gateway to its first token."""
    tpot_ms: float = 0.0
    """Mean time between two tokens after the first."""

    def __bool__(self) -> bool:
        return bool(self.ttft_ms or self.tpot_ms)

    def or_else(self, other: Objectives) -> Objectives:
        return Objectives(self.ttft_ms or other.ttft_ms, self.tpot_ms or other.tpot_ms)

    def are_met(self, ttft_ms: float, tpot_ms: float) -> bool:
        return (not self.ttft_ms or ttft_ms <= self.ttft_ms) and (not self.tpot_ms or tpot_ms <= self.tpot_ms)


NONE: Final = Objectives()


@dataclass(frozen=True, slots=True)
class Predicted:
    """A scheduler's prediction for a request, from its placement on; 0 is unknown."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    cached_tokens: int = 0
    """Tokens of its prompt in the instance's prefix cache."""


NOTHING_PREDICTED: Final = Predicted()


class Tally(NamedTuple):
    """Numbers of requests that met all their objectives, and that did not."""

    num_met: int = 0
    num_missed: int = 0


def of_headers(headers: Mapping[str, str]) -> Objectives:
    """The objectives that a request names itself. Raises InvalidRequest."""
    return Objectives(*(_of_header(headers, name) for name in (TTFT_HEADER, TPOT_HEADER)))


def _of_header(headers: Mapping[str, str], name: str) -> float:
    text = headers.get(name)
    if text is None:
        return 0.0
    try:
        return milliseconds(text)
    except ValueError as error:
        raise InvalidRequest(f"The header `{name}`: {error}.") from None


def milliseconds(text: str) -> float:
    """The value of an objective. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_MS:
        raise ValueError(f"{text[:64]!r} is not a positive number of milliseconds, a day at most")
    return value


def by_model(texts: list[str]) -> Mapping[str, float]:
    """Milliseconds by model from `[MODEL=]MS`; the model "" is any other. Raises ValueError."""
    found = {}
    for each in texts:
        model, equals, text = each.rpartition("=")
        if equals and not model:
            raise ValueError(f"{each!r} is neither MS nor MODEL=MS")
        found[model] = milliseconds(text)
    return found
