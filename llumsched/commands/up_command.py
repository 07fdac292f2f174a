# SPDX-License-Identifier: Apache-2.0
"""`llumnix up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from llumlet.process.credentials import CredentialFiles, Credentials
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import entries
from llumsched.console.exit_codes import ExitCode
from llumsched.up.plan import CHECKS, UpConfig, model_fault, plan_of

DESCRIPTION = """Start engines, scheduler, rescheduler and gateway on this machine, and stop them all together.

  llumnix up MODEL --engines 2 -- --max-model-len 4096
  llumnix up MODEL --autoscale 1:4
  llumnix up MODEL --scheduling-policy virtual-usage     priorities below 0 go first, with room kept for them

Arguments after `--` go to each `vllm serve`. Every line of output begins with the component's name. Ctrl-C or SIGTERM
stops the gateway, once its streams have ended, then the engines and the scheduler; a second Ctrl-C cuts the streams. An
engine that ends by itself is reported and the others continue. If the scheduler, the gateway or the last engine ends,
everything is stopped with exit code 6. --autoscale starts engines as load grows and drains them when there are too
many: their requests move to the others, and no stream is cut."""

SETTINGS: Final = (UpConfig,)
_CREDENTIALS: Final = frozenset(entry.setting.flag for entry in entries(CredentialFiles))


def prepare(reading: Reading) -> UpConfig:
    config = reading.make(UpConfig, engine_args=reading.further)
    for check in CHECKS:
        reading.check(check, config)
    if {"--engines", "--autoscale"} <= set(reading.given):
        reading.faults.append("--engines and --autoscale exclude each other")
    if "--autoscale" not in reading.given:
        in_vain = [where for flag, where in reading.given.items() if flag.startswith("--autoscale-")]
        reading.faults += [f"{where} has no effect without --autoscale" for where in in_vain]
    if _CREDENTIALS.intersection(reading.given.values()):
        reading.faults.append("credentials have no effect here: everything but the gateway listens on loopback")
    return config


def run(config: UpConfig, _: Credentials) -> int:
    from llumsched.up.fleet import Fleet
    from llumsched.up.screen import Screen

    if why := model_fault(config):
        print(f"llumnix up: {why}", file=sys.stderr)
        return ExitCode.USAGE
    plan = plan_of(config)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    screen = Screen(sys.stdout, [spec.name for spec in plan.components], colour=colour)

    async def serve() -> int:
        return await Fleet(plan, screen).run()

    try:
        return asyncio.run(serve())
    finally:
        screen.close()
