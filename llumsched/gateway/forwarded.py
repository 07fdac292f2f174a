# SPDX-License-Identifier: Apache-2.0
"""Who asks, for the engine: it sees only the gateway's own connection.

As proxies do, the client's address is put after those that came in `X-Forwarded-For`; whether the client spoke TLS
stands in `X-Forwarded-Proto`, unless a proxy before this one has said it.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

RawHeaders = tuple[tuple[bytes, bytes], ...]
_FOR: Final = b"x-forwarded-for"
_PROTO: Final = b"x-forwarded-proto"
NAMES: Final = frozenset((_FOR, _PROTO))
"""Headers that no client can have left out."""


def with_client(request: web.BaseRequest) -> RawHeaders:
    """A request's headers, and what they do not say of its connection."""
    headers = request.raw_headers
    addresses, has_scheme = [], False
    for name, value in headers:
        lower = name.lower()
        if lower == _FOR:
            addresses.append(value)
        elif lower == _PROTO:
            has_scheme = True
    if addresses:
        headers = tuple(header for header in headers if header[0].lower() != _FOR)
    if address := request.remote:
        addresses.append(address.encode())
    if addresses:
        headers += ((b"X-Forwarded-For", b", ".join(addresses)),)
    if not has_scheme:
        headers += ((b"X-Forwarded-Proto", request.scheme.encode()),)
    return headers
