# SPDX-License-Identifier: Apache-2.0
"""`llumnix rescheduler`: balances and fails over in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from typing import Final

from llumlet.credentials import Credentials
from llumsched.cms.store import name_of
from llumsched.commands import arguments, instances
from llumsched.exit_codes import ExitCode
from llumsched.rescheduling import arguments as rescheduling
from llumsched.rescheduling.config import Config

DESCRIPTION = """Move running requests from hot instances to cold ones and away from sick ones.

  llumnix rescheduler --standalone-rescheduling-mode --cms 127.0.0.1:8003
  llumnix rescheduler --standalone-rescheduling-mode --cms redis://10.0.0.5:6379

One per cluster: two would undo each other's moves. A scheduler runs one inside with --enable-rescheduling
--colocated-rescheduling-mode, and knows there what it sent and no status shows yet."""

HOST: Final = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    instances.add_cms(parser)
    http = parser.add_argument_group("HTTP", "/metrics, /healthz and /debug/rescheduling.")
    http.add_argument("--host", default=HOST, help="to listen at (default %(default)s)")
    http.add_argument("--port", metavar="N", help="0: any free one (default: no HTTP)")
    rescheduling.add_arguments(parser)
    rescheduling.add_failover(parser.add_argument_group("failover"))


def faults(args: argparse.Namespace) -> list[str]:
    """Leaves the configuration in `args.config` and the port in `args.port`."""
    found = instances.cms_faults(args)
    if not args.cms and not found:
        found.append(f"--cms HOST:PORT or redis://… is missing (or {instances.CMS_VARIABLE})")
    found += rescheduling.faults(args)
    if rescheduling.switch(args, "colocated_rescheduling_mode"):
        wanted = "here it is --standalone-rescheduling-mode"
        found.append(f"--colocated-rescheduling-mode is for `llumnix scheduler`; {wanted}")
    if rescheduling.switch(args, "enable_rescheduling") is False:
        found.append("--enable-rescheduling=false leaves nothing to do")
    if args.port is not None:
        number, fault = arguments.number("--port", args.port)
        if not fault and (number != int(number) or not 0 <= number < 65536):
            fault = [f"--port {args.port!r} is not a port"]
        found += fault
        args.port = int(number)
    if not found:
        args.config = rescheduling.config(args)
    return found


def run(args: argparse.Namespace) -> int:
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(_serve(args.cms, args.config, args.credentials, args.host, args.port))
    except OSError as error:
        print(f"llumnix rescheduler: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.OK


async def _serve(cms: str, config: Config, credentials: Credentials, host: str, port: int | None) -> None:
    """Until SIGTERM or SIGINT."""
    from llumsched.rescheduling import process

    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    running = await process.serve(cms, config, credentials, host=host, port=port)
    try:
        where = f", http://{host}:{running.port}" if running.port else ""
        policies = ", ".join(config.policies)
        logging.getLogger("llumnix.rescheduler").info("%s of %s%s", policies, name_of(cms), where)
        await ended.wait()
    finally:
        await running.close()
