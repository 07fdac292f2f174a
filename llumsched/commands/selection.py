# SPDX-License-Identifier: Apache-2.0
"""The arguments of `llumnix migrate` that say which requests are meant."""

from __future__ import annotations

import argparse
from typing import cast

from llumlet.types import MigrateRequest, MigrationReqPolicy, MigrationType
from llumsched.commands.arguments import number

_RULES = {name: cast(MigrationType, value) for name, value in MigrationType.items() if value}
_ORDERS = {name: cast(MigrationReqPolicy, value) for name, value in MigrationReqPolicy.items() if value}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("which requests")
    which.add_argument(
        "--request",
        action="append",
        default=[],
        metavar="ID",
        help="this request: the engine's id, the client's, or the beginning of one (repeatable)",
    )
    which.add_argument("--all", action="store_true", help="all requests, waiting and running")
    which.add_argument("--rule", metavar="RULE", help=f"what --value counts: {', '.join(_RULES)}")
    which.add_argument("--order", metavar="ORDER", help=f"whom first: {', '.join(_ORDERS)}")
    which.add_argument(
        "--value",
        metavar="N",
        help="requests (-1: all), tokens, or share of the KV cache in (0, 1]",
    )


def faults(args: argparse.Namespace, request: MigrateRequest) -> list[str]:
    """What is wrong with the selection; a rule that is right goes into `request`.

    Explicit ids stay in `args.request`: which requests they mean is for the source to say.
    """
    rule = {f"--{name}": getattr(args, name) for name in ("rule", "order", "value")}
    if args.all:
        del rule["--order"]
    by_rule = any(given is not None for given in rule.values())
    ways = {"--request": bool(args.request), "--all": args.all, "a rule": by_rule}
    chosen = [way for way, given in ways.items() if given]
    if not chosen:
        return ["say which requests: --request ID, --all, or --rule with --order and --value"]
    if len(chosen) > 1:
        return [f"{' and '.join(chosen)} exclude each other"]
    if args.request:
        return ["--request: the id is empty"] if "" in args.request else []
    if args.all:
        request.migration_type, request.num_reqs = MigrationType.NUM_REQ, -1
        return _order_faults(args.order or "FCR", request)
    missing = [f"{flag} is missing" for flag, given in rule.items() if given is None]
    found = _order_faults(args.order, request) if args.order is not None else []
    if args.rule is not None and args.rule.upper() not in _RULES:
        found.append(f"--rule {args.rule!r} is not one of {', '.join(_RULES)}")
    elif args.rule is not None:
        request.migration_type = _RULES[args.rule.upper()]
    if args.value is not None:
        found += _value_faults(args.value, request)
    return missing + found


def _order_faults(text: str, request: MigrateRequest) -> list[str]:
    if text.upper() not in _ORDERS:
        return [f"--order {text!r} is not one of {', '.join(_ORDERS)}"]
    request.migration_req_policy = _ORDERS[text.upper()]
    return []


def _value_faults(text: str, request: MigrateRequest) -> list[str]:
    amount, found = number("--value", text)
    if found:
        return found
    if request.migration_type == MigrationType.RATIO:
        if not 0 < amount <= 1:
            return [f"--value {text}: a RATIO lies in (0, 1]"]
        request.kv_cache_usage_ratio = amount
    elif request.migration_type and not (amount.is_integer() and amount < 1 << 62):
        return [f"--value {text} is not a whole number"]
    elif request.migration_type == MigrationType.TOKEN:
        if amount < 1:
            return [f"--value {text}: a number of tokens is positive"]
        request.num_tokens = int(amount)
    elif request.migration_type == MigrationType.NUM_REQ:
        if amount < 1 and amount != -1:
            return [f"--value {text}: a number of requests is positive, or -1 for all"]
        request.num_reqs = int(amount)
    return []
