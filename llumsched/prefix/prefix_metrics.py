# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the prefix index, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llumsched.prefix.hits import PrefixHits


class PrefixMetrics(Collector):
    """A scrape must run on the event loop of `hits`."""

    def __init__(self, hits: PrefixHits) -> None:
        self._hits = hits

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        hits, index = self._hits, self._hits.index
        for name, text, value in (
            ("scheduler_prefix_instances_in_sync", "Of which is known what they hold.", hits.num_instances),
            ("scheduler_prefix_index_blocks", "That are known to be held.", len(index)),
            ("scheduler_prefix_index_bytes", "Of what is known.", index.num_bytes),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("scheduler_prefix_resyncs", "Instances that told everything anew.", hits.num_resyncs),
            ("scheduler_prefix_blocks_left_out", "Without room in the index.", index.num_left_out),
        ):
            yield CounterMetricFamily(name, text, value=value)
