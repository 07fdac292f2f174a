# SPDX-License-Identifier: Apache-2.0
"""The model that a multipart form names, without taking the form apart: it is passed on as the bytes that came. Pure.

The value that counts is the last of that name, as in the engines' form parser. What is no form, or names no model, is
for the engine to refuse.
"""

from __future__ import annotations

from email.message import Message
from typing import Final

_MOST_PARTS: Final = 256
_MOST_HEAD_BYTES: Final = 4096
_MOST_VALUE_BYTES: Final = 1024
_MOST_BOUNDARY_BYTES: Final = 70


def model_of(content: bytes | bytearray, content_type: str) -> str:
    """The model that a form names; "" if there is none, or it lies behind the first `_MOST_PARTS` parts."""
    boundary = _boundary(content_type)
    if not boundary:
        return ""
    delimiter = b"\r\n--" + boundary
    model = ""
    start = 0 if content.startswith(delimiter[2:]) else content.find(delimiter) + 2
    if start == 1:
        return ""
    start += len(delimiter) - 2
    for _ in range(_MOST_PARTS):
        end = content.find(delimiter, start)
        if end < 0:
            break
        model = _model_in(content, start, end) or model
        start = end + len(delimiter)
    return model


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary("") if header.get_content_type() == "multipart/form-data" else ""
    encoded = boundary.encode(errors="replace")
    return encoded if len(encoded) <= _MOST_BOUNDARY_BYTES else b""


def _model_in(content: bytes | bytearray, start: int, end: int) -> str:
    """The model, if this part of the form names it."""
    head_end = content.find(b"\r\n\r\n", start, min(end, start + _MOST_HEAD_BYTES))
    if head_end < 0 or end - head_end - 4 > _MOST_VALUE_BYTES:
        return ""
    for line in content[start:head_end].split(b"\r\n"):
        name, _, value = line.decode(errors="replace").partition(":")
        if name.strip().lower() == "content-disposition":
            header = Message()
            header["Content-Disposition"] = value.strip()
            if header.get_param("name", header="Content-Disposition") == "model":
                return content[head_end + 4 : end].decode(errors="replace")
    return ""
