# SPDX-License-Identifier: Apache-2.0
"""`llumnix explain`: where a request would go now, or which requests would change place, and why."""

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
from llumsched import output
from llumsched.commands import explained
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.commands.instances import Cluster
from llumsched.exit_codes import ExitCode
from llumsched.scheduler_access import Access, AccessSettings

DESCRIPTION = """Ask a running scheduler where it would send a request now, and why not elsewhere.

Nothing is placed. A reason in brackets was not held against the instance: all others were refused as well, and the
policy's thresholds were left out. TTFT and TPOT are what the engine itself is expected to need, and how far the model
of its steps may be off, for want of steps like these; "?" is a kind of step that it has never seen. HIT is what its
prefix cache has of the prompt, if --prompt-token-ids names it and the scheduler knows of prefix caches. SINCE is what
has been moved on since the instance's last report (--forward-status of the scheduler): as it was told, and as it is
taken to be now.

  llumnix explain --metric decode_batch_size,num_waiting_requests     with metrics that the policy does not compare
  llumnix explain --rescheduling                                      which requests its rescheduler would move now,
                                                                      and why no others: nothing is moved
  llumnix explain --rescheduling --scheduler HOST:PORT                the same of a `llumnix rescheduler --port PORT`"""

_MODES: Final = ("neutral", "pd_batch")
_TIMEOUT_S: Final = 5.0
_HINT: Final = (
    "Is it running? Another one is named by --cluster HOST[:PORT] (or LLUMNIX_CLUSTER), or --scheduler HOST:PORT."
)


def _token_ids(path: str) -> list[int]:
    """Token ids of a file. Raises ValueError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from error


def _scheduler() -> Address | None:
    what = "address of its HTTP service (default: that of the cluster)"
    return OPTIONS.setting(None, Kind(Address.parse, "HOST:PORT"), what)


@dataclass(frozen=True, slots=True)
class Question:
    """A request that asks for a place."""

    scheduler: Address | None = _scheduler()
    model: str = OPTIONS.setting("", kinds.text("MODEL"), "model that the request asks for; default: any")
    prompt_num_tokens: int = OPTIONS.setting(0, kinds.integer(at_least=0), "length of its prompt")
    prompt_token_ids: str = OPTIONS.setting(
        "", kinds.file(_token_ids), "a file with the prompt's token ids, as JSON has a list of numbers"
    )
    priority: int = OPTIONS.setting(
        0, kinds.integer(), "its priority, for policies that heed it; lower ones come first"
    )
    ttft_slo_ms: float = OPTIONS.setting(
        0.0, kinds.number("MS", at_least=0), "its objective for the first token; 0: the policy's"
    )
    tpot_slo_ms: float = OPTIONS.setting(
        0.0, kinds.number("MS", at_least=0), "its objective for the time between two tokens; 0: the policy's"
    )
    waited_ms: float = OPTIONS.setting(0.0, kinds.number("MS", at_least=0), "how long it has waited already")
    may_wait: bool = OPTIONS.setting(False, SWITCH, "it would rather wait than miss its objectives")
    scheduling_mode: str = OPTIONS.setting(
        "neutral", kinds.one_of(_MODES), "on one instance, or prefill and decode on two"
    )
    metrics: tuple[str, ...] = OPTIONS.setting(
        (),
        kinds.repeatable(kinds.several(kinds.text("NAME"), "NAME[,NAME…]")),
        "metrics to show beside those that the policy compares (repeatable)",
        flag="--metric",
    )


@dataclass(frozen=True, slots=True)
class DryRun:
    """A pass of the rescheduler that starts nothing."""

    scheduler: Address | None = _scheduler()
    rescheduling: bool = OPTIONS.setting(
        False, MARK, "instead: which requests its rescheduler would move now, and why no others"
    )
    policy: str = OPTIONS.setting(
        "", kinds.text("NAME"), "with --rescheduling: what this policy would move; default: all of them"
    )


SETTINGS: Final = (Question, DryRun, Cluster, AccessSettings, Output)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A question, and the scheduler that is asked."""

    asked: Question | DryRun
    scheduler: Address
    access: AccessSettings
    as_json: bool


def prepare(reading: Reading) -> Explanation:
    dry_run = reading.make_with_defaults(DryRun)
    reading.faults += _useless(reading, dry_run)
    asked = dry_run if dry_run.rescheduling else reading.make(Question)
    scheduler = dry_run.scheduler or reading.make_with_defaults(Cluster).cluster
    return Explanation(asked, scheduler, reading.make(AccessSettings), reading.make_with_defaults(Output).json)


def _useless(reading: Reading, dry_run: DryRun) -> Iterator[str]:
    """Faults of what is of no use for what is asked."""
    if not dry_run.rescheduling:
        if "--policy" in reading.given:
            yield f"{reading.given['--policy']} is of no use without --rescheduling"
        return
    shared = {entry.setting.flag for entry in entries(DryRun)}
    for entry in entries(Question):
        if (flag := entry.setting.flag) in reading.given and flag not in shared:
            yield f"{reading.given[flag]} is of no use with --rescheduling"


def run(explanation: Explanation, _: Credentials) -> int:
    asked, scheduler, access = explanation.asked, explanation.scheduler, explanation.access.access
    try:
        if isinstance(asked, DryRun):
            status, answer = asyncio.run(_ask_dry_run(scheduler, asked, access))
        else:
            status, answer = asyncio.run(_ask(scheduler, _body(asked), access))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = getattr(error, "strerror", None) or error or "no answer"
        print(f"llumnix: cannot reach the scheduler {scheduler}: {why}\n  {_HINT}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    if status != 200:
        said = "no rescheduler runs there" if isinstance(asked, DryRun) and status == 404 else answer
        print(f"llumnix explain: scheduler {scheduler} answers {status}: {said}", file=sys.stderr)
        return ExitCode.USAGE if status == 400 else ExitCode.REFUSED
    if explanation.as_json:
        output.print_json(answer)
    elif isinstance(asked, DryRun):
        explained.show_dry_run(answer)
    else:
        explained.show_decisions(answer)
    return ExitCode.OK


def _body(question: Question) -> dict[str, Any]:
    body = asdict(question)
    del body["scheduler"], body["prompt_token_ids"]
    if question.prompt_token_ids:
        body["prompt_token_ids"] = _token_ids(question.prompt_token_ids)
    return body


async def _ask_dry_run(scheduler: Address, dry_run: DryRun, access: Access) -> tuple[int, Any]:
    return await _ask(scheduler, {"policy": dry_run.policy}, access, "/debug/rescheduling/plan")


async def _ask(
    scheduler: Address, asked: dict[str, Any], access: Access, path: str = "/debug/schedule"
) -> tuple[int, Any]:
    url = access.url(scheduler, path)
    async with access.session(_TIMEOUT_S) as session, session.post(url, json=asked, headers=access.headers) as answer:
        return answer.status, await (answer.json() if answer.status == 200 else answer.text())
