# SPDX-License-Identifier: Apache-2.0
"""The components of `llumnix up` start, stop and die in the order and with the words that are promised."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llumsched.console.exit_codes import ExitCode
from llumsched.up import reaper
from llumsched.up.ports import free_ports

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120.0


class Up:
    """A supervisor of fakes, its output in a file."""

    def __init__(self, directory: Path, *options: str, num_engines: int = 2) -> None:
        self.journal = directory / "journal"
        self.journal.touch()
        self._out = directory / "out"
        self.ports = free_ports(2 + num_engines)
        command = ["-m", "tests.llumsched.up.fakes", "up", str(self.journal), ",".join(map(str, self.ports)), *options]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        self._seen: set[int] = set()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def notes(self) -> list[str]:
        """What happened, pids left out."""
        return [" ".join(line.split()[:2]) for line in self.journal.read_text().splitlines()]

    def pids(self, name: str) -> list[int]:
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return next([int(pid) for pid in words[2:]] for words in lines if words[:2] == [name, "start"])

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.out
            self._seen.update(reaper.descendants(self.process.pid))
            time.sleep(0.02)

    def ready(self) -> None:
        self.until(lambda: "all of it is ready" in self.out)

    def ended(self) -> int:
        """The exit code; asserts that nothing of it is left."""
        self._seen.update(reaper.descendants(self.process.pid))
        code = self.process.wait(DEADLINE_S)
        self.until(lambda: not self._seen & set(reaper.parents()))
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def run(*options: str, num_engines: int = 2) -> Up:
        started.append(Up(tmp_path, *options, num_engines=num_engines))
        return started[-1]

    yield run
    for up in started:
        up.process.kill()
        up.process.wait()


def test_it_starts_in_order_says_so_and_shows_the_lines_of_all(start: Callable[..., Up]) -> None:
    up = start()
    up.ready()
    assert up.notes[0] == "scheduler start"
    assert sorted(up.notes[1:]) == ["engine-0 start", "engine-1 start", "gateway start"]
    for name in ("scheduler", "gateway", "engine-0", "engine-1"):
        assert f"{name:<9} | {name} has something to say" in up.out
        assert f"llumnix up: {name} is ready after" in up.out
    up.process.send_signal(signal.SIGINT)
    assert up.ended() == ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_gateway_then_the_engines_then_the_scheduler(
    start: Callable[..., Up], number: signal.Signals
) -> None:
    up = start("gateway:--drain 0.3", "engine-1:--drain 0.3")
    up.ready()
    begun = len(up.notes)
    up.process.send_signal(number)
    assert up.ended() == ExitCode.OK
    notes = up.notes[begun:]
    assert notes[:2] == ["gateway term", "gateway end"]
    assert sorted(notes[2:6]) == ["engine-0 end", "engine-0 term", "engine-1 end", "engine-1 term"]
    assert notes[6:] == ["scheduler term", "scheduler end"]


def test_a_second_signal_cuts_what_still_drains(start: Callable[..., Up]) -> None:
    up = start("gateway:--drain 600", "engine-0:--ignore-term")
    up.ready()
    up.process.send_signal(signal.SIGINT)
    up.until(lambda: "gateway term" in up.notes)
    up.process.send_signal(signal.SIGINT)
    # The drain of ten minutes is not waited for, and the engine that heeds no signal has its second.
    assert up.ended() == ExitCode.OK


@pytest.mark.parametrize("name", ["scheduler", "gateway"])
def test_the_death_of_scheduler_or_gateway_stops_everything(start: Callable[..., Up], name: str) -> None:
    up = start()
    up.ready()
    subprocess.run(["kill", "-9", str(up.pids(name)[0])], check=True)
    assert up.ended() == ExitCode.COMPONENT_DIED
    assert f"{name} ended by signal 9; everything is stopped" in up.out
    assert {"engine-0 end", "engine-1 end"} <= set(up.notes)


def test_a_dead_engine_is_reported_and_the_rest_goes_on_until_the_last(start: Callable[..., Up]) -> None:
    up = start()
    up.ready()
    subprocess.run(["kill", "-9", str(up.pids("engine-0")[0])], check=True)
    up.until(lambda: "engine-0 ended by signal 9; it is not restarted, 1 of 2 engines go on" in up.out)
    assert up.process.poll() is None
    assert "gateway term" not in up.notes
    subprocess.run(["kill", "-9", str(up.pids("engine-1")[0])], check=True)
    assert up.ended() == ExitCode.COMPONENT_DIED
    assert "no engine is left (engine-1 ended by signal 9); everything is stopped" in up.out


def test_an_engine_that_dies_while_it_starts_stops_everything(start: Callable[..., Up]) -> None:
    up = start("engine-1:--missing", "engine-0:--never-ready")
    assert up.ended() == ExitCode.COMPONENT_DIED
    assert "llumnix up: engine-1" in up.out
    assert "everything is stopped" in up.out
    assert "all of it is ready" not in up.out


def test_last_line_repeats_why_an_engine_ended(start: Callable[..., Up]) -> None:
    up = start("engine-1:--fail", "engine-0:--never-ready")
    assert up.ended() == ExitCode.COMPONENT_DIED
    last = "llumnix up: engine-1 ended with status 1: OSError: no-such/model is no model"
    assert up.out.splitlines()[-1] == last


def test_a_signal_during_the_start_stops_what_was_started(start: Callable[..., Up]) -> None:
    up = start("engine-0:--never-ready")
    up.until(lambda: len(up.notes) == 4)
    up.process.send_signal(signal.SIGTERM)
    assert up.ended() == ExitCode.OK
    assert "all of it is ready" not in up.out
    assert up.notes[-1] == "scheduler end"


def test_nothing_is_left_when_it_is_killed(start: Callable[..., Up]) -> None:
    up = start("engine-0:--ignore-term")
    up.ready()
    up.until(lambda: True)
    up.process.kill()
    assert up.ended() == -signal.SIGKILL
