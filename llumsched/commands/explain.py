# SPDX-License-Identifier: Apache-2.0
"""`llumnix explain`: where a request would go now, and why."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from llumlet import kinds
from llumlet.credentials import Credentials
from llumlet.kinds import SWITCH, Kind
from llumlet.setting_sources import Reading
from llumlet.types import Address
from llumsched import output
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.exit_codes import ExitCode
from llumsched.scheduler.process import PORT
from llumsched.scheduler_access import Access, AccessSettings

DESCRIPTION = """Ask a running scheduler where it would send a request now, and why not elsewhere.

Nothing is placed. A reason in brackets was not held against the instance: all others were refused as well, and the
policy's thresholds were left out. TTFT and TPOT are what the engine itself is expected to need, and how far the model
of its steps may be off, for want of steps like these; "?" is a kind of step that it has never seen. HIT is what its
prefix cache has of the prompt, if --prompt-token-ids names it and the scheduler knows of prefix caches. SINCE is what
has been moved on since the instance's last report (--forward-status of the scheduler): as it was told, and as it is
taken to be now."""

_MODES: Final = ("neutral", "pd_batch")
_TIMEOUT_S: Final = 5.0
_SHOWN: Final = (
    ("num_used_gpu_tokens", "KV tokens"),
    ("scheduler_running_to_decode_requests_num", "decodes"),
    ("num_uncomputed_tokens_scheduler_running_prefills", "prefill tokens"),
    ("num_waiting_requests", "waiting"),
    ("sent_requests", "sent"),
)
"""Columns of what has been moved on, and what they are called; the JSON has all."""


def _token_ids(path: str) -> list[int]:
    """Token ids of a file. Raises ValueError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Question:
    scheduler: Address = OPTIONS.setting(
        Address("127.0.0.1", PORT), Kind(Address.parse, "HOST:PORT"), "address of its HTTP service"
    )
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


SETTINGS: Final = (Question, AccessSettings, Output)


def prepare(reading: Reading) -> tuple[Question, AccessSettings, bool]:
    return reading.make(Question), reading.make(AccessSettings), reading.make_with_defaults(Output).json


def run(prepared: tuple[Question, AccessSettings, bool], _: Credentials) -> int:
    question, access, as_json = prepared
    asked = asdict(question)
    del asked["scheduler"], asked["prompt_token_ids"]
    if question.prompt_token_ids:
        asked["prompt_token_ids"] = _token_ids(question.prompt_token_ids)
    try:
        status, answer = asyncio.run(_ask(question.scheduler, asked, access.access))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        print(f"llumnix explain: scheduler {question.scheduler}: {error or 'no answer'}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    if status != 200:
        print(f"llumnix explain: scheduler {question.scheduler} answers {status}: {answer}", file=sys.stderr)
        return ExitCode.REFUSED
    if as_json:
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
        predictions = [one.get("predicted") for one in stage["instances"]]
        extra = (">TTFT", ">TPOT") if any(predictions) else ()
        hits = (">HIT",) if any(one.get("kv_cache_hit_len") for one in stage["instances"]) else ()
        moved = [one.get("moved_on") for one in stage["instances"]]
        since = ("SINCE",) if any(moved) else ()
        titles = (*(f">{name}" for name in names), *hits, *extra, *since)
        rows = output.table(("INSTANCE", "VERDICT", *titles, "WHY NOT"))
        for instance, predicted, each in zip(stage["instances"], predictions, moved, strict=True):
            values = [str(instance["metrics"][name]) for name in names]
            values += [str(instance["kv_cache_hit_len"])] if hits else []
            values += [_predicted(predicted, name) for name in ("ttft", "tpot")] if extra else []
            values += [_since(each)] if since else []
            rows.add_row(*map(output.clean, (instance["instance_id"], instance["verdict"], *values, _why(instance))))
        console.print(rows)


def _predicted(predicted: dict[str, Any] | None, name: str) -> str:
    """What is expected, and how far the model itself may be off, for want of steps like these."""
    if predicted is None:
        return "-"
    value, deviation = predicted[f"{name}_ms"], predicted[f"{name}_deviation"]
    sure = f"± {100 * deviation:.0f} %" if isinstance(deviation, int | float) else "± ?"
    return f"{value:.0f} ms {sure}" if isinstance(value, int | float) else "-"


def _since(moved: dict[str, list[float]] | None) -> str:
    known = moved or {}
    return ", ".join("{} {:g} → {:g}".format(said, *known[name]) for name, said in _SHOWN if name in known)


def _why(instance: dict[str, Any]) -> str:
    reasons = [
        f"({refusal['reason']})" if refusal["skipped"] else refusal["reason"] for refusal in instance["refused_by"]
    ]
    return "; ".join(reasons)
