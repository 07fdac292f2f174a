# SPDX-License-Identifier: Apache-2.0
"""A component of the cluster as a process under a reaper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from llumsched.console import output
from llumsched.up import reaper

READY_POLL_S = 0.1
READY_CALL_S = 5.0
KILLED = -9
_MAX_LINE_BYTES = 16_384
_ERROR: Final = re.compile(r"\b\w*(Error|Exception): \S.*|\berror: \S.*")
_NO_CAUSE: Final = "root cause above"
"""A line of vLLM's API server that only refers to the engine's error, which is shown instead."""


class ComponentDied(RuntimeError):
    """Raised if a component ended, or was not ready in time, while it was awaited."""


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """The command of a component and its readiness check. `environment` is added to this process's, without
    LLUMNIX_*."""

    name: str
    command: tuple[str, ...]
    ready_url: str
    """URL that answers 200 once the component can work."""
    ready_timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    warm_up: tuple[str, Mapping[str, object]] | None = None
    """URL and JSON of a request to send when it answers; the component is ready after that."""
    cores: tuple[int, ...] = ()
    """CPU cores to use; empty: all of this process."""


class Component:
    """A component's process, on one event loop. `line` is called with each line of its output."""

    def __init__(self, spec: ComponentSpec, line: Callable[[str], None]) -> None:
        self.spec = spec
        self._line = line
        self._last_error = ""
        self._process: asyncio.subprocess.Process | None = None
        self._grace_s: float | None = None
        """The grace period of a stop that was requested before the process existed."""
        self._pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._life: asyncio.Task[int] | None = None

    @property
    def running(self) -> bool:
        return self._life is not None and not self._ended.done()

    async def start(self) -> int:
        """Starts the component and returns its pid. Raises ComponentDied if it could not be started."""
        # The life is a task of its own: whoever waits here may be cancelled, and the process still has its keeper.
        self._life = asyncio.create_task(self._live(), name=self.spec.name)
        self._life.add_done_callback(self._end)
        pid = await asyncio.shield(self._pid)
        if pid == 0:
            await self.wait_ended()
            raise ComponentDied(f"{self.spec.name}: {self.spec.command[0]} could not be started")
        return pid

    def end_in_words(self, code: int) -> str:
        """The end in words, with the last error that it wrote. `code` is from `wait_ended`."""
        cause = f": {self._last_error}" if self._last_error and code else ""
        return f"{self.spec.name} ended {describe(code)}{cause}"

    async def wait_ended(self) -> int:
        """The exit code, negative for a signal, once no process of the component is left."""
        return await asyncio.shield(self._ended)

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        """Waits until it is ready. Raises ComponentDied after `ready_timeout_s`; `wait_ended` reports its end."""
        try:
            async with asyncio.timeout(self.spec.ready_timeout_s):
                while True:
                    if await self._answers(session):
                        break
                    await asyncio.sleep(READY_POLL_S)
                await self._warm_up(session)
        except TimeoutError:
            message = f"{self.spec.name} was not ready after {self.spec.ready_timeout_s:.0f} s"
            raise ComponentDied(message) from None

    def ask_to_stop(self, grace_s: float) -> None:
        """Sends SIGTERM now, and SIGKILL to all its processes after `grace_s`. With repeated calls the earliest end
        counts."""
        self._grace_s = grace_s
        if self._process is not None and self._process.stdin is not None and self.running:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(f"stop {grace_s}\n".encode())

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=READY_CALL_S)
            async with session.get(self.spec.ready_url, timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _end(self, life: asyncio.Task[int]) -> None:
        if not self._pid.done():
            self._pid.set_result(0)
        if life.cancelled():
            self._ended.cancel()
        elif (error := life.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(life.result())

    async def _warm_up(self, session: aiohttp.ClientSession) -> None:
        if self.spec.warm_up is None:
            return
        url, document = self.spec.warm_up
        # It may be refused (a model that does not generate): then it has not worked, and nothing is wrong.
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(url, json=document, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                await answer.read()

    async def _live(self) -> int:
        # Unix socket paths hold 107 characters: the scratch directory must have a short name.
        scratch = tempfile.mkdtemp(prefix="llx-", dir="/tmp")
        try:
            process = self._process = await self._spawn(scratch)
            if self._grace_s is not None:
                self.ask_to_stop(self._grace_s)
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdin is not None
            code, _ = await asyncio.gather(self._read_report(process.stdout), self._forward(process.stderr))
            await process.wait()
            process.stdin.close()
            return code
        finally:
            # The reaper does the same; one that was killed could not.
            shutil.rmtree(scratch, ignore_errors=True)

    async def _spawn(self, scratch: str) -> asyncio.subprocess.Process:
        options = ["--scratch", scratch]
        if self.spec.cores:
            options += ["--cores", ",".join(map(str, self.spec.cores))]
        # Credentials and addresses of another cluster are none of this one's business, and engines refuse what they do
        # not know.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LLUMNIX_")}
        ours = {"PYTHONUNBUFFERED": "1", "TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-I", reaper.__file__, *options, "--", *self.spec.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**kept, **ours, **self.spec.environment},
            # A Ctrl-C in the terminal reaches this process only, which then stops its components in order.
            start_new_session=True,
        )

    async def _read_report(self, stream: asyncio.StreamReader) -> int:
        # A reaper that was killed says nothing more, and the kernel kills its component.
        code = KILLED
        while line := await stream.readline():
            word, _, number = line.decode().partition(" ")
            if word == "pid":
                self._pid.set_result(int(number))
            elif word == "exit":
                code = int(number)
        return code

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._show(line)
        if rest:
            self._show(rest)

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        if (error := _ERROR.search(text)) is not None and _NO_CAUSE not in text:
            self._last_error = output.clean(error[0].strip())
        self._line(text)


def describe(code: int) -> str:
    """`by signal 9`, `with status 1`"""
    return f"by signal {-code}" if code < 0 else f"with status {code}"
