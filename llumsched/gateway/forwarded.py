# SPDX-License-Identifier: Apache-2.0
"""The headers of a client that reach its engine, and the key that the client shows.

They are an allow-list: the gateway decides about headers that change an engine's work (priority, rank, load), and a new
vLLM cannot expose another one. A test compares the list with the headers that the installed vLLM reads.

The client's address is appended to `X-Forwarded-For`, and `X-Forwarded-Proto` says if the client used TLS, unless a
proxy before the gateway has said so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from aiohttp import web

from llumlet.contract.attempt_header import ATTEMPT_HEADER

RawHeaders = tuple[tuple[bytes, bytes], ...]
_FOR: Final = b"x-forwarded-for"
_PROTO: Final = b"x-forwarded-proto"
NAMES: Final = frozenset((_FOR, _PROTO))
"""Headers that a client cannot have removed."""
AUTHORIZATION: Final = "Authorization"
_KEYS: Final = ("X-Api-Key", "Api-Key")
"""Headers in which clients of Anthropic and Azure show their keys."""
RANK_HEADER: Final = "X-data-parallel-rank"
"""vLLM's header for the data-parallel rank. A client's own would undo the placement."""

PASSED: Final = frozenset(
    (b"accept", b"accept-language", b"content-type", b"referer", b"user-agent", b"traceparent",
     b"tracestate", b"via", b"forwarded", b"x-forwarded-host", b"x-forwarded-port", b"x-forwarded-prefix",
     b"x-real-ip", b"x-session-id", b"anthropic-version", b"anthropic-beta", *NAMES)
)  # fmt: skip
"""Headers of a client that reach its engine."""
OWNED: Final[Mapping[str, str]] = {
    AUTHORIZATION: "a credential: passed as it is only where engines, and not the gateway, ask for keys",
    **dict.fromkeys(_KEYS, "a credential: engines get it as `Authorization`, where they get any"),
    "Cookie": "a credential",
    "X-Request-Id": "engines get the id under which gateway and scheduler know the request",
    ATTEMPT_HEADER: "says how many instances died with the request",
    RANK_HEADER: "the scheduler chooses the rank",
    "X-Vllm-Priority": "read as `X-Priority`: checked, and put into the body",
    "endpoint-load-metrics-format": "would tell clients the engine's load",
}
"""Headers that engines read and clients may not set, with the reason."""


def keys_shown(headers: Mapping[str, str]) -> Iterator[str]:
    """The keys that a client shows, in the headers of all APIs."""
    scheme, _, key = headers.get(AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        yield key
    for name in _KEYS:
        if name in headers:
            yield headers[name]


def authorization(headers: Mapping[str, str]) -> str:
    """A client's credential in the form that engines read; "" if there is none."""
    if AUTHORIZATION in headers:
        return headers[AUTHORIZATION]
    return next((f"Bearer {key}" for key in keys_shown(headers)), "")


def with_client(request: web.BaseRequest) -> RawHeaders:
    """The headers of a request for an engine: the passed ones, its credential and its connection. `Upstream` removes
    the credential where engines must not see it."""
    passed, connection = PASSED, request.headers.get("Connection", "").lower()
    if connection not in ("", "keep-alive", "close"):
        nominated = connection.encode("utf-8", "surrogateescape").split(b",")
        passed = PASSED - ({token.strip() for token in nominated} - NAMES)
    headers = tuple((name, value) for name, value in request.raw_headers if name.lower() in passed)
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
    if credential := authorization(request.headers):
        headers += ((AUTHORIZATION.encode(), credential.encode("utf-8", "surrogateescape")),)
    return headers
