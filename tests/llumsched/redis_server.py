# SPDX-License-Identifier: Apache-2.0
"""A real redis-server of a test's own, on a free port of loopback, without files."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from types import TracebackType
from typing import Self

import pytest

from llumsched.up.ports import free_port


class RedisServer:
    """`async with`; may be killed, paused and started anew at the same port in between."""

    def __init__(self, password: str = "") -> None:
        self._password = password
        self._process: asyncio.subprocess.Process | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="llumnix-redis-")
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://{f':{self._password}@' if self._password else ''}127.0.0.1:{self.port}"

    async def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is not installed (apt-get install redis-server)")
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        options += ["--dir", self._directory.name, "--daemonize", "no"]
        options += ["--requirepass", self._password] if self._password else []
        self._process = await asyncio.create_subprocess_exec(
            program, *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except ConnectionRefusedError:
                    assert self._process.returncode is None, "redis-server has ended"
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                await writer.wait_closed()
                return

    async def kill(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
        self._directory.cleanup()
