# SPDX-License-Identifier: Apache-2.0
"""`llumnix ps`: the requests of instances."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import ListRequestsResponse, Mode, MoveInfo, MovePhase, RequestInfo, reason_word, word
from llumsched.commands.instances import Listing
from llumsched.console import output

_DESCRIPTION = """List the requests of instances.

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


def _rows(_: str, listed: ListRequestsResponse) -> Iterator[list[str]]:
    for request in listed.requests:
        yield [listed.instance_id, *_row(request)]


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


COMMAND: Final = Listing(
    _DESCRIPTION,
    LlumletClient.list_requests,
    lambda listed: {} if listed is None else output.to_dict(listed),
    _COLUMNS,
    _rows,
    "no requests",
)
