# SPDX-License-Identifier: Apache-2.0
"""Gauges of instances in Prometheus's text format, written directly from columns.

A thousand instances have 25,000 samples, and requests must be placed meanwhile. A sample is one line of text, where the
client library would make several objects, and other tasks run in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from prometheus_client.utils import floatToGoString

from llumsched.cluster.columns import Columns, Values
from llumsched.cluster.instance import Instance

AT_ONCE: Final = 500
"""Samples written before the event loop runs other tasks; half a millisecond."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_number: Final[Callable[[float], str]] = floatToGoString
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gauge:
    name: str
    text: str
    values: Callable[[Columns], Values]
    """The samples by row."""


async def exposition(
    gauges: Sequence[Gauge],
    columns: Columns,
    instances: Sequence[Instance],
    labels_of: Callable[[Instance], Mapping[str, str]],
) -> list[bytes]:
    """The samples of all gauges and instances. The event loop runs in between, so the columns are read first."""
    values = [gauge.values(columns).tolist() for gauge in gauges]
    instances = list(instances)
    labels: list[str] = []
    for some in _parts_of(instances):
        labels += [_text_of(labels_of(instance)) for instance in some]
        await asyncio.sleep(0)
    parts = []
    for gauge, of_gauge in zip(gauges, values, strict=True):
        name = gauge.name
        parts.append(f"# HELP {name} {gauge.text}\n# TYPE {name} gauge\n".encode())
        for samples in _parts_of(list(zip(labels, of_gauge, strict=True))):
            lines = [f"{name}{of_instance} {_number(value)}\n" for of_instance, value in samples]
            parts.append("".join(lines).encode())
            await asyncio.sleep(0)
    return parts


def _parts_of(whole: Sequence[T]) -> Iterator[Sequence[T]]:
    return (whole[begin : begin + AT_ONCE] for begin in range(0, len(whole), AT_ONCE))


def _text_of(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"
