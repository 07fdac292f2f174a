# SPDX-License-Identifier: Apache-2.0
"""Between the words of `llumlet.protocol` and the numbers of messages."""

from __future__ import annotations

from llumlet.protocol.selection import Rule, parse_rule
from llumlet.types import MigrateRequest, MigrationReqPolicy, MigrationType


def rule_of(request: MigrateRequest) -> Rule:
    """Of a request that names none by id. Raises Refused(invalid_request)."""
    unit = MigrationType.Name(request.migration_type)
    order = MigrationReqPolicy.Name(request.migration_req_policy or MigrationReqPolicy.SR)
    return parse_rule(unit, order, getattr(request, request.WhichOneof("value") or "num_reqs"))
