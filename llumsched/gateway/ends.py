# SPDX-License-Identifier: Apache-2.0
"""Which ends of an answer are the model's, and which are the engine's. Pure.

The model ends an answer by a token, a limit, a tool call or a loop. Every other end that an engine reports is the
engine's own: it failed, or it aborted the request (vLLM does so to all its requests at SIGTERM, `/pause?mode=abort`,
`/sleep` and `/abort_requests`) although the client is still there. What an API calls these ends is in `_judge`.

vLLM 0.32 hides an abort in two places, where it cannot be told from the model's end: `/v1/responses` of models that are
not gpt-oss says `completed`, and Cohere's chat says `COMPLETE`. Transcriptions in one piece name no end at all.
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
"""Finish reasons that are final. The last two are OpenAI's; vLLM does not give them."""
_LIMITS: Final = frozenset((None, "max_output_tokens", "content_filter"))
"""Reasons for which a response may be incomplete."""
_OF_THE_INSTANCE: Final = frozenset((502, 503, 504))
"""Statuses that speak of the server, whatever the request was."""


class End(Enum):
    """How an engine itself ended a request."""

    ERROR = auto()
    ABORT = auto()
    UNAVAILABLE = auto()
    """It said that it could not serve, which speaks of the engine alone."""
    REFUSED = auto()
    """An error that is the request's own, as every other engine would report it."""

    @property
    def what(self) -> str:
        return "aborted the request" if self is End.ABORT else "reported an error"


class Ended(NamedTuple):
    """An engine's own end in a stream."""

    end: End
    at: int
    """Where its event begins."""


def of_status(status: int) -> End:
    """The end that a status of 500 or above stands for."""
    return End.UNAVAILABLE if status in _OF_THE_INSTANCE else End.ERROR


_FINISH: Final = re.compile(rb'"finish_reason"\s*:\s*"(?!(?:%b)")' % b"|".join(sorted(map(str.encode, MODELS_ENDS))))


def tells_finish(data: bytes) -> bool:
    """True if events may tell why a choice ended. Cheap, as most do not."""
    return data.count(b'"finish_reason":null') != data.count(b'"finish_reason"')


def _may_end_openai(data: bytes) -> bool:
    return b"error" in data or (tells_finish(data) and _FINISH.search(data) is not None)


_MAY_END: Final[Mapping[Style, Callable[[bytes], bool]]] = {
    Style.OPENAI: _may_end_openai,
    Style.RESPONSES: lambda data: b"error" in data or b'"response"' in data,
    Style.ANTHROPIC: lambda data: b"error" in data or b"message_delta" in data,
    Style.COHERE: lambda data: b"error" in data or b"message-end" in data,
}
"""True if events are worth reading: nearly none of a stream are."""


def in_events(data: bytes, style: Style) -> Ended | None:
    """The first event by which the engine itself ends the stream. `data`: whole events."""
    if not _MAY_END[style](data):
        return None
    at = 0
    for event in split(data):
        fields = fields_of(event)
        try:
            document = msgspec.json.decode(fields.data)
        except (msgspec.DecodeError, RecursionError):
            document = None
        end = _judge(document) if isinstance(document, dict) else None
        if end is None and fields.name == b"error":
            end = End.ERROR
        if end is not None:
            return Ended(end, at)
        at += len(event)
    return None


def of_answer(body: bytes | bytearray, style: Style) -> End | None:
    """The engine's own end of an answer in one piece, of status 200."""
    if style is Style.OPENAI and not _FINISH.search(body):
        return None
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _judge(document) if isinstance(document, dict) else None


def _judge(document: dict[str, Any]) -> End | None:
    kind = document.get("type")
    error = document.get("error")
    if error or kind in ("error", "response.failed") or document.get("object") == "error":
        return _of_error(error if isinstance(error, dict) else document)
    if kind == "message":  # Anthropic's, in one piece
        return None if document.get("stop_reason") else End.ABORT
    delta = document.get("delta")
    if kind == "message_delta" and isinstance(delta, dict) and "stop_reason" in delta:
        return None if delta["stop_reason"] else End.ABORT
    if kind == "message-end" and isinstance(delta, dict):
        return End.ERROR if delta.get("finish_reason") == "ERROR" else None
    response = document.get("response") if document.get("object") != "response" else document
    if isinstance(response, dict):
        return _of_response(response)
    choices = document.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if isinstance(reason, str) and reason not in MODELS_ENDS:
            return End.ERROR if reason == "error" else End.ABORT
    return End.ERROR if document.get("finish_reason") == "ERROR" else None


def _of_error(error: dict[str, Any]) -> End:
    code = error.get("code")
    if not isinstance(code, int):
        return End.ERROR
    return End.REFUSED if 400 <= code < 500 else of_status(code)


def _of_response(response: dict[str, Any]) -> End | None:
    status = response.get("status")
    if status == "failed":
        return End.ERROR
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return End.ABORT if status == "cancelled" or (status == "incomplete" and reason not in _LIMITS) else None
