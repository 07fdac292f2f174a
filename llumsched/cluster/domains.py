# SPDX-License-Identifier: Apache-2.0
"""Which instances fail together."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from llumsched.cluster.columns import Columns, Mask


class FailoverDomain(StrEnum):
    """What fails with an instance. One without a node or a unit fails alone; a unit has more than one member only with
    data parallelism, so that engines without it never fail each other, whatever their `unit_id`."""

    INSTANCE = "instance"
    NODE = "node"
    INSTANCE_UNIT = "instance-unit"
    NODE_UNIT = "node-unit"
    """The instances on its node, and all units that have an instance there."""


def failing_with(domain: FailoverDomain, failed: Mask, cluster: Columns, lost: Columns | None = None) -> Mask:
    """The failed instances, and those that share their domain, or that of one which is `lost`."""
    if domain in (FailoverDomain.NODE, FailoverDomain.NODE_UNIT):
        failed = failed | _sharing("node", failed, cluster, lost)
    if domain in (FailoverDomain.INSTANCE_UNIT, FailoverDomain.NODE_UNIT):
        failed = failed | _sharing("engine", failed, cluster, lost)
    return failed


def _sharing(column: str, members: Mask, cluster: Columns, lost: Columns | None) -> Mask:
    codes = cluster[column]
    shared = codes[members]
    if lost is not None:
        shared = np.concatenate([shared, lost[column]])
    shared = shared[shared >= 0]
    return np.isin(codes, shared) if shared.size else np.zeros(len(cluster), np.bool_)
