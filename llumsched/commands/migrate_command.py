# SPDX-License-Identifier: Apache-2.0
"""`llumnix migrate`: moves running requests from one instance to another and shows the progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.contract.types import MigrateRequest, Mode, MoveSummary, Reason
from llumlet.process import kinds
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import MARK
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import Group
from llumsched.cms.look import CmsUnreachable
from llumsched.commands import instances, selection
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.console import output
from llumsched.console.exit_codes import ExitCode
from llumsched.console.fan_out import ask_all
from llumsched.console.move_display import JsonDisplay, MoveDisplay, TextDisplay
from llumsched.console.request_ids import find

DESCRIPTION = """Move running requests, with their KV cache if it can be moved, from one instance to another.

Choose them by --request ID (repeatable), by --all, or by a rule:
  --rule NUM_REQ --order SR --value 2       the two shortest running requests
  --rule TOKEN --order LR --value 8000      the longest ones, 8,000 tokens of them
  --rule RATIO --order FCWSR --value 0.1    a tenth of the KV cache, waiting requests first
Orders: LCR, FCR last/first come, running; LR, SR longest/shortest running; FCW first come, waiting;
FCWSR first waiting, then shortest running; LP lowest priority (largest number), then longest, running.

A request that cannot move continues on the source. Interrupting this command does not stop the moves.
--json prints one object per event; "event" is progress, error or, at the end, summary."""

_METHODS: Final = {
    "auto": Mode.MODE_UNSPECIFIED,
    "live": Mode.LIVE,
    "blocking": Mode.BLOCKING,
    "recompute": Mode.RECOMPUTE,
}
_TRIGGER: Final = "manual"
_how = Group("how", unit="")


@dataclass(frozen=True, slots=True)
class MigrateOptions:
    source: str = OPTIONS.setting(
        "", kinds.text("INSTANCE"), "source instance, by id or by its llumlet's HOST:PORT", flag="--from"
    )
    destination: str = OPTIONS.setting(
        "",
        kinds.text("INSTANCE"),
        "destination instance, by id or by its llumlet's HOST:PORT; the source must reach it under the same address",
        flag="--to",
    )
    method: str = _how.setting(
        "auto",
        kinds.one_of(_METHODS),
        "live copies while the request decodes; blocking stops it, copies and resumes it; recompute copies nothing; "
        "auto is live, or recompute for a request whose KV cache cannot be moved",
    )
    force: bool = _how.setting(False, MARK, "move even if the stall exceeds its budget")
    stall_budget_ms: float | None = _how.setting(
        None,
        kinds.number("MS", at_least=0),
        "longest stall of a stream, in milliseconds (default: the source's --llumlet-stall-budget-ms)",
    )
    timeout_s: float = _how.setting(
        600.0, kinds.seconds(above=0), "time to watch the moves, in seconds; they continue afterwards"
    )


SETTINGS: Final = (MigrateOptions, instances.ClusterAddress, instances.Cms, selection.RequestChoice, Output)


@dataclass(frozen=True, slots=True)
class Migration:
    ends: instances.Places
    """Places of source and destination."""
    request: MigrateRequest
    """The call, without its ends and without `request_ids`."""
    request_ids: tuple[str, ...]
    timeout_s: float
    as_json: bool


def prepare(reading: Reading) -> Migration:
    options, cms = reading.make(MigrateOptions), instances.cluster_of(reading)[0]
    texts = {"--from": options.source, "--to": options.destination}
    reading.faults += [
        f"{flag} INSTANCE is missing: its id, or its llumlet's HOST:PORT" for flag, text in texts.items() if not text
    ]
    ends = instances.places(reading, [(flag, text) for flag, text in texts.items() if text], cms)
    if len(ends.places) == 1 and all(texts.values()):
        reading.faults.append(f"--from and --to are the same llumlet, {ends.places[0]}")
    request = MigrateRequest(trigger_policy=_TRIGGER, force=options.force, method=_METHODS[options.method])
    if options.stall_budget_ms is not None:
        request.stall_budget_ms = options.stall_budget_ms
    reading.check(selection.ask_for, chosen := reading.make(selection.RequestChoice), reading.given, request)
    return Migration(ends, request, chosen.request, options.timeout_s, reading.make(Output).json)


def run(migration: Migration, credentials: Credentials) -> int:
    display: MoveDisplay = JsonDisplay() if migration.as_json else TextDisplay()
    try:
        return asyncio.run(_migrate(migration, credentials, display))
    except KeyboardInterrupt:
        display.interrupted()
        return ExitCode.INTERRUPTED


async def _migrate(migration: Migration, credentials: Credentials, display: MoveDisplay) -> ExitCode:
    try:
        ends = await migration.ends.resolve(credentials)
    except CmsUnreachable as error:
        display.failed(error)
        return output.exit_code(error)
    answers = await ask_all(ends, LlumletClient.get_instance_metadata, credentials)
    failures = [answer.failure for answer in answers if answer.failure is not None]
    async with LlumletClient(ends[0], credentials=credentials) as source:
        if not failures:
            here, there = (answer.value for answer in answers if answer.value is not None)
            request = migration.request
            request.src_engine_id, request.dst_engine_id = here.instance_id, there.instance_id
            request.dst_engine_ip, request.dst_engine_port = ends[1]
            try:
                if migration.request_ids:
                    request.request_ids.extend(await _find(source, migration.request_ids))
                return await _watch(source, request, migration.timeout_s, display)
            except LlumletCallFailed as error:
                failures = [error]
    for failure in failures:
        display.failed(failure)
    return output.exit_code(failures[0])


async def _find(source: LlumletClient, texts: Sequence[str]) -> list[str]:
    listed = await source.list_requests()
    ids, faults = find(texts, listed.requests)
    if faults:
        raise LlumletError(Reason.UNKNOWN_REQUEST, "; ".join(faults), source.address)
    return ids


async def _watch(source: LlumletClient, request: MigrateRequest, timeout_s: float, display: MoveDisplay) -> ExitCode:
    with display:
        async with aclosing(source.migrate(request, deadline_s=timeout_s)) as events:
            async for event in events:
                if event.HasField("summary"):
                    code = _exit_code(event.summary)
                    display.summary(event.summary, code)
                    return code
                display.progress(event.progress)
    raise LlumletUnreachable(source.address, "the answer ended before its summary")


def _exit_code(summary: MoveSummary) -> ExitCode:
    if summary.selected == 0:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.OK if summary.moved == summary.selected else ExitCode.NOT_MOVED
