# SPDX-License-Identifier: Apache-2.0
"""The scaler's advice over HTTP and for Prometheus.

    GET /scale                                    all groups: {"groups": [{"model": …, "wanted": 3, …}]}
    GET /scale?model=NAME[&infer_type=neutral]    one group: {"model": …, "wanted": 3, …}

The second form is for KEDA's `metrics-api` scaler with `valueLocation: wanted`: docs/operate/scaling.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llumsched.cluster.columns import Cluster
from llumsched.cluster.view import View
from llumsched.scaling.scaler import Advice, Scaler
from llumsched.scaling.scaling_config import Bounds, ScalingConfig

LOST_S: Final = 2.0
"""Time after which a lost store is not relied on: the number of instances stays as it is."""
_OFF: Final = "numbers of instances are not looked at: start the scheduler with --scaling MIN:MAX"
_LABELS: Final = ("model", "infer_type")
_GAUGES: Final[tuple[tuple[str, str, Callable[[Advice], float]], ...]] = (
    ("llumnix_saturation", "Instances needed for each that serves; from 1 on too few.", lambda one: one.saturation),
    ("llumnix_wanted_replicas", "Instances that there should be.", lambda one: one.wanted),
    ("llumnix_replicas", "Instances that serve.", lambda one: one.num_serving),
    ("llumnix_starting_replicas", "Instances that report nothing yet.", lambda one: one.num_starting),
    ("llumnix_leaving_replicas", "Instances that take nothing new.", lambda one: one.num_leaving),
)  # fmt: skip


class Scaling(Collector):
    """The newest advice. Belongs to the event loop of `view`; `clock` is the view's."""

    def __init__(
        self,
        config: ScalingConfig,
        bounds: Bounds,
        view: View,
        cluster: Cluster,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.advice: Sequence[Advice] = ()
        self._interval_s = config.interval_s
        self._scaler = Scaler(config, bounds)
        self._view, self._cluster, self._clock = view, cluster, clock
        registry.register(self)

    async def run(self) -> None:
        """Evaluates periodically until it is cancelled."""
        while True:
            if self._view.age_s <= LOST_S:
                self.advice = self._scaler.advise(self._cluster, self._clock())
            await asyncio.sleep(self._interval_s)

    # For Prometheus

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for one in self.advice:
                gauge.add_metric(one.group, value(one))
            yield gauge


def add_route(app: web.Application, scaling: Scaling | None) -> None:
    """`scaling` is None without scaling."""

    async def scale(request: web.Request) -> web.Response:
        if scaling is None:
            return web.json_response({"error": _OFF}, status=404)
        query = request.query
        if unknown := sorted(set(query) - set(_LABELS)):
            return web.json_response({"error": f"unknown: {', '.join(unknown)}"}, status=400)
        found = [
            _shown(one)
            for one in scaling.advice
            if all(query.get(name, of) == of for name, of in one.group._asdict().items())
        ]
        if "model" not in query:
            return web.json_response({"groups": found})
        if len(found) != 1:
            what = "no instance of it was seen" if not found else "several infer types: say infer_type"
            return web.json_response({"error": f"model {query['model']!r}: {what}"}, status=404 if not found else 400)
        return web.json_response(found[0])

    app.router.add_get("/scale", scale)


def numbers(one: Advice) -> dict[str, Any]:
    """The present and desired numbers, and the reason."""
    return {
        **one.group._asdict(),
        "wanted": one.wanted,
        "replicas": one.num_serving,
        "starting": one.num_starting,
        "leaving": one.num_leaving,
        "saturation": round(one.saturation, 4),
        "reason": one.reason,
    }


def _shown(one: Advice) -> dict[str, Any]:
    return numbers(one) | {"leave": one.leave, "cheapest_first": one.cheapest_first}
