# SPDX-License-Identifier: Apache-2.0
"""The instances that are cheapest to remove: those with the fewest tokens to move.

The last instance on a node leaves only after those on shared nodes, so that the group survives the loss of a node.
Among equals the last id leaves: `llumnix up` and StatefulSets number theirs and keep the first.
"""

from __future__ import annotations

from collections import Counter

from llumsched.cluster.columns import Cluster, Rows
from llumsched.policy.candidates import Candidates, Context
from llumsched.scaling.load import claimed_tokens


def cheapest_first(cluster: Cluster, rows: Rows, number: int) -> list[str]:
    """Ids of up to `number` instances in `rows`, in the order in which they should leave."""
    tokens = claimed_tokens(Candidates(cluster, Context(0.0)))
    by_cost = sorted(rows.tolist(), key=lambda row: (tokens[row], -cluster.order.rank[row]))
    nodes = cluster["node"]
    company = Counter(nodes[row] for row in by_cost)
    chosen: list[int] = []
    while by_cost and len(chosen) < number:
        alone_everywhere = max(company.values()) < 2
        row = next(row for row in by_cost if alone_everywhere or company[nodes[row]] > 1)
        by_cost.remove(row)
        chosen.append(row)
        company[nodes[row]] -= 1
    return [cluster.instances[row].id for row in chosen]
