# SPDX-License-Identifier: Apache-2.0
"""The settings of a gateway."""

from __future__ import annotations

import enum
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds, tls
from llumlet.process.addresses import Address, is_loopback
from llumlet.process.kinds import SWITCH, Kind
from llumlet.process.secret_files import read_secret, read_word
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import Group
from llumsched.endpoints import Endpoint
from llumsched.gateway.api_keys import read_keys
from llumsched.gateway.objectives import Objectives, by_model


class AccessLog(enum.StrEnum):
    OFF = "off"
    LINE = "line"
    JSON = "json"


LATE_WAIT: Final = "--late-wait"
LATE_WAIT_S: Final = 60.0
SHED_PRIORITY: Final = "--shed-priority"
ROUND_ROBIN: Final = "round-robin"
MOST_WORKERS: Final = 256


def _policy(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise ValueError(f"{name!r} is not the name of a policy")
    return name


def _tokenizers(texts: list[str]) -> Mapping[str, str]:
    found = {}
    for each in texts:
        model, equals, path = each.rpartition("=")
        if not path or (equals and not model):
            raise ValueError(f"{each!r} is neither PATH nor MODEL=PATH")
        found[model] = path
    return found


_ADDRESS: Final = Kind(lambda each: Address.parse(each.removeprefix("http://")))
_SHARE: Final = kinds.number("SHARE", at_least=0, at_most=1)
_COUNT: Final = kinds.integer(at_least=1)
_TIME: Final = kinds.seconds(above=0)

_listening = Group("listening", unit="")
_instances = Group("instances", unit="")
_waiting = Group("waiting", unit="")
_failures = Group("failures", unit="")
_tokens = Group("tokens", unit="")


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a gateway. All times in seconds."""

    host: str = _listening.setting("127.0.0.1", kinds.text("HOST"), "address to listen on", common=True)
    port: int = _listening.setting(8001, kinds.port(), "port to listen on; 0 picks a free port", common=True)
    metrics_host: str = _listening.setting(
        "127.0.0.1",
        kinds.text("HOST"),
        "address for /metrics and /ready; beyond loopback it uses --ssl-certfile and asks for no key",
    )
    metrics_port: int = _listening.setting(8004, kinds.port(), "port for /metrics and /ready; 0 picks a free port")
    workers: int = _listening.setting(
        1, kinds.integer(at_least=1, at_most=MOST_WORKERS), "number of processes that share the port", common=True
    )
    max_body_bytes: int = _listening.setting(
        64 << 20, kinds.integer("BYTES", at_least=1), "largest request body, in bytes; a larger one gets 413"
    )
    max_bodies_bytes: int = _listening.setting(
        1 << 30,
        kinds.integer("BYTES", at_least=1),
        "largest total size of request bodies in flight per worker, in bytes; further requests get 429",
    )
    max_head_bytes: int = _listening.setting(
        64 << 10,
        kinds.integer("BYTES", at_least=1024),
        "largest head (request line and headers) of a request, in bytes; a larger one gets 431",
    )
    client_timeout_s: float = _listening.setting(
        60.0, _TIME, "close a connection whose client sends less than 1 KiB, or reads nothing, for this many seconds"
    )
    body_timeout_s: float = _listening.setting(
        300.0, _TIME, "longest time for a whole request body to arrive, in seconds; then the request gets 408"
    )
    header_timeout_s: float = _listening.setting(
        10.0,
        _TIME,
        "longest time for the head of a request to arrive after its first byte or a new connection, in seconds",
    )
    keep_alive_timeout_s: float = _listening.setting(
        75.0, _TIME, "close a client's connection after this many seconds without a request"
    )
    sse_keepalive_s: float = _listening.setting(
        15.0,
        kinds.seconds(),
        "send a comment line, for proxies, on a stream that was silent for this many seconds; 0 sends none",
    )
    api_key_file: str = _listening.setting(
        "",
        kinds.file(read_keys),
        "JSON file with the keys of clients and what each may use; empty accepts every client",
        common=True,
    )
    allowed_origins: tuple[str, ...] = _listening.setting(
        ("*",),
        kinds.several(kinds.text("ORIGIN"), "ORIGIN,…"),
        "web origins whose pages may read answers (CORS); * allows every origin, empty none",
    )
    trust_transfer_params: bool = _listening.setting(
        False,
        SWITCH,
        "pass the `kv_transfer_params` and `ec_transfer_params` of clients to engines, which then read caches from "
        "the hosts named there; if false, such requests get 403",
    )
    ssl_certfile: str = _listening.setting(
        "", kinds.file(kinds.is_file), "certificate for HTTPS (PEM); empty serves plain HTTP", common=True
    )
    ssl_keyfile: str = _listening.setting(
        "", kinds.file(read_secret), "private key of --ssl-certfile (PEM)", common=True
    )
    insecure: bool = _listening.setting(False, SWITCH, "allow listening beyond this machine without keys or TLS")
    shutdown_delay_s: float = _listening.setting(
        0.0,
        kinds.seconds(),
        "accept requests for this long after SIGTERM, in seconds, while /ready answers 503 already; 0 stops at once",
    )
    shutdown_timeout_s: float = _listening.setting(
        30.0,
        kinds.seconds(),
        "longest time for streams to end once no request is accepted any more, in seconds; 0 cuts them at once",
    )
    access_log: AccessLog = _listening.setting(
        AccessLog.LINE, kinds.one_of(AccessLog), "log nothing, a line or a JSON object for each request"
    )

    scheduling_policy: str = _instances.setting(
        "load-balance",
        Kind(_policy, "POLICY"),
        "round-robin chooses instances here; any other name asks the scheduler, which applies its own policy",
        common=True,
    )
    backend_endpoints: tuple[Endpoint | Address, ...] = _instances.setting(
        (),
        kinds.several(Kind(Endpoint.parse), "HOST:PORT,…"),
        "API servers for round-robin and for times without a scheduler: HOST:PORT or http(s)://HOST:PORT/PATH",
        flag="--llm-backend-endpoints",
        common=True,
    )
    backend_https: bool = _instances.setting(
        False, SWITCH, "use https for instances of which the scheduler gives only the address"
    )
    backend_ca_file: str = _instances.setting(
        "",
        kinds.file(tls.checked_ca_file),
        "certificates of the authorities trusted for engines (PEM); empty trusts the system's",
    )
    backend_api_key_file: str = _instances.setting(
        "",
        kinds.file(read_word),
        "file with the engines' --api-key, which engines get in place of the client's key; empty sends them the "
        "client's, unless --api-key-file is set",
    )
    models: tuple[str, ...] = _instances.setting(
        (),
        kinds.several(kinds.text("NAME"), "NAME,…"),
        "models that are known before an instance serves them: requests for them get 503 instead of 404",
    )
    scheduler_endpoints: tuple[Address, ...] = _instances.setting(
        (), kinds.several(_ADDRESS, "HOST:PORT,…"), "schedulers to ask; the first that answers is used", common=True
    )
    scheduler_ca_file: str = _instances.setting(
        "",
        kinds.file(tls.checked_ca_file),
        "certificates of authorities trusted for schedulers (PEM), which are then asked over https; empty uses http",
    )
    full_mode: bool = _instances.setting(
        True,
        SWITCH,
        "select full mode, where instances report to the scheduler; false is lite mode, where the gateway reports",
        flag="--enable-full-mode-scheduling",
    )
    requests_report_duration_s: float = _instances.setting(
        1.0, kinds.seconds(), "lite mode: seconds between two reports to the scheduler; 0 sends none"
    )
    service_token: str = _instances.setting(
        "",
        kinds.text("TEXT"),
        "token to send to the scheduler as Authorization; --service-token-file keeps it off the command line",
        secret=True,
    )
    service_token_file: str = _instances.setting(
        "", kinds.file(read_word), "file with the token to send to the scheduler"
    )
    models_refresh_s: float = _instances.setting(
        10.0, _TIME, "seconds between two queries of the models that instances serve"
    )

    ttft_slo_ms: Mapping[str, float] = _waiting.setting(
        {},
        Kind(by_model, "[MODEL=]MS", repeated=True),
        "objective for the time to first token of requests that name none, in milliseconds, for one model or all "
        "others (repeatable)",
        flag="--ttft-slo",
    )
    """Milliseconds by model; the model "" is any other."""
    tpot_slo_ms: Mapping[str, float] = _waiting.setting(
        {},
        Kind(by_model, "[MODEL=]MS", repeated=True),
        "objective for the mean time between two tokens of requests that name none, in milliseconds, for one model or "
        "all others (repeatable)",
        flag="--tpot-slo",
    )
    late_wait_s: float = _waiting.setting(
        LATE_WAIT_S,
        kinds.seconds(),
        "longest time that a request which can no longer meet its objective waits behind those that can, in seconds, "
        "before it is placed anyway; 0 places it at once. Applies if the scheduler's policy rejects late requests "
        "(slo)",
        flag=LATE_WAIT,
    )
    shed_priority: int | None = _waiting.setting(
        None,
        kinds.integer(),
        "refuse requests (429) with this priority or a larger number when their objective can no longer be met "
        "(default: none)",
        flag=SHED_PRIORITY,
    )
    max_queue_size: int = _waiting.setting(
        512, _COUNT, "largest number of requests that wait for an instance, per worker; more get 429"
    )
    max_requests: int = _waiting.setting(8192, _COUNT, "largest number of requests in flight, per worker; more get 429")
    wait_scheduling_timeout_s: float = _waiting.setting(
        5.0, kinds.seconds(), "longest time a request waits for an instance, in seconds; then it gets 503"
    )
    wait_scheduling_retry_interval_s: float = _waiting.setting(
        0.1, _TIME, "seconds between two attempts to place the waiting requests"
    )
    schedule_timeout_s: float = _waiting.setting(2.0, _TIME, "longest wait for an answer of the scheduler, in seconds")

    retry_max_count: int = _failures.setting(
        2,
        kinds.integer(at_least=0),
        "number of retries of a request before its first byte, and of continuations after it; 0 allows none",
    )
    retry_budget: float = _failures.setting(
        0.2, _SHARE, "share of requests that may be retried; 10 per second are always allowed"
    )
    retry_patience_s: float = _failures.setting(
        10.0,
        kinds.seconds(),
        "longest time that a request which lost its instance waits for the retry budget, in seconds",
    )
    max_ejected: float = _failures.setting(
        0.5, _SHARE, "largest share of instances that may be ejected for failing; 0 ejects only unreachable ones"
    )
    continuation: bool = _failures.setting(True, SWITCH, "continue the streams of a lost engine on other engines")
    connect_timeout_s: float = _failures.setting(3.0, _TIME, "longest time to connect to an engine, in seconds")
    response_timeout_s: float = _failures.setting(
        900.0, _TIME, "longest time until the first byte of an engine's answer, in seconds"
    )
    read_timeout_s: float = _failures.setting(
        300.0, _TIME, "longest time between two bytes of an engine's stream, in seconds"
    )
    stall_s: float = _failures.setting(
        5.0,
        _TIME,
        "ask for an instance's health when one of its streams was silent for this many seconds",
        flag="--stall-time",
    )
    health_timeout_s: float = _failures.setting(
        3.0, _TIME, "longest wait for an instance's answer to a health check, in seconds"
    )
    engine_stall_s: float = _failures.setting(
        60.0,
        _TIME,
        "treat an instance as hung when none of its streams produced a token for this many seconds, even if /health "
        "answers (twice as long before the first token)",
        flag="--engine-stall-time",
    )
    """Before its first token, an instance is probed with a request for one token, and is hung if it computes nothing
    for as long again."""

    tokenizers: Mapping[str, str] = _tokens.setting(
        {},
        Kind(_tokenizers, "[MODEL=]PATH", repeated=True),
        "tokenizer of one model or all others, a path or a name on the hub (repeatable); without one, tokens are "
        "estimated",
        flag="--tokenizer-path",
        aliases=("--tokenizer-name",),
        common=True,
    )
    """Tokenizers by model; the model "" is any other."""
    chat_template: str = _tokens.setting(
        "", kinds.file(kinds.is_file), "file with a chat template; empty uses the tokenizers' own"
    )
    count_timeout_s: float = _tokens.setting(
        0.5, _TIME, "longest processor time to render and encode one request, in seconds; then its tokens are estimated"
    )
    reader_processes: int = _tokens.setting(
        2,
        kinds.integer(at_least=1, at_most=MOST_WORKERS),
        "number of processes per worker that count tokens and read large requests",
    )

    @property
    def lateness(self) -> str:
        """The flag that changes the treatment of late requests; "" if none does."""
        if self.shed_priority is not None:
            return SHED_PRIORITY
        return LATE_WAIT if self.late_wait_s != LATE_WAIT_S else ""

    def objectives(self, model: str) -> Objectives:
        """The objectives of requests that name none."""
        return Objectives(*(of.get(model, of.get("", 0.0)) for of in (self.ttft_slo_ms, self.tpot_slo_ms)))

    @property
    def asks_https(self) -> bool:
        """True if an engine may be reached over https."""
        endpoints = self.backend_endpoints
        return self.backend_https or any(isinstance(one, Endpoint) and one.is_tls for one in endpoints)

    @property
    def is_guarded(self) -> bool:
        """True if clients need a key and their connections are encrypted."""
        return bool(self.api_key_file and self.ssl_certfile and self.ssl_keyfile)

    @property
    def is_local(self) -> bool:
        return self.scheduling_policy == ROUND_ROBIN


def prepare(reading: Reading) -> Config:
    """The settings of a gateway. Contradictions are added to the faults."""
    config = reading.make(Config)
    reading.check(_lateness, config, reading.given)
    for check in (_endpoints, _workers, _authorities, _certificate, _host, _metrics_host, _template, _token):
        reading.check(check, config)
    return config


def _endpoints(config: Config) -> Iterator[str]:
    if config.is_local and config.scheduler_endpoints:
        yield "--scheduler-endpoints has no effect with --scheduling-policy round-robin"
    if config.is_local and not config.backend_endpoints:
        yield "--scheduling-policy round-robin needs --llm-backend-endpoints"
    if not config.is_local and not config.scheduler_endpoints:
        yield f"--scheduling-policy {config.scheduling_policy} needs --scheduler-endpoints"


def _lateness(config: Config, given: Container[str]) -> Iterator[str]:
    for flag in (LATE_WAIT, SHED_PRIORITY):
        if config.is_local and flag in given:
            yield f"{flag} has no effect with --scheduling-policy {ROUND_ROBIN}, which never refuses late requests"


def _workers(config: Config) -> Iterator[str]:
    if config.workers > 1 and not config.port:
        yield "--workers above 1 needs a --port: each worker binds it"
    if config.workers > 1 and not config.metrics_port:
        yield "--workers above 1 needs a --metrics-port: each worker binds it"


def _authorities(config: Config) -> Iterator[str]:
    if config.backend_ca_file and not config.asks_https:
        yield "--backend-ca-file has no effect without https endpoints or --backend-https"


def _certificate(config: Config) -> list[str]:
    return tls.server_faults(config.ssl_certfile, config.ssl_keyfile)


def _host(config: Config) -> Iterator[str]:
    if not (config.insecure or config.is_guarded or is_loopback(config.host)):
        yield (
            f"--host {config.host} is not a loopback address, and whoever reaches this gateway could use all engines: "
            "it needs --api-key-file, --ssl-certfile and --ssl-keyfile, or else --insecure"
        )


def _metrics_host(config: Config) -> Iterator[str]:
    if not (config.insecure or config.ssl_certfile or is_loopback(config.metrics_host)):
        yield (
            f"--metrics-host {config.metrics_host} is not a loopback address: it needs --ssl-certfile and "
            "--ssl-keyfile, or else --insecure"
        )


def _template(config: Config) -> Iterator[str]:
    if config.chat_template and not config.tokenizers:
        yield "--chat-template has no effect without --tokenizer-path"


def _token(config: Config) -> Iterator[str]:
    if config.service_token and config.service_token_file:
        yield "--service-token and --service-token-file exclude each other"
