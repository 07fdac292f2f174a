# SPDX-License-Identifier: Apache-2.0
"""Fields of a multipart form, which is passed on unchanged. Pure.

As in the engines' parser, the last field of a name counts. Malformed forms are left for the engine to refuse.
"""

from __future__ import annotations

from collections.abc import Collection
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Final

from llumsched.gateway.errors import InvalidRequest

_MOST_PARTS: Final = 256
_MOST_HEAD_BYTES: Final = 4096
_MOST_VALUE_BYTES: Final = 64 << 10
_MOST_BOUNDARY_BYTES: Final = 70


def fields_of(content: bytes | bytearray, content_type: str, names: Collection[str]) -> dict[str, str]:
    """The fields with these names. Raises InvalidRequest for a form that may hide one, because a head, a value, the
    boundary or the number of parts exceeds the limits here."""
    boundary = _boundary(content_type)
    if not boundary:
        return {}
    delimiter = b"\r\n--" + boundary
    start = 0 if content.startswith(delimiter[2:]) else content.find(delimiter) + 2
    if start == 1:
        return {}
    start += len(delimiter) - 2
    found: dict[str, str] = {}
    for _ in range(_MOST_PARTS):
        end = content.find(delimiter, start)
        if end < 0:
            return found
        head_end = content.find(b"\r\n\r\n", start, end)
        if head_end > start + _MOST_HEAD_BYTES:
            raise InvalidRequest(f"The head of a part of the form has more than {_MOST_HEAD_BYTES} bytes.")
        if head_end > 0 and (name := _name_in(content[start:head_end])) in names:
            if end - head_end - 4 > _MOST_VALUE_BYTES:
                raise InvalidRequest(f"`{name}` has more than {_MOST_VALUE_BYTES} bytes.")
            found[name] = content[head_end + 4 : end].decode(errors="replace")
        start = end + len(delimiter)
    raise InvalidRequest(f"The form has more than {_MOST_PARTS} parts.")


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["Content-Type"] = content_type
    if header.get_content_type() != "multipart/form-data":
        return b""
    boundary = header.get_boundary("").encode(errors="replace")
    if len(boundary) > _MOST_BOUNDARY_BYTES:
        raise InvalidRequest(f"The form's boundary has more than {_MOST_BOUNDARY_BYTES} bytes.")
    return boundary


def _name_in(head: bytes | bytearray) -> str:
    """The field's name in the head of a part; "" if there is none."""
    for line in head.split(b"\r\n"):
        name, _, value = line.decode(errors="replace").partition(":")
        if name.strip().lower() == "content-disposition":
            header = Message()
            header["Content-Disposition"] = value.strip()
            return collapse_rfc2231_value(header.get_param("name", "", header="Content-Disposition"))
    return ""
