# SPDX-License-Identifier: Apache-2.0
"""The metrics of all workers, read from their files. An unreadable file is left out and reported, so that it does not
hide the others."""

from __future__ import annotations

import glob
import logging
import struct
from collections.abc import Iterable
from typing import ClassVar, Final

from prometheus_client import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

_log = logging.getLogger(__name__)
_UNREADABLE: Final = (struct.error, ValueError, IndexError, OSError)


class MetricFiles(Collector):
    _told: ClassVar[set[str]] = set()

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for file in glob.glob(f"{self._directory}/*.db"):
            try:
                found = _read(file)
            except FileNotFoundError:
                continue  # its worker has ended
            except _UNREADABLE as error:
                if file not in self._told:
                    self._told.add(file)
                    _log.error("the metrics in %s are left out: they cannot be read (%s)", file, error)
                continue
            for name, metric in found.items():
                if name in merged:
                    merged[name].samples += metric.samples
                else:
                    merged[name] = metric
        return MultiProcessCollector._accumulate_metrics(merged, accumulate=True)  # type: ignore[no-untyped-call, no-any-return]


def is_whole(file: str) -> bool:
    try:
        _read(file)
    except _UNREADABLE:
        return False
    return True


def _read(file: str) -> dict[str, Metric]:
    return MultiProcessCollector._read_metrics([file])  # type: ignore[no-untyped-call, no-any-return]
