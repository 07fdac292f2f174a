# SPDX-License-Identifier: Apache-2.0
"""The selection of requests by `llumnix migrate`."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Final, cast

from llumlet.contract.types import MigrateRequest, MigrationReqPolicy, MigrationType
from llumlet.process import kinds
from llumlet.process.kinds import MARK, Kind
from llumlet.process.settings import Group
from llumlet.protocol.move.selection import Unit, value_fault

_RULES: Final = {name: cast(MigrationType, value) for name, value in MigrationType.items() if value}
_ORDERS: Final = {name: cast(MigrationReqPolicy, value) for name, value in MigrationReqPolicy.items() if value}
_which = Group("which requests")


@dataclass(frozen=True, slots=True)
class RequestChoice:
    request: tuple[str, ...] = _which.setting(
        (),
        Kind(tuple, "ID", repeated=True),
        "move this request, named by the engine's id, the client's id, or the beginning of one (repeatable)",
    )
    """Ids or prefixes, which the source resolves."""
    all: bool = _which.setting(False, MARK, "move all requests, waiting and running")
    rule: str | None = _which.setting(
        None, kinds.one_of(_RULES), "unit of --value: requests, tokens, or share of the KV cache"
    )
    order: str | None = _which.setting(None, kinds.one_of(_ORDERS), "order in which requests are chosen")
    value: float | None = _which.setting(
        None,
        kinds.number(),
        "amount to move: a number of requests (-1: all) or tokens, or a share of the KV cache in (0, 1]",
    )


def ask_for(selection: RequestChoice, given: Container[str], request: MigrateRequest) -> Iterator[str]:
    """Puts a rule into `request`, and says what is wrong with it, or with the flags that were `given`."""
    rule = [flag for flag in ("--rule", "--order", "--value") if flag != "--order" or not selection.all]
    ways = {"--request": bool(selection.request), "--all": selection.all, "a rule": any(flag in given for flag in rule)}
    chosen = [way for way, is_given in ways.items() if is_given]
    if not chosen:
        yield "say which requests: --request ID, --all, or --rule with --order and --value"
    elif len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other"
    elif selection.request:
        if "" in selection.request:
            yield "--request: the id is empty"
    elif selection.all:
        request.migration_type, request.num_reqs = MigrationType.NUM_REQ, -1
        request.migration_req_policy = _ORDERS[selection.order or "FCR"]
    else:
        yield from (f"{flag} is missing" for flag in rule if flag not in given)
        if selection.order and selection.rule and selection.value is not None:
            request.migration_req_policy = _ORDERS[selection.order]
            request.migration_type = _RULES[selection.rule]
            yield from _value_faults(selection.value, request)


def _value_faults(value: float, request: MigrateRequest) -> Iterator[str]:
    unit = Unit(MigrationType.Name(request.migration_type))
    if fault := value_fault(unit, value):
        yield f"--value {fault}"
    elif unit is Unit.RATIO:
        request.kv_cache_usage_ratio = value
    elif unit is Unit.TOKEN:
        request.num_tokens = int(value)
    else:
        request.num_reqs = int(value)
