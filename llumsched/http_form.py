# SPDX-License-Identifier: Apache-2.0
"""The form of HTTP errors of scheduler and rescheduler, without the software's name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def give_form(app: web.Application) -> None:
    """Gives errors that no handler makes (unknown path, wrong method, large body) as JSON."""
    app.middlewares.append(_in_json)
    app.on_response_prepare.append(_without_name)


@web.middleware
async def _in_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        content = {"message": f"{request.method} {request.path[:256]}: {error.reason}", "code": error.status}
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.json_response({"error": content}, status=error.status, headers=headers)


async def _without_name(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)
