# SPDX-License-Identifier: Apache-2.0
"""Messages nobody should send: random ones, damaged ones, and well-formed ones with the worst values."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

MAX_BYTES = 4000

texts = st.one_of(
    st.sampled_from(["", "r", "127.0.0.1:1", "unix:/x:1", "../../etc/passwd", "\x00", "%s%n", "x" * 70_000]),
    st.text(max_size=40),
)
"""Well-formed Unicode: protobuf takes no other."""

_SIGNED = {FieldDescriptor.TYPE_INT32: 32, FieldDescriptor.TYPE_SINT32: 32, FieldDescriptor.TYPE_INT64: 64}
_UNSIGNED = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Of a range, its ends more often than not."""
    return st.one_of(
        st.sampled_from([value for value in (low, -1, 0, 1, 2, high - 1, high) if low <= value <= high]),
        st.integers(low, high),
    )


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` cut off, with bytes changed, repeated, or with something behind it."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "append"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case "double":
                data += data[at:]
            case "append":
                data += draw(st.binary(max_size=64))
    return bytes(data[:MAX_BYTES])


def anything(*examples: bytes) -> st.SearchStrategy[bytes]:
    """Random bytes, or a damaged example."""
    return st.one_of(st.binary(max_size=200), st.sampled_from(examples).flatmap(damaged))


@st.composite
def filled(draw: st.DrawFn, kind: type[Message], depth: int = 0) -> Message:
    """A message of this type, each field left out or with a hostile value."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if draw(st.booleans()):
            _fill(draw, message, field, depth)
    return message


@st.composite
def worsened(draw: st.DrawFn, legal: Message) -> Message:
    """A legal message with one or two fields replaced, in it or in a message that it holds."""
    message = type(legal)()
    message.CopyFrom(legal)
    for _ in range(draw(st.integers(1, 2))):
        inner, field = draw(st.sampled_from(_fields(message)))
        inner.ClearField(field.name)
        _fill(draw, inner, field, 0)
    return message


def _fields(message: Message) -> list[tuple[Message, FieldDescriptor]]:
    found: list[tuple[Message, FieldDescriptor]] = []
    for field in message.DESCRIPTOR.fields:
        found.append((message, field))
        if field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
            found += _fields(getattr(message, field.name))
    return found


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if depth < 3 and not field.is_repeated:
            getattr(message, field.name).CopyFrom(draw(filled(field.message_type._concrete_class, depth + 1)))
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(_values(field), max_size=20)))
    else:
        setattr(message, field.name, draw(_values(field)))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if (bits := _SIGNED.get(field.type)) is not None:
        return integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if (bits := _UNSIGNED.get(field.type)) is not None:
        return integers(0, 2**bits - 1)
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return texts
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=100)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            return st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 99, 2**31 - 1])
        case _:
            return st.floats(width=32)
