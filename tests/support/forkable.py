# SPDX-License-Identifier: Apache-2.0
"""The process that has imported vLLM and is forked for each server; a program.

    python -m tests.support.forkable FD

Each message on the socket FD is an order for a server; the answer is the pid of its reaper and a descriptor of it. The
reaper is a fork that keeps `llumsched/up/reaper.py`'s contract, the server a fork of the reaper.

A server has children, each a new Python that `multiprocessing` starts (its method `spawn`) and hands all it needs in a
pipe. Only how such a Python comes to be is replaced (`multiprocessing.util.spawnv_passfds`): before a process begins
its work it forks a *seed*, which waits; where it would execute Python it asks the seed for a fork instead. The fork is
made by a process that ends at once, so that the kernel gives it to the nearest ancestor that takes orphans: for the
length of the request, the process that asked. The tree of processes is that of a cold start, plus the seeds.

Only the main thread runs in a process that is forked here, and nothing has been computed in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any, NoReturn

import numpy
import setproctitle

from llumsched.up import reaper

MESSAGE_BYTES = 1 << 17
IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.preload",
    "vllm.entrypoints.cli.snapshot",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "grpc.aio",
)
HIGH = 500
"""Descriptors of our own from here on: below, a child gets some under the numbers that its parent names."""
MAX_FDS = 64


class Become(BaseException):
    """Unwinds a forked process to the bottom of its stack, where it takes on its role and ends as a Python does."""

    def __init__(self, role: Callable[[], object]) -> None:
        self.role = role


class Child:
    """A forked process in the place of a `subprocess.Popen`, as far as the reaper needs one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, sig: int) -> None:
        if self._code is None:
            os.kill(self.pid, sig)


def serve(channel: socket.socket) -> None:
    """Until the owner closes its end. In forks: raises Become."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        _bury_the_dead()
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            channel.close()
            _supervise(json.loads(message), fds)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(channel, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _bury_the_dead() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _supervise(order: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """This fork is a server's reaper."""
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    if order["core"] is not None:
        os.sched_setaffinity(0, {order["core"]})

    def start(command: list[str]) -> Child:
        pid = os.fork()
        if pid == 0:
            _become_server(command, order)
        return Child(pid)

    code = None
    try:
        code = reaper.supervise(order["command"], start)
    except OSError as error:
        print(f"the reaper has ended: {error!r}", file=sys.stderr)
    reaper.finish(code, order["scratch"])
    os._exit(0)


def _become_server(command: list[str], order: dict[str, Any]) -> NoReturn:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python leaves it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    reaper.die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _close_all_but(_of_imports)
    os.chdir(order["scratch"])
    _take(order["environment"])
    _plant_seed()

    def role() -> None:
        sys.argv = command[:]
        runpy.run_path(command[0], run_name="__main__")

    raise Become(role)


def _take(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # or the one of the former environment
    numpy.random.seed()


def _close_all_but(kept: set[int]) -> None:
    """Of the descriptors from 3 on."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the one that has listed them
                os.close(int(name))


_of_imports: set[int] = set()
"""Descriptors that modules have opened while they were imported."""


def _plant_seed() -> None:
    """From now on this process's children are forks of a seed of it. In those children: raises Become."""
    ours, theirs = map(_high, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        reaper.die_with_parent()
        if os.getppid() == parent:
            _grow(theirs, parent)
        os._exit(0)
    theirs.close()
    lock, execute = threading.Lock(), util.spawnv_passfds

    def spawnv_passfds(path: bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
        arguments = list(map(os.fsdecode, args))
        if not any("spawn_main" in argument for argument in arguments):
            return execute(path, args, passfds)  # the resource tracker
        order = {"args": arguments, "environment": dict(os.environ), "fds": list(passfds)}
        with lock:
            reaper.take_orphans(True)
            try:
                socket.send_fds(ours, [json.dumps(order).encode()], list(passfds))
                answer = ours.recv(MESSAGE_BYTES)
            finally:
                reaper.take_orphans(False)
        if not answer:
            raise OSError("this process's seed has ended")
        return int(answer)

    util.spawnv_passfds = spawnv_passfds


def _high(end: socket.socket) -> socket.socket:
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH))


def _grow(channel: socket.socket, parent: int) -> None:
    """The seed's life, until its process closes its end or ends. In forks: raises Become."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MAX_FDS)
        if not message:
            return
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                while os.getppid() != parent:
                    time.sleep(0.0005)
                _become_child(json.loads(message), fds)
            os.write(tell, str(pid).encode())
            os._exit(0)
        for fd in (tell, *fds):
            os.close(fd)
        os.waitpid(between, 0)
        channel.send(os.read(told, 32))
        os.close(told)


def _become_child(order: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in fds]
    _close_all_but(_of_imports | set(high))
    for source, target in zip(high, order["fds"], strict=True):
        os.dup2(source, target)
        os.close(source)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take(order["environment"])
    _plant_seed()
    args = order["args"]

    def role() -> None:
        code = args.index("-c") + 1
        sys.argv = ["-c", *args[code + 1 :]]
        exec(args[code], {"__name__": "__main__"})

    raise Become(role)


def _import() -> None:
    # Finds the place of titles by the environment that Python was started with: before anything changes that.
    setproctitle.getproctitle()
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # in another version of vLLM
            importlib.import_module(name)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"importing has started {len(tasks) - 1} threads: they would be missing in forks"
    assert "vllm_llumnix.faults" not in sys.modules, "it reads a variable that each server has for itself"
    gc.collect()
    gc.freeze()


def main(channel: socket.socket) -> Callable[[], object]:
    """What this process, or a fork of it, does at last."""
    _import()
    _of_imports.update(int(name) for name in os.listdir("/proc/self/fd"))
    _of_imports.discard(channel.fileno())
    try:
        serve(channel)
    except Become as fork:
        return fork.role
    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))()
