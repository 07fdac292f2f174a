# SPDX-License-Identifier: Apache-2.0
"""The flags of `llumnix gateway`: which setting of the configuration each fills, and how its text is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llumlet.secret_files import read_secret
from llumlet.types import Address
from llumsched.gateway.config import MOST_WORKERS, AccessLog
from llumsched.gateway.endpoints import Endpoint
from llumsched.gateway.key_file import read_keys
from llumsched.tls import checked_ca_file

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_UNITS = {None: 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "h": 3600.0}


def _text(text: str) -> str:
    return text


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(f"{text!r} is no file")
    return text


def _secret_file(text: str) -> str:
    read_secret(text)
    return text


def _word_of_file(text: str) -> str:
    word = read_secret(text).decode(errors="replace").strip()
    if not re.fullmatch(r"[!-~]+", word):
        raise ValueError(f"{text} does not hold one word of printable ASCII characters")
    return word


def _bearer_of_file(text: str) -> str:
    return f"Bearer {_word_of_file(text)}"


def _api_keys(text: str) -> str:
    read_keys(text)
    return text


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration like 5, 500ms or 3m")
    return float(match[1]) * _UNITS[match[2]]


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if value <= 0:
        raise ValueError(f"{text!r} must be positive")
    return value


def _count(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not minimum <= int(text) <= maximum:
            limits = f"from {minimum} to {maximum}" if maximum < math.inf else f"of at least {minimum}"
            raise ValueError(f"{text!r} is not a number {limits}")
        return int(text)

    return read


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{text!r} is not a share from 0 to 1")
    return value


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _addresses(text: str) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(Address.parse(part.removeprefix("http://")) for part in text.split(",") if part.strip()))


def _endpoints(text: str) -> tuple[Endpoint, ...]:
    return tuple(dict.fromkeys(Endpoint.parse(part) for part in text.split(",") if part.strip()))


def _access_log(text: str) -> AccessLog:
    try:
        return AccessLog(text)
    except ValueError:
        raise ValueError(f"{text!r} is not one of {', '.join(AccessLog)}") from None


def _policy(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", text):
        raise ValueError(f"{text!r} is not the name of a policy")
    return text


def _tokenizers(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        model, equals, path = text.rpartition("=")
        if not path or (equals and not model):
            raise ValueError(f"{text!r} is neither PATH nor MODEL=PATH")
        found[model] = path
    return found


SWITCHES = ("--insecure", "--backend-https")
"""Flags that may stand without a value."""
REPEATED = ("--tokenizer-path", "--tokenizer-name")
Flag = tuple[str, Callable[[Any], Any], str, str]
"""Setting, reader (raises ValueError), metavar, help."""

FLAGS: dict[str, dict[str, Flag]] = {
    "listening": {
        "--host": ("host", _text, "HOST", "address to listen at"),
        "--port": ("port", _count(0, 65535), "PORT", "0: any free one"),
        "--workers": ("workers", _count(1, MOST_WORKERS), "N", "processes that share the port"),
        "--max-body-bytes": ("max_body_bytes", _count(1), "BYTES", "largest request"),
        "--client-timeout": (
            "client_timeout_s",
            _positive_seconds,
            "TIME",
            "for the next KiB of a client's request, or with nothing taken by it of its answer",
        ),
        "--header-timeout": ("header_timeout_s", _positive_seconds, "TIME", "for a request's head, once it has begun"),
        "--keep-alive-timeout": (
            "keep_alive_timeout_s",
            _positive_seconds,
            "TIME",
            "between two requests on a client's connection",
        ),
        "--sse-keepalive": (
            "sse_keepalive_s",
            _seconds,
            "TIME",
            "silence of a stream after which its client gets a comment line, as proxies close what is silent; 0: never",
        ),
        "--api-key-file": ("api_key_file", _api_keys, "FILE", "keys of clients, and what each may ask for (JSON)"),
        "--ssl-certfile": ("ssl_certfile", _file, "FILE", "certificate to listen with (PEM)"),
        "--ssl-keyfile": ("ssl_keyfile", _secret_file, "FILE", "its private key (PEM)"),
        "--insecure": ("insecure", _switch, "", "listen beyond this machine without keys or TLS"),
        "--shutdown-delay": (
            "shutdown_delay_s",
            _seconds,
            "TIME",
            "how long requests are accepted after SIGTERM, while /ready is 503 already",
        ),
        "--shutdown-timeout": ("shutdown_timeout_s", _seconds, "TIME", "how long streams may go on after that"),
        "--access-log": ("access_log", _access_log, "FORM", "off, line or json"),
    },
    "instances": {
        "--scheduling-policy": (
            "scheduling_policy",
            _policy,
            "POLICY",
            "round-robin is done here; any other by the scheduler",
        ),
        "--llm-backend-endpoints": (
            "backend_endpoints",
            _endpoints,
            "HOST:PORT,…",
            "API servers, for round-robin and while the scheduler is away; also http(s)://HOST:PORT/PATH",
        ),
        "--backend-https": ("backend_https", _switch, "", "instances that the scheduler names are asked over https"),
        "--backend-ca-file": ("backend_ca_file", checked_ca_file, "FILE", "authorities of engines' certificates (PEM)"),
        "--backend-api-key-file": ("backend_api_key", _word_of_file, "FILE", "the engines' own --api-key"),
        "--scheduler-endpoints": (
            "scheduler_endpoints",
            _addresses,
            "HOST:PORT,…",
            "schedulers; the first that answers is asked",
        ),
        "--scheduler-ca-file": (
            "scheduler_ca_file",
            checked_ca_file,
            "FILE",
            "authorities of their certificates (PEM): they are asked over https",
        ),
        "--enable-full-mode-scheduling": (
            "full_mode",
            _switch,
            "BOOL",
            "false: lite mode, in which the gateway reports what runs",
        ),
        "--requests-report-duration": (
            "requests_report_duration_s",
            _seconds,
            "TIME",
            "lite mode: between two reports; 0: none",
        ),
        "--service-token": ("service_token", _text, "TEXT", "sent to the scheduler as Authorization"),
        "--service-token-file": ("service_token", _bearer_of_file, "FILE", "the same, a token out of a file"),
        "--models-refresh": (
            "models_refresh_s",
            _positive_seconds,
            "TIME",
            "between two looks at what instances serve",
        ),
    },
    "waiting": {
        "--max-queue-size": ("max_queue_size", _count(1), "N", "requests that may wait for an instance; more get 429"),
        "--max-requests": ("max_requests", _count(1), "N", "requests that may be in flight per worker; more get 429"),
        "--wait-scheduling-timeout": (
            "wait_scheduling_timeout_s",
            _seconds,
            "TIME",
            "how long a request waits for an instance",
        ),
        "--wait-scheduling-retry-interval": (
            "wait_scheduling_retry_interval_s",
            _positive_seconds,
            "TIME",
            "between two tries of that",
        ),
        "--schedule-timeout": ("schedule_timeout_s", _positive_seconds, "TIME", "for the scheduler's answer"),
    },
    "failures": {
        "--retry-max-count": ("retry_max_count", _count(0), "N", "other instances tried for one request"),
        "--retry-budget": ("retry_budget", _share, "SHARE", "of the requests, that may be sent again"),
        "--retry-patience": (
            "retry_patience_s",
            _seconds,
            "TIME",
            "how long a request that lost its instance waits for that",
        ),
        "--max-ejected": (
            "max_ejected",
            _share,
            "SHARE",
            "of the instances, that may be left out as they fail; 0: none but those that no connection reaches",
        ),
        "--continuation": ("continuation", _switch, "BOOL", "continue streams that lose their engine"),
        "--connect-timeout": ("connect_timeout_s", _positive_seconds, "TIME", "for a connection to an engine"),
        "--response-timeout": ("response_timeout_s", _positive_seconds, "TIME", "until an answer's first byte"),
        "--read-timeout": ("read_timeout_s", _positive_seconds, "TIME", "between two bytes of a stream"),
        "--stall-time": ("stall_s", _positive_seconds, "TIME", "silence after which an instance's health is asked for"),
        "--health-timeout": ("health_timeout_s", _positive_seconds, "TIME", "for that"),
        "--engine-stall-time": (
            "engine_stall_s",
            _positive_seconds,
            "TIME",
            "silence on all its streams that makes an instance hung, healthy or not; twice that if none has begun",
        ),
    },
    "tokens": {
        "--tokenizer-path": (
            "tokenizers",
            _tokenizers,
            "[MODEL=]PATH",
            "tokenizer of one model, or of all others (repeatable)",
        ),
        "--tokenizer-name": (
            "tokenizers",
            _tokenizers,
            "[MODEL=]NAME",
            "the same, by its name on the hub (repeatable)",
        ),
        "--chat-template": ("chat_template", _file, "FILE", "instead of the tokenizers' own"),
        "--count-timeout": (
            "count_timeout_s",
            _positive_seconds,
            "TIME",
            "of a processor, to render and encode one request; then its tokens are estimated",
        ),
        "--reader-processes": (
            "reader_processes",
            _count(1, MOST_WORKERS),
            "N",
            "per worker, that count tokens and read large requests",
        ),
    },
}
