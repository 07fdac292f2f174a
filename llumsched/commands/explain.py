# SPDX-License-Identifier: Apache-2.0
"""`llumnix explain`: where a request would go now, and why."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import aiohttp

from llumlet.types import Address
from llumsched import output, scheduler_access
from llumsched.commands import arguments
from llumsched.exit_codes import ExitCode
from llumsched.scheduler.process import PORT
from llumsched.scheduler_access import Access

DESCRIPTION = """Ask a running scheduler where it would send a request now, and why not elsewhere.

Nothing is placed. A reason in brackets was not held against the instance: all others were refused as well, and the
policy's thresholds were left out."""

_MODES = ("neutral", "pd_batch")
_TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scheduler", default=f"127.0.0.1:{PORT}", metavar="HOST:PORT", help="of its HTTP port (default %(default)s)"
    )
    parser.add_argument("--model", default="", help="that the request asks for; default: any")
    parser.add_argument("--prompt-num-tokens", default="0", metavar="N", help="length of its prompt (default 0)")
    parser.add_argument(
        "--scheduling-mode", default="neutral", metavar="MODE", help=f"{', '.join(_MODES)} (default %(default)s)"
    )
    scheduler_access.add_arguments(parser)
    arguments.add_json(parser)


def faults(args: argparse.Namespace) -> list[str]:
    args.addresses, found = arguments.address("--scheduler", args.scheduler)
    args.access, more = scheduler_access.given(args)
    found += more
    if not (args.prompt_num_tokens.isascii() and args.prompt_num_tokens.isdigit()):
        found.append(f"--prompt-num-tokens {args.prompt_num_tokens!r} is not a number")
    if args.scheduling_mode not in _MODES:
        found.append(f"--scheduling-mode {args.scheduling_mode!r} is none of {', '.join(_MODES)}")
    return found


def run(args: argparse.Namespace) -> int:
    asked = {
        "id": "",
        "model": args.model,
        "prompt_num_tokens": int(args.prompt_num_tokens),
        "scheduling_mode": args.scheduling_mode,
    }
    try:
        status, answer = asyncio.run(_ask(args.addresses[0], asked, args.access))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        print(f"llumnix explain: scheduler {args.addresses[0]}: {error or 'no answer'}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    if status != 200:
        print(f"llumnix explain: scheduler {args.addresses[0]} answers {status}: {answer}", file=sys.stderr)
        return ExitCode.REFUSED
    if args.json:
        output.print_json(answer)
    else:
        _show(answer)
    return ExitCode.OK


async def _ask(scheduler: Address, asked: dict[str, Any], access: Access) -> tuple[int, Any]:
    async with (
        access.session(_TIMEOUT_S) as session,
        session.post(access.url(scheduler, "/debug/schedule"), json=asked) as answer,
    ):
        return answer.status, await (answer.json() if answer.status == 200 else answer.text())


def _show(answer: dict[str, Any]) -> None:
    console = output.console()
    old = f", view {answer['view_age_s']:.1f} s old" if answer["view_age_s"] else ""
    old += ", warming up: nothing is placed yet" if answer["warming"] else ""
    for stage in answer["stages"]:
        second = ", nobody passed all filters" if stage["fallback"] else ""
        console.print(
            output.clean(
                f"{stage['infer_type']}: {stage['chosen'] or 'nobody'} ({answer['policy']}, {answer['mode']} mode, "
                f"{stage['selector']}{second}{old})"
            ),
            markup=False,
        )
        names = [metric["name"] for metric in stage["metrics"]]
        rows = output.table(("INSTANCE", "VERDICT", *(f">{name}" for name in names), "WHY NOT"))
        for instance in stage["instances"]:
            values = [str(instance["metrics"][name]) for name in names]
            rows.add_row(*map(output.clean, (instance["instance_id"], instance["verdict"], *values, _why(instance))))
        console.print(rows)


def _why(instance: dict[str, Any]) -> str:
    reasons = [
        f"({refusal['reason']})" if refusal["skipped"] else refusal["reason"] for refusal in instance["refused_by"]
    ]
    return "; ".join(reasons)
