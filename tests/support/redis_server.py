# SPDX-License-Identifier: Apache-2.0
"""Real servers of a test's own, on free ports of loopback, without files: a redis-server, and one that three Sentinels
look after."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from redis import asyncio as redis
from redis.exceptions import RedisError

from llumlet.process.credentials import CredentialFiles
from llumsched.up.ports import free_port

SERVICE = "llumnix-test"


class _Process(ABC):
    """`async with`; may be killed, paused and started anew at the same port in between."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="llumnix-redis-")
        self.port = free_port()

    @abstractmethod
    def _arguments(self) -> list[str]: ...

    async def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is not installed (apt-get install redis-server)")
        self._process = await asyncio.create_subprocess_exec(
            program, *self._arguments(), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
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


class RedisServer(_Process):
    """With `tls` over TLS only, for clients with a certificate of the same authority. `options`: further ones of
    redis-server."""

    def __init__(self, password: str = "", options: Sequence[str] = (), tls: CredentialFiles | None = None) -> None:
        super().__init__()
        self.password = password
        self._options = options
        self._tls = tls

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}"

    async def change_password(self, password: str) -> None:
        """Whoever is connected stays so."""
        await self.tell("CONFIG", "SET", "requirepass", password)
        self.password = password

    async def tell(self, *command: str) -> Any:
        """The answer to a command of an administrator."""
        return await _ask(self.port, *command, password=self.password, tls=self._tls)

    def _arguments(self) -> list[str]:
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self._directory.name]
        options += ["--daemonize", "no", "--repl-diskless-sync", "no", *self._options]
        if self.password:
            options += ["--requirepass", self.password, "--masterauth", self.password]
        if self._tls is None:
            return [*options, "--port", str(self.port)]
        options += ["--port", "0", "--tls-port", str(self.port), "--tls-replication", "yes"]
        return options + [part for option, path in _tls_options(self._tls) for part in (f"--{option}", path)]


class SentinelServer(_Process):
    """Of the server at `master_port`, which it takes for lost after half a second."""

    def __init__(
        self, master_port: int, master_password: str, password: str, tls: CredentialFiles | None = None
    ) -> None:
        super().__init__()
        self._tls = tls
        self._master = f"127.0.0.1 {master_port}"
        self._master_password = master_password
        self._password = password

    async def tell(self, *command: str) -> Any:
        return await _ask(self.port, *command, password=self._password, tls=self._tls)

    def _arguments(self) -> list[str]:
        port = [f"port {self.port}"]
        if self._tls is not None:
            port = ["port 0", f"tls-port {self.port}", "tls-replication yes", *map(" ".join, _tls_options(self._tls))]
        lines = [
            *port,
            "bind 127.0.0.1",
            f"dir {self._directory.name}",
            f"sentinel monitor {SERVICE} {self._master} 2",
            f"sentinel down-after-milliseconds {SERVICE} 500",
            f"sentinel failover-timeout {SERVICE} 2000",
            f"sentinel auth-pass {SERVICE} {self._master_password}",
        ]
        lines += [f"requirepass {self._password}"]
        file = Path(self._directory.name, "sentinel.conf")
        file.write_text("\n".join(lines) + "\n")
        return [str(file), "--sentinel"]


class SentinelGroup:
    """A master, a replica and three Sentinels that know each other, with passwords. `async with`."""

    def __init__(self, tls: CredentialFiles | None = None) -> None:
        self._tls = tls
        self._of_sentinels = "watchword"
        self.servers = [RedisServer("secret", tls=tls) for _ in range(2)]
        port = self.servers[0].port
        self.sentinels = [SentinelServer(port, "secret", self._of_sentinels, tls) for _ in range(3)]
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis{'s' if self._tls else ''}+sentinel://:secret@{places}/{SERVICE}?sentinel_password={self._of_sentinels}"

    async def master(self) -> RedisServer:
        """That of the last Sentinel."""
        _, port = await self.sentinels[-1].tell("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    async def cut_off_the_replica(self) -> None:
        """What the master is told from now on, nobody else will know."""
        master, replica = self.servers
        await replica.tell("CONFIG", "SET", "masterauth", "wrong")
        await master.tell("CLIENT", "KILL", "TYPE", "replica")

    async def lose_the_master(self) -> float:
        """Kill it. Returns the seconds until the Sentinels have the other one in its place."""
        began_s = time.monotonic()
        await self.servers[0].kill()
        await eventually(self._promoted)
        return time.monotonic() - began_s

    async def _promoted(self) -> bool:
        role, *_ = await self.servers[1].tell("ROLE")
        return role == b"master" and await self.master() is self.servers[1]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            master, replica = self.servers
            for process in (master, replica):
                await stack.enter_async_context(process)
            await replica.tell("REPLICAOF", "127.0.0.1", str(master.port))
            await eventually(lambda: self.follows(1))
            for sentinel in self.sentinels:
                await stack.enter_async_context(sentinel)
                # How often they tell each other of themselves, and ask who the replicas are.
                await sentinel.tell("SENTINEL", "DEBUG", "PUBLISH-PERIOD", "100", "INFO-PERIOD", "100")
            await eventually(self._complete)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def follows(self, number: int) -> bool:
        """Whether that one of the servers is told of what is written to the other one."""
        return b"state=online" in await self.servers[1 - number].tell("INFO", "replication")

    async def _complete(self) -> bool:
        for sentinel in self.sentinels:
            told = await sentinel.tell("SENTINEL", "MASTER", SERVICE)
            known = {bytes(name): int(number) for name, number in _pairs(told) if bytes(name).startswith(b"num-")}
            if known != {b"num-slaves": 1, b"num-other-sentinels": len(self.sentinels) - 1}:
                return False
        return True


def _tls_options(files: CredentialFiles) -> list[tuple[str, str]]:
    names = {"tls_cert": "tls-cert-file", "tls_key": "tls-key-file", "tls_ca": "tls-ca-cert-file"}
    return [(option, getattr(files, name)) for name, option in names.items()]


async def _ask(port: int, *command: str, password: str, tls: CredentialFiles | None) -> Any:
    files = {}
    if tls is not None:
        files = {"ssl": True, "ssl_certfile": tls.tls_cert, "ssl_keyfile": tls.tls_key, "ssl_ca_certs": tls.tls_ca}
    client = redis.Redis(
        host="127.0.0.1", port=port, password=password or None, retry=None, socket_timeout=5, protocol=2, **files
    )
    try:
        client.response_callbacks.clear()
        return await client.execute_command(*command)
    finally:
        await client.aclose()


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    """Wait for `condition`, and for the server that it asks."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                if await condition():
                    return
            except (RedisError, OSError):
                pass
            await asyncio.sleep(0.02)
