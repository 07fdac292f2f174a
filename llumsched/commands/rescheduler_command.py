# SPDX-License-Identifier: Apache-2.0
"""`llumnix rescheduler`: the rescheduler in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds
from llumlet.process.addresses import is_loopback
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import MARK
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import Group
from llumsched.cms.store import name_of
from llumsched.commands import instances
from llumsched.console.exit_codes import ExitCode
from llumsched.rescheduling import caches
from llumsched.rescheduling import switches as arguments
from llumsched.rescheduling.caches import CacheSettings
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.rescheduling.switches import Switches

DESCRIPTION = """Move running requests from hot instances to cold ones and away from failed ones.

  llumnix rescheduler --standalone-rescheduling-mode --cms 127.0.0.1:8003
  llumnix rescheduler --standalone-rescheduling-mode --cms redis://10.0.0.5:6379

Run one per cluster: two would undo each other's moves. `llumnix scheduler --enable-rescheduling` runs one inside the
scheduler, where it also knows the requests that were dispatched and are in no status yet."""

_http = Group("HTTP", "/metrics, /healthz, /debug/rescheduling, and what `llumnix explain --rescheduling` asks.")


@dataclass(frozen=True, slots=True)
class Http:
    host: str = _http.setting("127.0.0.1", kinds.text("HOST"), "address to listen on", common=True)
    port: int | None = _http.setting(
        None, kinds.port(), "port to listen on; 0 picks a free port (default: no HTTP)", common=True
    )
    insecure: bool = _http.setting(
        False, MARK, "allow listening beyond this machine; this service asks for no token", common=True
    )


SETTINGS: Final = (instances.Cms, Http, Switches, ReschedulingConfig, CacheSettings)


def prepare(reading: Reading) -> tuple[str, Http, ReschedulingConfig, CacheSettings]:
    cms = instances.cms_of(reading)
    if "--cms" not in reading.given:
        reading.faults.append(f"--cms HOST:PORT or redis://… is missing (or {instances.CMS_VARIABLE})")
    switches, config = arguments.prepare(reading)
    reading.check(arguments.constant_faults, config)
    if switches.colocated:
        reading.faults.append(
            "--colocated-rescheduling-mode is for `llumnix scheduler`; here it is --standalone-rescheduling-mode"
        )
    if switches.enable is False:
        reading.faults.append("--enable-rescheduling=false leaves this process nothing to do; omit it")
    http = reading.make(Http)
    reading.check(_host_faults, http)
    return cms, http, config, caches.prepare(reading)


def _host_faults(http: Http) -> Iterator[str]:
    if http.port is not None and not (http.insecure or is_loopback(http.host)):
        yield (
            f"--host {http.host} is not a loopback address, and whoever reaches this service sees what moves and why: "
            "it needs --insecure, and a network that is trusted"
        )


def run(prepared: tuple[str, Http, ReschedulingConfig, CacheSettings], credentials: Credentials) -> int:
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(_serve(*prepared, credentials))
    except OSError as error:
        print(f"llumnix rescheduler: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.OK


async def _serve(
    cms: str, http: Http, config: ReschedulingConfig, caches: CacheSettings, credentials: Credentials
) -> None:
    """Serves until SIGTERM or SIGINT."""
    from llumsched.rescheduling import standalone as process

    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    running = await process.serve(
        cms, config, credentials, num_cached_blocks=caches.num_known_blocks, host=http.host, port=http.port
    )
    try:
        where = f", http://{http.host}:{running.port}" if running.port else ""
        policies = ", ".join(config.policies)
        logging.getLogger("llumnix.rescheduler").info("%s of %s%s", policies, name_of(cms), where)
        await ended.wait()
    finally:
        await running.close()
