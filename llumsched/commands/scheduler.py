# SPDX-License-Identifier: Apache-2.0
"""`llumnix scheduler`: chooses an instance for each request."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import sys
from typing import Any, Final
from urllib.parse import quote, urlencode

from llumlet.loopback import is_loopback
from llumlet.protocol.infer_type import InferType
from llumlet.types import Address
from llumsched import descriptors
from llumsched.cluster.domains import FailoverDomain
from llumsched.cms.store import LISTEN, name_of, store_faults
from llumsched.commands import arguments
from llumsched.exit_codes import ExitCode
from llumsched.policy.document import Mode, Overrides, Policy, load_policy
from llumsched.policy.reader import PolicyError, built_in_policies
from llumsched.rescheduling import arguments as rescheduling
from llumsched.rescheduling.config import Config as ReschedulingConfig
from llumsched.scheduler import process
from llumsched.scheduler.access import read_tokens
from llumsched.scheduler.backends import API_KEY_VARIABLE
from llumsched.tls import server_faults

DESCRIPTION = """Choose an instance for each request of the gateways.

  llumnix scheduler                                      instances report to it (--llumlet-cms 127.0.0.1:8003)
  llumnix scheduler --cms redis://10.0.0.5:6379          or to a Redis, for several schedulers
  llumnix scheduler --enable-full-mode-scheduling=false --llm-backend-endpoints 10.0.0.1:8000,10.0.0.2:8000
                                                         lite mode: engines of stock vLLM, which report nothing
  llumnix scheduler --colocated-rescheduling-mode --enable-rescheduling
                                                         and move running requests from hot to cold

A switch may be written --name, --name=true or --name=false. Policies: docs/policies.md."""

_log = logging.getLogger("llumnix.scheduler")
_REDIS_PORT: Final = "6379"
_WITH_REDIS_HOST: Final = (
    "--cms-redis-port",
    "--cms-redis-username",
    "--cms-redis-password",
    "--cms-redis-password-file",
)
_OF_ONE_MODE: Final = {
    Mode.FULL: (
        "--enable-instance-status-local-account",
        "--request-local-account-staleness-seconds",
        "--warm-up-seconds",
    ),
    Mode.LITE: ("--gateway-ttl-seconds", "--request-state-ttl-seconds"),
}
_DEFAULTS: Final[dict[str, Any]] = {
    field.name: field.default for field in process.SchedulerConfig.__dataclass_fields__.values()
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("process")
    group.add_argument("--host", default=process.HOST, help="to listen at (default %(default)s)")
    group.add_argument("--port", default=str(process.PORT), metavar="N", help="0: any free one (default %(default)s)")
    group.add_argument(
        "--service-token-file", metavar="FILE",
        help='tokens of those who may ask over HTTP, by role: {"gateway": […], "reader": […], "operator": […]}',
    )  # fmt: skip
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate to answer HTTP with, over TLS (PEM)")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its private key (PEM)")
    _add_cms(parser.add_argument_group("instances"))
    _add_dispatch(parser.add_argument_group("dispatch"))
    rescheduling.add_arguments(parser)


def _add_cms(group: Any) -> None:
    group.add_argument(
        "--cms", metavar="URL",
        help="listen://HOST:PORT: be the CMS; redis://…; redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; HOST:PORT: the "
        f"CMS of another process (default {process.CMS})",
    )  # fmt: skip
    group.add_argument("--cms-listen", metavar="HOST:PORT", help="the same as --cms listen://HOST:PORT")
    group.add_argument("--cms-redis-host", metavar="HOST", help="with --cms-redis-port, the same as --cms redis://…")
    group.add_argument("--cms-redis-port", metavar="N", help=f"default {_REDIS_PORT}")
    group.add_argument("--cms-redis-username", metavar="NAME")
    group.add_argument(
        "--cms-redis-password",
        metavar="TEXT",
        help="which everybody on this host sees; better: --cms-redis-password-file",
    )
    group.add_argument("--cms-redis-password-file", metavar="FILE", help="that holds it, not readable for everybody")
    group.add_argument(
        "--llm-backend-endpoints", default="", metavar="HOST:PORT[=TYPE],…",
        help=f"lite mode: the engines' API servers, and what each is there for: {', '.join(InferType)} (default "
        f"{InferType.NEUTRAL}). If they have an --api-key: {API_KEY_VARIABLE} in the environment",
    )  # fmt: skip
    group.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine without complete credentials"
    )


def _add_dispatch(group: Any) -> None:
    def switch(name: str, text: str) -> None:
        group.add_argument(name, nargs="?", const="true", metavar="BOOL", help=f"{text} (default true)")

    switch("--enable-full-mode-scheduling", "load is what instances report; false: what was sent to them")
    group.add_argument(
        "--scheduling-policy", default="load-balance", metavar="NAME",
        help=f"{', '.join(built_in_policies())}, or a .yaml file (default %(default)s)",
    )  # fmt: skip
    for infer_type in InferType:
        group.add_argument(f"--dispatch-{infer_type}-load-metric", metavar="METRIC", help="default: the policy's")
        group.add_argument(f"--dispatch-{infer_type}-load-threshold", metavar="LOAD", help="default: the policy's")
    group.add_argument("--dispatch-top-k", metavar="N", help="choose among the N best (default: the policy's, 1)")
    group.add_argument(
        "--failover-domain", metavar="DOMAIN",
        help=f"what fails with an instance: {', '.join(FailoverDomain)} (default: the policy's, instance)",
    )  # fmt: skip
    group.add_argument(
        "--instance-staleness-seconds", metavar="S",
        help="silence after which an instance gets nothing (default: the policy's, 60)",
    )  # fmt: skip
    switch("--enable-instance-status-local-account", "full mode: count what was sent and is in no status yet")
    for flag, name, text in (
        ("--request-local-account-staleness-seconds", "account_staleness_s",
         "full mode: how long, for a request that never gets there"),
        ("--warm-up-seconds", "warms_up_s",
         "full mode: after a start, how long no instance must have come before requests are placed"),
        ("--gateway-ttl-seconds", "gateway_ttl_s", "lite mode: silence after which a gateway's requests count no more"),
        ("--request-state-ttl-seconds", "state_ttl_s", "lite mode: silence after which one request counts no more"),
    ):  # fmt: skip
        group.add_argument(flag, metavar="S", help=f"{text} (default {_DEFAULTS[name]:g})")


def faults(args: argparse.Namespace) -> list[str]:
    """Leaves the configuration in `args.config` if there are none."""
    reader = _Reader(args)
    values = reader.values()
    if not reader.faults:
        args.config = process.SchedulerConfig(**values)
    return reader.faults


class _Reader:
    """Of the flags; collects what is wrong."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.faults: list[str] = []

    def values(self) -> dict[str, Any]:
        args = self._args
        mode = Mode.FULL if self._switch("--enable-full-mode-scheduling") else Mode.LITE
        endpoints = self._endpoints(args.llm_backend_endpoints)
        if mode is Mode.LITE and not endpoints and not args.llm_backend_endpoints:
            self.faults.append("--enable-full-mode-scheduling=false needs --llm-backend-endpoints")
        if mode is Mode.FULL and args.llm_backend_endpoints:
            self.faults.append("--llm-backend-endpoints is of no use without --enable-full-mode-scheduling=false")
        for other in set(Mode) - {mode}:
            given = [flag for flag in _OF_ONE_MODE[other] if self._text(flag) is not None]
            self.faults += [f"{flag} is of no use in {mode} mode" for flag in given]
        values: dict[str, Any] = {
            "host": args.host,
            "port": self._port("--port", args.port, lowest=0),
            "cms": self._cms(mode),
            "account": self._switch("--enable-instance-status-local-account"),
            "account_staleness_s": self._seconds("--request-local-account-staleness-seconds", "account_staleness_s"),
            "warms_up_s": self._seconds("--warm-up-seconds", "warms_up_s", may_be_0=True),
            "gateway_ttl_s": self._seconds("--gateway-ttl-seconds", "gateway_ttl_s"),
            "state_ttl_s": self._seconds("--request-state-ttl-seconds", "state_ttl_s"),
            "backend_endpoints": endpoints,
            "backend_api_key": os.environ.get(API_KEY_VARIABLE, ""),
            "insecure": args.insecure,
            "service_token_file": self._service_tokens(),
            "ssl_certfile": args.ssl_certfile or "",
            "ssl_keyfile": args.ssl_keyfile or "",
        }
        self.faults += server_faults(values["ssl_certfile"], values["ssl_keyfile"])
        values["policy"] = self._policy(mode)
        values["rescheduling"] = self._rescheduling(mode)
        return values

    def _service_tokens(self) -> str:
        file, host = self._args.service_token_file or "", self._args.host
        if file:
            try:
                read_tokens(file)
            except ValueError as error:
                self.faults.append(f"--service-token-file {error}")
        elif not (self._args.insecure or is_loopback(host)):
            self.faults.append(
                f"--host {host} is not a loopback address, and whoever reaches this scheduler sees and influences "
                "where requests go: it needs --service-token-file, or else --insecure"
            )
        return file

    def _policy(self, mode: Mode) -> Policy | None:
        args = self._args
        metrics, thresholds = {}, {}
        for infer_type in InferType:
            if (metric := getattr(args, f"dispatch_{infer_type}_load_metric")) is not None:
                metrics[infer_type] = metric
            if (text := getattr(args, f"dispatch_{infer_type}_load_threshold")) is not None:
                thresholds[infer_type], fault = arguments.number(f"--dispatch-{infer_type}-load-threshold", text)
                self.faults += fault
        top_k = None
        if args.dispatch_top_k is not None:
            top_k = int(args.dispatch_top_k) if args.dispatch_top_k.isdecimal() else 0
            if top_k < 1:
                self.faults.append(f"--dispatch-top-k {args.dispatch_top_k!r} is not a number from 1 on")
                top_k = None
        if (domain := args.failover_domain) is not None and domain not in tuple(FailoverDomain):
            self.faults.append(f"--failover-domain {domain!r} is none of {', '.join(FailoverDomain)}")
            domain = None
        staleness_s = None
        if args.instance_staleness_seconds is not None:
            staleness_s = self._seconds("--instance-staleness-seconds") or None
        # The rescheduler has a domain and a staleness of its own.
        optional = frozenset({"failover_domain", "staleness_s"} if rescheduling.colocated(args) else ())
        overrides = Overrides(metrics, thresholds, top_k, domain, staleness_s, optional)
        try:
            return load_policy(args.scheduling_policy, mode, overrides)
        except PolicyError as error:
            self.faults += error.faults
            return None

    def _rescheduling(self, mode: Mode) -> ReschedulingConfig | None:
        args, own = argparse.Namespace(**vars(self._args)), ReschedulingConfig()
        if args.failover_domain not in tuple(FailoverDomain):  # said already, if it was given
            args.failover_domain = str(own.failover_domain)
        if args.instance_staleness_seconds is None:
            args.instance_staleness_seconds = f"{own.staleness_s:g}"
        found = [fault for fault in rescheduling.faults(args) if "--instance-staleness-seconds" not in fault]
        self.faults += found
        if args.standalone_rescheduling_mode in ("true", True):
            self.faults.append("--standalone-rescheduling-mode is for `llumnix rescheduler`")
        if not rescheduling.colocated(args):
            return None
        if mode is Mode.LITE:
            self.faults.append("rescheduling needs full mode: engines that report nothing cannot move requests")
        return None if found else rescheduling.config(args)

    def _cms(self, mode: Mode) -> str:
        args = self._args
        given = {}
        if args.cms:
            given["--cms"] = args.cms
        if args.cms_listen:
            given["--cms-listen"] = LISTEN + args.cms_listen
        if args.cms_redis_host:
            given["--cms-redis-host"] = self._redis_url()
        else:
            useless = [flag for flag in _WITH_REDIS_HOST if self._text(flag) is not None]
            self.faults += [f"{flag} is of no use without --cms-redis-host" for flag in useless]
        if len(given) > 1:
            self.faults.append(f"{' and '.join(given)}: one of them")
        if given and mode is Mode.LITE:
            self.faults.append(f"{next(iter(given))} is of no use in lite mode: instances report to nobody")
        for flag, url in given.items():
            self.faults += [f"{flag} {fault}" for fault in store_faults(url)]
        return next(iter(given.values()), process.CMS)

    def _redis_url(self) -> str:
        args = self._args
        host = args.cms_redis_host.removeprefix("[").removesuffix("]")
        if not re.fullmatch(r"[\w.:-]+", host):
            self.faults.append(f"--cms-redis-host {args.cms_redis_host!r} is not a host")
            host = "localhost"
        address = Address(host, self._port("--cms-redis-port", args.cms_redis_port or _REDIS_PORT, lowest=1))
        user, password = (quote(text or "", safe="") for text in (args.cms_redis_username, args.cms_redis_password))
        url = f"redis://{user}:{password}@{address}" if user or password else f"redis://{address}"
        file = args.cms_redis_password_file
        return f"{url}?{urlencode({'password_file': file})}" if file else url

    def _endpoints(self, text: str) -> dict[Address, InferType]:
        flag, found = "--llm-backend-endpoints", dict[Address, InferType]()
        for part in filter(None, map(str.strip, text.split(","))):
            endpoint, _, kind = part.removeprefix("http://").partition("=")
            addresses, fault = arguments.address(flag, endpoint)
            self.faults += fault
            try:
                infer_type = InferType(kind or InferType.NEUTRAL)
            except ValueError:
                self.faults.append(f"{flag} {part!r}: {kind!r} is none of {', '.join(InferType)}")
                continue
            for address in addresses:
                if found.setdefault(address, infer_type) != infer_type:
                    self.faults.append(f"{flag} {endpoint}: both {found[address]} and {infer_type}")
        return found

    def _switch(self, flag: str) -> bool:
        text = (self._text(flag) or "true").lower()
        if text not in ("true", "false"):
            self.faults.append(f"{flag} {text!r} is neither true nor false")
        return bool(text != "false")

    def _seconds(self, flag: str, field: str = "", *, may_be_0: bool = False) -> float:
        """That of a flag that was not given is the default of the field; 0 for a fault."""
        text = self._text(flag)
        if text is None:
            return float(_DEFAULTS[field])
        value, fault = arguments.number(flag, text)
        if not fault and (value < 0 or (value == 0 and not may_be_0)):
            fault = [f"{flag} must be positive"]
        self.faults += fault
        return 0.0 if fault else value

    def _text(self, flag: str) -> str | None:
        """None if it was not given."""
        text: str | None = getattr(self._args, flag.removeprefix("--").replace("-", "_"))
        return text

    def _port(self, flag: str, text: str, lowest: int) -> int:
        if text.isascii() and text.isdigit() and lowest <= int(text) < 65536:
            return int(text)
        self.faults.append(f"{flag} {text!r} is not a port")
        return 0


def run(args: argparse.Namespace) -> int:
    import dataclasses

    import uvloop

    descriptors.raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = dataclasses.replace(args.config, credentials=args.credentials)
    try:
        uvloop.run(_serve(config))
    except (OSError, ValueError) as error:
        print(f"llumnix scheduler: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.OK


async def _serve(config: process.SchedulerConfig) -> None:
    """Until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    running = await process.serve(config)
    try:
        policy = config.policy
        source = name_of(config.cms) if policy.mode is Mode.FULL else ", ".join(map(str, config.backend_endpoints))
        _log.info("at http://%s:%d: %s, %s mode, %s", running.host, running.port, policy.name, policy.mode, source)
        await ended.wait()
    finally:
        await running.close()
