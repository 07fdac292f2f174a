# SPDX-License-Identifier: Apache-2.0
"""The errors of a request, and their answers to its client.

GatewayError                       status and kind of the answer
  InvalidRequest            400
  Unauthorized              401    with WWW-Authenticate
  Forbidden                 403
  CannotPass                501
  UnknownModel              404
  UnknownPath               404
  UnknownResponse           404
  MethodNotAllowed          405    with Allow
  RequestTimedOut           408    its client stopped in the middle of it
  RequestTooLarge           413
  UnsupportedCoding         415
  Overloaded                429    with Retry-After
  HeadTooLarge              431
  NoInstance                503    with Retry-After
  OutOfDescriptors          503    with Retry-After; the gateway's own fault, not an instance's
  UpstreamFailed            502    no instance answered
  UpstreamTimedOut          504
  EngineRefused             the engine's own, as an event
StreamLost                         an engine's answer broke off; the exchange continues elsewhere, or says so
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from llumsched.causes import Cause
from llumsched.gateway.ends import End
from llumsched.gateway.paths import Style


class GatewayError(Exception):
    status: int = 500
    kind: str = "InternalServerError"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`headers`: further headers of the answer."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.headers = headers


class InvalidRequest(GatewayError):
    status = 400
    kind = "BadRequestError"


class Unauthorized(GatewayError):
    status = 401
    kind = "AuthenticationError"


class Forbidden(GatewayError):
    status = 403
    kind = "PermissionDeniedError"


class CannotPass(GatewayError):
    status = 501
    kind = "NotImplementedError"


class UnknownModel(GatewayError):
    status = 404
    kind = "NotFoundError"


class UnknownPath(UnknownModel):
    pass


class UnknownResponse(UnknownModel):
    pass


class MethodNotAllowed(GatewayError):
    status = 405
    kind = "MethodNotAllowedError"


class RequestTimedOut(GatewayError):
    status = 408
    kind = "RequestTimeoutError"


class RequestTooLarge(GatewayError):
    status = 413
    kind = "BadRequestError"


class UnsupportedCoding(GatewayError):
    status = 415
    kind = "BadRequestError"


class HeadTooLarge(GatewayError):
    status = 431
    kind = "BadRequestError"


class Overloaded(GatewayError):
    status = 429
    kind = "TooManyRequestsError"


class NoInstance(GatewayError):
    status = 503
    kind = "ServiceUnavailableError"


class OutOfDescriptors(GatewayError):
    status = 503
    kind = "ServiceUnavailableError"


class UpstreamFailed(GatewayError):
    status = 502
    kind = "BadGatewayError"


class UpstreamTimedOut(GatewayError):
    status = 504
    kind = "GatewayTimeoutError"


class StreamLost(Exception):
    """An engine's answer broke off. `cause`: its meaning for the instance. `was_sent`: true if the engine may have had
    the request. `end`: the end that the engine reported, if it did. `words`: its last event of a stream."""

    def __init__(
        self,
        message: str,
        *,
        timed_out: bool = False,
        cause: Cause = Cause.ERRORS,
        was_sent: bool = True,
        end: End | None = None,
        words: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.cause = cause
        self.was_sent = was_sent
        self.end = end
        self.words = words


class EngineRefused(GatewayError):
    """An engine's refusal, for a client that waits for events. `answer` is the refusal's body."""

    def __init__(self, status: int, answer: bytes) -> None:
        try:
            document = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            document = None
        error = document.get("error", document) if isinstance(document, dict) else {}
        message = error.get("message") if isinstance(error, dict) else error
        super().__init__(str(message or f"The engine answered {status}."))
        self.status = status
        self.kind = str(error.get("type") or self.kind) if isinstance(error, dict) else self.kind


def body(error: GatewayError, style: Style = Style.OPENAI) -> bytes:
    """The answer's body, as vLLM writes errors of that API; Cohere's clients get that of OpenAI."""
    content: dict[str, object] = {"message": str(error), "type": error.kind, "param": None, "code": error.status}
    document: dict[str, object] = {"error": content}
    if style is Style.ANTHROPIC:
        document = {"type": "error", "error": {"type": error.kind, "message": str(error)}}
    return msgspec.json.encode(document)


def last_event(error: GatewayError, style: Style, sequence_number: int = 0) -> bytes:
    """The error as the end of a stream. `sequence_number`: of the event, where events have one."""
    if style is Style.ANTHROPIC:
        return b"event: error\ndata: " + body(error, style) + b"\n\n"
    if style is Style.RESPONSES:
        event = {"type": "error", "code": error.kind, "message": str(error), "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(event | {"sequence_number": sequence_number}) + b"\n\n"
    return b"data: " + body(error) + b"\n\ndata: [DONE]\n\n"
