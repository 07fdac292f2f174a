# SPDX-License-Identifier: Apache-2.0
"""The grammar of server-sent events (WHATWG HTML, section 9.2). Pure.

A line ends in CR LF, LF or CR, and an empty line ends an event. An event has a field `data`; what has none is a comment
or a setting, which readers leave out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

_BOM: Final = b"\xef\xbb\xbf"
_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LF_END: Final = re.compile(rb"\n\n")
"""The same in what has no CR, as engines write it, in a hundredth of the time: some events are megabytes."""
_DATA: Final = re.compile(rb"(?:^(?:\xef\xbb\xbf)?|[\r\n])data[:\r\n]")
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class Fields(NamedTuple):
    name: bytes
    """The field `event`; empty if it has none."""
    data: bytes


def end_of_events(data: bytes) -> int:
    """Length of the whole events at the beginning of `data`."""
    if data.endswith(b"\n\n"):
        return len(data)
    if b"\r" not in data:
        return data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
    end = 0
    for match in _END.finditer(data):
        end = match.end()
    return end


def split(data: bytes) -> Iterator[bytes]:
    """Whole events, one by one, with their ends."""
    start = 0
    for match in (_END if b"\r" in data else _LF_END).finditer(data):
        yield data[start : match.end()]
        start = match.end()
    if start < len(data):
        yield data[start:]


def has_event(data: bytes) -> bool:
    """True if there is an event among what is whole: comments are none."""
    return _DATA.search(data) is not None


def fields_of(event: bytes) -> Fields:
    name, data = b"", []
    for line in event.removeprefix(_BOM).splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Fields(name, b"\n".join(data))


def payload(event: bytes) -> Any:
    """The JSON of one event, None for any other (a comment, the end mark)."""
    try:
        return _DECODER.decode(fields_of(event).data)
    except (msgspec.DecodeError, RecursionError):
        return None
