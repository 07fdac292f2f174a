# SPDX-License-Identifier: Apache-2.0
"""`llumnix explain`: where a request would go now, or which requests the rescheduler would move, and why."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from llumlet.process import kinds
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import MARK, SWITCH, Kind
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import entries
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.commands.instances import ClusterAddress
from llumsched.console import explained, output
from llumsched.console.exit_codes import ExitCode
from llumsched.scheduler_access import AccessSettings, SchedulerAccess

DESCRIPTION = """Ask a running scheduler where it would send a request now, and why not elsewhere.

Nothing is placed. A reason in brackets was ignored: every instance was refused, so the policy left its thresholds out.
TTFT and TPOT are predictions for the engine, with their uncertainty; "?" marks a kind of step that was never seen. HIT
is the part of the prompt in the prefix cache, if --prompt-token-ids is given and the scheduler follows prefix caches.
SINCE shows the status as reported and as estimated for now (--forward-status of the scheduler).

  llumnix explain --metric decode_batch_size,num_waiting_requests     show further metrics
  llumnix explain --rescheduling                                      show what its rescheduler would move now, and why
  llumnix explain --rescheduling --scheduler HOST:PORT                ask a `llumnix rescheduler --port PORT`"""

_MODES: Final = ("neutral", "pd_batch")
_TIMEOUT_S: Final = 5.0
_HINT: Final = (
    "Check that it runs, or name another one: --cluster HOST[:PORT] (or LLUMNIX_CLUSTER) or --scheduler HOST:PORT."
)


def _token_ids(path: str) -> list[int]:
    """Token ids of a file. Raises ValueError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from error


def _scheduler() -> Address | None:
    what = "HTTP address of the scheduler or rescheduler to ask (default: the cluster's scheduler)"
    return OPTIONS.setting(None, Kind(Address.parse, "HOST:PORT"), what, common=True)


@dataclass(frozen=True, slots=True)
class RequestQuestion:
    """A request to be placed."""

    scheduler: Address | None = _scheduler()
    model: str = OPTIONS.setting("", kinds.text("MODEL"), "model that the request asks for; empty is any", common=True)
    prompt_num_tokens: int = OPTIONS.setting(
        0, kinds.integer(at_least=0), "length of the prompt, in tokens", common=True
    )
    prompt_token_ids: str = OPTIONS.setting(
        "", kinds.file(_token_ids), "JSON file with the token ids of the prompt, a list of numbers"
    )
    priority: int = OPTIONS.setting(
        0, kinds.integer(), "priority of the request, for policies that use it; lower numbers come first", common=True
    )
    ttft_slo_ms: float = OPTIONS.setting(
        0.0,
        kinds.number("MS", at_least=0),
        "objective for the time to first token, in milliseconds; 0 uses the policy's",
    )
    tpot_slo_ms: float = OPTIONS.setting(
        0.0,
        kinds.number("MS", at_least=0),
        "objective for the mean time between two tokens, in milliseconds; 0 uses the policy's",
    )
    waited_ms: float = OPTIONS.setting(
        0.0, kinds.number("MS", at_least=0), "time that the request has waited already, in milliseconds"
    )
    may_wait: bool = OPTIONS.setting(
        False, SWITCH, "treat the request as one that would rather wait than miss its objectives"
    )
    scheduling_mode: str = OPTIONS.setting(
        "neutral",
        kinds.one_of(_MODES),
        "place the request on one instance (neutral), or prefill and decode on two (pd_batch)",
        common=True,
    )
    metrics: tuple[str, ...] = OPTIONS.setting(
        (),
        kinds.repeatable(kinds.several(kinds.text("NAME"), "NAME[,NAME…]")),
        "metrics to show beside those that the policy compares (repeatable)",
        flag="--metric",
        common=True,
    )


@dataclass(frozen=True, slots=True)
class PassQuestion:
    """A pass of the rescheduler that starts nothing."""

    scheduler: Address | None = _scheduler()
    rescheduling: bool = OPTIONS.setting(
        False,
        MARK,
        "show which requests the rescheduler would move now, and why no others, instead of placing a request",
        common=True,
    )
    policy: str = OPTIONS.setting(
        "",
        kinds.text("NAME"),
        "rescheduling policy whose moves --rescheduling shows; empty shows those of all policies",
        common=True,
    )


SETTINGS: Final = (RequestQuestion, PassQuestion, ClusterAddress, AccessSettings, Output)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A question and the scheduler to ask."""

    asked: RequestQuestion | PassQuestion
    scheduler: Address
    access: AccessSettings
    as_json: bool


def prepare(reading: Reading) -> Explanation:
    dry_run = reading.make(PassQuestion)
    reading.faults += _useless(reading, dry_run)
    asked = dry_run if dry_run.rescheduling else reading.make(RequestQuestion)
    scheduler = dry_run.scheduler or reading.make(ClusterAddress).cluster
    return Explanation(asked, scheduler, reading.make(AccessSettings), reading.make(Output).json)


def _useless(reading: Reading, dry_run: PassQuestion) -> Iterator[str]:
    """Faults of arguments that have no effect on this question."""
    if not dry_run.rescheduling:
        if "--policy" in reading.given:
            yield f"{reading.given['--policy']} has no effect without --rescheduling"
        return
    shared = {entry.setting.flag for entry in entries(PassQuestion)}
    for entry in entries(RequestQuestion):
        if (flag := entry.setting.flag) in reading.given and flag not in shared:
            yield f"{reading.given[flag]} has no effect with --rescheduling"


def run(explanation: Explanation, _: Credentials) -> int:
    asked, scheduler, access = explanation.asked, explanation.scheduler, explanation.access.access
    try:
        if isinstance(asked, PassQuestion):
            status, answer = asyncio.run(_ask_dry_run(scheduler, asked, access))
        else:
            status, answer = asyncio.run(_ask(scheduler, _body(asked), access))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = getattr(error, "strerror", None) or error or "no answer"
        print(f"llumnix: cannot reach the scheduler {scheduler}: {why}\n  {_HINT}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    if status != 200:
        said = "no rescheduler runs there" if isinstance(asked, PassQuestion) and status == 404 else answer
        print(f"llumnix explain: scheduler {scheduler} answers {status}: {said}", file=sys.stderr)
        return ExitCode.USAGE if status == 400 else ExitCode.REFUSED
    if explanation.as_json:
        output.print_json(answer)
    elif isinstance(asked, PassQuestion):
        explained.show_dry_run(answer)
    else:
        explained.show_decisions(answer)
    return ExitCode.OK


def _body(question: RequestQuestion) -> dict[str, Any]:
    body = asdict(question)
    del body["scheduler"], body["prompt_token_ids"]
    if question.prompt_token_ids:
        body["prompt_token_ids"] = _token_ids(question.prompt_token_ids)
    return body


async def _ask_dry_run(scheduler: Address, dry_run: PassQuestion, access: SchedulerAccess) -> tuple[int, Any]:
    return await _ask(scheduler, {"policy": dry_run.policy}, access, "/debug/rescheduling/plan")


async def _ask(
    scheduler: Address, asked: dict[str, Any], access: SchedulerAccess, path: str = "/debug/schedule"
) -> tuple[int, Any]:
    url = access.url(scheduler, path)
    async with access.session(_TIMEOUT_S) as session, session.post(url, json=asked, headers=access.headers) as answer:
        return answer.status, await (answer.json() if answer.status == 200 else answer.text())
