# SPDX-License-Identifier: Apache-2.0
"""Requests refused before an exchange begins, and connections that never become one: answered, counted and logged here.

Clients' words are never quoted, as they may hold a key. Unreadable requests are not in the access log; the log has a
line with the client's address, at most once in ten seconds.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Final

from aiohttp import web

from llumsched.gateway import errors, request_id
from llumsched.gateway.access_log import AccessLogger
from llumsched.gateway.errors import GatewayError
from llumsched.gateway.exchange import failure
from llumsched.gateway.gateway_metrics import Metrics, Record
from llumsched.gateway.paths import Style, find

_log = logging.getLogger(__name__)
_TELL_S: Final = 10.0
_MOST_PATH_CHARACTERS: Final = 256


class Refusals:
    def __init__(self, metrics: Metrics, access_log: AccessLogger) -> None:
        self._metrics = metrics
        self._access_log = access_log
        self._told_s = -math.inf
        self._num_untold = 0

    def answer(self, request: web.BaseRequest, error: GatewayError, key: str = "") -> web.Response:
        """Answers a refused request. `key` is the name of its API key."""
        found = find(request.path)
        own_id = request_id.chosen(request.headers.get("X-Request-Id"))
        self._metrics.refusals.labels(error.status).inc()
        self._access_log.ended(Record(own_id, request.path[:_MOST_PATH_CHARACTERS], key=key, status=error.status))
        return failure(error, own_id, found.path.style if found else Style.OPENAI)

    def unreadable(self, peer: str, error: GatewayError) -> web.Response:
        """Answers an unreadable request, whose connection then ends."""
        self._metrics.refusals.labels(error.status).inc()
        self._tell(peer, f"status {error.status}: {error}")
        response = failure(error, "")
        response.force_close()
        return response

    def head_too_large(self, peer: str, limit: int) -> bytes:
        """The same as bytes, for a head that is not read to its end."""
        error = errors.HeadTooLarge(f"The request's head has more than {limit} bytes.")
        self.unreadable(peer, error)
        body = errors.body(error)
        return (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def no_tls(self, peer: str, reason: str) -> None:
        """Notes a failed TLS handshake. `reason` is OpenSSL's word."""
        self._metrics.tls_failures.inc()
        self._tell(peer, f"TLS handshake: {reason}")

    def _tell(self, peer: str, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < _TELL_S:
            self._num_untold += 1
            return
        more = f" (and {self._num_untold} others since the last such line)" if self._num_untold else ""
        self._told_s, self._num_untold = now_s, 0
        _log.warning("refused what %s sent: %s%s", peer, what, more)
