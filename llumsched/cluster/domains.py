# SPDX-License-Identifier: Apache-2.0
"""Which instances fail together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llumsched.rescheduling.config import Domain

Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]


def failing(domain: Domain, sick: Mask, nodes: Codes, units: Codes) -> Mask:
    """The sick instances, and those that share their domain.

    `nodes` and `units` are numbers of the names, -1 where there is none: an instance without a node or without a unit
    fails alone. Instances of one data-parallel engine have a unit; others count as if they had none.
    """
    match domain:
        case Domain.INSTANCE:
            return sick
        case Domain.NODE:
            return sick | _sharing(sick, nodes)
        case Domain.INSTANCE_UNIT:
            return sick | _sharing(sick, units)
        case Domain.NODE_UNIT:
            on_nodes = sick | _sharing(sick, nodes)
            return on_nodes | _sharing(on_nodes, units)


def _sharing(members: Mask, codes: Codes) -> Mask:
    shared = np.unique(codes[members & (codes >= 0)])
    return np.isin(codes, shared)


def codes_of(names: list[str]) -> Codes:
    """A number for each name, equal for equal names; -1 for the empty one."""
    known: dict[str, int] = {"": -1}
    return np.array([known.setdefault(name, len(known) - 1) for name in names], dtype=np.int64)
