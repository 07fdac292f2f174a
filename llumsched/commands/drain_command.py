# SPDX-License-Identifier: Apache-2.0
"""`llumnix drain`: empties an instance, waits for its last stream, and lets it end."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletUnreachable
from llumlet.contract.types import DrainProgress, DrainRequest
from llumlet.process import kinds
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import Kind
from llumlet.process.setting_sources import Reading
from llumsched.cms.look import CmsUnreachable
from llumsched.commands import instances
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.console import output
from llumsched.console.exit_codes import ExitCode

DESCRIPTION = """Move everything away from an instance and end it, as SIGTERM does.

The instance refuses new requests (HTTP 503) and moves its requests to the destinations. Requests that cannot move run
to their end. Its engine ends when it is empty; its API server, which holds the clients' connections, ends after its
last stream or after --timeout seconds.

The exit code is 0 only if no stream was cut. Interrupting this command does not stop the drain; a SIGTERM to the
instance then ends it at once. --json prints one object per event; "event" is progress, error or, last, summary."""

_GRACE_SECONDS = 15.0
"""Time beyond the instance's own limit after which it counts as unreachable."""


@dataclass(frozen=True, slots=True)
class DrainOptions:
    instance: str = OPTIONS.setting(
        "",
        Kind(str, instances.INSTANCE, {"nargs": "?"}),
        "instance to end, by id or by its llumlet's HOST:PORT",
        flag="instance",
    )
    llumlet: str = OPTIONS.setting("", kinds.text("HOST:PORT"), "instance to end, by its llumlet's address")
    to: tuple[str, ...] = OPTIONS.setting(
        (),
        Kind(tuple, "INSTANCE[,INSTANCE…]", repeated=True),
        "destinations of the requests, under addresses that the instance reaches (repeatable; default: its peers)",
    )
    timeout_s: float | None = OPTIONS.setting(
        None,
        kinds.seconds(above=0),
        "longest time for streams to end, in seconds (default: the instance's --llumlet-drain-seconds)",
    )


SETTINGS: Final = (DrainOptions, instances.ClusterAddress, instances.Cms, Output)


@dataclass(frozen=True, slots=True)
class Drain:
    places: instances.Places
    """Places of the instance, then of the destinations."""
    timeout_s: float | None
    """The time limit; None uses the instance's own."""
    as_json: bool


def prepare(reading: Reading) -> Drain:
    options, cms = reading.make(DrainOptions), instances.cluster_of(reading)[0]
    if options.instance and options.llumlet:
        reading.faults.append("INSTANCE and --llumlet exclude each other")
    if not (options.instance or options.llumlet):
        reading.faults.append("INSTANCE is missing: the id of the instance that is to end, or --llumlet HOST:PORT")
    texts = [(instances.INSTANCE, options.instance), ("--llumlet", options.llumlet)]
    instance = instances.places(reading, [(flag, text) for flag, text in texts if text][:1], cms)
    destinations = instances.places(reading, [("--to", text) for text in instances.words(options.to)], cms)
    if both := set(instance.places) & set(destinations.places):
        reading.faults.append(f"--llumlet and --to name the same llumlet, {both.pop()}")
    places = instances.Places([*instance.places, *destinations.places], cms)
    return Drain(places, options.timeout_s, reading.make(Output).json)


def run(drain: Drain, credentials: Credentials) -> int:
    try:
        return asyncio.run(_drain(drain, credentials))
    except KeyboardInterrupt:
        if drain.as_json:
            output.print_json({"event": "interrupted", "detail": "The drain goes on."})
        else:
            print("The drain goes on; SIGTERM ends the instance at once.", file=sys.stderr)
        return ExitCode.INTERRUPTED


async def _drain(drain: Drain, credentials: Credentials) -> ExitCode:
    as_json = drain.as_json
    try:
        address, *destinations = await drain.places.resolve(credentials)
    except CmsUnreachable as error:
        return output.report_failure(error, as_json=as_json)
    request = DrainRequest(timeout_s=drain.timeout_s or 0.0, destinations=map(str, destinations))
    async with LlumletClient(address, credentials=credentials) as client:
        try:
            # Without --timeout the limit is the instance's, which its first progress tells.
            events = client.drain(request, deadline_s=_deadline_s(drain.timeout_s))
            async with aclosing(events):
                async for progress in events:
                    _show(progress, as_json=as_json)
                    if progress.done:
                        return _exit_code(progress)
            raise LlumletUnreachable(client.address, "the answer ended before its summary")
        except LlumletCallFailed as error:
            return output.report_failure(error, as_json=as_json)


def _deadline_s(timeout_s: float | None) -> float:
    return timeout_s + _GRACE_SECONDS if timeout_s else 24 * 3600.0


def _show(progress: DrainProgress, *, as_json: bool) -> None:
    if as_json:
        document = {"event": "summary" if progress.done else "progress"} | output.to_dict(progress)
        output.print_json(document | ({"exit_code": int(_exit_code(progress))} if progress.done else {}))
    elif progress.done:
        print(f"drained in {progress.elapsed_s:.1f} s: {progress.num_moved} requests moved, {_end(progress)}")
    else:
        refused = ", ".join(f"{number}x {reason}" for reason, number in sorted(progress.refusals.items()))
        print(
            f"{progress.elapsed_s:.0f} of {progress.timeout_s:.0f} s: {progress.num_streams} streams, "
            f"{progress.num_requests} requests here, {progress.num_moving} moving, {progress.num_moved} moved"
            + (f"; refused: {refused}" if refused else ""),
            file=sys.stderr,
        )


def _end(progress: DrainProgress) -> str:
    if progress.num_cut:
        return f"{progress.num_cut} streams cut"
    if progress.num_streams:
        return f"the engine ends; {progress.num_streams} streams go on at others, through its API server"
    return "every stream came to its end"


def _exit_code(progress: DrainProgress) -> ExitCode:
    return ExitCode.NOT_MOVED if progress.num_cut else ExitCode.OK
