# SPDX-License-Identifier: Apache-2.0
"""`llumnix migrate`: moves running requests from one instance to another and shows how it goes."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing

from llumlet.client import LlumletClient
from llumlet.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.types import MigrateRequest, Mode, MoveSummary, Reason
from llumsched import output
from llumsched.cms.snapshot import CmsUnreachable
from llumsched.commands import arguments, instances, selection
from llumsched.exit_codes import ExitCode
from llumsched.fan_out import ask_all
from llumsched.move_display import JsonDisplay, MoveDisplay, TextDisplay
from llumsched.request_ids import find

DESCRIPTION = """Move running requests, with their KV cache if it can be carried, from one instance to another.

Say which: --request ID (repeatable), or --all, or a rule:
  --rule NUM_REQ --order SR --value 2       the two shortest running requests
  --rule TOKEN --order LR --value 8000      the longest ones, 8,000 tokens of them
  --rule RATIO --order FCWSR --value 0.1    a tenth of the KV cache, waiting requests first
Orders: LCR, FCR last/first come, running; LR, SR longest/shortest running; FCW first come, waiting;
FCWSR first waiting, then the shortest running.

A request that does not move goes on where it was. The moves go on if this command is interrupted.
With --json: an object per event, `"event"` is progress, summary or error, the summary last."""

_METHODS = {
    "auto": Mode.MODE_UNSPECIFIED,
    "live": Mode.LIVE,
    "blocking": Mode.BLOCKING,
    "recompute": Mode.RECOMPUTE,
}
_TRIGGER = "manual"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="source", metavar="INSTANCE", help="the source: its llumlet's HOST:PORT, or its id"
    )
    parser.add_argument(
        "--to",
        dest="destination",
        metavar="INSTANCE",
        help="the destination, likewise; the source must reach it under this address, too",
    )
    instances.add_cms(parser)
    selection.add_arguments(parser)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--method",
        default="auto",
        metavar="METHOD",
        help="live: copy while it decodes; blocking: stop, copy, go on; recompute: no copy; "
        "auto (default): live, and what cannot bring its KV cache goes without a copy",
    )
    how.add_argument("--force", action="store_true", help="move even if the stall exceeds its budget")
    how.add_argument(
        "--stall-budget-ms",
        metavar="MS",
        help="instead of the source's own --llumlet-stall-budget-ms",
    )
    how.add_argument(
        "--timeout",
        default="600",
        metavar="SECONDS",
        help="how long to watch (default %(default)s); the moves go on afterwards",
    )
    arguments.add_json(parser)


def faults(args: argparse.Namespace) -> list[str]:
    """Leaves parsed values in `args.places` (source and destination), `.timeout` and `.template`."""
    found = instances.cms_faults(args)
    source, more = instances.place("--from", args.source, args)
    found += more
    destination, more = instances.place("--to", args.destination, args)
    found += more
    if source and source == destination:
        found.append(f"--from and --to are the same llumlet, {source[0]}")
    args.template = MigrateRequest(trigger_policy=_TRIGGER, force=args.force)
    found += selection.faults(args, args.template)
    found += _method_faults(args, args.template)
    args.timeout, more = arguments.number("--timeout", args.timeout)
    if not more and args.timeout <= 0:
        more = ["--timeout must be positive"]
    found += more
    args.places = [*source, *destination]
    return found


def _method_faults(args: argparse.Namespace, request: MigrateRequest) -> list[str]:
    found = []
    if args.method.lower() in _METHODS:
        request.method = _METHODS[args.method.lower()]
    else:
        found.append(f"--method {args.method!r} is not one of {', '.join(_METHODS)}")
    if args.stall_budget_ms is not None:
        budget, more = arguments.number("--stall-budget-ms", args.stall_budget_ms)
        if not more and budget < 0:
            more = ["--stall-budget-ms must not be negative"]
        if not more:
            request.stall_budget_ms = budget
        found += more
    return found


def run(args: argparse.Namespace) -> int:
    display: MoveDisplay = JsonDisplay() if args.json else TextDisplay()
    try:
        return asyncio.run(_migrate(args, display))
    except KeyboardInterrupt:
        display.interrupted()
        return ExitCode.INTERRUPTED


async def _migrate(args: argparse.Namespace, display: MoveDisplay) -> ExitCode:
    try:
        ends = await instances.resolve(args.places, args)
    except CmsUnreachable as error:
        display.failed(error)
        return output.exit_code(error)
    answers = await ask_all(ends, LlumletClient.get_instance_metadata, args.credentials)
    failures = [answer.failure for answer in answers if answer.failure is not None]
    async with LlumletClient(ends[0], credentials=args.credentials) as source:
        if not failures:
            here, there = (answer.value for answer in answers if answer.value is not None)
            request = args.template
            request.src_engine_id, request.dst_engine_id = here.instance_id, there.instance_id
            request.dst_engine_ip, request.dst_engine_port = ends[1]
            try:
                if args.request:
                    request.request_ids.extend(await _find(source, args.request))
                return await _watch(source, request, args.timeout, display)
            except LlumletCallFailed as error:
                failures = [error]
    for failure in failures:
        display.failed(failure)
    return output.exit_code(failures[0])


async def _find(source: LlumletClient, texts: list[str]) -> list[str]:
    listed = await source.list_requests()
    ids, faults = find(texts, listed.requests)
    if faults:
        raise LlumletError(Reason.UNKNOWN_REQUEST, "; ".join(faults), source.address)
    return ids


async def _watch(source: LlumletClient, request: MigrateRequest, timeout_s: float, display: MoveDisplay) -> ExitCode:
    with display:
        async with aclosing(source.migrate(request, deadline_s=timeout_s)) as events:
            async for event in events:
                if event.HasField("summary"):
                    code = _exit_code(event.summary)
                    display.summary(event.summary, code)
                    return code
                display.progress(event.progress)
    raise LlumletUnreachable(source.address, "the answer ended before its summary")


def _exit_code(summary: MoveSummary) -> ExitCode:
    if summary.selected == 0:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.OK if summary.moved == summary.selected else ExitCode.NOT_MOVED
