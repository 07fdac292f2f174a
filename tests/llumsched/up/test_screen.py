# SPDX-License-Identifier: Apache-2.0
"""Lines come out with their prefix, and a terminal that stands still holds nobody up."""

from __future__ import annotations

import io
import os
import threading

from llumsched.up.screen import Screen


def test_lines_have_the_name_before_them_and_cannot_steer_the_terminal() -> None:
    out = io.StringIO()
    screen = Screen(out, ["gateway", "engine-0"], colour=False)
    screen.line("gateway", "\x1b[2Jhello\tyou")
    screen.line("engine-0", "10%\r50%\r100%\r")
    screen.say("all is well")
    screen.close()
    assert out.getvalue().splitlines() == ["gateway  | �[2Jhello       you", "engine-0 | 100%", "all is well"]


def test_colours_tell_components_apart() -> None:
    out = io.StringIO()
    screen = Screen(out, ["a", "b"], colour=True)
    screen.line("a", "x")
    screen.line("b", "y")
    screen.close()
    first, second = out.getvalue().splitlines()
    assert first.startswith("\x1b[")
    assert first.split("a |")[0] != second.split("b |")[0]


def test_a_reader_that_stands_still_loses_the_oldest_and_stops_nobody() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream:
        screen = Screen(stream, ["a"], colour=False, capacity=100)
        # More than a pipe holds: the thread that writes stands still, this one does not.
        for number in range(20_000):
            screen.line("a", f"line {number} " + "x" * 80)
        received: list[bytes] = []

        def drain() -> None:
            while chunk := os.read(reading, 1 << 16):
                received.append(chunk)

        reader = threading.Thread(target=drain)
        reader.start()
        screen.close()
    reader.join(10)
    os.close(reading)
    text = b"".join(received).decode()
    assert "lines were left out" in text
    assert text.splitlines()[-1].startswith("a | line 19999 ")
