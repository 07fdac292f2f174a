# SPDX-License-Identifier: Apache-2.0
"""The instances in one decision: the columns of the cluster, the request and the time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from llumsched.cluster.columns import Cluster, Columns, Mask, UnknownColumn, Values
from llumsched.cluster.providers import HIT_COLUMN, RequestProvider
from llumsched.policy.metrics import METRICS, Metric
from llumsched.policy.predictions import PREDICTIONS
from llumsched.request import REQUEST_COLUMNS, Request

OF_DECISION: Final = (*REQUEST_COLUMNS, "age_s", HIT_COLUMN, *PREDICTIONS)
"""Columns of every decision beside the cluster's: the request's, seconds since an instance's last report, its prefix
hits, and the predictions for the request."""


@dataclass(frozen=True, slots=True)
class Context:
    """The inputs of a decision that are the same for all instances."""

    now_s: float
    """The time on the view's clock. While the store is lost, the time of its loss, so that instances do not grow
    stale."""
    request: Request = field(default_factory=Request)
    avoid: frozenset[str] = frozenset()
    """Ids of instances that failed the request; used again only if there is no other."""
    complaints: Mapping[str, str] = field(default_factory=dict)
    """Complaints of the asking gateway, with reasons, by instance id."""
    lost: Columns | None = None
    """Recently lost instances. They are no candidates, but others may share their domain."""


class Candidates:
    """The `Columns` of one decision, each computed at most once. Valid until the cluster changes."""

    def __init__(
        self,
        cluster: Cluster,
        context: Context,
        providers: Sequence[RequestProvider] = (),
        *,
        reported: Cluster | None = None,
    ) -> None:
        """`reported`: the cluster as reported, if `cluster` is an estimate of its present. Predictions start from the
        report."""
        self.cluster, self.context = cluster, context
        self._as_reported = self if reported is None else Candidates(reported, context, providers)
        self._providers = providers
        self._columns: dict[str, Values] = {}
        self._values: dict[str, Values] = {}

    def __len__(self) -> int:
        return len(self.cluster)

    def __getitem__(self, name: str) -> Values:
        known = self._columns.get(name)
        if known is not None:
            return known
        try:
            return self.cluster[name]
        except UnknownColumn:
            self._columns.update(self._of_decision(name))
        return self._columns[name]

    def _of_decision(self, name: str) -> dict[str, Values]:
        if name in REQUEST_COLUMNS:
            return {name: np.full(len(self), float(getattr(self.context.request, name)))}
        if name == "age_s":
            return {name: self.context.now_s - self.cluster["received_s"]}
        if name in PREDICTIONS:
            return {name: self.values(METRICS[name])}
        for provider in self._providers:
            if name in provider.columns:
                return dict(zip(provider.columns, provider.of_request(self.context.request, self.cluster), strict=True))
        if name == HIT_COLUMN:
            return {name: np.zeros(len(self))}
        raise UnknownColumn(name)

    @property
    def reported(self) -> Mask:
        return self.cluster["reported"] > 0

    def values(self, metric: Metric) -> Values:
        """Values of a metric by row; never NaN."""
        known = self._values.get(metric.name)
        if known is None:
            columns = self._as_reported if metric.name in PREDICTIONS else self
            known = self._values[metric.name] = metric.values(columns)
        return known

    def predicted(self, row: int) -> dict[str, float]:
        """Predictions for the request at an instance, by the names of `PREDICTIONS`, in milliseconds; only those that
        the decision used."""
        told = {name: float(self._values[name][row]) for name in PREDICTIONS if name in self._values}
        return {name: value for name, value in told.items() if math.isfinite(value)}

    def among(self, ids: Collection[str]) -> Mask:
        """Rows of these instances. Unknown ids are allowed."""
        mask = np.zeros(len(self), np.bool_)
        if ids:
            index = self.cluster.index
            mask[[index[instance_id] for instance_id in ids if instance_id in index]] = True
        return mask
