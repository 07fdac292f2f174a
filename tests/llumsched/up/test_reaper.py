# SPDX-License-Identifier: Apache-2.0
"""Nothing survives its owner, however the owner or the command ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llumsched.up import reaper

# A command that resists: it ignores SIGTERM, forks a daemon out of its session, and has children in
# its own and in another session. Every process writes its pid into the directory it is given.
STUBBORN = textwrap.dedent(
    """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def note():
        open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
    def child(*, session=False, daemon=False):
        if os.fork() == 0:
            if session or daemon:
                os.setsid()
            if daemon and os.fork() > 0:
                os._exit(0)
            note()
            time.sleep(600)
            os._exit(0)
    child()
    child(session=True)
    child(daemon=True)
    note()
    time.sleep(600)
    """
)
OWNER = textwrap.dedent(
    """
    import subprocess, sys, time
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    print(process.stdout.readline().decode(), process.pid, flush=True)
    time.sleep(600)
    """
)


def eventually(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pids: list[int]) -> list[int]:
    """Zombies do not count: they wait for the container's init."""
    table = reaper.parents()
    return [pid for pid in pids if pid in table]


@pytest.fixture
def pid_dir(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "pids"
    directory.mkdir()
    yield directory
    for name in directory.iterdir():
        try:
            os.kill(int(name.name), signal.SIGKILL)
        except ProcessLookupError:
            continue


def supervised(*command: str, scratch: Path | None = None) -> list[str]:
    extra = ["--scratch", str(scratch)] if scratch else []
    return [sys.executable, "-S", "-I", reaper.__file__, *extra, "--", *command]


def stubborn_pids(pid_dir: Path) -> list[int]:
    assert eventually(lambda: len(list(pid_dir.iterdir())) == 4)
    return [int(path.name) for path in pid_dir.iterdir()]


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_killed_owner_leaves_nothing(pid_dir: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = supervised(sys.executable, "-c", STUBBORN, str(pid_dir), scratch=scratch)
    with subprocess.Popen([sys.executable, "-c", OWNER, *command], stdout=subprocess.PIPE) as owner:
        pids = stubborn_pids(pid_dir)
        assert alive(pids) == pids
        owner.kill()
    assert eventually(lambda: not alive(pids)), alive(pids)
    assert eventually(lambda: not scratch.exists())


def test_a_stopped_command_is_killed_after_its_grace(pid_dir: Path) -> None:
    with start(supervised(sys.executable, "-c", STUBBORN, str(pid_dir))) as process:
        pids = stubborn_pids(pid_dir)
        out, _ = process.communicate(b"stop 0.2\n", timeout=60)
    assert alive(pids) == []
    assert out.decode().splitlines()[-1] == f"exit {-signal.SIGKILL}"


def test_a_frozen_command_can_be_stopped(tmp_path: Path) -> None:
    with start(supervised("sleep", "600")) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        os.kill(pid, signal.SIGSTOP)
        out, _ = process.communicate(b"stop 600\n", timeout=60)
    assert out.decode().split() == ["exit", str(-signal.SIGTERM)]


def test_left_processes_are_killed(pid_dir: Path) -> None:
    leaver = STUBBORN.rpartition("time.sleep")[0] + "os._exit(7)"
    with start(supervised(sys.executable, "-c", leaver, str(pid_dir))) as process:
        assert process.stdout is not None
        out = process.stdout.read()
    assert out.decode().splitlines()[-1] == "exit 7"
    assert alive([int(path.name) for path in pid_dir.iterdir()]) == []


def test_a_killed_reaper_takes_its_command_along() -> None:
    with start(supervised("sleep", "600")) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        process.kill()
    assert eventually(lambda: not alive([pid]))


def test_an_interrupt_of_the_terminal_does_not_reach_the_reaper() -> None:
    with start(supervised("sleep", "600")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None
        process.communicate(b"stop 60\n", timeout=120)


def test_it_sleeps_until_something_ends() -> None:
    def switches() -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]

    with start(supervised("sh", "-c", "(sleep 2 &); exec sleep 600")) as process:
        assert process.stdout is not None
        command = psutil.Process(int(process.stdout.readline().split()[1]))
        reaping = psutil.Process(process.pid)
        assert eventually(lambda: len(reaping.children()) == 2), "it adopts the orphan"
        assert eventually(lambda: reaping.children() == [command]), "and collects it"
        before = switches()
        time.sleep(0.5)
        assert switches() == before
        process.communicate(b"stop 60\n", timeout=120)
