# SPDX-License-Identifier: Apache-2.0
"""Inputs that come in parts, of requests that may have left the engine that the first part was sent to.

A request moves between two parts. Those that come meanwhile may meet an engine that has just let it go, and drops them:
whoever has the request says with each heartbeat how many of its parts have come, and is sent what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from llumlet.protocol.origin.owners import Owner
from llumlet.protocol.origin.streams import Input, Stream, Streams


class SendPart(msgspec.Struct, frozen=True):
    """A part of the stream's input for the engine on the connection with this identity, at once or not at all.
    `part`: as it was added; None: there is no more."""

    identity: bytes
    stream: Stream
    number: int
    part: object | None


class Inputs:
    """The inputs of the streams of one API server process."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def add(self, stream: Stream, part: object) -> list[SendPart]:
        """Adds a part. Returns the messages to send, if the request has left its home engine."""
        return [*_send(stream, [_input_of(stream).add(part)])]

    def end(self, stream: Stream) -> list[SendPart]:
        """No more comes. An engine need not hear of it that has nothing left to answer."""
        number = _input_of(stream).end()
        return [*_send(stream, [number])] if stream.num_ends < number else []

    def lacking_at(self, owner: Owner, num_parts: Mapping[str, int]) -> Iterator[SendPart]:
        """`owner` has so many parts of these requests."""
        for request_id, count in num_parts.items():
            stream = self._streams.get(request_id)
            if stream is not None and stream.input is not None and stream.owner is owner:
                yield from _send(stream, stream.input.numbers_from(max(count, stream.num_ends)))


def _send(stream: Stream, numbers: list[int] | range) -> Iterator[SendPart]:
    owner, kept = stream.owner, _input_of(stream).kept
    if owner is not None and owner.identity:
        for number in numbers:
            yield SendPart(owner.identity, stream, number, kept.get(number))


def _input_of(stream: Stream) -> Input:
    assert stream.input is not None
    return stream.input
