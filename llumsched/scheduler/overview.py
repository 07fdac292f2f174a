# SPDX-License-Identifier: Apache-2.0
"""The web page's overview beside instances and moves: objectives, and the capacity that serves them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.policy.metrics import METRICS
from llumsched.policy.predictions import PREDICTIONS
from llumsched.scheduler.recent import NOTHING, Attainment, RecentShares
from llumsched.scheduler.scale_advice import Scaling, numbers

OBJECTIVES: Final = {"predicted_ttft": "ttft_slo", "predicted_tpot": "tpot_slo"}
"""Constants of a policy that serve as objectives of requests without any."""


class PredictedTimes(NamedTuple):
    """Predicted milliseconds of an empty request at one instance; None while unknown."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


UNKNOWN: Final = PredictedTimes()


class Overview:
    """Reads the dispatcher's view on its event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        attainment: Attainment,
        cached: RecentShares,
        scaling: Scaling | None,
    ) -> None:
        """`cached`: cached tokens of prompts at their chosen instance, under the name "". `scaling`: None without
        scaling."""
        self._dispatcher, self._attainment, self._cached, self._scaling = dispatcher, attainment, cached, scaling

    def of_cluster(self) -> dict[str, Any]:
        """The overview in JSON types. Shares are [part, whole] of the last minute."""
        constants = self._dispatcher.policy.constants
        return {
            "policy": self._dispatcher.policy.name,
            "objectives_ms": [constants.get(OBJECTIVES[name]) for name in PREDICTIONS],
            "attainment": self._attainment.sums(),
            "cached": None if self._dispatcher.hits is None else self._cached.sums().get("", NOTHING),
            "scaling": None if self._scaling is None else [numbers(one) for one in self._scaling.advice],
        }

    def of_instances(self) -> Mapping[str, PredictedTimes]:
        """The present predictions by instance id; half a millisecond for a thousand instances."""
        table = self._dispatcher.table
        columns = [METRICS[name].values(table).tolist() for name in PREDICTIONS]
        return {
            instance.id: PredictedTimes(*(round(value, 2) if math.isfinite(value) else None for value in values))
            for instance, values in zip(table.instances, zip(*columns, strict=True), strict=True)
        }
