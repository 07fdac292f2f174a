# SPDX-License-Identifier: Apache-2.0
"""Server-sent events of a completion stream, scanned rather than parsed. Pure.

Whole events are handed on in their original bytes. Token ids that the gateway asked for and the client did not become
`null`, which is what engines write then.

Text cannot imitate `"token_ids":[`: within a JSON string each quote has a backslash before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from llumsched.gateway import ends
from llumsched.gateway.errors import StreamLost
from llumsched.gateway.events import end_of_events, has_event, payload, split
from llumsched.gateway.paths import Style

_IDS = re.compile(rb'"(prompt_)?token_ids"\s*:\s*\[([0-9,\s]*)\]')
_NULL_IDS = {b"": b'"token_ids":null', b"prompt_": b'"prompt_token_ids":null'}
_MARKS = re.compile(rb'"(finish_reason|reasoning|reasoning_content)"\s*:\s*"|"(tool_calls)"\s*:\s*\[\s*[^]\s]')
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)"\s*:\s*"(?!")')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_NUMBERS = msgspec.json.Decoder(list[int])

MOST_EVENT_BYTES: Final = 64 << 20
"""Longest event of an engine. Log probabilities of an echoed prompt are tens of megabytes."""
_LINE_END_BYTES: Final = 2
"""Longest line end: so many bytes of an unfinished event may be the first half of its end."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of event streams skip."""


class Usage(NamedTuple):
    """Tokens that an answer tells; 0 if it does not."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    """Prompt tokens in the engine's prefix cache."""


class EventCutter:
    """Cuts a stream into whole events. It scans each byte once, in however many reads an event comes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._tail = b""

    @property
    def rest(self) -> bytes:
        """The beginning of the event that is not whole yet."""
        return b"".join(self._parts)

    def feed(self, data: bytes) -> bytes:
        """The events that are whole now. Raises StreamLost if one has more than `MOST_EVENT_BYTES`."""
        end = end_of_events(self._tail + data if self._tail else data) - len(self._tail)
        if end <= 0:
            self._keep(data, self._tail)
            return b""
        whole = data if end == len(data) else data[:end]
        if self._parts:
            whole = b"".join((*self._parts, whole))
            self._parts, self._num_bytes, self._tail = [], 0, b""
        if end < len(data):
            self._keep(data[end:])
        return whole

    def _keep(self, data: bytes, before: bytes = b"") -> None:
        self._parts.append(data)
        self._num_bytes += len(data)
        self._tail = (before + data[-_LINE_END_BYTES:])[-_LINE_END_BYTES:]
        if self._num_bytes > MOST_EVENT_BYTES:
            raise StreamLost(f"an event has more than {MOST_EVENT_BYTES >> 20} MiB")


@dataclass(eq=False, slots=True)
class EventStream:
    """Cuts bytes into whole events and keeps what a continuation needs."""

    wants_ids: bool = False
    """True if token ids are collected."""
    keeps_ids: bool = False
    """True if the client gets them too."""
    first: bytes = b""
    """The first event, without token ids."""
    prompt_ids: bytes | None = None
    """Token ids as they came, separated by commas: there are many, and they are rarely needed."""
    token_ids: list[int] = field(default_factory=list)
    num_texts: int = 0
    """Parts of the answer, which count as tokens while no ids are known."""
    has_text: bool = False
    """True if text of any kind has come."""
    is_finished: bool = False
    """True if a finish reason of any choice has come."""
    has_usage: bool = False
    """True if the usage after the last choice has come."""
    usage: Usage = Usage()
    """The usage that the stream told."""
    is_done: bool = False
    """True if the stream's end mark has come."""
    is_parsed: bool = False
    """True if the engine parses reasoning or tool calls from the text."""
    has_event: bool = False
    """True if an event, and not only comments, has come."""
    end: ends.End | None = None
    """The engine's own end of the stream."""
    failure: bytes = b""
    """The event of that end and all later bytes, which `feed` did not return."""
    _cutter: EventCutter = field(default_factory=EventCutter)

    def feed(self, data: bytes) -> bytes:
        """Bytes that the client gets of it now. Raises StreamLost for an event that is too long."""
        data = self._cutter.feed(data)
        if not data:
            return data
        is_told = ends.tells_finish(data)
        if (is_told or b"error" in data) and (ended := ends.in_events(data, Style.OPENAI)):
            self.end, self.failure, data = ended.end, data[ended.at :], data[: ended.at]
        if not self.has_event:
            self._take_first(data)
        if not self.token_ids:
            self.num_texts += len(_TEXT.findall(data))
        self.has_text = self.has_text or _TEXT.search(data) is not None
        if is_told or (not self.is_parsed and (b'"reasoning' in data or b'"tool_calls"' in data)):
            self._take_marks(data)
        if self.is_finished:
            self.is_done = data.rstrip().endswith(b"[DONE]")
            if _NO_CHOICES.search(data):
                self.has_usage, self.usage = True, usage_of(data)
        if self.wants_ids:
            return _IDS.sub(self._take_ids, data)
        return data

    def _take_first(self, data: bytes) -> None:
        for part in split(data):
            if has_event(part):
                self.has_event, self.first = True, _IDS.sub(_without_ids, part)
                return

    def _take_marks(self, data: bytes) -> None:
        for mark in _MARKS.finditer(data):
            if mark.group(1) == b"finish_reason":
                self.is_finished = True
            else:
                self.is_parsed = True

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
    """Reads numbers separated by commas, 20 ns each."""
    return _NUMBERS.decode(b"[" + ids + b"]")


def last_numbers(ids: bytes, most: int) -> list[int]:
    return numbers(b",".join(ids.rsplit(b",", most)[-most:]))


def num_numbers(ids: bytes) -> int:
    return ids.count(b",") + 1 if ids.strip() else 0


def event(document: object) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def rewrite(data: bytes, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> bytes:
    """Rewrites the JSON object of each whole event; None drops the event. Other events stay unchanged."""
    changed = []
    for part in split(data):
        document = payload(part)
        if not isinstance(document, dict):
            changed.append(part)
        elif (new := change(document)) is not None:
            changed.append(event(new))
    return b"".join(changed)


_USAGE = re.compile(rb'"(?:(prompt|input)|completion|output)_tokens"\s*:\s*([0-9]+)')
_CACHED = re.compile(rb'"(?:cached_tokens|(cache_read_input_tokens))"\s*:\s*([0-9]+)')


def usage_of(body: bytes) -> Usage:
    """Reads the usage at the end of an answer of any API."""
    end = body[-4096:]
    found = {bool(is_prompt): int(number) for is_prompt, number in _USAGE.findall(end)}
    num_prompt, num_cached = found.get(True, 0), 0
    if cached := _CACHED.search(end):
        num_cached = int(cached[2])
        num_prompt += num_cached if cached[1] else 0  # Anthropic's other tokens are those that were not there
    return Usage(num_prompt, found.get(False, 0), num_cached)
