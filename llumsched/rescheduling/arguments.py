# SPDX-License-Identifier: Apache-2.0
"""The flags of the rescheduler, for `llumnix rescheduler` and for the scheduler that runs one inside.

A switch may be written `--name`, `--name=true` or `--name=false`. Nothing is checked by the parser: `faults` says
everything that is wrong at once, and after it (and an empty answer) `config` gives what was asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

from llumlet.protocol.infer_type import InferType
from llumlet.protocol.selection import ALL, Order, Unit
from llumsched.cluster.domains import FailoverDomain
from llumsched.policy.metrics import metric_fault
from llumsched.rescheduling.config import POLICIES, Config, LoadTarget, Scope
from llumsched.rescheduling.moves import AS_NEEDED, Selection

_DEFAULT: Final = Config()

_DESCRIPTION = """Moves running requests from hot instances to cold ones and away from sick ones.
Example: only decode instances, sources from 70 % of the KV cache on:
  --rescheduling-policies=decode_load --rescheduling-decode-load-threshold=0.7
Example: everything away from a node with a sick instance:
  --rescheduling-policies=prefill_failover,decode_failover,neutral_failover
  --failover-domain=node --instance-staleness-seconds=100"""


@dataclass(frozen=True, slots=True)
class _Number:
    """A flag with a number, and the field of `Config` that it sets."""

    flag: str
    field: str
    help: str
    fits: Callable[[float], bool]
    must: str
    whole: bool = False

    @property
    def dest(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def _not_negative(value: float) -> bool:
    return value >= 0


def _positive(value: float) -> bool:
    return value > 0


_NUMBERS: Final = (
    _Number(
        "--rescheduling-interval-ms",
        "interval_ms",
        "at most so long between two passes; a change of load or the end of a move wakes it earlier; 0: no passes",
        _not_negative,
        "not be negative",
    ),
    _Number(
        "--rescheduling-debounce-ms",
        "debounce_ms",
        "at least so long between two passes",
        _not_negative,
        "not be negative",
    ),
    _Number(
        "--rescheduling-load-balance-threshold",
        "balance_threshold",
        "least difference of load between source and destination",
        _not_negative,
        "not be negative",
    ),
    _Number(
        "--rescheduling-horizon-seconds",
        "horizon_s",
        "how long a better balance counts when it is weighed against a move's cost; more means more moves",
        _positive,
        "be positive",
    ),
    _Number(
        "--rescheduling-link-bytes-per-second",
        "link_bytes_per_s",
        "what the links carry, until moves have shown it",
        _positive,
        "be positive",
    ),
    _Number(
        "--rescheduling-max-moves-per-pass",
        "max_moves_per_pass",
        "pairs of instances that one pass may choose",
        _positive,
        "be positive",
        True,
    ),
    _Number(
        "--rescheduling-request-cooldown-seconds",
        "request_cooldown_s",
        "how long a request that was moved to balance load stays where it is",
        _not_negative,
        "not be negative",
    ),
    _Number(
        "--rescheduling-pair-cooldown-seconds",
        "pair_cooldown_s",
        "how long nothing goes back between two instances",
        _not_negative,
        "not be negative",
    ),
    _Number(
        "--rescheduling-avoid-seconds",
        "avoid_s",
        "how long a destination that refused or failed is left alone; twice as long each time in a row",
        _not_negative,
        "not be negative",
    ),
    _Number(
        "--llumlet-grpc-connection-pool-size",
        "connection_pool_size",
        "moves that one source is asked for at a time",
        _positive,
        "be positive",
        True,
    ),
    _Number(
        "--llumlet-grpc-timeout-seconds",
        "grpc_timeout_s",
        "longest silence of a source during a call",
        _positive,
        "be positive",
    ),
)


def add_switches(parser: argparse._ActionsContainer) -> None:
    """Whether there is a rescheduler, and where."""
    for flag, text in (
        ("--enable-rescheduling", "reschedule; =false switches it off whatever the mode"),
        ("--colocated-rescheduling-mode", "inside the scheduler process"),
        ("--standalone-rescheduling-mode", "in a process of its own"),
    ):
        parser.add_argument(flag, nargs="?", const="true", metavar="BOOL", help=text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but those that the scheduler has as well (`add_failover`)."""
    group = parser.add_argument_group("rescheduling", _DESCRIPTION)
    add_switches(group)
    policies = ",".join(_DEFAULT.policies)
    group.add_argument("--rescheduling-policies", default=policies, metavar="NAMES", help="default %(default)s")
    for infer_type in InferType:
        target = _DEFAULT.target(infer_type)
        group.add_argument(
            f"--rescheduling-{infer_type}-load-metric",
            default=target.metric,
            metavar="METRIC",
            help=f"how the load of {infer_type} instances is measured (default %(default)s)",
        )
        if infer_type != "prefill":
            group.add_argument(
                f"--rescheduling-{infer_type}-load-threshold",
                default=str(target.threshold),
                metavar="LOAD",
                help="sources are at or above it, destinations below; 0 (default): everybody may be either",
            )
    selection = _DEFAULT.selection
    choices = (
        ("rule", ", ".join(Unit), selection.unit),
        ("order", ", ".join(Order), selection.order),
        ("value", "requests, tokens, or share of the KV cache; 0: as much as evens the pair out", selection.value),
    )
    for name, text, default in choices:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        group.add_argument(
            f"--rescheduling-req-select-{name}", default=shown, metavar="X", help=f"{text} (default {shown})"
        )
    scopes = ", ".join(Scope)
    group.add_argument(
        "--rescheduling-load-balance-scope",
        default=str(_DEFAULT.scope),
        metavar="SCOPE",
        help=f"{scopes} (default %(default)s); thresholds apply to the cluster",
    )
    for number in _NUMBERS:
        default_number = getattr(_DEFAULT, number.field)
        group.add_argument(
            number.flag, default=f"{default_number:g}", metavar="N", help=f"{number.help} (default {default_number:g})"
        )


def add_failover(parser: argparse._ActionsContainer) -> None:
    """For a command that has no scheduler, which has these itself."""
    domains = ", ".join(FailoverDomain)
    parser.add_argument(
        "--failover-domain",
        default=str(_DEFAULT.failover_domain),
        metavar="DOMAIN",
        help=f"what fails with an instance: {domains} (default %(default)s)",
    )
    parser.add_argument(
        "--instance-staleness-seconds",
        default=f"{_DEFAULT.staleness_s:g}",
        metavar="SECONDS",
        help="an instance that was silent for longer is sick (default %(default)s)",
    )


def faults(args: argparse.Namespace) -> list[str]:
    """Everything that is wrong, a sentence each."""
    _, found = _parse(args)
    for name in ("enable_rescheduling", "colocated_rescheduling_mode", "standalone_rescheduling_mode"):
        found += _switch(args, name)[1]
    if _switch(args, "colocated_rescheduling_mode")[0] and _switch(args, "standalone_rescheduling_mode")[0]:
        found.append("--colocated-rescheduling-mode and --standalone-rescheduling-mode exclude each other")
    for infer_type in InferType:
        fault = metric_fault(getattr(args, f"rescheduling_{infer_type}_load_metric"))
        if fault:
            found.append(f"--rescheduling-{infer_type}-load-metric {fault}")
    return found


def config(args: argparse.Namespace) -> Config:
    """What `faults` has found nothing wrong with."""
    values, _ = _parse(args)
    return Config(**values)


def enabled(args: argparse.Namespace) -> bool:
    """`--enable-rescheduling` if it was given; else whether a mode was."""
    explicit = _switch(args, "enable_rescheduling")[0]
    modes = (_switch(args, f"{mode}_rescheduling_mode")[0] for mode in ("colocated", "standalone"))
    return any(modes) if explicit is None else explicit


def colocated(args: argparse.Namespace) -> bool:
    """Whether the scheduler process is to run it."""
    return enabled(args) and not _switch(args, "standalone_rescheduling_mode")[0]


def switch(args: argparse.Namespace, name: str) -> bool | None:
    """None if it was not given."""
    return _switch(args, name)[0]


def _switch(args: argparse.Namespace, name: str) -> tuple[bool | None, list[str]]:
    text = getattr(args, name, None)
    if text is None or isinstance(text, bool):
        return text, []
    if text.lower() in ("true", "false"):
        return text.lower() == "true", []
    return None, [f"--{name.replace('_', '-')} {text!r} is neither true nor false"]


def _parse(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Fields of `Config`, and what was wrong with the others."""
    found: list[str] = []
    values: dict[str, Any] = {"policies": _policies(args.rescheduling_policies, found)}
    for number in _NUMBERS:
        value = _number(number.flag, getattr(args, number.dest), found)
        if value is None:
            continue
        if not number.fits(value):
            found.append(f"{number.flag} must {number.must}")
        elif number.whole and value != int(value):
            found.append(f"{number.flag} must be a whole number")
        else:
            values[number.field] = int(value) if number.whole else value
    for infer_type in InferType:
        values[infer_type] = _target(args, infer_type, found)
    values["scope"] = _word("--rescheduling-load-balance-scope", args.rescheduling_load_balance_scope, Scope, found)
    values["failover_domain"] = _word("--failover-domain", args.failover_domain, FailoverDomain, found)
    staleness = _number("--instance-staleness-seconds", args.instance_staleness_seconds, found)
    if staleness is not None and staleness <= 0:
        found.append("--instance-staleness-seconds must be positive")
    values["staleness_s"] = staleness
    values["selection"] = _selection(args, found)
    assert values.keys() <= {field.name for field in fields(Config)}
    return values, found


def _policies(text: str, found: list[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in POLICIES and not name.endswith((".yaml", ".yml"))]
    if unknown:
        known = ", ".join(POLICIES)
        found.append(f"--rescheduling-policies: {', '.join(unknown)} is none of {known}, nor a .yaml file")
    if not names:
        found.append("--rescheduling-policies is empty")
    return names


def _target(args: argparse.Namespace, infer_type: str, found: list[str]) -> LoadTarget:
    metric = getattr(args, f"rescheduling_{infer_type}_load_metric")
    if infer_type == "prefill":
        return LoadTarget(metric)
    flag = f"--rescheduling-{infer_type}-load-threshold"
    threshold = _number(flag, getattr(args, f"rescheduling_{infer_type}_load_threshold"), found)
    return LoadTarget(metric, threshold or 0.0)


def _selection(args: argparse.Namespace, found: list[str]) -> Selection | None:
    prefix = "rescheduling_req_select"
    rule = _word("--rescheduling-req-select-rule", getattr(args, f"{prefix}_rule").upper(), Unit, found)
    order = _word("--rescheduling-req-select-order", getattr(args, f"{prefix}_order").upper(), Order, found)
    value = _number("--rescheduling-req-select-value", getattr(args, f"{prefix}_value"), found)
    if rule is None or order is None or value is None:
        return None
    fault = ""
    if rule is Unit.RATIO:
        fault = "" if 0 <= value <= 1 else "a RATIO lies in (0, 1]"
    elif value != int(value):
        fault = f"a {rule} is a whole number"
    elif value < AS_NEEDED and not (rule is Unit.NUM_REQ and value == ALL):
        fault = f"a {rule} is not negative"
    if value == AS_NEEDED and order is Order.FCW:
        fault = "0 (as needed) counts tokens that run, and FCW takes what waits: give a number"
    if fault:
        found.append(f"--rescheduling-req-select-value {value:g}: {fault}")
    return Selection(rule, order, value)


def _number(flag: str, text: str | float, found: list[str]) -> float | None:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value - value != 0:  # neither infinite nor no number at all
        found.append(f"{flag} {text!r} is not a number")
        return None
    return value


def _word(flag: str, text: str, words: Any, found: list[str]) -> Any:
    try:
        return words(text)
    except ValueError:
        found.append(f"{flag} {text!r} is not one of {', '.join(words)}")
        return None
