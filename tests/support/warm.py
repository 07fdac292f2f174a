# SPDX-License-Identifier: Apache-2.0
"""Servers that start without importing vLLM three times.

Of the 22 s of a core that a start of `vllm serve` takes, 17 are imports: in the API server, in the engine and in its
worker, each a new Python. Tests start some fifty servers. `Parents` keeps one process for each environment that has
imported what all three need and does nothing else; a server is forked from it, and so are the server's own children,
in the place of each new Python that `multiprocessing` would start (`forkable`). What a process has after its imports it
has by inheritance; from there on everything is as in a cold start: the command's own entry point and arguments, its
environment, a session below a reaper of its own, children that get all they know in a pickle.

A server whose environment must be there before Python is, or that is to be measured, starts cold.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import harness
from tests.support.forkable import MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
LATE = frozenset({
    "LLUMNIX_FAULTS", "PYTEST_CURRENT_TEST", "TMPDIR", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_SIM_MULTI_NUMA", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_RPC_BASE_PATH", "VLLM_SERVER_DEV_MODE",
})  # fmt: skip
"""Variables that nothing reads while it is imported (the last one, for how errors are logged alone): servers that
differ in no others have one parent."""
READY_SECONDS = 120.0
VLLM = harness.LAUNCHER[0]


class Forked:
    """A server's reaper, which is no child of this process: what `harness.Process` asks of one."""

    def __init__(self, pid: int, pidfd: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = io.FileIO(stdin, "wb")
        self.stdout = io.FileIO(stdout, "rb")
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Not None when it has ended; how, only its report tells."""
        if self._pidfd >= 0 and select.select([self._pidfd], [], [], 0)[0]:
            self._forget()
        return None if self._pidfd >= 0 else 0

    def wait(self) -> int:
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [])
            self._forget()
        return 0

    def _forget(self) -> None:
        os.close(self._pidfd)
        self._pidfd = -1


class Parents:
    """The parents of this run's servers, by what their environments have in common. Started when first asked for."""

    def __init__(self) -> None:
        self._parents: dict[tuple[tuple[str, str], ...], _Parent] = {}

    def start(
        self, command: Sequence[str], log: Path, scratch: Path, environment: Mapping[str, str], core: int | None
    ) -> harness.Process:
        """As `harness.execute`, and by it what is not a script of vLLM's."""
        if command[0] != VLLM:
            return harness.execute(command, log, scratch, environment, core)
        key = tuple(sorted(item for item in environment.items() if item[0] not in LATE))
        parent = self._parents.get(key)
        if parent is None:
            parent = self._parents[key] = _Parent(dict(key))
        return parent.start(command, log, scratch, environment, core)

    def close(self) -> None:
        while self._parents:
            self._parents.popitem()[1].close()


class _Parent:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(READY_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forkable", str(theirs.fileno())],
                env={**environment, **_preloaded(environment)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal is its owner's
            )

    def start(
        self, command: Sequence[str], log: Path, scratch: Path, environment: Mapping[str, str], core: int | None
    ) -> Forked:
        order = {
            "command": list(command),
            "scratch": str(scratch),
            "environment": {**environment, **_preloaded(environment)},
            "core": core,
        }
        (theirs_in, stdin), (stdout, theirs_out) = os.pipe(), os.pipe()
        with open(log, "wb") as log_file:
            socket.send_fds(self._channel, [json.dumps(order).encode()], [theirs_in, theirs_out, log_file.fileno()])
        os.close(theirs_in)
        os.close(theirs_out)
        answer, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        if not answer:
            raise RuntimeError(f"the parent of warm servers has ended: exit code {self._process.wait()}")
        return Forked(int(answer), fds[0], stdin, stdout)

    def close(self) -> None:
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


def _preloaded(environment: Mapping[str, str]) -> dict[str, str]:
    """The libraries that vLLM's platform for CPUs puts before all others in each new Python that it starts: here they
    have to be there from the beginning."""
    if environment.get("LD_PRELOAD"):
        return {}
    torch, vllm = (Path(importlib.util.find_spec(name).origin).parent for name in ("torch", "vllm"))
    found = [
        *vllm.glob("libs/libtcmalloc*.so*"),
        *torch.parent.glob("torch.libs/libgomp*.so*"),
        *torch.glob("lib/libgomp*.so*"),
    ]
    return {"LD_PRELOAD": ":".join(map(str, found))}
