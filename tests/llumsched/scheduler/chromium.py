# SPDX-License-Identifier: Apache-2.0
"""A page in headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

DEADLINE_S = 60.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--hide-scrollbars", "--remote-debugging-port=0", "--window-size=1280,1040"),
)


def installed() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """`problems` collects what the page wrote to its console as an error, and exceptions nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(DEADLINE_S):
            return await answer

    async def value(self, expression: str) -> Any:
        """Of JavaScript, which must not throw."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The value of the expression as soon as it is true."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if value := await self.value(expression):
                    return value
                await asyncio.sleep(0.05)

    async def open(self, url: str, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.show_in(scheme)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState == 'complete'")

    async def show_in(self, scheme: str) -> None:
        """`light` or `dark`"""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, file: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        _write(file, base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            document = message.json()
            if "id" in document:
                answer = self._answers.pop(document["id"])
                if not answer.done():
                    answer.set_result(document.get("result", document))
            elif document["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(document["params"]["exceptionDetails"]))
            elif document["method"] == "Log.entryAdded" and document["params"]["entry"]["level"] == "error":
                self.problems.append(str(document["params"]["entry"]))


@contextlib.asynccontextmanager
async def tab(directory: Path) -> AsyncIterator[Tab]:
    """An empty tab of a browser with a profile of its own in `directory`."""
    program = installed()
    assert program is not None, "chromium is not installed"
    with (directory / "chromium.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            *_FLAGS,
            f"--user-data-dir={directory / 'profile'}",
            "about:blank",
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address(session, directory / "profile" / "DevToolsActivePort")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                opened = Tab(socket)
                try:
                    yield opened
                finally:
                    await opened.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _port(file: Path) -> int:
    return int(file.read_text().split()[0])


async def _address(session: aiohttp.ClientSession, file: Path) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(OSError, aiohttp.ClientError, StopIteration, ValueError, IndexError):
                port = _port(file)
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [target for target in await answer.json() if target["type"] == "page"]
                return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
