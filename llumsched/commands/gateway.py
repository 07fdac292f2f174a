# SPDX-License-Identifier: Apache-2.0
"""`llumnix gateway`: the OpenAI API in front of all engines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from llumlet.loopback import is_loopback
from llumsched import tls
from llumsched.exit_codes import ExitCode
from llumsched.gateway.config import Config
from llumsched.gateway.flags import FLAGS, REPEATED, SWITCHES

DESCRIPTION = """Serve the OpenAI API in front of all engines.

  llumnix gateway --scheduler-endpoints 127.0.0.1:8088
  llumnix gateway --scheduling-policy round-robin --llm-backend-endpoints 10.0.0.1:8000,10.0.0.2:8000

Every field of a request reaches the engine as it came. A request whose engine fails before its first token goes to
another one; a stream whose engine disappears goes on at another one from the tokens that its client has, unless the
client sent `X-Llumnix-Continuation: off`. SIGTERM ends it once its streams have ended; behind a load
balancer give it time to notice first, with --shutdown-delay."""

_DEFAULTS = {field.name: field.default for field in fields(Config)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, (name, _, metavar, text) in flags.items():
            default = _DEFAULTS.get(name)
            shown = "" if default in ("", ()) or not isinstance(default, str | int | float) else f" (default {default})"
            repeated: dict[str, Any] = {"action": "append"} if flag in REPEATED else {}
            if flag in SWITCHES:
                repeated = {"nargs": "?", "const": "true"}
            group.add_argument(flag, dest=f"gateway{flag}", metavar=metavar or "BOOL", help=text + shown, **repeated)


def faults(args: argparse.Namespace) -> list[str]:
    """Leaves the configuration in `args.config`."""
    found: list[str] = []
    values: dict[str, Any] = {}
    unread: set[str] = set()
    for flags in FLAGS.values():
        for flag, (name, read, _, _) in flags.items():
            text = getattr(args, f"gateway{flag}")
            if text is None:
                continue
            try:
                value = read(text)
            except ValueError as error:
                found.append(f"{flag} {error}")
                unread.add(name)
            else:
                values[name] = values.get(name, {}) | value if isinstance(value, dict) else value
    args.config = Config(**values)
    return found + [fault for settings, fault in _contradictions(args.config) if not settings & unread]


def _contradictions(config: Config) -> Iterator[tuple[set[str], str]]:
    """What is wrong, and the settings without which that cannot be said."""
    if config.is_local and not config.backend_endpoints:
        needed = "--scheduling-policy round-robin needs --llm-backend-endpoints"
        yield {"scheduling_policy", "backend_endpoints"}, needed
    if config.is_local and config.scheduler_endpoints:
        yield {"scheduling_policy"}, "--scheduler-endpoints is of no use with --scheduling-policy round-robin"
    if not config.is_local and not config.scheduler_endpoints:
        needed = f"--scheduling-policy {config.scheduling_policy} needs --scheduler-endpoints"
        yield {"scheduling_policy", "scheduler_endpoints"}, needed
    if config.workers > 1 and not config.port:
        yield {"workers", "port"}, "--workers above 1 needs a --port: each worker binds it"
    if config.backend_ca_file and not config.asks_https:
        yield {"backend_endpoints"}, "--backend-ca-file is of no use without https endpoints or --backend-https"
    for given, missing in (("certfile", "keyfile"), ("keyfile", "certfile")):
        if getattr(config, f"ssl_{given}") and not getattr(config, f"ssl_{missing}"):
            yield {f"ssl_{missing}"}, f"--ssl-{given} needs --ssl-{missing}"
    if config.ssl_certfile and config.ssl_keyfile:
        for fault in tls.server_faults(config.ssl_certfile, config.ssl_keyfile):
            yield {"ssl_certfile", "ssl_keyfile"}, fault
    if not (config.insecure or config.is_guarded or is_loopback(config.host)):
        needed = (
            f"--host {config.host} is not a loopback address, and whoever reaches this gateway could use all engines: "
            "it needs --api-key-file, --ssl-certfile and --ssl-keyfile, or else --insecure"
        )
        yield {"insecure", "api_key_file", "ssl_certfile", "ssl_keyfile"}, needed
    if config.chat_template and not config.tokenizers:
        yield {"tokenizers"}, "--chat-template is of no use without --tokenizer-path"


def run(args: argparse.Namespace) -> int:
    from llumsched.gateway import workers

    return workers.run(args.config) or ExitCode.OK
