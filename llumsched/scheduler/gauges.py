# SPDX-License-Identifier: Apache-2.0
"""Gauges of instances in Prometheus's text format, written straight from their loads.

A thousand instances have 25,000 samples, and requests are to be placed meanwhile: a sample is one line of text, where
the client library makes several objects and a dozen calls of it, and after some of them others have their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from prometheus_client.utils import floatToGoString

from llumsched.scheduling.load import Load

AT_ONCE: Final = 500
"""Samples; half a millisecond."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_number: Final[Callable[[float], str]] = floatToGoString
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gauge:
    name: str
    text: str
    value: Callable[[Load], float]


async def exposition(
    gauges: Sequence[Gauge], loads: Sequence[Load], labels_of: Callable[[Load], Mapping[str, str]]
) -> list[bytes]:
    """A sample of each gauge for each load, in pieces of text. Others on the event loop run in between."""
    rows = []
    for some in _parts_of(loads):
        rows += [(_text_of(labels_of(load)), load) for load in some]
        await asyncio.sleep(0)
    parts = []
    for gauge in gauges:
        name, value = gauge.name, gauge.value
        parts.append(f"# HELP {name} {gauge.text}\n# TYPE {name} gauge\n".encode())
        for some_rows in _parts_of(rows):
            lines = [f"{name}{labels} {_number(value(load))}\n" for labels, load in some_rows]
            parts.append("".join(lines).encode())
            await asyncio.sleep(0)
    return parts


def _parts_of(whole: Sequence[T]) -> Iterator[Sequence[T]]:
    return (whole[begin : begin + AT_ONCE] for begin in range(0, len(whole), AT_ONCE))


def _text_of(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"
