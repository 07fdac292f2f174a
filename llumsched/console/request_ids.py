# SPDX-License-Identifier: Apache-2.0
"""Finds requests by the ids that a person typed. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from llumlet.contract.types import RequestInfo

_MOST_SHOWN = 5


def find(texts: Iterable[str], requests: Sequence[RequestInfo]) -> tuple[list[str], list[str]]:
    """The engine's ids of the requests that `texts` name, without duplicates, and the faults of the other texts.

    A text is an engine's id, a client's id (which names all its requests: `n > 1` makes several), or a prefix of either
    that fits one request only.
    """
    found: dict[str, None] = {}
    faults = []
    for text in texts:
        matches = _matches(text, requests)
        exact = any(text in (request.request_id, request.external_request_id) for request in matches)
        if exact or len(matches) == 1:
            found.update(dict.fromkeys(request.request_id for request in matches))
        elif matches:
            ids = _some([request.request_id for request in matches])
            faults.append(f"{text!r} is the beginning of {len(matches)} requests: {ids}")
        else:
            faults.append(_unknown(text, requests))
    return list(found), faults


def _matches(text: str, requests: Sequence[RequestInfo]) -> list[RequestInfo]:
    by_engine_id = [request for request in requests if request.request_id == text]
    by_client_id = [request for request in requests if request.external_request_id == text]
    return (
        by_engine_id
        or by_client_id
        or [
            request
            for request in requests
            if request.request_id.startswith(text) or request.external_request_id.startswith(text)
        ]
    )


def _unknown(text: str, requests: Sequence[RequestInfo]) -> str:
    if not requests:
        return f"no request {text!r}: the instance has none at all"
    ids = [request.request_id for request in requests]
    names = ids + [request.external_request_id for request in requests]
    near = difflib.get_close_matches(text, dict.fromkeys(filter(None, names)), n=_MOST_SHOWN)
    if near:
        return f"no request {text!r}; near: {', '.join(near)}"
    return f"no request {text!r}; the instance has {_some(ids)}"


def _some(ids: Sequence[str]) -> str:
    rest = len(ids) - _MOST_SHOWN
    return ", ".join(ids[:_MOST_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
