# SPDX-License-Identifier: Apache-2.0
"""The scheduler's web page and its server-sent events: `/`, `/page.js`, `/page.css`, `/events`.

An event is one JSON object: changed `instances` (`llumsched.summary`, with `age_s` and `predicted_ms`), the ids of
those that `left`, changed `moves` of the rescheduler, the age of the view, and met objectives (`overview`). The first
event holds everything. Events come at most every `INTERVAL_S`, at least every `BEAT_S`, and less often with many
changes, since requests are placed on the same loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from importlib import resources
from typing import Final

from aiohttp import web

from llumsched.cluster.view import View
from llumsched.rescheduling.executing.records import Records
from llumsched.scheduler.feed import Feed, PageReader
from llumsched.scheduler.overview import Overview

INTERVAL_S: Final = 0.1
BEAT_S: Final = 1.0
INSTANCES_PER_INTERVAL: Final = 200
"""Instances in an event that cause no longer pause before the next one: 2 % of a core."""
STUCK_S: Final = 30.0
"""Time after which a reader that reads nothing is disconnected."""
MAX_READERS: Final = 64
_TYPES = {"index.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
_HEADERS = {
    "Cache-Control": "no-cache",
    # Everything comes from here, and nothing of it is anybody's text: ids and numbers are set as text.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def add_routes(app: web.Application, view: View, records: Records | None, overview: Overview | None = None) -> None:
    """`records`: the rescheduler's; None if it runs in another process, so that the page shows no moves."""
    page = _Page(Feed(view, records, overview))
    app.router.add_get("/", page.file)
    app.router.add_get("/{name:page\\.(?:js|css)}", page.file)
    app.router.add_get("/events", page.events)
    app.router.add_get("/favicon.ico", page.no_icon)
    app.on_shutdown.append(page.close)


class _Page:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._handlers: set[asyncio.Task[None]] = set()
        self._files = {name: (resources.files("llumsched.scheduler") / "page" / name).read_bytes() for name in _TYPES}

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        return web.Response(body=self._files[name], content_type=_TYPES[name], charset="utf-8", headers=_HEADERS)

    async def no_icon(self, _: web.Request) -> web.Response:
        """Answers browsers' requests for an icon."""
        return web.Response(status=204, headers={"Cache-Control": "max-age=86400"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        if len(self._feed) >= MAX_READERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_READERS} readers are connected already\n")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        # Buffered by nobody on the way.
        response.headers["X-Accel-Buffering"] = "no"
        await response.prepare(request)
        reader = self._feed.join()
        task = asyncio.ensure_future(self._tell(response, reader))
        self._handlers.add(task)
        try:
            with contextlib.suppress(ConnectionError, TimeoutError, asyncio.CancelledError):
                await task
        finally:
            task.cancel()
            self._handlers.discard(task)
            self._feed.leave(reader)
        return response

    async def close(self, _: web.Application) -> None:
        """Ends the streams, for which the server's end would wait."""
        for task in self._handlers:
            task.cancel()

    async def _tell(self, response: web.StreamResponse, reader: PageReader) -> None:
        while True:
            event = b"data: %b\n\n" % await self._feed.take(reader)
            async with asyncio.timeout(STUCK_S):
                await response.write(event)
            await asyncio.sleep(_pause_s(reader.num_newest, time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S - INTERVAL_S):
                    await reader.woken.wait()


def _pause_s(num_told: int, now_s: float) -> float:
    """Seconds until the next event, at the same time for all readers, so that they share its text."""
    interval_s = min(INTERVAL_S * max(1, math.ceil(num_told / INSTANCES_PER_INTERVAL)), BEAT_S)
    pause_s = interval_s - now_s % interval_s
    return pause_s if pause_s > interval_s / 2 else pause_s + interval_s
