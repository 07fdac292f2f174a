# SPDX-License-Identifier: Apache-2.0
"""Events that come in many reads: each byte is scanned once, and an event has a largest size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llumsched.gateway import sse
from llumsched.gateway.events import end_of_events
from llumsched.gateway.sse import EventCutter
from tests.llumsched.gateway.support import cluster
from tests.llumsched.gateway.test_ends import COMPLETIONS, DONE, MESSAGE, MESSAGES, STREAMED, Said, Scripts, _token


@given(st.lists(st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"data: x", b"y"])).map(b"".join)))
def test_cuts_are_those_of_all_that_has_come(reads: list[bytes]) -> None:
    cutter, rest = EventCutter(), b""
    for data in filter(None, reads):
        rest += data
        end = end_of_events(rest)
        assert cutter.feed(data) == rest[:end]
        rest = rest[end:]
        assert cutter.rest == rest


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_bytes_of_a_long_event_are_scanned_once(monkeypatch: pytest.MonkeyPatch, line_end: bytes) -> None:
    scanned = 0

    def scan(data: bytes) -> int:
        nonlocal scanned
        scanned += len(data)
        return end_of_events(data)

    monkeypatch.setattr(sse, "end_of_events", scan)
    event = b"data: " + b"x" * (1 << 20) + 2 * line_end
    cutter, size = EventCutter(), 4096
    reads = [event[start : start + size] for start in range(0, len(event), size)]
    assert b"".join(map(cutter.feed, reads)) == event
    assert scanned <= len(event) + 2 * len(reads)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_event_that_is_too_long_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(sse, "MOST_EVENT_BYTES", 1 << 20)
    first = _token("a", 1) if path == COMPLETIONS else MESSAGE[0]
    endless = [b"data: " + b"x" * (1 << 19)] * 3
    async with cluster(mock=Scripts(script=[Said([first, *endless, b"\n\n", DONE])])) as it:
        reply = await it.post(path, STREAMED | {"logprobs": 1})
    assert b"an event has more than 1 MiB" in reply.content
    assert b"xxx" not in reply.content
    assert (b"event: error\n" in reply.content) == (path == MESSAGES)
