# SPDX-License-Identifier: Apache-2.0
"""Everything that can be set of a gateway."""

from __future__ import annotations

import enum
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds
from llumlet.process.addresses import Address, is_loopback
from llumlet.process.kinds import SWITCH, Kind
from llumlet.process.secret_files import read_secret, read_word
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import Group
from llumsched import tls
from llumsched.endpoints import Endpoint
from llumsched.gateway.key_file import read_keys
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

    host: str = _listening.setting("127.0.0.1", kinds.text("HOST"), "to listen at")
    port: int = _listening.setting(8001, kinds.port(), "to listen at; 0: any free one")
    metrics_host: str = _listening.setting(
        "127.0.0.1",
        kinds.text("HOST"),
        "address for /metrics and /ready; beyond loopback it uses --ssl-certfile and asks for no key",
    )
    metrics_port: int = _listening.setting(8004, kinds.port(), "port for /metrics and /ready; 0 picks a free port")
    workers: int = _listening.setting(
        1, kinds.integer(at_least=1, at_most=MOST_WORKERS), "processes that share the port"
    )
    max_body_bytes: int = _listening.setting(64 << 20, kinds.integer("BYTES", at_least=1), "largest request")
    max_bodies_bytes: int = _listening.setting(
        1 << 30,
        kinds.integer("BYTES", at_least=1),
        "largest total size of request bodies in flight, per worker; further requests get 429",
    )
    max_head_bytes: int = _listening.setting(
        64 << 10,
        kinds.integer("BYTES", at_least=1024),
        "largest head (request line and headers) of a request; a larger one gets 431",
    )
    client_timeout_s: float = _listening.setting(
        60.0,
        _TIME,
        "close a connection whose client sends less than 1 KiB, or reads nothing, for this many seconds",
    )
    body_timeout_s: float = _listening.setting(
        300.0, _TIME, "for the whole body of a request, however steadily it comes; then it gets 408"
    )
    header_timeout_s: float = _listening.setting(10.0, _TIME, "for a request's head, once it or a connection has begun")
    keep_alive_timeout_s: float = _listening.setting(75.0, _TIME, "between two requests on a client's connection")
    sse_keepalive_s: float = _listening.setting(
        15.0,
        kinds.seconds(),
        "silence of a stream after which its client gets a comment line, as proxies close what is silent; 0: never",
    )
    api_key_file: str = _listening.setting(
        "",
        kinds.file(read_keys),
        "keys of clients, and what each may ask for (JSON); without it nobody is asked for one",
    )
    trust_transfer_params: bool = _listening.setting(
        False,
        SWITCH,
        "pass clients' `kv_transfer_params` and `ec_transfer_params` to engines, which read caches of the hosts named "
        "there; false: such requests get 403",
    )
    ssl_certfile: str = _listening.setting("", kinds.file(kinds.is_file), "certificate to listen with (PEM)")
    ssl_keyfile: str = _listening.setting("", kinds.file(read_secret), "its private key (PEM)")
    insecure: bool = _listening.setting(False, SWITCH, "listen beyond this machine without keys or TLS")
    shutdown_delay_s: float = _listening.setting(
        0.0, kinds.seconds(), "how long requests are accepted after SIGTERM, while /ready is 503 already"
    )
    shutdown_timeout_s: float = _listening.setting(
        30.0, kinds.seconds(), "how long streams may go on once nothing new is accepted"
    )
    access_log: AccessLog = _listening.setting(
        AccessLog.LINE, kinds.one_of(AccessLog), "what is written of each request"
    )

    scheduling_policy: str = _instances.setting(
        "load-balance",
        Kind(_policy, "POLICY"),
        "round-robin is done here; with any other the scheduler is asked, which applies its own",
    )
    backend_endpoints: tuple[Endpoint | Address, ...] = _instances.setting(
        (),
        kinds.several(Kind(Endpoint.parse), "HOST:PORT,…"),
        "API servers, for round-robin and while the scheduler is away; also http(s)://HOST:PORT/PATH",
        flag="--llm-backend-endpoints",
    )
    backend_https: bool = _instances.setting(
        False, SWITCH, "instances of which only the address is known, as the scheduler names them, are asked over https"
    )
    backend_ca_file: str = _instances.setting(
        "", kinds.file(tls.checked_ca_file), "authorities of engines' certificates (PEM) instead of the system's"
    )
    backend_api_key_file: str = _instances.setting(
        "", kinds.file(read_word), "the engines' own --api-key, sent to them instead of what clients send"
    )
    models: tuple[str, ...] = _instances.setting(
        (),
        kinds.several(kinds.text("NAME"), "NAME,…"),
        "models that are known before an instance has served them: requests for them get 503, not 404",
    )
    scheduler_endpoints: tuple[Address, ...] = _instances.setting(
        (), kinds.several(_ADDRESS, "HOST:PORT,…"), "schedulers; the first that answers is asked"
    )
    scheduler_ca_file: str = _instances.setting(
        "", kinds.file(tls.checked_ca_file), "authorities of schedulers' certificates (PEM): they are asked over https"
    )
    full_mode: bool = _instances.setting(
        True, SWITCH, "false: lite mode, in which the gateway reports what runs", flag="--enable-full-mode-scheduling"
    )
    requests_report_duration_s: float = _instances.setting(
        1.0, kinds.seconds(), "lite mode: between two reports to the scheduler; 0: none"
    )
    service_token: str = _instances.setting(
        "", kinds.text("TEXT"), "sent to the scheduler as Authorization", secret=True
    )
    service_token_file: str = _instances.setting(
        "", kinds.file(read_word), "a file with a token that the scheduler is shown"
    )
    models_refresh_s: float = _instances.setting(10.0, _TIME, "between two looks at what instances serve")

    ttft_slo_ms: Mapping[str, float] = _waiting.setting(
        {},
        Kind(by_model, "[MODEL=]MS", repeated=True),
        "objective for the first token of requests that name none, of one model or all others (repeatable)",
        flag="--ttft-slo",
    )
    """Milliseconds by model; the model "" is any other."""
    tpot_slo_ms: Mapping[str, float] = _waiting.setting(
        {},
        Kind(by_model, "[MODEL=]MS", repeated=True),
        "the same for the mean time between two tokens",
        flag="--tpot-slo",
    )
    late_wait_s: float = _waiting.setting(
        LATE_WAIT_S,
        kinds.seconds(),
        "how long a request that can no longer meet its objective waits behind those that can, if the scheduler's "
        "policy refuses what would be late (slo); 0: not at all",
        flag=LATE_WAIT,
    )
    shed_priority: int | None = _waiting.setting(
        None,
        kinds.integer(),
        "refuse requests (429) with this priority or a larger number when their objective can no longer be met "
        "(default: none)",
        flag=SHED_PRIORITY,
    )
    max_queue_size: int = _waiting.setting(512, _COUNT, "requests that may wait for an instance; more get 429")
    max_requests: int = _waiting.setting(8192, _COUNT, "requests that may be in flight per worker; more get 429")
    wait_scheduling_timeout_s: float = _waiting.setting(
        5.0, kinds.seconds(), "how long a request waits for an instance"
    )
    wait_scheduling_retry_interval_s: float = _waiting.setting(
        0.1, _TIME, "between two rounds that ask for an instance for those who wait"
    )
    schedule_timeout_s: float = _waiting.setting(2.0, _TIME, "for the scheduler's answer")

    retry_max_count: int = _failures.setting(
        2,
        kinds.integer(at_least=0),
        "other instances tried for one request before its first byte, and continuations after",
    )
    retry_budget: float = _failures.setting(0.2, _SHARE, "of the requests, that may be sent again")
    retry_patience_s: float = _failures.setting(
        10.0, kinds.seconds(), "how long a request that lost its instance waits for that"
    )
    max_ejected: float = _failures.setting(
        0.5, _SHARE, "of the instances, that may be left out as they fail; 0: none but those that no connection reaches"
    )
    continuation: bool = _failures.setting(True, SWITCH, "continue streams that lose their engine")
    connect_timeout_s: float = _failures.setting(3.0, _TIME, "for a connection to an engine")
    response_timeout_s: float = _failures.setting(900.0, _TIME, "until an answer's first byte")
    read_timeout_s: float = _failures.setting(300.0, _TIME, "between two bytes of a stream")
    stall_s: float = _failures.setting(
        5.0, _TIME, "silence after which an instance's health is asked for", flag="--stall-time"
    )
    health_timeout_s: float = _failures.setting(3.0, _TIME, "for an instance to say that it is well")
    engine_stall_s: float = _failures.setting(
        60.0,
        _TIME,
        "silence on all its streams that makes an instance hung, healthy or not; twice that if none has begun",
        flag="--engine-stall-time",
    )
    """An instance with no stream begun is asked for a token then, and is hung if it computes nothing for as long
    again."""

    tokenizers: Mapping[str, str] = _tokens.setting(
        {},
        Kind(_tokenizers, "[MODEL=]PATH", repeated=True),
        "tokenizer of one model, or of all others: a path, or a name on the hub (repeatable)",
        flag="--tokenizer-path",
        aliases=("--tokenizer-name",),
    )
    """Tokenizers by model; the model "" is any other."""
    chat_template: str = _tokens.setting(
        "", kinds.file(kinds.is_file), "a chat template instead of the tokenizers' own"
    )
    count_timeout_s: float = _tokens.setting(
        0.5, _TIME, "of a processor, to render and encode one request; then its tokens are estimated"
    )
    reader_processes: int = _tokens.setting(
        2, kinds.integer(at_least=1, at_most=MOST_WORKERS), "per worker, that count tokens and read large requests"
    )

    @property
    def lateness(self) -> str:
        """The flag by which what would be late is treated otherwise than by default; "": none."""
        if self.shed_priority is not None:
            return SHED_PRIORITY
        return LATE_WAIT if self.late_wait_s != LATE_WAIT_S else ""

    def objectives(self, model: str) -> Objectives:
        """Those of requests that name none."""
        return Objectives(*(of.get(model, of.get("", 0.0)) for of in (self.ttft_slo_ms, self.tpot_slo_ms)))

    @property
    def asks_https(self) -> bool:
        """Whether an engine may be reached by https."""
        endpoints = self.backend_endpoints
        return self.backend_https or any(isinstance(one, Endpoint) and one.is_tls for one in endpoints)

    @property
    def is_guarded(self) -> bool:
        """Whether clients need a key, and what they say is encrypted."""
        return bool(self.api_key_file and self.ssl_certfile and self.ssl_keyfile)

    @property
    def is_local(self) -> bool:
        return self.scheduling_policy == ROUND_ROBIN


def prepare(reading: Reading) -> Config:
    """The settings of a gateway; what contradicts itself is added to the faults."""
    config = reading.make(Config)
    reading.check(_lateness, config, reading.given)
    for check in (_endpoints, _workers, _authorities, _certificate, _host, _metrics_host, _template, _token):
        reading.check(check, config)
    return config


def _endpoints(config: Config) -> Iterator[str]:
    if config.is_local and config.scheduler_endpoints:
        yield "--scheduler-endpoints is of no use with --scheduling-policy round-robin"
    if config.is_local and not config.backend_endpoints:
        yield "--scheduling-policy round-robin needs --llm-backend-endpoints"
    if not config.is_local and not config.scheduler_endpoints:
        yield f"--scheduling-policy {config.scheduling_policy} needs --scheduler-endpoints"


def _lateness(config: Config, given: Container[str]) -> Iterator[str]:
    for flag in (LATE_WAIT, SHED_PRIORITY):
        if config.is_local and flag in given:
            yield f"{flag} is of no use with --scheduling-policy {ROUND_ROBIN}, which refuses nothing that is late"


def _workers(config: Config) -> Iterator[str]:
    if config.workers > 1 and not config.port:
        yield "--workers above 1 needs a --port: each worker binds it"
    if config.workers > 1 and not config.metrics_port:
        yield "--workers above 1 needs a --metrics-port: each worker binds it"


def _authorities(config: Config) -> Iterator[str]:
    if config.backend_ca_file and not config.asks_https:
        yield "--backend-ca-file is of no use without https endpoints or --backend-https"


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
        yield "--chat-template is of no use without --tokenizer-path"


def _token(config: Config) -> Iterator[str]:
    if config.service_token and config.service_token_file:
        yield "--service-token and --service-token-file: one of them"
