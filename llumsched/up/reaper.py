# SPDX-License-Identifier: Apache-2.0
"""Run one command so that nothing of it outlives its owner, whatever happens to the owner.

    python -S -I reaper.py [--scratch DIR] [--cores N,N…] -- COMMAND ARG…

The owner starts this program instead of the command and keeps the write end of its stdin open.
Contract:

- The command runs in a session of its own. This process makes itself the *subreaper* of everything
  below it (`PR_SET_CHILD_SUBREAPER`), so a descendant whose parent dies, even one that left the
  session, is still found below it.
- stdout is the report, one line each: `pid N` when the command was started, `exit CODE` (a negative
  CODE is a signal) when the command ended and every descendant is gone. The command itself writes
  to this process's stderr.
- A line `stop SECONDS` on stdin ends the command: SIGTERM, then SIGKILL to the whole tree after
  SECONDS. End of file on stdin, which is what the kernel delivers when the owner is killed, does
  the same with a grace of `ORPHAN_GRACE_S`.
- When the command ends by itself, what it left behind is killed at once.
- If this process is killed, the kernel sends SIGKILL to the command (`PR_SET_PDEATHSIG`).
- `--scratch DIR` is removed at the very end. `--cores` are the only CPU cores that the command may use.

Only the standard library is used and nothing of this project is imported: the process must start in
milliseconds and stay small, there is one per server.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Child(Protocol):
        """A started command, as `subprocess.Popen` has it."""

        pid: int

        def poll(self) -> int | None: ...
        def wait(self) -> int: ...
        def terminate(self) -> None: ...
        def send_signal(self, sig: int) -> None: ...


ORPHAN_GRACE_S = 3.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def parents() -> dict[int, int]:
    """Parent of every process that can be read in /proc; zombies are left out."""
    table: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                # The second field is the command in parentheses and may itself hold spaces and
                # parentheses.
                state, ppid = stat.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            table[int(name)] = int(ppid)
    return table


def descendants(root: int) -> list[int]:
    """Living processes below `root`, parents before children; `root` itself is not among them."""
    children: dict[int, list[int]] = {}
    for pid, ppid in parents().items():
        children.setdefault(ppid, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def kill_tree(root: int) -> None:
    """SIGKILLs everything below `root` until nothing is left, however fast it forks."""
    while below := descendants(root):
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
        time.sleep(0.005)


def reap() -> None:
    """Collects adopted descendants that have ended. The command itself is collected through its Popen object."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == _command_pid:
            return
        os.waitpid(ended.si_pid, 0)


_command_pid = 0


def die_with_parent() -> None:
    """Has a child be killed when the thread that forked it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def take_orphans(taken: bool) -> None:
    """Makes orphaned descendants children of this process, or stops doing so."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, int(taken), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")


def execute(command: list[str]) -> subprocess.Popen[bytes]:
    """Starts the command in its own session, to be killed if this process is."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
        restore_signals=True,
        preexec_fn=_restore_and_bind,
    )


def supervise(command: list[str], start: Callable[[list[str]], Child] = execute) -> int:
    """Runs `command` by `start` under the contract above; returns its exit code."""
    global _command_pid
    take_orphans(True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        # The owner decides when to stop, through stdin; a Ctrl-C in the terminal reaches the owner
        # as well.
        signal.signal(number, signal.SIG_IGN)
    wake = _woken_by_children()
    child = start(command)
    _command_pid = child.pid
    _report(f"pid {child.pid}")
    deadline: float | None = None
    buffer = b""
    watching = True
    while child.poll() is None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        ready = select.select([0, wake] if watching else [wake], [], [], left)[0]
        if wake in ready:
            os.read(wake, 4096)
            reap()
        if 0 not in ready:
            continue
        received = os.read(0, 4096)
        buffer += received
        grace: float | None = None
        if not received:
            watching, grace = False, ORPHAN_GRACE_S
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            word, _, argument = line.decode().partition(" ")
            if word == "stop":
                grace = float(argument)
        if grace is not None:
            until = time.monotonic() + grace
            deadline = until if deadline is None else min(deadline, until)
            child.terminate()
            # A stopped process acts on SIGTERM only after SIGCONT.
            child.send_signal(signal.SIGCONT)
    kill_tree(os.getpid())
    return child.wait()


def _woken_by_children() -> int:
    """A file descriptor that becomes readable when a child has ended."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake


def _restore_and_bind() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()


def _report(line: str) -> None:
    try:
        os.write(1, line.encode() + b"\n")
    except OSError:
        return  # The owner is gone; there is nobody to tell.


def finish(code: int | None, scratch: str | None) -> None:
    """Cleans up after the command has ended with `code`, or could not be started (None)."""
    kill_tree(os.getpid())
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    if code is not None:
        _report(f"exit {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a command that cannot outlive its owner.")
    parser.add_argument("--scratch", help="directory to remove at the end")
    parser.add_argument("--cores", help="CPU cores, by number, with commas between")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, {int(core) for core in arguments.cores.split(",")})
    code = None
    try:
        code = supervise(arguments.command)
    finally:
        finish(code, arguments.scratch)


if __name__ == "__main__":
    main()
