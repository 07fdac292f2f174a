# SPDX-License-Identifier: Apache-2.0
"""`llumnix ps`: the requests of instances."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import ListRequestsResponse, Mode, MoveInfo, MovePhase, RequestInfo, reason_word, word
from llumlet.process.credentials import Credentials
from llumlet.process.setting_sources import Reading
from llumsched.commands import instances
from llumsched.commands.arguments import Output
from llumsched.console import output
from llumsched.console.fan_out import LlumletAnswer, report_failures

DESCRIPTION = """List the requests of instances.

MOVABLE shows how a request would move now: live, with its KV cache; recompute, as tokens from which the destination
computes its KV cache again; waiting, without any KV cache yet. Or it shows the reason why the request cannot move.

--json prints one object per instance, with its requests or the error."""

_COLUMNS = (
    "INSTANCE",
    "REQUEST",
    "PHASE",
    ">PROMPT",
    ">OUTPUT",
    ">BLOCKS",
    ">AGE",
    "EPOCH",
    "ORIGIN",
    "MOVABLE",
    "MOVE",
)


SETTINGS: Final = (instances.Named, instances.ClusterAddress, instances.Cms, Output)


def prepare(reading: Reading) -> tuple[instances.Places, bool]:
    return instances.named(reading), reading.make_with_defaults(Output).json


def run(prepared: tuple[instances.Places, bool], credentials: Credentials) -> int:
    places, as_json = prepared
    answers = asyncio.run(places.ask(LlumletClient.list_requests, credentials))
    if as_json:
        for answer in answers:
            output.print_json(_document(answer))
    else:
        _print_table(answers)
    return report_failures(answers, quiet=as_json)


def _document(answer: LlumletAnswer[ListRequestsResponse]) -> dict[str, object]:
    document: dict[str, object] = {"address": answer.where, "error": answer.error_dict()}
    return document | (output.to_dict(answer.value) if answer.value is not None else {})


def _print_table(answers: list[LlumletAnswer[ListRequestsResponse]]) -> None:
    rows = output.table(_COLUMNS)
    for answer in answers:
        if answer.value is not None:
            for request in answer.value.requests:
                rows.add_row(*map(output.clean, (answer.value.instance_id, *_row(request))))
    if rows.row_count:
        output.console().print(rows)
    elif any(answer.value is not None for answer in answers):
        output.console().print("no requests")


def _row(request: RequestInfo) -> list[str]:
    return [
        request.request_id,
        word(RequestInfo.Phase, request.phase),
        str(request.prompt_tokens),
        str(request.output_tokens),
        str(request.num_blocks),
        output.duration(time.time() - request.arrival_time) if request.arrival_time else "",
        f"{request.epoch.term}.{request.epoch.hop}",
        request.origin,
        _movable(request),
        _move(request.move) if request.HasField("move") else "",
    ]


def _movable(request: RequestInfo) -> str:
    """The mode in which a request would move, or the reason why it would not."""
    if request.movable:
        return word(Mode, request.moves_as) if request.moves_as else "yes"
    return reason_word(request.reason) or "no"


def _move(move: MoveInfo) -> str:
    arrow = "→" if move.direction == MoveInfo.OUT else "←"
    peer = move.peer_instance_id or move.peer_address
    return f"{arrow} {peer} {word(MovePhase, move.phase)} {move.transport}".rstrip()
