# SPDX-License-Identifier: Apache-2.0
"""The rescheduler over HTTP: its records (`/debug/rescheduling`), its next pass (`/debug/rescheduling/plan`), and the
small server of a standalone process."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from llumsched.cluster.view import View
from llumsched.http_form import give_form
from llumsched.rescheduling.rescheduler import Rescheduler

MOST: Final = 1000
"""Largest number of passes or moves in an answer."""
_TOLD_AT_ONCE: Final = 8
"""Instances of `/debug/rescheduling/plan` between which other tasks run; less than a millisecond."""


class _DryRun(Struct):
    """A question to `/debug/rescheduling/plan`."""

    policy: Annotated[str, Meta(max_length=4096)] = ""
    """The only policy to show; "" shows all."""


def add_debug_routes(app: web.Application, rescheduler: Rescheduler) -> None:
    """GET /debug/rescheduling?passes=20&moves=100: the latest of each, newest last.

    POST /debug/rescheduling/plan {"policy": "neutral_load"}: the pass that one policy, or all, would make now; changes
    nothing. 400 for an unknown policy.
    """

    async def show(request: web.Request) -> web.Response:
        try:
            numbers = [int(request.query.get(name, default)) for name, default in (("passes", "20"), ("moves", "100"))]
        except ValueError:
            return web.json_response({"error": "passes and moves are whole numbers"}, status=400)
        return web.json_response(rescheduler.records.to_dict(*(min(max(number, 0), MOST) for number in numbers)))

    async def plan(request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read() or b"{}", type=_DryRun)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return web.Response(status=400, text=f"bad JSON: {error or 'nested too deeply'}")
        if asked.policy and asked.policy not in rescheduler.policies:
            known = ", ".join(rescheduler.policies)
            return web.Response(status=400, text=f"policy {asked.policy!r} is none of the rescheduler's: {known}")
        dry_run, policies = rescheduler.dry_run(), []
        for policy, instances in dry_run.of_policies(asked.policy):
            told = []
            for number, instance in enumerate(instances, 1):
                told.append(msgspec.Raw(msgspec.json.encode(instance)))
                if number % _TOLD_AT_ONCE == 0:
                    await asyncio.sleep(0)
            policies.append(policy | {"instances": told})
        body = msgspec.json.encode({"skipped": dry_run.skipped, "policies": policies})
        return web.Response(body=body, content_type="application/json")

    app.router.add_get("/debug/rescheduling", show)
    app.router.add_post("/debug/rescheduling/plan", plan)


def standalone(view: View, rescheduler: Rescheduler, registry: CollectorRegistry) -> web.Application:
    """`/healthz`, `/metrics`, `/debug/rescheduling`, `/debug/rescheduling/plan`."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def health(request: web.Request) -> web.Response:
        """Answers 503 while the CMS is lost, as nothing is planned then."""
        document = {"instances": len(view), "connected": view.connected, "view_age_s": round(view.age_s, 3)}
        return web.json_response(document, status=200 if view.connected else 503)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", health)
    app.router.add_get("/health", health)
    give_form(app)
    add_debug_routes(app, rescheduler)
    return app
