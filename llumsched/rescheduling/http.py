# SPDX-License-Identifier: Apache-2.0
"""What the rescheduler did, over HTTP: `/debug/rescheduling`; and the small server of a process of its own."""

from __future__ import annotations

from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from llumsched.cluster.view import View
from llumsched.rescheduling.records import Records

MOST: Final = 1000
"""Limit of passes or moves of one answer."""


def add_debug_route(app: web.Application, records: Records) -> None:
    """GET /debug/rescheduling?passes=20&moves=100: the newest of each, newest last."""

    async def show(request: web.Request) -> web.Response:
        try:
            numbers = [int(request.query.get(name, default)) for name, default in (("passes", "20"), ("moves", "100"))]
        except ValueError:
            return web.json_response({"error": "passes and moves are whole numbers"}, status=400)
        return web.json_response(records.to_dict(*(min(max(number, 0), MOST) for number in numbers)))

    app.router.add_get("/debug/rescheduling", show)


def standalone(view: View, records: Records, registry: CollectorRegistry) -> web.Application:
    """`/healthz`, `/metrics`, `/debug/rescheduling`."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def health(request: web.Request) -> web.Response:
        """Answers 503 while the CMS is lost: nothing is planned then."""
        document = {"instances": len(view), "connected": view.connected, "view_age_s": round(view.age_s, 3)}
        return web.json_response(document, status=200 if view.connected else 503)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", health)
    add_debug_route(app, records)
    return app
