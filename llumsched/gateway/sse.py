# SPDX-License-Identifier: Apache-2.0
"""Server-sent events of a completion stream, by scanning rather than parsing. Pure.

What an engine sends is handed on in whole events, as many as have come, in the bytes in which they came. Token ids,
which the gateway asked for and the client did not, become `null`: what the engine writes when nobody asked.

A scan for `"token_ids":[` cannot be misled by text: within a JSON string each quote has a backslash before it, so the
quote before the colon ends a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

_IDS = re.compile(rb'"(prompt_)?token_ids":\s*\[([0-9,\s]*)\]')
_NULL_IDS = {b"": b'"token_ids":null', b"prompt_": b'"prompt_token_ids":null'}
_MARKS = re.compile(rb'"(finish_reason|reasoning|reasoning_content)":\s*"|"(tool_calls)":\s*\[\s*[^]\s]')
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)":\s*"(?!")')
_FAILED = re.compile(rb'^data:\s*\{\s*"error":', re.MULTILINE)
_NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_NUMBERS = msgspec.json.Decoder(list[int])

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every reader of event streams leaves out."""


class Usage(NamedTuple):
    """Tokens that an answer tells; 0 if it does not."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    """Of the prompt, those that were in the engine's prefix cache."""


@dataclass(eq=False, slots=True)
class EventStream:
    """Cuts what was read into whole events and keeps what a continuation needs to know of them."""

    wants_ids: bool = False
    """Whether token ids are collected."""
    keeps_ids: bool = False
    """Whether the client gets them, too."""
    first: bytes = b""
    """The first event, but for token ids."""
    prompt_ids: bytes | None = None
    """Token ids with commas between them, as they came: they are many, and hardly ever needed."""
    token_ids: list[int] = field(default_factory=list)
    num_texts: int = 0
    """Parts of the answer, which stand for tokens as long as no ids tell them."""
    has_text: bool = False
    """Whether text of the answer has come, of whatever kind."""
    is_finished: bool = False
    """Whether a finish reason has come: of a stream of several choices, that of one of them."""
    has_usage: bool = False
    """Whether the event that tells the usage after the last choice has come."""
    usage: Usage = Usage()
    """What it tells."""
    is_done: bool = False
    """Whether the stream's end mark has come."""
    is_parsed: bool = False
    """Whether the engine makes more of the text than content: reasoning or tool calls."""
    failure: bytes = b""
    """The engine's own error, and what came after it; not among what `feed` returned."""
    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """Bytes that the client gets of it now."""
        if self._rest:
            data = self._rest + data
        end = end_of_events(data)
        if end != len(data):
            self._rest, data = data[end:], data[:end]
            if not data:
                return data
        else:
            self._rest = b""
        if b'{"error"' in data and (failed := _FAILED.search(data)):
            self.failure, data = data[failed.start() :], data[: failed.start()]
        if not self.first:
            self.first = _IDS.sub(_without_ids, data[: _end_of_first(data)])
        if not self.token_ids:
            self.num_texts += len(_TEXT.findall(data))
        self.has_text = self.has_text or _TEXT.search(data) is not None
        if mark := _MARKS.search(data):
            self._take_marks(data, mark)
        if self.is_finished:
            self.is_done = data.rstrip().endswith(b"[DONE]")
            if _NO_CHOICES.search(data):
                self.has_usage, self.usage = True, usage_of(data)
        if self.wants_ids:
            return _IDS.sub(self._take_ids, data)
        return data

    def _take_marks(self, data: bytes, mark: re.Match[bytes] | None) -> None:
        while mark:
            if mark.group(1) == b"finish_reason":
                self.is_finished = True
            else:
                self.is_parsed = True
            mark = _MARKS.search(data, mark.end())

    def _take_ids(self, match: re.Match[bytes]) -> bytes:
        prompt, ids = match.groups(b"")
        if prompt:
            if self.prompt_ids is None:
                self.prompt_ids = ids
        elif ids:
            self.token_ids += numbers(ids)
        return match.group() if self.keeps_ids else _NULL_IDS[prompt]


def _without_ids(match: re.Match[bytes]) -> bytes:
    return _NULL_IDS[match[1] or b""]


def numbers(ids: bytes) -> list[int]:
    """Numbers with commas between them, 20 ns each."""
    return _NUMBERS.decode(b"[" + ids + b"]")


def last_numbers(ids: bytes, most: int) -> list[int]:
    return numbers(b",".join(ids.rsplit(b",", most)[-most:]))


def num_numbers(ids: bytes) -> int:
    return ids.count(b",") + 1 if ids.strip() else 0


def end_of_events(data: bytes) -> int:
    """Length of the whole events at the beginning of `data`."""
    if data.endswith(b"\n\n"):
        return len(data)
    end = data.rfind(b"\n\n") + 2
    crlf = data.rfind(b"\r\n\r\n") + 4
    return max(end if end > 1 else 0, crlf if crlf > 3 else 0)


def _end_of_first(data: bytes) -> int:
    ends = [end + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (end := data.find(mark)) >= 0]
    return min(ends, default=0)


def payload(event: bytes) -> Any:
    """The JSON of one event, None for any other (a comment, the end mark)."""
    for line in event.splitlines():
        if line.startswith(b"data:"):
            try:
                return _DECODER.decode(line[5:].strip())
            except msgspec.DecodeError:
                return None
    return None


def is_clients_fault(failure: bytes) -> bool:
    """Whether an error in a stream would come from every other engine as well."""
    document = payload(failure[: failure.find(b"\n\n") + 2])
    error = document.get("error") if isinstance(document, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(code, int) and 400 <= code < 500


def event(document: object) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def rewrite(data: bytes, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> bytes:
    """Whole events, each with its JSON object changed; None drops it. What is no JSON object stays as it is."""
    changed = []
    for part in re.split(rb"(?<=\n\n)|(?<=\r\n\r\n)", data):
        document = payload(part)
        if not isinstance(document, dict):
            changed.append(part)
        elif (new := change(document)) is not None:
            changed.append(event(new))
    return b"".join(changed)


_USAGE = re.compile(rb'"(?:(prompt|input)|completion|output)_tokens":\s*([0-9]+)')
_CACHED = re.compile(rb'"(?:cached_tokens|(cache_read_input_tokens))":\s*([0-9]+)')


def usage_of(body: bytes) -> Usage:
    """What the end of an answer tells, whatever its API calls it."""
    end = body[-4096:]
    found = {bool(is_prompt): int(number) for is_prompt, number in _USAGE.findall(end)}
    num_prompt, num_cached = found.get(True, 0), 0
    if cached := _CACHED.search(end):
        num_cached = int(cached[2])
        num_prompt += num_cached if cached[1] else 0  # Anthropic's other tokens are those that were not there
    return Usage(num_prompt, found.get(False, 0), num_cached)
