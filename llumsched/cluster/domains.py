# SPDX-License-Identifier: Apache-2.0
"""Instances that fail together."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from llumsched.cluster.columns import Columns, Mask


class FailoverDomain(StrEnum):
    """The instances that fail with an instance. Without a node or unit, an instance fails alone. A unit has several
    members only with data parallelism."""

    INSTANCE = "instance"
    NODE = "node"
    INSTANCE_UNIT = "instance-unit"
    NODE_UNIT = "node-unit"
    """The instances on its node, and all units that have an instance there."""


def failing_with(domain: FailoverDomain, failed: Mask, cluster: Columns, lost: Columns | None = None) -> Mask:
    """The failed instances, and those that share a domain with them or with a `lost` one."""
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
