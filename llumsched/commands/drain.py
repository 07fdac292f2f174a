# SPDX-License-Identifier: Apache-2.0
"""`llumnix drain`: empties an instance, waits for its last stream, and lets it end."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing

from llumlet.client import LlumletClient
from llumlet.errors import LlumletCallFailed, LlumletUnreachable
from llumlet.types import DrainProgress, DrainRequest
from llumsched import output
from llumsched.cms.snapshot import CmsUnreachable
from llumsched.commands import arguments, instances
from llumsched.exit_codes import ExitCode

DESCRIPTION = """Move everything away from an instance and end it, as SIGTERM does.

The instance refuses new requests (HTTP 503), moves what it runs to the destinations, lets what
cannot move run to its end, and exits when its last stream has ended. A client's connection stays
where it is: the instance's API server lives until then, at most --timeout seconds.

The exit code is 0 only if every stream came to its end. The drain goes on if this command is
interrupted; a SIGTERM to the instance then ends it at once.
With --json: an object per event, `"event"` is progress, summary or error, the summary last."""

_GRACE_SECONDS = 15.0
"""Beyond the instance's own limit: after that it does not answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "instance", nargs="?", metavar="INSTANCE", help="the instance that is to end, by id (needs --cms) or HOST:PORT"
    )
    parser.add_argument("--llumlet", metavar="HOST:PORT", help="the same, by the address of its llumlet")
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="INSTANCE[,INSTANCE…]",
        help="who takes the requests (repeatable), as the instance reaches them (default: its peers)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        help="how long streams may go on (default: the instance's --llumlet-drain-seconds)",
    )
    instances.add_cms(parser)
    arguments.add_json(parser)


def faults(args: argparse.Namespace) -> list[str]:
    """Leaves parsed values in `args.places` (the instance first, then the destinations) and `.request`."""
    found = instances.cms_faults(args)
    if args.instance and args.llumlet:
        found.append("INSTANCE and --llumlet exclude each other")
    instance, more = (
        instances.place(instances.INSTANCE, args.instance, args)
        if args.instance
        else instances.place("--llumlet", args.llumlet, args)
    )
    found += more
    destinations: list[instances.Place] = []
    for text in (text for argument in args.to for text in argument.split(",")):
        destination, more = instances.place("--to", text, args)
        destinations += destination
        found += more
    if instance and instance[0] in destinations:
        found.append(f"--llumlet and --to name the same llumlet, {instance[0]}")
    args.request = DrainRequest()
    if args.timeout is not None:
        args.request.timeout_s, more = arguments.number("--timeout", args.timeout)
        if not more and args.request.timeout_s <= 0:
            more = ["--timeout must be positive"]
        found += more
    args.places = [*instance, *dict.fromkeys(destinations)]
    return found


def run(args: argparse.Namespace) -> int:
    try:
        return asyncio.run(_drain(args))
    except KeyboardInterrupt:
        if args.json:
            output.print_json({"event": "interrupted", "detail": "The drain goes on."})
        else:
            print("The drain goes on; SIGTERM ends the instance at once.", file=sys.stderr)
        return ExitCode.INTERRUPTED


async def _drain(args: argparse.Namespace) -> ExitCode:
    try:
        address, *destinations = await instances.resolve(args.places, args)
    except CmsUnreachable as error:
        return _failed(error, as_json=args.json)
    args.request.destinations.extend(map(str, destinations))
    async with LlumletClient(address, credentials=args.credentials) as client:
        try:
            # Without --timeout the limit is the instance's, which its first progress tells.
            events = client.drain(args.request, deadline_s=_deadline_s(args.request.timeout_s))
            async with aclosing(events):
                async for progress in events:
                    _show(progress, as_json=args.json)
                    if progress.done:
                        return _exit_code(progress)
            raise LlumletUnreachable(client.address, "the answer ended before its summary")
        except LlumletCallFailed as error:
            return _failed(error, as_json=args.json)


def _failed(error: LlumletCallFailed, *, as_json: bool) -> ExitCode:
    if as_json:
        document = {"address": error.address} | output.failure_dict(error)
        output.print_json({"event": "error", "error": document})
    else:
        output.print_failure(error)
    return output.exit_code(error)


def _deadline_s(timeout_s: float) -> float:
    return timeout_s + _GRACE_SECONDS if timeout_s else 24 * 3600.0


def _show(progress: DrainProgress, *, as_json: bool) -> None:
    if as_json:
        document = {"event": "summary" if progress.done else "progress"} | output.to_dict(progress)
        output.print_json(document | ({"exit_code": int(_exit_code(progress))} if progress.done else {}))
    elif progress.done:
        end = f"{progress.num_cut} streams cut" if progress.num_cut else "every stream came to its end"
        print(f"drained in {progress.elapsed_s:.1f} s: {progress.num_moved} requests moved, {end}")
    else:
        refused = ", ".join(f"{number}x {reason}" for reason, number in sorted(progress.refusals.items()))
        print(
            f"{progress.elapsed_s:.0f} of {progress.timeout_s:.0f} s: {progress.num_streams} streams, "
            f"{progress.num_requests} requests here, {progress.num_moving} moving, {progress.num_moved} moved"
            + (f"; refused: {refused}" if refused else ""),
            file=sys.stderr,
        )


def _exit_code(progress: DrainProgress) -> ExitCode:
    return ExitCode.NOT_MOVED if progress.num_cut else ExitCode.OK
