# SPDX-License-Identifier: Apache-2.0
"""`llumnix up`: a whole cluster on this machine."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
from typing import Any

from llumlet import settings
from llumlet.credential_files import CredentialFiles
from llumsched.commands import arguments
from llumsched.up.plan import UpConfig, faults_of, plan_of

DESCRIPTION = """Start engines, scheduler, rescheduler and gateway on this machine, and stop them all together.

  llumnix up MODEL --engines 2 -- --max-model-len 4096

What follows `--` is for each `vllm serve`. Everything that the components write is shown with their names before it.
Ctrl-C or SIGTERM stops all of it: the gateway takes nothing new and lets its streams end, then the engines, then the
scheduler; a second Ctrl-C does not wait for streams. An engine that ends by itself is reported and the others go on;
without scheduler, gateway or any engine everything is stopped, and the exit code is 6."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(UpConfig)}


_FLAGS = {
    "num_engines": ("--engines", "N", "how many engines"),
    "host": ("--host", "HOST", "where the gateway listens; everything else listens at loopback"),
    "port": ("--port", "PORT", "of the gateway; 0: any free one"),
    "scheduler_port": ("--scheduler-port", "PORT", "of the scheduler and its web page; 0: any free one"),
    "cms_port": ("--cms-port", "PORT", "to which the engines report; 0: any free one"),
    "scheduling_policy": ("--scheduling-policy", "NAME", "how the scheduler sends requests to engines"),
    "gateway_workers": ("--gateway-workers", "N", "processes of the gateway"),
    "drain_s": ("--drain-seconds", "SECONDS", "how long streams may go on when everything stops"),
    "start_timeout_s": ("--start-timeout", "SECONDS", "within which an engine must be ready"),
}
"""Flag, metavar and help of a field of the configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(takes_further=True)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory, or a name that vLLM knows")
    for name, (flag, metavar, text) in _FLAGS.items():
        parser.add_argument(flag, dest=name, metavar=metavar, help=f"{text} (default {_DEFAULTS[name]})")
    parser.add_argument(
        "--enable-rescheduling",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS["enable_rescheduling"],
        help="move running requests from hot engines to cold ones (default on)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="the gateway may listen beyond this machine, without keys or TLS"
    )
    parser.add_argument("--share-gpus", action="store_true", help="all engines see all GPUs, instead of each its own")


def faults(args: argparse.Namespace) -> list[str]:
    """Leaves the configuration in `args.config`."""
    found: list[str] = []
    values: dict[str, Any] = {
        "share_gpus": args.share_gpus,
        "enable_rescheduling": args.enable_rescheduling,
        "insecure": args.insecure,
    }
    for name, (flag, _, _) in _FLAGS.items():
        given, default = getattr(args, name), _DEFAULTS[name]
        if isinstance(given, str) and isinstance(default, int | float):
            number, wrong = arguments.number(flag, given)
            if isinstance(default, int) and number != int(number):
                wrong = [f"{flag} {given} is not a whole number"]
            found += wrong
            given = None if wrong else type(default)(number)
        if given is not None:
            values[name] = given
    if args.model is None:
        found.append("MODEL is missing")
    if settings.read("up", (CredentialFiles,), args, {}).given:
        found.append("credentials are for several hosts; here everything but the gateway listens at loopback")
    args.config = UpConfig(args.model or "", **values, engine_args=tuple(args.further))
    return found + faults_of(args.config)


def run(args: argparse.Namespace) -> int:
    from llumsched.up.cluster import Cluster
    from llumsched.up.screen import Screen

    plan = plan_of(args.config)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    screen = Screen(sys.stdout, [spec.name for spec in plan.components], colour=colour)

    async def serve() -> int:
        return await Cluster(plan, screen).run()

    try:
        return asyncio.run(serve())
    finally:
        screen.close()
