# SPDX-License-Identifier: Apache-2.0
"""The ends of an answer: the model's own, or the engine's. Pure.

The model ends an answer by a token, a limit, a tool call or a loop. Every other end is the engine's: it failed, or it
aborted the request although the client is still there (vLLM does so at SIGTERM, `/pause?mode=abort`, `/sleep` and
`/abort_requests`). `_judge` holds each API's words for these ends.

vLLM 0.32 hides an abort in two places: `/v1/responses` of models other than gpt-oss says `completed`, and Cohere's chat
says `COMPLETE`. Transcriptions in one piece name no end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import msgspec

from llumsched.gateway.events import fields_of, split
from llumsched.gateway.paths import Style

MODELS_ENDS: Final = frozenset(("stop", "length", "tool_calls", "repetition", "function_call", "content_filter"))
"""Finish reasons of the model. The last two are OpenAI's; vLLM does not use them."""
_LIMITS: Final = frozenset((None, "max_output_tokens", "content_filter"))
"""Reasons for which a response may be incomplete."""
_OF_THE_INSTANCE: Final = frozenset((502, 503, 504))
"""Statuses that describe the server, whatever the request was."""


class End(Enum):
    """An engine's own end of a request."""

    ERROR = auto()
    ABORT = auto()
    UNAVAILABLE = auto()
    """The engine cannot serve."""
    REFUSED = auto()
    """An error of the request, which every other engine would report too."""

    @property
    def what(self) -> str:
        return "aborted the request" if self is End.ABORT else "reported an error"


class Ended(NamedTuple):
    """An engine's own end in a stream."""

    end: End
    at: int
    """Offset of its event."""


def of_status(status: int) -> End:
    """The end that a status of 500 or above means."""
    return End.UNAVAILABLE if status in _OF_THE_INSTANCE else End.ERROR


_FINISH: Final = re.compile(rb'"finish_reason"\s*:\s*"(?!(?:%b)")' % b"|".join(sorted(map(str.encode, MODELS_ENDS))))


def tells_finish(data: bytes) -> bool:
    """True if events may tell a finish reason. Cheap, as most do not."""
    return data.count(b'"finish_reason":null') != data.count(b'"finish_reason"')


def _may_end_openai(data: bytes) -> bool:
    return b"error" in data or (tells_finish(data) and _FINISH.search(data) is not None)


_MAY_END: Final[Mapping[Style, Callable[[bytes], bool]]] = {
    Style.OPENAI: _may_end_openai,
    Style.RESPONSES: lambda data: b"error" in data or b'"response"' in data,
    Style.ANTHROPIC: lambda data: b"error" in data or b"message_delta" in data,
    Style.COHERE: lambda data: b"error" in data or b"message-end" in data,
}
"""Cheap tests by API for events worth parsing: nearly none are."""


def in_events(data: bytes, style: Style) -> Ended | None:
    """The first event by which the engine ends the stream. `data` holds whole events."""
    if not _MAY_END[style](data):
        return None
    at = 0
    for event in split(data):
        fields = fields_of(event)
        end = _judge(fields.data)
        if end is None and fields.name == b"error":
            end = End.ERROR
        if end is not None:
            return Ended(end, at)
        at += len(event)
    return None


def of_answer(body: bytes | bytearray, style: Style) -> End | None:
    """The engine's own end of an answer in one piece with status 200."""
    if style is Style.OPENAI and not _FINISH.search(body):
        return None
    return _judge(body)


def of_part(part: bytes, style: Style, *, is_last: bool) -> End | None:
    """The engine's own end in a part of an answer that is too long to be held. Quotes in a model's words are escaped,
    so they are not mistaken for an end. Responses and Cohere's chats cannot be recognised in this way."""
    if style is Style.ANTHROPIC:
        return End.ABORT if is_last and not _STOP.search(part) else None
    found = _FINISH.search(part) if style is Style.OPENAI else None
    return None if found is None else End.ERROR if part.startswith(b'error"', found.end()) else End.ABORT


_STOP: Final = re.compile(rb'"stop_reason"\s*:\s*"')


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Response(msgspec.Struct):
    status: Any = None
    incomplete_details: Any = None


class _Said(_Response):
    """The fields of answers and events that tell an end. Skipping the others makes decoding eight times faster."""

    type: Any = None
    object: Any = None
    error: Any = None
    code: Any = None
    stop_reason: Any = None
    finish_reason: Any = None
    delta: Any = None
    response: _Response | None = None
    choices: list[_Choice] | None = None


_SAID: Final = msgspec.json.Decoder(_Said)


def _judge(data: bytes | bytearray) -> End | None:
    """The end that an answer or event tells; None if it tells none or is not a JSON object of a known API."""
    try:
        said = _SAID.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    if said.error or said.type in ("error", "response.failed") or said.object == "error":
        return _of_error(said.error.get("code") if isinstance(said.error, dict) else said.code)
    if said.type == "message":  # Anthropic's, in one piece
        return None if said.stop_reason else End.ABORT
    if said.type == "message_delta" and isinstance(said.delta, dict) and "stop_reason" in said.delta:
        return None if said.delta["stop_reason"] else End.ABORT
    if said.type == "message-end" and isinstance(said.delta, dict):
        return End.ERROR if said.delta.get("finish_reason") == "ERROR" else None
    response = said if said.object == "response" else said.response
    if response is not None:
        return _of_response(response)
    for choice in said.choices or ():
        reason = choice.finish_reason
        if isinstance(reason, str) and reason not in MODELS_ENDS:
            return End.ERROR if reason == "error" else End.ABORT
    return End.ERROR if said.finish_reason == "ERROR" else None


def _of_error(code: Any) -> End:
    if not isinstance(code, int):
        return End.ERROR
    return End.REFUSED if 400 <= code < 500 else of_status(code)


def _of_response(response: _Response) -> End | None:
    if response.status == "failed":
        return End.ERROR
    details = response.incomplete_details
    reason = details.get("reason") if isinstance(details, dict) else None
    is_cut = response.status == "incomplete" and reason not in _LIMITS
    return End.ABORT if response.status == "cancelled" or is_cut else None
